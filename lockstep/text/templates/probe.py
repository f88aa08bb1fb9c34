"""Probes of chat templates: which parts of a conversation reach the prompt, by marker words."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FIRST = "probeone"
SECOND = "probetwo"
TOOLS = "tools"
_USER = {"role": "user", "content": "Hi"}
_CALL = {"function": {"name": FIRST, "arguments": {SECOND: "x"}}, "type": "function", "id": "call1"}
_TOOL = {"type": "function", "function": {"name": FIRST, "description": "", "parameters": {}}}
_PLURAL = {
    "user": "user messages",
    "system": "system messages",
    "assistant": "assistant messages",
    "tool": "tool results",
}
Message = dict[str, Any]
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]


@dataclass(frozen=True)
class Reading:
    """Findings about a template.

    parts: roles whose content may be a list of text parts; only_parts: roles whose content must be
    one; lost: parts of a conversation that the template leaves out without an error.
    """

    parts: frozenset[str]
    only_parts: frozenset[str]
    lost: tuple[str, ...]

    def contents(self, messages: list[Message]) -> list[Message]:
        """Return the messages with their content in the form that the template reads.

        A list of parts is handed on to a template that reads it, as transformers does, and joined
        by newlines for another one.
        """
        return [{**m, "content": self._content(m["role"], m["content"])} for m in messages]

    def _content(self, role: str, content: Any) -> Any:
        if isinstance(content, str):
            is_read = role not in self.only_parts
            return content if is_read else [{"type": "text", "text": content}]
        return content if role in self.parts else "\n".join(part["text"] for part in content)


def probe(render: Render) -> Reading:
    """Find out what a template reads. render: renders messages and tools; it may raise anything."""
    parts = set()
    only_parts = set()
    lost = []
    for role, name in _PLURAL.items():
        reads_parts = _reads_parts(render, role)
        text = _rendered(render, _conversation(role, FIRST))
        loses_text = text is not None and FIRST not in text
        if reads_parts:
            parts.add(role)
            if loses_text:
                only_parts.add(role)
        elif loses_text:
            lost.append(name)
    calls = _rendered(render, [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}])
    if calls is not None and not (FIRST in calls and SECOND in calls):
        lost.append("tool calls of earlier turns")
    tools = _rendered(render, [_USER], [_TOOL])
    if tools is not None and FIRST not in tools:
        lost.append(TOOLS)
    return Reading(frozenset(parts), frozenset(only_parts), tuple(lost))


def _reads_parts(render: Render, role: str) -> bool:
    """Return whether a list of text parts is written as its texts, not as a list of Python."""
    parts = [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}]
    text = _rendered(render, _conversation(role, parts))
    if text is None or "'text'" in text or '"text"' in text:
        return False
    return 0 <= text.find(FIRST) < text.find(SECOND)


def _conversation(role: str, content: Any) -> list[Message]:
    """Return a short conversation with a message of this role and content."""
    call = {**_CALL, "function": {"name": "call", "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    message = {"role": role, "content": content}
    conversations: dict[str, list[Message]] = {
        "user": [message],
        "system": [message, _USER],
        "assistant": [_USER, message, _USER],
        "tool": [_USER, asked, {**message, "name": "call", "tool_call_id": "call1"}],
    }
    return conversations[role]


def _rendered(
    render: Render, messages: list[Message], tools: list[dict[str, Any]] | None = None
) -> str | None:
    """Return the text of a conversation; None where the template refuses it, which is no loss."""
    try:
        return render(messages, tools)
    except Exception:  # a template may do anything to what it is given
        return None
