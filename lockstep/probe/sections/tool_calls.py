"""Tool calls: the share of clean calls of 60 prompts, of four kinds.

A call is clean if its tool exists, its arguments are JSON that matches the tool's schema, its
finish reason is tool_calls, its id is unique, and the content has no markup of calls.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lockstep.probe.answers import Answer, ToolCall
from lockstep.probe.json_schema import closed, mismatch, parse
from lockstep.probe.report import Section, Table
from lockstep.probe.session import Session, refusal

PER_KIND = 15
CITIES = ("Lisbon", "Oslo", "Lima", "Cairo", "Rome", "Kyoto", "Dublin", "Quito")
TOPICS = ("solar panels", "old maps", "tea", "violins", "bridges", "owls", "glaciers")
OUTCOMES = (
    "clean",
    "malformed",
    "other schema",
    "too few calls",
    "no call",
    "cut",
    "failed",
)
KINDS = ("single", "parallel", "nested", "streamed")
STRING: dict[str, Any] = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": STRING,
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
    },
    "search": {
        "type": "object",
        "properties": {"query": STRING, "limit": {"type": "integer"}},
        "required": ["query"],
    },
    "add_event": {
        "type": "object",
        "properties": {
            "title": STRING,
            "place": closed({"city": STRING, "street": STRING}),
            "guests": {"type": "array", "items": closed({"name": STRING, "email": STRING})},
        },
        "required": ["title", "place", "guests"],
    },
}
DESCRIPTIONS = {
    "get_weather": "Get the weather of a city.",
    "search": "Search the web.",
    "add_event": "Add an event to the calendar.",
}
MARKUP = re.compile(
    r"</?tool_calls?>|<\|?tool[_▁]|\[TOOL_CALLS\]|<function=|<\|python_tag\|>|<invoke\b"
    r'|\{\s*"name"\s*:\s*"\w+"\s*,\s*"(arguments|parameters)"\s*:'
)
"""Markup of tool calls in the formats of the usual model families."""


def run(session: Session, section: Section) -> None:
    """Ask for calls of each kind, and judge every answer."""
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": DESCRIPTIONS[name], "parameters": schema},
        }
        for name, schema in SCHEMAS.items()
    ]
    # The kinds alternate, so that a probe that ends early has some of each.
    kinds = [kind for _ in range(PER_KIND) for kind in KINDS]
    requests = [
        {
            "prompt": _prompt(kind, index // len(KINDS)),
            "tools": tools,
            "stream": kind == "streamed",
            "max_tokens": 256,
        }
        for index, kind in enumerate(kinds)
    ]
    first = session.ask_all(requests[: len(KINDS)], len(KINDS))
    refused = refusal(first)
    if refused is not None:
        section.unsupported["tools"] = refused.detail
        return
    answers = [*first, *session.ask_all(requests[len(KINDS) :], len(KINDS))]
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, answer in zip(kinds, answers, strict=False):
        outcomes[kind][_judge(answer, kind, section)] += 1
    _report(section, outcomes)


def _prompt(kind: str, index: int) -> str:
    city, other = CITIES[index % len(CITIES)], CITIES[(index + 3) % len(CITIES)]
    topic = TOPICS[index % len(TOPICS)]
    if kind == "parallel":
        return f"What is the weather in {city} and in {other}? Call the tool once for each city."
    if kind == "nested":
        return (
            f"Add an event: a talk on {topic}, {index + 1} Main Street, {city}. Guests: Ana "
            f"<ana{index}@example.org> and Bo <bo{index}@example.org>."
        )
    if kind == "streamed" and index % 2:
        return f"Search the web for {topic}, at most {index + 2} results."
    return f"What is the weather in {city} in celsius?"


def _judge(answer: Answer, kind: str, section: Section) -> str:
    """Return the outcome of an answer, one of OUTCOMES."""
    if not answer.ok:
        return "failed"
    if answer.finish_reason == "length":
        return "cut"
    faults = list(_answer_faults(answer))
    faults += [fault for call in answer.tool_calls for fault in _faults_of(call)]
    for name, detail in faults:
        section.fault(name, f"{kind}: {detail}")
    if faults:
        return "malformed"
    if not answer.tool_calls:
        return "no call"
    mismatches = list(filter(None, map(_mismatch, answer.tool_calls)))
    for why in mismatches:
        # The API promises the schema only for strict tools.
        section.warn("arguments of a call do not match the tool's schema", f"{kind}: {why}")
    if mismatches:
        return "other schema"
    return "too few calls" if kind == "parallel" and len(answer.tool_calls) < 2 else "clean"


def _answer_faults(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield (name, detail) of what is wrong with an answer apart from its single calls."""
    if MARKUP.search(answer.text):
        yield "markup of tool calls is in the content", repr(answer.text[:80])
    elif not answer.tool_calls and answer.finish_reason == "tool_calls":
        yield "finish_reason is tool_calls without a call", repr(answer.text[:80])
    ids = [call.call_id for call in answer.tool_calls]
    if not all(ids) or len(set(ids)) < len(ids):
        yield "tool calls have no unique ids", str(ids)[:80]
    if answer.tool_calls and answer.finish_reason != "tool_calls":
        yield "finish_reason of tool calls is not tool_calls", str(answer.finish_reason)


def _faults_of(call: ToolCall) -> list[tuple[str, str]]:
    """Return (name, detail) of what is wrong with a call."""
    if call.name not in SCHEMAS:
        return [("a call names a tool that was not offered", call.name[:60])]
    try:
        parse(call.arguments)
    except ValueError:
        return [("arguments of a call are not JSON", call.arguments[:80])]
    return []


def _mismatch(call: ToolCall) -> str | None:
    """Return why the arguments of a call do not match its tool's schema, or None."""
    return mismatch(parse(call.arguments), SCHEMAS[call.name], "arguments")


def _report(section: Section, outcomes: dict[str, Counter[str]]) -> None:
    rows = tuple(
        (kind, *(str(counts[name]) for name in OUTCOMES)) for kind, counts in outcomes.items()
    )
    section.tables.append(Table(("kind", *OUTCOMES), rows))
    total = sum(outcomes.values(), Counter[str]())
    section.figures["clean"] = f"{total['clean']} of {total.total()}"
    if total.total():
        section.figures["clean, %"] = 100 * total["clean"] / total.total()
    if total["no call"] == total.total() - total["failed"] - total["cut"]:
        section.warn(
            "no answer has a tool call", "the model makes none, or the server does not read them"
        )
