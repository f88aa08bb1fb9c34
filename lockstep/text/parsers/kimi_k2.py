"""Tool calls as Kimi K2 writes them: functions.NAME:INDEX, which is the call's id, and JSON."""

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
    """The model's own id is the call's: it is what the model expects to read again."""

    SIGNS = (_SEPARATOR,)
    OPENERS = {
        "calls": _CALLS,
        "call": _CALL,
        "calls_end": _CALLS_END,
        # The model writes the section's tags in the singular at times.
        "singular": _SINGULAR,
        "singular_end": _SINGULAR_END,
    }
    SEPARATOR = _SEPARATOR
    OVER = {"end": _CALL_END}
    ENDS_REASONING = (_CALLS, _SINGULAR, _CALL)
    AROUND = (_CALLS, _CALLS_END)
    TAGS = (_CALL, _CALL_END)
    BETWEEN = ""
    LEAD = "functions."
    TRAIL = f":0{_SEPARATOR}"

    @classmethod
    def call(cls, tool: Tool, rules: Rules) -> str:
        """The number counts the conversation's calls, so that any may stand there."""
        name = rules.text(f"{cls.LEAD}{tool.name}:")
        number = "/[0-9]{1,4}/"
        return sequence(name, number, rules.text(_SEPARATOR), rules.arguments(tool))

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self._ids: set[str] = set()

    def _named(self, header: str) -> tuple[str, str | None]:
        """An id that came before in the answer is none, since results are told apart by it."""
        call_id = header.strip()
        found = _ID.fullmatch(call_id)
        new = call_id not in self._ids
        self._ids.add(call_id)
        return (found[1] if found else ""), call_id if new else None
