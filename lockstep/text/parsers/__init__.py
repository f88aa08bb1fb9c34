"""Reasoning and tool-call parsers, and which of them a model's template asks for."""

from typing import Any

from lockstep.errors import ConfigError, choice_error
from lockstep.text.parsers.deepseek_v3 import DeepSeekV3Parser
from lockstep.text.parsers.deepseek_v31 import DeepSeekV31Parser
from lockstep.text.parsers.events import Content, Event, Parser, ReasoningParser, Reply
from lockstep.text.parsers.hermes import HermesParser
from lockstep.text.parsers.kimi_k2 import KimiK2Parser
from lockstep.text.parsers.llama3 import Llama3Parser
from lockstep.text.parsers.nemotron import NemotronParser
from lockstep.text.parsers.pythonic import PythonicParser
from lockstep.text.parsers.qwen3_coder import Qwen3CoderParser
from lockstep.text.parsers.think import ThinkParser

# A parser is one file and one line here; auto takes the first whose SIGNS the template holds. Names
# are vLLM's and those that model cards give, several for one form.
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
    """The parser class of a choice: a name, "auto" (by the template), or None or "none"."""
    if choice in (None, "none"):
        return None
    if choice == "auto":
        held = template or ""
        return next((p for p in table.values() if all(s in held for s in p.SIGNS)), None)
    if choice not in table:
        allowed = ", ".join(["auto", "none", *table])
        raise choice_error(ConfigError, field, choice, allowed, "Choose one of them.")
    return table[choice]


class ReplyParser:
    """Reasoning first, then tool calls in what is left. Either may be None."""

    def __init__(self, reasoning: ReasoningParser | None, tools: Parser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def reasons(self) -> bool:
        """Whether the text so far ends inside of reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    @property
    def may_reason(self) -> bool:
        """Whether more text may stand inside of reasoning."""
        return self._reasoning is not None and not self._reasoning.over

    def feed(self, text: str) -> list[Event]:
        """The events that more text settles."""
        if not text:
            return []
        return self._calls(self._reasoning.feed(text) if self._reasoning else [Content(text)])

    def finish(self) -> list[Event]:
        """What was held back, once no more text comes."""
        events = self._calls(self._reasoning.finish() if self._reasoning else [])
        return events + (self._tools.finish() if self._tools else [])

    def _calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.feed(event.text) if isinstance(event, Content) else [event]
        return found

    def parse(self, text: str) -> Reply:
        """A whole answer at once."""
        return Reply().add(self.feed(text) + self.finish())
