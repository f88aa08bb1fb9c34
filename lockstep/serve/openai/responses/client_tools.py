"""Tools as clients of /v1/responses declare them, and the functions by which the model calls them.

A model calls functions with JSON. A custom tool, whose input is free text, becomes a function of
one string; a tool of a namespace becomes a function whose name has the namespace in front. Tools
that OpenAI's API defines and clients run (item_tools.py) become functions of the same name.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import MAX_GRAMMAR_CHARACTERS
from lockstep.serve.openai.protocol import MAX_NAME, MAX_TOOLS, TOOL_DEFAULTS, TOOL_NOTES
from lockstep.serve.openai.responses.builtin_tools import (
    ItemTool,
    LocalShellTool,
    PatchTool,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
)
from lockstep.serve.requests.body_models import Nested
from lockstep.text.grammars.lark import LARK
from lockstep.text.parsers.events import AnswerEvent, CallArguments, CallStart

JOINT = "__"
"""Separator of a namespace and a name in a function's name, as clients of MCP servers join them."""
_BEGIN = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"', re.DOTALL)
_ESCAPED = re.compile(
    r"(?:[^\"\\]"
    r"|\\[^u]"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u])))*",
    re.DOTALL,
)
"""Part of a JSON string that can be decoded by itself: no half of an escape or of a pair."""


class FunctionTool(Nested):
    """A function that the model may call; `parameters` is a JSON schema."""

    WITHOUT_EFFECT = TOOL_NOTES
    ONLY_DEFAULTS = TOOL_DEFAULTS

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Nested):
    """Free text."""

    type: Literal["text"]


class GrammarFormat(Nested):
    """Text of a grammar, which binds the model."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)


class CustomTool(Nested):
    """A tool whose input is text."""

    WITHOUT_EFFECT = TOOL_NOTES
    ONLY_DEFAULTS = TOOL_DEFAULTS

    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


Called = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Nested):
    """Tools under one name, such as those of one MCP server."""

    WITHOUT_EFFECT = TOOL_NOTES

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    tools: list[Called] = Field(fail_fast=True, max_length=MAX_TOOLS)


Tool = Annotated[
    FunctionTool
    | CustomTool
    | NamespaceTool
    | LocalShellTool
    | ShellTool
    | PatchTool
    | ToolSearchTool
    | WebSearchTool,
    Field(discriminator="type"),
]


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function by which the model calls a tool."""
    if not namespace:
        return name
    return f"{namespace.removesuffix(JOINT)}{JOINT}{name}"


@dataclass(frozen=True)
class Callee:
    """Tool of the client, called by the model as a function. path: its place in the request."""

    tool: FunctionTool | CustomTool | ItemTool
    path: str
    namespace: NamespaceTool | None = None

    @property
    def function_name(self) -> str:
        """The function's name."""
        return function_name(self.tool.name, self.namespace.name if self.namespace else None)

    @property
    def is_custom(self) -> bool:
        """True for a tool whose input is text."""
        return isinstance(self.tool, CustomTool)

    def function(self) -> dict[str, Any]:
        """Return the function as chat completions declare it."""
        tool = self.tool
        about = [self.namespace.description if self.namespace else None]
        if not isinstance(tool, ItemTool):
            about.append(tool.description)
        fields: dict[str, Any]
        if isinstance(tool, CustomTool):
            text: dict[str, Any] = {"type": "string"}
            fields = {"strict": None}
            form = tool.format
            if isinstance(form, GrammarFormat) and form.syntax == "regex":
                text["pattern"] = f"^(?:{form.definition})$"
                fields = {"strict": True}
            elif isinstance(form, GrammarFormat):
                text[LARK] = form.definition
                fields = {"strict": True}
                about.append(f"The input matches this grammar, in Lark:\n{form.definition}")
            fields["parameters"] = input_schema(text)
        elif isinstance(tool, ItemTool):
            fields = tool.declaration()
            about.append(fields.pop("description"))
        else:
            fields = {"parameters": tool.parameters, "strict": tool.strict}
        named = {
            "name": self.function_name,
            "description": "\n".join(filter(None, about)) or None,
            **fields,
        }
        known = {key: value for key, value in named.items() if value is not None}
        return {"type": "function", "function": known}


def input_schema(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a custom tool's function; text: schema of the input."""
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


class Toolbox:
    """The tools of one request, by the names of their functions. Raises RequestError where two
    tools have one name."""

    def __init__(self, tools: Iterable[Any], added: Iterable[Any] = ()) -> None:
        """tools: those of the request. added: those that items of the conversation bring."""
        self._callees: dict[str, Callee] = {}
        for callee in callees(tools, "tools"):
            name = callee.function_name
            if name in self._callees:
                raise RequestError(
                    f"tools has two of the name {brief(name)}; allowed: names that differ. Rename "
                    "one.",
                    "tools",
                )
            self._callees[name] = callee
        # A tool that was found twice, or is sent as well, is one tool.
        for callee in callees(added, "input"):
            self._callees.setdefault(callee.function_name, callee)
        if len(self._callees) > MAX_TOOLS:
            raise RequestError(
                f"tools has {len(self._callees)} functions, those of namespaces among them; "
                f"allowed: at most {MAX_TOOLS}. Send fewer.",
                "tools",
            )

    def functions(self) -> list[dict[str, Any]]:
        """Return the functions as chat completions declare them."""
        return [callee.function() for callee in self._callees.values()]

    def sent_path(self, message: str) -> str:
        """Return an error's message with the path of the client's tool for that of a function."""
        for index, callee in enumerate(self._callees.values()):
            begin = f"tools[{index}].function"
            if message.startswith(begin):
                return callee.path + message.removeprefix(begin)
        return message

    def chosen_name(self, choice: Mapping[str, Any]) -> str:
        """Return the function's name of a tool that a tool_choice names."""
        name = function_name(str(choice["name"]), choice.get("namespace"))
        if name in self._callees:
            return name
        same = [full for full, one in self._callees.items() if one.tool.name == choice["name"]]
        return same[0] if len(same) == 1 else name

    def is_custom(self, function: str) -> bool:
        """Return whether the function is a tool's whose input is text."""
        callee = self._callees.get(function)
        return callee is not None and callee.is_custom

    def item_tool(self, function: str) -> ItemTool | None:
        """Return the function's tool if its calls are items of their own type."""
        callee = self._callees.get(function)
        tool = callee.tool if callee else None
        return tool if isinstance(tool, ItemTool) else None

    def named(self, function: str) -> dict[str, Any]:
        """Return the name of a called tool, and its namespace, as the client knows them."""
        callee = self._callees.get(function)
        if callee is None or callee.namespace is None:
            return {"name": function}
        return {"name": callee.tool.name, "namespace": callee.namespace.name}


def callees(tools: Iterable[Any], field: str) -> Iterator[Callee]:
    """Yield what the model may call. field: the list's name in the request."""
    for i, tool in enumerate(tools):
        path = f"{field}[{i}]"
        if isinstance(tool, NamespaceTool):
            for j, one in enumerate(tool.tools):
                yield Callee(one, f"{path}.tools[{j}]", tool)
        elif not isinstance(tool, WebSearchTool):
            yield Callee(tool, path)


class InputText:
    """Decodes a custom tool's input while the model writes the arguments of its function."""

    def __init__(self) -> None:
        self._left = ""
        self._begun = False

    def feed(self, arguments: str) -> str:
        """Return the text that more arguments hold; an incomplete escape waits for the rest."""
        self._left += arguments
        if not self._begun:
            begin = _BEGIN.match(self._left)
            if begin is None:
                return ""
            self._begun = True
            self._left = self._left[begin.end() :]
        # A closing quote stays in front, so nothing behind it is decoded.
        whole = _ESCAPED.match(self._left)
        end = whole.end() if whole else 0
        part = self._left[:end]
        self._left = self._left[end:]
        text: str = json.loads(f'"{part}"', strict=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ClientEvents:
    """Turns events of an answer into those that the client's tools ask for."""

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools
        self._inputs: dict[int, InputText] = {}

    def read(self, events: Sequence[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Yield the events, with arguments of custom tools as their input."""
        for event in events:
            if isinstance(event, CallStart) and self._tools.is_custom(event.name):
                self._inputs[event.index] = InputText()
            if isinstance(event, CallArguments) and event.index in self._inputs:
                text = self._inputs[event.index].feed(event.text)
                if text:
                    yield CallArguments(event.index, text)
                continue
            yield event
