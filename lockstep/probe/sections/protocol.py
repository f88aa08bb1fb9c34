"""Protocol: errors for wrong requests, the limit of output tokens, and the server's metrics."""

from typing import Any

from lockstep.probe.http import REFUSED
from lockstep.probe.report import Section
from lockstep.probe.session import Session

WRONG_VALUES: dict[str, dict[str, Any]] = {
    "temperature as text": {"temperature": "hot"},
    "a negative max_tokens": {"max_tokens": -5},
    "messages without roles": {"messages": [{"content": "hello"}]},
}


def run(session: Session, section: Section) -> None:
    """Check one correct answer, a limited one, and the refusal of wrong requests.

    Deviations that other sections meet are added to this section, too.
    """
    session.learn_limits()
    plain = session.ask("Name a colour.", max_tokens=16)
    streamed = session.ask("Name a colour.", stream=True, max_tokens=16)
    if streamed.ok and streamed.tokens is None:
        section.unsupported["usage of streams"] = "stream_options.include_usage has no effect"
    if plain.ok and plain.tokens is None:
        section.fault("an answer has no usage", "usage is missing in a chat completion")
    short = session.ask("Count from 1 to 50.", max_tokens=3)
    if short.ok and short.finish_reason not in ("length", "stop"):
        section.fault("a limited answer has a wrong finish_reason", str(short.finish_reason))
    if not plain.output and plain.ok and plain.finish_reason == "stop" and not plain.tokens:
        section.warn("an answer is empty", "Name a colour.")
    refused = 0
    for name, fields in WRONG_VALUES.items():
        answer = session.ask(fields.get("messages", "hello"), **_without_messages(fields))
        if answer.failure is not None and answer.failure.kind == REFUSED:
            refused += 1
        elif answer.ok:
            section.warn("a wrong request is answered", name)
    section.figures["wrong requests refused"] = f"{refused} of {len(WRONG_VALUES)}"
    if session.max_model_len:
        section.figures["context length, tokens"] = session.max_model_len


def _without_messages(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "messages"}
