"""Structured outputs: OpenAI's and vLLM's fields for the form of an answer, old and new."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import StructuredOutputsParams

GUIDED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's older fields -> those of StructuredOutputsParams."""
STRUCTURED_OUTPUTS = "structured_outputs"
WHITESPACE_PATTERN = "guided_whitespace_pattern"
FORM_FIELDS = ("response_format", STRUCTURED_OUTPUTS, *GUIDED_FIELDS, WHITESPACE_PATTERN)
"""Fields of a request that describe the form of the answer."""
FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True)
class RenamedParams(StructuredOutputsParams):
    """Structured outputs that another field of the request describes.

    sent_field: that field; errors name it.
    """

    sent_field: str = ""

    def field_of(self, name: str) -> str:
        """See StructuredOutputsParams."""
        return WHITESPACE_PATTERN if name == "whitespace_pattern" else self.sent_field


def structured_outputs(sent: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the form that the fields of a request describe; None for any text.

    Raises RequestError where several fields describe a form, or where one is wrong.
    """
    forms: dict[str, dict[str, Any]] = {}
    if sent.get("response_format") is not None:
        form = _response_format(sent["response_format"])
        if form is not None:
            forms["response_format"] = form
    if sent.get(STRUCTURED_OUTPUTS) is not None:
        forms[STRUCTURED_OUTPUTS] = sent[STRUCTURED_OUTPUTS]
    for name, kind in GUIDED_FIELDS.items():
        if sent.get(name) is not None:
            forms[name] = {kind: sent[name]}
    pattern = sent.get(WHITESPACE_PATTERN)
    if len(forms) > 1:
        raise RequestError(
            f"{' and '.join(forms)} all ask for a form of the answer; allowed: one of them. Leave "
            "the others out.",
            list(forms)[1],
        )
    if not forms:
        if pattern is not None:
            raise RequestError(
                f"{WHITESPACE_PATTERN} needs guided_json; send it, or leave this out.",
                WHITESPACE_PATTERN,
            )
        return None
    ((field, fields),) = forms.items()
    if pattern is not None:
        fields = {**fields, "whitespace_pattern": pattern}
    return (
        StructuredOutputsParams.read(fields)
        if field == STRUCTURED_OUTPUTS
        else RenamedParams(**fields, sent_field=field)
    )


def _response_format(sent: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert response_format to fields of StructuredOutputsParams; None for any text."""
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
    # Clients of llama.cpp and others put the schema into the format itself.
    container = sent.get("json_schema") or sent
    schema = container.get("schema") if isinstance(container, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError(
            f"response_format.json_schema={brief(sent.get('json_schema'))} is not allowed; "
            "allowed: an object with name and schema. Send a schema.",
            "response_format",
        )
    return {"json": dict(schema)}
