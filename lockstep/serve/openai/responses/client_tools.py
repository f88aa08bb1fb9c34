"""Tools of /v1/responses, and the functions by which the model calls them.

The model calls functions with JSON arguments. A custom tool, whose input is free text, becomes a
function with one string. A tool of a namespace becomes a function with the namespace as the prefix
of its name. Built-in tools (builtin_tools.py) become functions of the same name.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from lockstep.errors import RequestError, brief
from lockstep.sampling_params import MAX_GRAMMAR_CHARACTERS
from lockstep.serve.openai.conversation import MAX_NAME, MAX_TOOLS, TOOL_ANNOTATIONS, TOOL_DEFAULTS
from lockstep.serve.openai.responses.builtin_tools import (
    BuiltinTool,
    LocalShellTool,
    PatchTool,
    ShellTool,
    ToolSearchTool,
    WebSearchTool,
)
from lockstep.serve.requests.body_models import Nested
from lockstep.text.grammars.lark import LARK
from lockstep.text.parsers.events import AnswerEvent, CallArguments, CallStart

NAMESPACE_SEPARATOR = "__"
"""Separator of a namespace and a name in a function's name, as clients of MCP servers join them."""
_INPUT_START = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"', re.DOTALL)
_DECODABLE = re.compile(
    r"(?:[^\"\\]"
    r"|\\[^u]"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u])))*",
    re.DOTALL,
)
"""Prefix of a JSON string that can be decoded: it ends within no escape and no surrogate pair."""


class FunctionTool(Nested):
    """A function that the model may call; `parameters` is a JSON schema."""

    WITHOUT_EFFECT = TOOL_ANNOTATIONS
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
    """Text that a grammar constrains."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)


class CustomTool(Nested):
    """A tool whose input is text."""

    WITHOUT_EFFECT = TOOL_ANNOTATIONS
    ONLY_DEFAULTS = TOOL_DEFAULTS

    type: Literal["custom"]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    format: Annotated[TextFormat | GrammarFormat, Field(discriminator="type")] | None = None


CallableTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(Nested):
    """Tools under a common name, such as those of an MCP server."""

    WITHOUT_EFFECT = TOOL_ANNOTATIONS

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    tools: list[CallableTool] = Field(fail_fast=True, max_length=MAX_TOOLS)


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
    return f"{namespace.removesuffix(NAMESPACE_SEPARATOR)}{NAMESPACE_SEPARATOR}{name}"


@dataclass(frozen=True)
class Callee:
    """Tool of the client that the model calls as a function. path: its path in the request."""

    tool: FunctionTool | CustomTool | BuiltinTool
    path: str
    namespace: NamespaceTool | None = None

    @property
    def function_name(self) -> str:
        """Name of the function."""
        return function_name(self.tool.name, self.namespace.name if self.namespace else None)

    @property
    def is_custom(self) -> bool:
        """True for a tool whose input is text."""
        return isinstance(self.tool, CustomTool)

    def function(self) -> dict[str, Any]:
        """Return the function as chat completions declare it."""
        tool = self.tool
        descriptions = [self.namespace.description if self.namespace else None]
        if not isinstance(tool, BuiltinTool):
            descriptions.append(tool.description)
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
                descriptions.append(f"The input matches this grammar, in Lark:\n{form.definition}")
            fields["parameters"] = input_schema(text)
        elif isinstance(tool, BuiltinTool):
            fields = tool.declaration()
            descriptions.append(fields.pop("description"))
        else:
            fields = {"parameters": tool.parameters, "strict": tool.strict}
        declaration = {
            "name": self.function_name,
            "description": "\n".join(filter(None, descriptions)) or None,
            **fields,
        }
        known = {key: value for key, value in declaration.items() if value is not None}
        return {"type": "function", "function": known}


def input_schema(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a custom tool's function. text: JSON schema of the input."""
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


class ToolName(TypedDict):
    """Name of a tool, and its namespace."""

    name: str
    namespace: NotRequired[str]


class Toolbox:
    """Tools of a request, by the names of their functions.

    tools: tools of the request. added: tools that items of the conversation add. Raises
    RequestError for two tools of the same name, and for more than MAX_TOOLS functions.
    """

    def __init__(self, tools: Iterable[Any], added: Iterable[Any] = ()) -> None:
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
        # Searches may add a tool again that is known already.
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
        """Replace the path of a function in an error's message by the path of the client's tool."""
        for index, callee in enumerate(self._callees.values()):
            begin = f"tools[{index}].function"
            if message.startswith(begin):
                return callee.path + message.removeprefix(begin)
        return message

    def chosen_name(self, choice: Mapping[str, Any]) -> str:
        """Return the name of the function that a tool_choice names."""
        name = function_name(str(choice["name"]), choice.get("namespace"))
        if name in self._callees:
            return name
        # The namespace may be left out where the name is unique.
        matches = [
            full_name
            for full_name, callee in self._callees.items()
            if callee.tool.name == choice["name"]
        ]
        return matches[0] if len(matches) == 1 else name

    def is_custom(self, function: str) -> bool:
        """Return whether the function belongs to a custom tool, whose input is text."""
        callee = self._callees.get(function)
        return callee is not None and callee.is_custom

    def builtin_tool(self, function: str) -> BuiltinTool | None:
        """Return the built-in tool of a function, if it belongs to one."""
        callee = self._callees.get(function)
        tool = callee.tool if callee else None
        return tool if isinstance(tool, BuiltinTool) else None

    def client_name(self, function: str) -> ToolName:
        """Return the name and the namespace of a called tool, as the client knows them."""
        callee = self._callees.get(function)
        if callee is None or callee.namespace is None:
            return {"name": function}
        return {"name": callee.tool.name, "namespace": callee.namespace.name}


def callees(tools: Iterable[Any], field: str) -> Iterator[Callee]:
    """Yield the tools that the model may call. field: name of the list in the request."""
    for i, tool in enumerate(tools):
        path = f"{field}[{i}]"
        if isinstance(tool, NamespaceTool):
            for j, inner in enumerate(tool.tools):
                yield Callee(inner, f"{path}.tools[{j}]", tool)
        elif not isinstance(tool, WebSearchTool):
            yield Callee(tool, path)


class InputDecoder:
    """Decoder of a custom tool's input while the model writes the arguments of its function."""

    def __init__(self) -> None:
        self._pending = ""
        self._has_started = False

    def feed(self, arguments: str) -> str:
        """Return the text of more arguments; an incomplete escape waits for its end."""
        self._pending += arguments
        if not self._has_started:
            start = _INPUT_START.match(self._pending)
            if start is None:
                return ""
            self._has_started = True
            self._pending = self._pending[start.end() :]
        # The match ends before the closing quote, so the rest of the object is never decoded.
        match = _DECODABLE.match(self._pending)
        end = match.end() if match else 0
        part = self._pending[:end]
        self._pending = self._pending[end:]
        text: str = json.loads(f'"{part}"', strict=False)
        # Half of a surrogate pair, which the model may write as an escape, becomes U+FFFD.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class ClientToolEvents:
    """Converter of parser events: arguments of custom tools become their input text."""

    def __init__(self, tools: Toolbox) -> None:
        self._tools = tools
        self._decoders: dict[int, InputDecoder] = {}

    def convert(self, events: Sequence[AnswerEvent]) -> Iterator[AnswerEvent]:
        """Yield the events, with the arguments of custom tools decoded."""
        for event in events:
            if isinstance(event, CallStart) and self._tools.is_custom(event.name):
                self._decoders[event.index] = InputDecoder()
            if isinstance(event, CallArguments) and event.index in self._decoders:
                text = self._decoders[event.index].feed(event.text)
                if text:
                    yield CallArguments(event.index, text)
                continue
            yield event
