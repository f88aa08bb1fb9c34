"""Grammars of tool calls: the model's own call syntax around arguments that match the tools'
schemas.

The syntax is declared by the parser (parsers/call_parser.py), so that the grammar allows what the
parser reads. RequestErrors name the tool whose schema is not enforced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import MAX_GRAMMAR_CHARACTERS, StructuredOutputsParams
from lockstep.text.grammars.json_schema import drop_annotations
from lockstep.text.grammars.lark import (
    BLANK,
    LARK,
    Rules,
    Tool,
    alternatives,
    containing,
    either,
    sequence,
)
from lockstep.text.grammars.structured_output import ANY_OBJECT, MAX_RULES, check_lark, schema_of
from lockstep.text.parsers.call_parser import CallParser

LEADING = r"/\n{0,2}/"
"""Text before an answer's calls: line ends after the reasoning."""
JSON_MARKS = frozenset('"{}[]')
"""Characters of a tool's name that a JSON reader would misread."""
Json = dict[str, Any]


@dataclass(frozen=True)
class CallParams(StructuredOutputsParams):
    """Parameters of an answer whose calls match tools. Errors of the grammar name the field tools.

    or_form: the answer is either calls or JSON of the requested form; its first character decides.
    json_after: see GrammarRecipe.
    """

    or_form: bool = False
    json_after: tuple[str, ...] | None = None

    @property
    def is_client_grammar(self) -> bool:
        """See StructuredOutputsParams."""
        return False

    def field_of(self, name: str) -> str:
        """See StructuredOutputsParams."""
        return "tools"


@dataclass(frozen=True)
class ToolChoice:
    """Restriction of an answer's tool calls.

    mode: auto, none or required.
    names: functions that may be called; None for all.
    """

    mode: str
    names: frozenset[str] | None = None

    @classmethod
    def read(cls, sent: Any) -> "ToolChoice":
        """Parse a tool_choice of OpenAI's Chat Completions API. Raises RequestError."""
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

    def allows(self, name: str) -> bool:
        """Return whether the function of this name may be called."""
        return self.names is None or name in self.names

    def strict(self, tools: Sequence[Any] | None) -> bool:
        """Return whether an allowed tool asks for calls that match its schema (strict)."""
        functions = [tool.get("function") for tool in tools or () if isinstance(tool, dict)]
        return any(
            isinstance(function, dict)
            and function.get("strict") is True
            and self.allows(function.get("name", ""))
            for function in functions
        )


ANY_CALL = ToolChoice("auto")
"""Default of tool_choice."""


def _name(tool: Any) -> str | None:
    """Return the name of a tool's function; None if it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


@dataclass(frozen=True)
class ToolSyntax:
    """Call syntax of a model.

    parser: class that reads the calls.
    tokens: tags that are special tokens of the model -> token ids.
    """

    parser: type[CallParser]
    tokens: Mapping[str, int]

    def calls_only(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Return the grammar of an answer that is one or more calls and nothing else.

        parallel: allow more than one call.
        """
        rules = Rules(self.tokens)
        return _bounded(rules, sequence(LEADING, self._calls(tools, rules, parallel)))

    def calls_or_form(self, tools: Sequence[Tool], parallel: bool, form: str) -> str:
        """Return the grammar of an answer that is either calls or JSON.

        form: Lark expression of the JSON. The parser's calls must begin with an opener, unlike
        JSON.
        """
        rules = Rules(self.tokens)
        calls = sequence(LEADING, self._calls(tools, rules, parallel))
        return _bounded(rules, f"{calls} | {rules.rule(form)}")

    def text_and_calls(self, tools: Sequence[Tool], parallel: bool) -> str:
        """Return the grammar of free text and calls: whatever the parser reads as a call matches a
        tool.

        If calls begin without an opener, an answer is either text or calls.
        """
        rules = Rules(self.tokens)
        parser = self.parser
        call_regex = containing(parser.OPENERS.values())
        if parser.BARE:
            call_begin = rf"{BLANK}*({alternatives([parser.BARE])})(.|\n)*"
            plain = rules.plain(call_regex, call_begin)
            return _bounded(rules, f"{self._calls(tools, rules, parallel)} | {plain}")
        plain = rules.plain(call_regex)
        opener, *rest = rules.parts(parser.AROUND[0] or parser.TAGS[0])
        # Text and opener are one terminal, since a longer text would hide where the opener begins.
        opened = rules.terminal(f"{plain} {opener}") if opener[0] == '"' else f"{plain} {opener}"
        call = either(self._choices(tools, rules))
        if parser.AROUND[0]:
            calls = self._calls(tools, rules, parallel, opened=True)
        else:
            calls = sequence(call, rules.text(parser.TAGS[1]))
        group = rules.rule(sequence(opened, *rest, calls))
        return _bounded(rules, f"{group}{'*' if parallel else '?'} {plain}")

    def json_after(self, tools: Sequence[Tool], free_text: bool) -> tuple[str, ...] | None:
        """Return the texts that introduce the JSON of calls: see GrammarRecipe.

        free_text: text may precede calls. Its quotes do not pair up as those of JSON do, nor do
        those of a name.
        """
        parser = self.parser
        named = any(JSON_MARKS.intersection(tool.name) for tool in tools)
        if named or not parser.JSON_CALLS or (free_text and parser.BARE):
            return None
        if not free_text:
            return ()
        call_begin = (parser.AROUND[0], parser.TAGS[0])
        openers = parser.OPENERS.values()
        return tuple(
            text for text in openers if any(begin.startswith(text) for begin in call_begin)
        )

    def _calls(
        self, tools: Sequence[Tool], rules: Rules, parallel: bool, opened: bool = False
    ) -> str:
        """Return the expression of all calls with their surrounding tags.

        opened: the opening tag of the section of calls has been written already.
        """
        parser = self.parser
        begin, end = map(rules.text, parser.AROUND)
        choices = either(self._choices(tools, rules))
        one = rules.rule(sequence(rules.text(parser.TAGS[0]), choices, rules.text(parser.TAGS[1])))
        more = f"({sequence(rules.text(parser.BETWEEN), one)})*" if parallel else ""
        return sequence("" if opened else begin, one, more, end)

    def _choices(self, tools: Sequence[Tool], rules: Rules) -> list[str]:
        return [rules.rule(self.parser.call(tool, rules)) for tool in tools]

    def tools(
        self, sent: Sequence[Json], choice: ToolChoice = ANY_CALL, enforced: bool = True
    ) -> list[Tool]:
        """Return the tools that may be called.

        enforced: enforce their schemas; otherwise any arguments are allowed.
        """
        allowed: dict[str, Tool] = {}
        for index, tool in enumerate(sent):
            field = f"tools[{index}]"
            function = _function(tool, field)
            if choice.allows(function["name"]) and function["name"] not in allowed:
                allowed[function["name"]] = self._tool(function, f"{field}.function", enforced)
        for name in sorted(choice.names or ()):
            if name not in allowed:
                raise RequestError(
                    f"tool_choice names {brief(name)}; allowed: the name of one of the tools. Send "
                    "it among tools, or choose another.",
                    "tool_choice",
                )
        return list(allowed.values())

    def _tool(self, function: Json, field: str, enforced: bool) -> Tool:
        name = function["name"]
        if not self.parser.reads(name):
            raise RequestError(
                f"{field}.name={brief(name)} cannot be written in this model's tool calls; "
                "allowed: names of letters, digits and underscores. Rename it.",
                f"{field}.name",
            )
        sent_parameters = function.get("parameters") if enforced else None
        self._check_grammars(sent_parameters, name)
        strict = function.get("strict") is True
        field = f"{field}.parameters"
        schema = schema_of(
            ANY_OBJECT if sent_parameters is None else sent_parameters, field, strict
        )
        if not isinstance(schema, dict):
            raise RequestError(
                f"{field}={brief(schema)} is not allowed; allowed: a JSON schema that is an "
                "object. Send one, or leave it out.",
                field,
            )
        return Tool(name, drop_annotations(schema), field, strict)

    def _check_grammars(self, parameters: Any, name: str) -> None:
        """Raise RequestError for a Lark grammar that cannot constrain the tool's calls."""
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        for schema in properties.values() if isinstance(properties, dict) else ():
            source = schema.get(LARK) if isinstance(schema, dict) else None
            if source is None:
                continue
            if not self.parser.PLAIN_VALUES:
                raise RequestError(
                    f"tools: the Lark grammar of {brief(name)} cannot be enforced, since this "
                    "model writes calls as JSON, whose strings have escapes. Remove the tool's "
                    "format, or send a regex.",
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
    """Return the function of a tool that was sent."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{field}={brief(tool)} is not allowed; allowed: an object "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}. Send one.',
            "tools",
        )
    return function


def _bounded(rules: Rules, start: str) -> str:
    """Return the source of the grammar; raise RequestError if it is too large."""
    source = rules.source(start)
    for count, limit, what in (
        (len(source), MAX_GRAMMAR_CHARACTERS, "characters"),
        (len(rules), MAX_RULES - 1, "rules"),
    ):
        if count > limit:
            raise RequestError(
                f"tools are a grammar of {count} {what}; allowed: at most {limit}. Send fewer "
                "tools, or shorter schemas.",
                "tools",
            )
    return source
