"""The form of the answer that a request's fields ask for: OpenAI's, vLLM's, and vLLM's older."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import StructuredOutputsParams

OLD = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields -> those of StructuredOutputsParams."""
OWN = "structured_outputs"
BLANKS = "guided_whitespace_pattern"
FORM_FIELDS = ("response_format", OWN, *OLD, BLANKS)
"""Fields of a request that this module reads."""
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True)
class AskedParams(StructuredOutputsParams):
    """What a field of another name asks for. asked_by: that field."""

    asked_by: str = ""

    def field_of(self, name: str) -> str:
        """See StructuredOutputsParams."""
        return BLANKS if name == "whitespace_pattern" else self.asked_by


def wanted(sent: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """sent: the fields of a request. Raises RequestError where several ask, or one is wrong."""
    asked: dict[str, dict[str, Any]] = {}
    if sent.get("response_format") is not None:
        found = _format(sent["response_format"])
        if found is not None:
            asked["response_format"] = found
    if sent.get(OWN) is not None:
        asked[OWN] = sent[OWN]
    for name, kind in OLD.items():
        if sent.get(name) is not None:
            asked[name] = {kind: sent[name]}
    blanks = sent.get(BLANKS)
    if len(asked) > 1:
        raise RequestError(
            f"{' and '.join(asked)} all ask for a form of the answer; allowed: one of them. Leave "
            "the others out.",
            list(asked)[1],
        )
    if not asked:
        if blanks is not None:
            raise RequestError(
                f"{BLANKS} needs guided_json; send it, or leave this out.",
                BLANKS,
            )
        return None
    ((field, fields),) = asked.items()
    if blanks is not None:
        fields = {**fields, "whitespace_pattern": blanks}
    return (
        StructuredOutputsParams.read(fields)
        if field == OWN
        else AskedParams(**fields, asked_by=field)
    )


def _format(sent: Mapping[str, Any]) -> dict[str, Any] | None:
    """response_format as fields of StructuredOutputsParams; None where it asks for text."""
    kind = sent.get("type")
    if kind not in FORMATS:
        raise RequestError(
            f"response_format.type={brief(kind)} is not allowed; allowed: {', '.join(FORMATS)}. "
            "Send one of them.",
            "response_format",
        )
    if kind == "text":
        return None
    if kind == "json_object" and "schema" not in sent:
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": dict(sent)}
    # llama.cpp and others put the schema into the format itself.
    named = sent.get("json_schema") or sent
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"response_format.json_schema={brief(sent.get('json_schema'))} is not allowed; "
            "allowed: an object with name and schema. Send a schema.",
            "response_format",
        )
    return {"json": dict(schema)}
