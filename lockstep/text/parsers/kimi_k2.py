"""Tool calls of Kimi K2: functions.NAME:INDEX, which is the call's id, and JSON."""

import re
from typing import Any

from lockstep.text.grammars.lark import Rules, Tool, sequence
from lockstep.text.parsers.named_calls import NamedCalls

_CALLS = "<|tool_calls_section_begin|>"
_CALLS_END = "<|tool_calls_section_end|>"
_SINGULAR = "<|tool_call_section_begin|>"
_SINGULAR_END = "<|tool_call_section_end|>"
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_SEPARATOR = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?", re.DOTALL)


class KimiK2Parser(NamedCalls):
    """Parser of Kimi K2's calls. The model's own id is kept, as the model expects to read it
    again."""

    SIGNS = (_SEPARATOR,)
    OPENERS = {
        "calls": _CALLS,
        "call": _CALL,
        "calls_end": _CALLS_END,
        # The model sometimes writes the section's tags in the singular.
        "singular": _SINGULAR,
        "singular_end": _SINGULAR_END,
    }
    SEPARATOR = _SEPARATOR
    CLOSERS = {"end": _CALL_END}
    ENDS_REASONING = (_CALLS, _SINGULAR, _CALL)
    AROUND = (_CALLS, _CALLS_END)
    TAGS = (_CALL, _CALL_END)
    BETWEEN = ""
    LEAD = "functions."
    TRAIL = f":0{_SEPARATOR}"

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """Return a call with any number: it counts the calls of the conversation."""
        name = rules.text(f"{cls.LEAD}{tool.name}:")
        number = "/[0-9]{1,4}/"
        return sequence(name, number, rules.text(_SEPARATOR), rules.arguments(tool))

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self._ids: set[str] = set()

    def _parse_header(self, header: str) -> tuple[str, str | None]:
        """Return the name and the id; a repeated id is dropped, since results are matched by id."""
        call_id = header.strip()
        match = _ID.fullmatch(call_id)
        is_new = call_id not in self._ids
        self._ids.add(call_id)
        return (match[1] if match else ""), call_id if is_new else None
