"""JSON: whether answers under response_format are JSON, and match their schema."""

from typing import Any

from lockstep.probe.answers import Answer
from lockstep.probe.json_schema import closed, mismatch, parse
from lockstep.probe.report import Section
from lockstep.probe.session import Session, refusal

STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Describe a person named Ada, aged 36.", closed({"name": STRING, "age": INTEGER})),
    (
        "Classify: the film was wonderful.",
        closed({"label": {"type": "string", "enum": ["positive", "negative"]}}),
    ),
    (
        "Give the address of a town hall.",
        closed(
            {"street": STRING, "place": closed({"city": STRING, "capital": {"type": "boolean"}})}
        ),
    ),
    (
        "List two books with their years.",
        closed({"books": {"type": "array", "items": closed({"title": STRING, "year": INTEGER})}}),
    ),
)
MAX_TOKENS = 256


def run(session: Session, section: Section) -> None:
    """Ask for JSON objects and for schemas, plain and streamed."""
    _json_object(session, section)
    requests = [
        {
            "prompt": prompt + " Answer in JSON.",
            "max_tokens": MAX_TOKENS,
            "stream": stream,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
        }
        for prompt, schema in CASES
        for stream in (False, True)
    ]
    answers = session.ask_all(requests, 2)
    refused = refusal(answers)
    if refused is not None:
        section.unsupported["response_format json_schema"] = refused.detail
        return
    valid = complete = 0
    schemas = [schema for _, schema in CASES for _ in (False, True)]
    for schema, answer in zip(schemas, answers, strict=False):
        if not answer.ok or answer.finish_reason == "length":
            continue
        complete += 1
        why = _fault_of(answer, schema)
        valid += why is None
        if why is not None:
            section.fault("json_schema is accepted and not kept", f"{why}: {answer.text[:80]!r}")
    section.figures["answers that match their schema"] = f"{valid} of {complete}"
    cut = sum(answer.finish_reason == "length" for answer in answers)
    if cut:
        section.figures["answers cut by max_tokens"] = cut


def _json_object(session: Session, section: Section) -> None:
    requests = [
        {
            "prompt": f"{prompt} Answer with a JSON object.",
            "max_tokens": MAX_TOKENS,
            "response_format": {"type": "json_object"},
        }
        for prompt, _ in CASES[:2]
    ]
    answers = session.ask_all(requests, 2)
    refused = refusal(answers)
    if refused is not None:
        section.unsupported["response_format json_object"] = refused.detail
        return
    complete = [answer for answer in answers if answer.ok and answer.finish_reason != "length"]
    invalid = [answer for answer in complete if _fault_of(answer, None) is not None]
    for answer in invalid:
        section.fault("json_object is accepted and not kept", repr(answer.text[:80]))
    section.figures["valid JSON objects"] = f"{len(complete) - len(invalid)} of {len(complete)}"


def _fault_of(answer: Answer, schema: dict[str, Any] | None) -> str | None:
    """Return why an answer is not the JSON that was asked for, or None."""
    try:
        value = parse(answer.text)
    except ValueError:
        return "not JSON"
    if schema is None:
        return None if isinstance(value, dict) else "not an object"
    return mismatch(value, schema)
