"""Tools that become callable, or cease to be, in the middle of a conversation.

Claude Code declares tools with `defer_loading` and loads them when it needs them. Chat templates
list all tools at the beginning of the prompt. So the prompt has the tools that are offered after
the last message.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.errors import RequestError, brief
from lockstep.serve.openai.conversation import (
    MAX_NAME,
    TOOL_ANNOTATIONS,
    TOOL_DEFAULTS,
    tool_type_check,
)
from lockstep.serve.requests.body_models import ANNOTATION_FIELDS, Nested


class SentTool(Nested):
    """A tool of the client; `input_schema` is a JSON schema.

    defer_loading: it may be called only after a message has added it or referred to it.
    """

    WITHOUT_EFFECT = TOOL_ANNOTATIONS
    ONLY_DEFAULTS = TOOL_DEFAULTS

    type: Annotated[Literal["custom"], tool_type_check("custom")] = "custom"
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool = False


class NamedTool(Nested):
    """Name of a tool that `tools`, or an earlier block, defines."""

    type: Literal["tool_reference"]
    name: str = Field(min_length=1, max_length=MAX_NAME)


class DefinedTool(Nested):
    """Definition of a tool within a message."""

    type: Literal["tool_definition"]
    definition: SentTool


class ToolAdditionBlock(Nested):
    """Tool that may be called from this block on."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS

    type: Literal["tool_addition"]
    tool: Annotated[NamedTool | DefinedTool, Field(discriminator="type")]


class ToolRemovalBlock(Nested):
    """Tool that may not be called from this block on."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS

    type: Literal["tool_removal"]
    tool: Annotated[NamedTool, Field(discriminator="type")]


class ToolReferenceBlock(Nested):
    """Tool that a search of the client found: it may be called from this result on."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1, max_length=MAX_NAME)


class OfferedTools:
    """Tools of a request, and the names of those that the model may call."""

    def __init__(self, tools: Sequence[SentTool]) -> None:
        self._sent = tools
        self._defined: dict[str, SentTool] = {}
        self._known = {tool.name for tool in tools}
        self._offered = {tool.name for tool in tools if not tool.defer_loading}

    def define(self, tool: SentTool) -> None:
        """Offer a tool that a message defines, instead of another one of its name."""
        self._defined.pop(tool.name, None)  # the latest definition is the last tool
        self._defined[tool.name] = tool
        self._known.add(tool.name)
        self._offered.add(tool.name)

    def add(self, name: str, path: str) -> None:
        """Offer a tool. path: of the block that names it. Raises RequestError."""
        self._check(name, path)
        self._offered.add(name)

    def remove(self, name: str, path: str) -> None:
        """Withdraw a tool. path: of the block that names it. Raises RequestError."""
        self._check(name, path)
        self._offered.discard(name)

    def tools(self) -> list[SentTool]:
        """Return the tools that are offered."""
        sent = [tool for tool in self._sent if tool.name not in self._defined]
        return [tool for tool in (*sent, *self._defined.values()) if tool.name in self._offered]

    def _check(self, name: str, path: str) -> None:
        if name not in self._known:
            raise RequestError(
                f"{path} names the tool {brief(name)}; allowed: a tool that the request defines. "
                "Send its definition among tools.",
                "messages",
            )
