"""Grammars of tool calls: the model's own syntax around arguments that match the tools' schemas.

The syntax is the parser's (lockstep.text.parsers.calls), so that what is written is what is read.
Raises RequestError, which names the tool, for what would not be obeyed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import MAX_GRAMMAR_CHARACTERS, StructuredOutputsParams
from lockstep.text.json_schema import without_notes
from lockstep.text.parsers.calls import CallParser
from lockstep.text.parsers.writing import (
    BLANK,
    LARK,
    Rules,
    Tool,
    alternatives,
    containing,
    either,
    sequence,
)
from lockstep.text.structured import ANY_OBJECT, MOST_RULES, check_lark, schema_of

LEADING = r"/\n{0,2}/"
"""What may stand in front of an answer's calls: line ends behind the reasoning."""
JSON_MARKS = frozenset('"{}[]')
"""Characters of a tool's name that would be taken for JSON."""
Json = dict[str, Any]


@dataclass(frozen=True)
class CallParams(StructuredOutputsParams):
    """An answer whose calls match tools: what is wrong with its grammar, is wrong with them.

    beside_form: it is calls, or else a form of the answer, which its first character tells.
    json_after: see GrammarRecipe.
    """

    beside_form: bool = False
    json_after: tuple[str, ...] | None = None

    @property
    def written(self) -> bool:
        """See StructuredOutputsParams."""
        return False

    def field_of(self, name: str) -> str:
        """See StructuredOutputsParams."""
        return "tools"


@dataclass(frozen=True)
class ToolChoice:
    """Which calls an answer may hold. mode: auto, none or required; names: of the functions that
    may be called, None for all."""

    mode: str
    names: frozenset[str] | None = None

    @classmethod
    def read(cls, sent: Any) -> "ToolChoice":
        """A tool_choice in the words of OpenAI's chat. Raises RequestError."""
        match sent:
            case str("auto" | "none" | "required"):
                return cls(sent)
            case {
                "type": str("allowed_tools"),
                "allowed_tools": {"mode": str("auto" | "required" as mode), "tools": [*tools]},
            }:
                names = [_name(tool) for tool in tools]
                if names and None not in names:
                    return cls(mode, frozenset(name for name in names if name is not None))
            case {"function": _}:
                name = _name(sent)
                if name is not None:
                    return cls("required", frozenset({name}))
        raise RequestError(
            f"tool_choice={brief(sent)} is not allowed; allowed: auto, none, required, or an "
            'object {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
            '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}. Send one of them.',
            "tool_choice",
        )

    def lets(self, name: str) -> bool:
        """Whether the function of this name may be called."""
        return self.names is None or name in self.names

    def strict(self, tools: Sequence[Any] | None) -> bool:
        """Whether one of the tools that may be called asks for calls that its schema allows."""
        functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
        return any(
            isinstance(one, dict) and one.get("strict") is True and self.lets(one.get("name", ""))
            for one in functions
        )


ANY_CALL = ToolChoice("auto")
"""What is meant where nothing is said."""


def _name(tool: Any) -> str | None:
    """The name of a tool's function; None where it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


@dataclass(frozen=True)
class ToolSyntax:
    """How a model writes calls. parser: what reads them; tokens: its tags that are special tokens
    of the model -> their ids."""

    parser: type[CallParser]
    tokens: Mapping[str, int]

    def calls_only(self, tools: Sequence[Tool], several: bool) -> str:
        """An answer that is nothing but calls, of which there is one at least.

        several: whether there may be more.
        """
        rules = Rules(self.tokens)
        return _bounded(rules, sequence(LEADING, self._calls(tools, rules, several)))

    def calls_or_form(self, tools: Sequence[Tool], several: bool, form: str) -> str:
        """An answer that is calls, or JSON of this form, an expression of a grammar.

        For parsers whose calls begin with an opener, as no JSON does.
        """
        rules = Rules(self.tokens)
        calls = sequence(LEADING, self._calls(tools, rules, several))
        return _bounded(rules, f"{calls} | {rules.rule(form)}")

    def text_and_calls(self, tools: Sequence[Tool], several: bool) -> str:
        """Free text in which whatever the parser takes for a call is one of these.

        Where calls begin without an opener, an answer is text or calls.
        """
        rules = Rules(self.tokens)
        parser = self.parser
        without = containing(parser.OPENERS.values())
        if parser.BARE:
            begins = rf"{BLANK}*({alternatives([parser.BARE])})(.|\n)*"
            plain = rules.plain(without, begins)
            return _bounded(rules, f"{self._calls(tools, rules, several)} | {plain}")
        plain = rules.plain(without)
        opener, *behind = rules.parts(parser.AROUND[0] or parser.TAGS[0])
        # Text and opener are one terminal, since a longer text would hide where the opener begins.
        opened = rules.terminal(f"{plain} {opener}") if opener[0] == '"' else f"{plain} {opener}"
        call = either(self._choices(tools, rules))
        if parser.AROUND[0]:
            calls = self._calls(tools, rules, several, begun=True)
        else:
            calls = sequence(call, rules.text(parser.TAGS[1]))
        group = rules.rule(sequence(opened, *behind, calls))
        return _bounded(rules, f"{group}{'*' if several else '?'} {plain}")

    def json_after(self, tools: Sequence[Tool], free_text: bool) -> tuple[str, ...] | None:
        """Return the texts that introduce the JSON of calls: see GrammarRecipe.

        free_text: whether text may come before calls. Its quotes do not pair up as those of JSON,
        nor do those of a name.
        """
        parser = self.parser
        named = any(JSON_MARKS.intersection(tool.name) for tool in tools)
        if named or not parser.JSON_CALLS or (free_text and parser.BARE):
            return None
        if not free_text:
            return ()
        begins = (parser.AROUND[0], parser.TAGS[0])
        openers = parser.OPENERS.values()
        return tuple(text for text in openers if any(one.startswith(text) for one in begins))

    def _calls(
        self, tools: Sequence[Tool], rules: Rules, several: bool, begun: bool = False
    ) -> str:
        """Calls and what stands around all of them; begun: what stands in front has come."""
        parser = self.parser
        begin, end = map(rules.text, parser.AROUND)
        choices = either(self._choices(tools, rules))
        one = rules.rule(sequence(rules.text(parser.TAGS[0]), choices, rules.text(parser.TAGS[1])))
        more = f"({sequence(rules.text(parser.BETWEEN), one)})*" if several else ""
        return sequence("" if begun else begin, one, more, end)

    def _choices(self, tools: Sequence[Tool], rules: Rules) -> list[str]:
        return [rules.rule(self.parser.call(tool, rules)) for tool in tools]

    def tools(
        self, sent: Sequence[Json], choice: ToolChoice = ANY_CALL, held: bool = True
    ) -> list[Tool]:
        """The tools that may be called.

        held: to their schemas; else any arguments may come.
        """
        found: dict[str, Tool] = {}
        for index, tool in enumerate(sent):
            field = f"tools[{index}]"
            function = _function(tool, field)
            if choice.lets(function["name"]) and function["name"] not in found:
                found[function["name"]] = self._tool(function, f"{field}.function", held)
        for name in sorted(choice.names or ()):
            if name not in found:
                raise RequestError(
                    f"tool_choice names {brief(name)}; allowed: the name of one of the tools. Send "
                    "it among tools, or choose another.",
                    "tool_choice",
                )
        return list(found.values())

    def _tool(self, function: Json, field: str, held: bool) -> Tool:
        name = function["name"]
        if not self.parser.reads(name):
            raise RequestError(
                f"{field}.name={brief(name)} cannot be written in this model's tool calls; "
                "allowed: letters, digits and underscores. Rename the tool.",
                f"{field}.name",
            )
        given = function.get("parameters") if held else None
        self._check_grammars(given, name)
        strict = function.get("strict") is True
        field = f"{field}.parameters"
        schema = schema_of(ANY_OBJECT if given is None else given, field, strict)
        if not isinstance(schema, dict):
            raise RequestError(
                f"{field}={brief(schema)} is not allowed; allowed: a JSON schema that is an "
                "object. Send one, or leave it out.",
                field,
            )
        return Tool(name, without_notes(schema), field, strict)

    def _check_grammars(self, parameters: Any, name: str) -> None:
        """Raise RequestError for a grammar of a tool's text that cannot constrain its calls."""
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        for schema in properties.values() if isinstance(properties, dict) else ():
            source = schema.get(LARK) if isinstance(schema, dict) else None
            if source is None:
                continue
            if not self.parser.PLAIN_VALUES:
                raise RequestError(
                    f"tools: the Lark grammar of {brief(name)} cannot be enforced: this model "
                    "writes calls as JSON, where texts have escapes. Leave the tool's format out, "
                    "or send a regex.",
                    "tools",
                )
            if not isinstance(source, str) or len(source) > MAX_GRAMMAR_CHARACTERS:
                raise RequestError(
                    f"tools: the grammar of {brief(name)} is not allowed; allowed: a text of at "
                    f"most {MAX_GRAMMAR_CHARACTERS} characters. Shorten it.",
                    "tools",
                )
            check_lark(source, "tools")


def _function(tool: Any, field: str) -> Json:
    """The function of a tool that was sent."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{field}={brief(tool)} is not allowed; allowed: an object "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}. Send one.',
            "tools",
        )
    return function


def _bounded(rules: Rules, start: str) -> str:
    """The grammar, if it is not too large."""
    source = rules.source(start)
    for count, most, what in (
        (len(source), MAX_GRAMMAR_CHARACTERS, "characters"),
        (len(rules), MOST_RULES - 1, "rules"),
    ):
        if count > most:
            raise RequestError(
                f"tools are a grammar of {count} {what}; allowed: at most {most}. Send fewer "
                "tools, or shorter schemas.",
                "tools",
            )
    return source
