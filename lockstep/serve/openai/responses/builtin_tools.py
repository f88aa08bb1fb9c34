"""Built-in tools of /v1/responses, which OpenAI's API defines by their type.

The model calls the tools that clients run as functions of the same name. Each of these tools has
its own type of item for a call.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from lockstep.serve.requests.body_models import Nested


def _require(allowed: Any, message: str) -> Callable[[Any], Any]:
    """Return a validator that accepts one value. message: reason and remedy for other values."""

    def check(value: Any) -> Any:
        if value != allowed:
            raise ValueError(message)
        return value

    return check


require_local = _require(
    "local", "this server runs no containers; allowed: local, for a shell of the client. Send that"
)
require_client = _require(
    "client", "this server searches no tools; allowed: client. Send that, or all tools as they are"
)
require_offline = _require(
    False,
    "this server does not search the web; allowed: false. Leave the tool out; Codex does with "
    'web_search = "disabled" in its config.toml',
)


def _strict_function(
    description: str, required: Sequence[str], **properties: Any
) -> dict[str, Any]:
    """Return the declaration of a function whose arguments a grammar constrains."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }
    # Strict, since clients reject a call's item that does not have the fields of its type.
    return {"description": description, "parameters": parameters, "strict": True}


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a complete call; {} where they are no JSON object."""
    try:
        arguments = json.loads(text)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


_WORDS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_COUNT = {"type": "integer", "minimum": 1}


class LocalShellTool(Nested):
    """Shell of the client that runs one command, a list of words."""

    name: ClassVar[str] = "local_shell"
    prefix: ClassVar[str] = "lsh"
    type: Literal["local_shell"]

    def declaration(self) -> dict[str, Any]:
        """Return the description, the parameters and the strictness of the tool's function."""
        return _strict_function(
            "Run a command on the user's machine. The command is a list of words.",
            ["command"],
            command=_WORDS,
            working_directory={"type": "string"},
            timeout_ms=_COUNT,
        )

    def item(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a call's item. arguments: {} while the model writes them."""
        # Clients require command and env, also while the model still writes the call.
        action = {"type": "exec", "command": [], "env": {}, **arguments}
        return {"type": "local_shell_call", "action": action}


class LocalEnvironment(Nested):
    """Environment of a shell: the client's machine."""

    ONLY_DEFAULTS = {"skills": ([],)}

    type: Annotated[Literal["local"], BeforeValidator(require_local)]


class ShellTool(Nested):
    """Shell of the client that runs several commands, each a line of text."""

    name: ClassVar[str] = "shell"
    prefix: ClassVar[str] = "sh"
    type: Literal["shell"]
    environment: LocalEnvironment | None = None

    def declaration(self) -> dict[str, Any]:
        """See LocalShellTool."""
        return _strict_function(
            "Run shell commands on the user's machine, each in a new shell.",
            ["commands"],
            commands=_WORDS,
            timeout_ms=_COUNT,
            max_output_length=_COUNT,
        )

    def item(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See LocalShellTool."""
        action = {"commands": [], "timeout_ms": None, "max_output_length": None, **arguments}
        return {"type": "shell_call", "action": action, "environment": {"type": "local"}}


class PatchTool(Nested):
    """Changes of files on the client's machine, one file per call."""

    name: ClassVar[str] = "apply_patch"
    prefix: ClassVar[str] = "apc"
    type: Literal["apply_patch"]

    def declaration(self) -> dict[str, Any]:
        """See LocalShellTool."""
        return _strict_function(
            "Create, update or delete a file. The diff is in V4A form, and empty for delete_file.",
            ["type", "path", "diff"],
            type={"enum": ["create_file", "update_file", "delete_file"]},
            path={"type": "string"},
            diff={"type": "string"},
        )

    def item(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See LocalShellTool."""
        operation = {"type": "update_file", "path": "", "diff": "", **arguments}
        # The grammar requires a diff of every operation, and the item of a deletion has none.
        if operation["type"] == "delete_file":
            del operation["diff"]
        return {"type": "apply_patch_call", "operation": operation}


class ToolSearchTool(Nested):
    """Search of the client for tools that the model may call."""

    name: ClassVar[str] = "tool_search"
    prefix: ClassVar[str] = "tsc"
    type: Literal["tool_search"]
    execution: Annotated[Literal["client"], BeforeValidator(require_client)] = Field(
        "server",
        validate_default=True,
    )
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def declaration(self) -> dict[str, Any]:
        """See LocalShellTool."""
        return {"description": self.description, "parameters": self.parameters, "strict": None}

    def item(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See LocalShellTool."""
        return {"type": "tool_search_call", "execution": "client", "arguments": {**arguments}}


BuiltinTool = LocalShellTool | ShellTool | PatchTool | ToolSearchTool
"""Built-in tools that clients run; each has its own type of item for a call."""
BUILTIN_TOOL_NAMES = ("local_shell", "shell", "apply_patch", "tool_search")
"""Types of these tools, and names of their functions."""


class WebSearchTool(Nested):
    """Search without access to the web, in the server's cache of pages.

    This server has no such cache, so a search could find nothing. The prompt omits the tool.
    """

    WITHOUT_EFFECT = frozenset(
        {"filters", "search_content_types", "search_context_size", "user_location"}
    )

    type: Literal["web_search"]
    external_web_access: Annotated[Literal[False], BeforeValidator(require_offline)] = Field(
        True,
        validate_default=True,
    )
