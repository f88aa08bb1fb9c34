"""Probes of chat templates: detect by marker words which parts of a conversation reach the
prompt."""

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
class TemplateFindings:
    """Findings about a template.

    parts: roles whose content may be a list of text parts.
    only_parts: roles whose content must be a list.
    lost: parts of a conversation that the template drops without an error.
    reads_late_system: it writes system messages that are not the first message.
    """

    parts: frozenset[str]
    only_parts: frozenset[str]
    lost: tuple[str, ...]
    reads_late_system: bool

    def contents(self, messages: list[Message]) -> list[Message]:
        """Return the messages with their content in the form that the template reads.

        A list of parts is passed to a template that reads lists, as transformers does, and is
        joined with newlines for others.
        """
        return [{**m, "content": self._content(m["role"], m["content"])} for m in messages]

    def _content(self, role: str, content: Any) -> Any:
        if isinstance(content, str):
            reads_text = role not in self.only_parts
            return content if reads_text else [{"type": "text", "text": content}]
        return content if role in self.parts else "\n".join(part["text"] for part in content)


def probe(render: Render) -> TemplateFindings:
    """Probe what a template reads. render: renders messages and tools; it may raise any
    exception."""
    parts = set()
    only_parts = set()
    lost = []
    for role, name in _PLURAL.items():
        reads_parts = _reads_parts(render, role)
        text = _render(render, _conversation(role, FIRST))
        loses_text = text is not None and FIRST not in text
        if reads_parts:
            parts.add(role)
            if loses_text:
                only_parts.add(role)
        elif loses_text:
            lost.append(name)
    calls = _render(render, [_USER, {"role": "assistant", "content": "", "tool_calls": [_CALL]}])
    if calls is not None and not (FIRST in calls and SECOND in calls):
        lost.append("tool calls of earlier turns")
    tools = _render(render, [_USER], [_TOOL])
    if tools is not None and FIRST not in tools:
        lost.append(TOOLS)
    content = [{"type": "text", "text": FIRST}] if "system" in only_parts else FIRST
    system = {"role": "system", "content": content}
    # A template whose roles alternate may refuse either conversation.
    histories = ([_USER, {"role": "assistant", "content": "Hi"}], [_USER])
    late = [_render(render, [*history, system, _USER]) for history in histories]
    reads_late_system = any(text is not None and FIRST in text for text in late)
    return TemplateFindings(frozenset(parts), frozenset(only_parts), tuple(lost), reads_late_system)


def _reads_parts(render: Render, role: str) -> bool:
    """Return whether a list of text parts is written as its texts, not as a Python list."""
    parts = [{"type": "text", "text": FIRST}, {"type": "text", "text": SECOND}]
    text = _render(render, _conversation(role, parts))
    if text is None or "'text'" in text or '"text"' in text:
        return False
    return 0 <= text.find(FIRST) < text.find(SECOND)


def _conversation(role: str, content: Any) -> list[Message]:
    """Return a short conversation with a message of this role and content."""
    call = {**_CALL, "function": {"name": "call", "arguments": {}}}
    with_call = {"role": "assistant", "content": "", "tool_calls": [call]}
    message = {"role": role, "content": content}
    conversations: dict[str, list[Message]] = {
        "user": [message],
        "system": [message, _USER],
        "assistant": [_USER, message, _USER],
        "tool": [_USER, with_call, {**message, "name": "call", "tool_call_id": "call1"}],
    }
    return conversations[role]


def _render(
    render: Render, messages: list[Message], tools: list[dict[str, Any]] | None = None
) -> str | None:
    """Return the text of a conversation; None if the template refuses it, which is no loss."""
    try:
        return render(messages, tools)
    except Exception:  # a template may raise any exception
        return None
