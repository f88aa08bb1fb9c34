"""Registry of reasoning and tool-call parsers, and their selection by the chat template."""

from typing import Any

from lockstep.errors import ConfigError, choice_error
from lockstep.text.parsers.call_parser import CallParser
from lockstep.text.parsers.deepseek_v3 import DeepSeekV3Parser
from lockstep.text.parsers.deepseek_v31 import DeepSeekV31Parser
from lockstep.text.parsers.events import (
    NATURAL_END,
    Content,
    Event,
    Parser,
    ReasoningParser,
    Reply,
    TextEnd,
)
from lockstep.text.parsers.hermes import HermesParser
from lockstep.text.parsers.kimi_k2 import KimiK2Parser
from lockstep.text.parsers.llama3 import Llama3Parser
from lockstep.text.parsers.nemotron import NemotronParser
from lockstep.text.parsers.pythonic import PythonicParser
from lockstep.text.parsers.qwen3_coder import Qwen3CoderParser
from lockstep.text.parsers.think import ThinkParser
from lockstep.text.scan import Markers, Scan

# A parser is one file and one line here; auto takes the first whose SIGNS are all in the template.
# Names are those of vLLM and of model cards; several may name one parser.
TOOL_PARSERS = {
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "hermes": HermesParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "kimi_k2": KimiK2Parser,
    "nemotron_json": NemotronParser,
    "llama3_json": Llama3Parser,
    "llama4_json": Llama3Parser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
}
REASONING_PARSERS = {
    "think": ThinkParser,
    "qwen3": ThinkParser,
    "deepseek_r1": ThinkParser,
    "deepseek_v3": ThinkParser,
    "kimi_k2": ThinkParser,
    "nemotron_v3": ThinkParser,
    "nano_v3": ThinkParser,
    "super_v3": ThinkParser,
}


def choose(field: str, table: dict[str, Any], choice: str | None, template: str | None) -> Any:
    """Return the parser class of a choice: a name, "auto" (by the template), or None or "none"."""
    if choice in (None, "none"):
        return None
    if choice == "auto":
        source = template or ""
        return next((p for p in table.values() if all(s in source for s in p.SIGNS)), None)
    if choice not in table:
        allowed = ", ".join(["auto", "none", *table])
        raise choice_error(ConfigError, field, choice, allowed, "Choose one of them.")
    return table[choice]


class ReplyParser:
    """Parser of an answer: reasoning first, then tool calls in the rest. Either may be None."""

    def __init__(self, reasoning: ReasoningParser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        if reasoning is not None and isinstance(tools, CallParser):
            reasoning.use_calls(tools.new)
        # Searches for the closing tag of reasoning that a call has ended; None once it is found.
        self._late_end: Scan | None = None
        if reasoning is not None:
            self._late_end = Scan(Markers({"end": reasoning.TAGS[1]}))
        self._skips_newlines = False

    @property
    def reasons(self) -> bool:
        """Return whether the text so far ends inside of reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    @property
    def may_reason(self) -> bool:
        """Return whether more text may be reasoning."""
        return self._reasoning is not None and not self._reasoning.ended

    def feed(self, text: str) -> list[Event]:
        """Parse more text and return the events that became certain."""
        if not text:
            return []
        return self._parse_calls(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self, end: TextEnd = NATURAL_END) -> list[Event]:
        """Return the pending events after the last text."""
        events = self._parse_calls(self._reasoning.finish(end) if self._reasoning else [])
        events += self._without_late_end(self._tools.finish(end)) if self._tools else []
        if self._ended_by_call and self._late_end is not None:
            rest = self._late_end.flush()
            events += [Content(rest)] if rest else []
        return events

    def _parse_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        parsed: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                parsed += self._without_late_end(self._tools.feed(event.text))
            else:
                parsed.append(event)
        return parsed

    @property
    def _ended_by_call(self) -> bool:
        return self._reasoning is not None and self._reasoning.ended_by_call

    def _without_late_end(self, events: list[Event]) -> list[Event]:
        """Drop the first closing tag of reasoning that comes after a call has ended reasoning."""
        if not self._ended_by_call:
            return events
        remaining: list[Event] = []
        for event in events:
            if not isinstance(event, Content):
                remaining.append(event)
            elif text := self._shown(event.text):
                remaining.append(Content(text))
        return remaining

    def _shown(self, text: str) -> str:
        """Return the visible part of content: without a late closing tag and the line ends after
        it."""
        before = ""
        if self._late_end is not None:
            taken = self._late_end.take(text)
            before = taken.text
            if taken.marker is None:
                return before
            self._late_end = None
            self._skips_newlines = True
            text = text[taken.end :]
        if self._skips_newlines:
            text = text.lstrip("\n")
            self._skips_newlines = not text
        return before + text

    def parse(self, text: str, end: TextEnd = NATURAL_END) -> Reply:
        """Parse a whole answer at once. end: why the text ended."""
        return Reply().add(self.feed(text) + self.finish(end))
