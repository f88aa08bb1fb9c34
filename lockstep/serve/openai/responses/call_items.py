"""Input items of /v1/responses with a tool call, with the result of a call, or with both.

The model calls functions. A call of any other kind of tool appears in the prompt as the call of a
function with the tool's name, so that a session of another server can continue here.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from lockstep.serve.openai.conversation import MAX_NAME, MAX_PARTS, MAX_TOOLS, Content
from lockstep.serve.openai.responses.client_tools import Tool, callees, function_name
from lockstep.serve.requests.body_models import ANNOTATION_FIELDS, Nested
from lockstep.text.grammars.json_schema import MAX_DEPTH, is_deep

MAX_ID = 128
"""Maximum characters of the id of a response or a call."""
ITEM_ANNOTATIONS = ANNOTATION_FIELDS | {"internal_chat_message_metadata_passthrough", "metadata"}
"""Fields of any item without effect."""
CALL_ANNOTATIONS = ITEM_ANNOTATIONS | {"caller", "created_by", "execution", "parsed_arguments"}
"""Fields of a call without effect."""
OUTPUT_ANNOTATIONS = CALL_ANNOTATIONS | {"name", "namespace", "max_output_length"}
"""Fields of a call's output without effect: its call_id says which tool was called."""


def shallow(value: Any) -> Any:
    """Return a value of any type. Raises ValueError if it is nested too deeply for a response."""
    if is_deep(value):
        raise ValueError(f"more than {MAX_DEPTH} levels of nesting; allowed: at most {MAX_DEPTH}")
    return value


def as_json(value: Any) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


class Call(NamedTuple):
    """Call of a function. arguments: JSON text."""

    id: str
    name: str
    arguments: str


class Result(NamedTuple):
    """Result of the call with this id. content: text, or a list of text parts."""

    call_id: str
    content: Any


class InputItem(Nested):
    """Item of a conversation, as a client sends it."""

    WITHOUT_EFFECT = ITEM_ANNOTATIONS

    def call(self) -> Call | None:
        """Return the item's call of a function, if it has one."""
        return None

    def result(self) -> Result | None:
        """Return the item's result of a call, if it has one."""
        return None

    def added_tools(self) -> list[Any]:
        """Return the tools that may be called from this item on."""
        return []


CallId = Annotated[str, Field(max_length=MAX_ID)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class InputCall(InputItem):
    """Call of a function."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS

    type: Literal["function_call"]
    call_id: CallId
    name: Name
    namespace: str | None = Field(None, max_length=MAX_NAME)
    arguments: str

    def call(self) -> Call:
        """See InputItem."""
        return Call(self.call_id, function_name(self.name, self.namespace), self.arguments)


class InputCustomCall(InputItem):
    """Call of a custom tool."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: Name
    namespace: str | None = Field(None, max_length=MAX_NAME)
    input: str

    def call(self) -> Call:
        """See InputItem."""
        name = function_name(self.name, self.namespace)
        return Call(self.call_id, name, as_json({"input": self.input}))


class InputCallOutput(InputItem):
    """Result of a call of a function. Codex sends results of no call, which have no call_id."""

    WITHOUT_EFFECT = OUTPUT_ANNOTATIONS

    type: Literal["function_call_output"]
    call_id: CallId = ""
    output: Content

    def result(self) -> Result:
        """See InputItem."""
        return Result(self.call_id, self.output)


class InputCustomCallOutput(InputCallOutput):
    """Result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class ExecAction(Nested):
    """Command of local_shell, as a list of words."""

    WITHOUT_EFFECT = frozenset({"type"})

    command: list[str] = Field(fail_fast=True, max_length=MAX_PARTS)
    working_directory: str | None = None
    timeout_ms: int | None = None
    env: dict[str, str] | None = None
    user: str | None = None


class InputLocalShellCall(InputItem):
    """Command that the client's local_shell ran. Codex may omit the call_id."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS - {"id"}

    type: Literal["local_shell_call"]
    id: CallId = ""
    call_id: CallId = ""
    action: ExecAction

    def call(self) -> Call:
        """See InputItem."""
        arguments = self.action.model_dump(exclude_none=True)
        return Call(self.call_id or self.id, "local_shell", as_json(arguments))


class InputLocalShellCallOutput(InputItem):
    """Result of a command of local_shell. OpenAI names the call in `id`, others in `call_id`."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS - {"id"}

    type: Literal["local_shell_call_output"]
    id: CallId = ""
    call_id: CallId = ""
    output: Content

    def result(self) -> Result:
        """See InputItem."""
        return Result(self.call_id or self.id, self.output)


class ShellAction(Nested):
    """Commands of shell; each one starts a new shell."""

    commands: list[str] = Field(fail_fast=True, max_length=MAX_PARTS)
    timeout_ms: int | None = None
    max_output_length: int | None = None


class InputShellCall(InputItem):
    """Commands that the client's shell ran."""

    # The environment says where the commands ran; the model knows their output.
    WITHOUT_EFFECT = CALL_ANNOTATIONS | {"environment"}

    type: Literal["shell_call"]
    call_id: CallId
    action: ShellAction

    def call(self) -> Call:
        """See InputItem."""
        return Call(self.call_id, "shell", as_json(self.action.model_dump(exclude_none=True)))


class ShellOutcome(Nested):
    """Outcome of a command: its exit code, or a timeout."""

    type: Literal["exit", "timeout"]
    exit_code: int | None = None


class ShellOutput(Nested):
    """Output of one command of shell."""

    WITHOUT_EFFECT = frozenset({"created_by"})

    stdout: str
    stderr: str
    outcome: ShellOutcome


class InputShellCallOutput(InputItem):
    """Result of commands of shell."""

    WITHOUT_EFFECT = OUTPUT_ANNOTATIONS

    type: Literal["shell_call_output"]
    call_id: CallId
    output: list[ShellOutput] = Field(fail_fast=True, max_length=MAX_PARTS)

    def result(self) -> Result:
        """See InputItem."""
        outputs = [output.model_dump(exclude_none=True) for output in self.output]
        return Result(self.call_id, as_json(outputs))


class PatchOperation(Nested):
    """Change of one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class InputPatchCall(InputItem):
    """Change of a file that the client's apply_patch made."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS

    type: Literal["apply_patch_call"]
    call_id: CallId
    operation: PatchOperation

    def call(self) -> Call:
        """See InputItem."""
        arguments = self.operation.model_dump(exclude_none=True)
        return Call(self.call_id, "apply_patch", as_json(arguments))


class InputPatchCallOutput(InputItem):
    """Result of a change of a file."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS - {"status"}

    type: Literal["apply_patch_call_output"]
    call_id: CallId
    status: Literal["completed", "failed"]
    output: str | None = None

    def result(self) -> Result:
        """See InputItem."""
        fields = {"status": self.status, "output": self.output}
        sent = {name: value for name, value in fields.items() if value is not None}
        return Result(self.call_id, as_json(sent))


class InputMcpCall(InputItem):
    """Call of a tool of an MCP server that another server made, with its result."""

    WITHOUT_EFFECT = (CALL_ANNOTATIONS - {"id"}) | {"approval_request_id"}

    type: Literal["mcp_call"]
    id: CallId
    server_label: Name
    name: Name
    arguments: str
    output: str | None = None
    error: Annotated[Any, BeforeValidator(shallow)] = None

    def call(self) -> Call:
        """See InputItem."""
        return Call(self.id, function_name(self.name, self.server_label), self.arguments)

    def result(self) -> Result:
        """See InputItem."""
        if self.error is None:
            return Result(self.id, self.output or "")
        return Result(self.id, as_json({"error": self.error}))


class InputToolSearchCall(InputItem):
    """Search for tools that the model may call."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS - {"id"}

    type: Literal["tool_search_call"]
    id: CallId = ""
    call_id: CallId = ""
    arguments: Annotated[Any, BeforeValidator(shallow)]

    def call(self) -> Call:
        """See InputItem."""
        # OpenAI's API has an object here, and some clients return it as the text of one.
        arguments = self.arguments
        text = arguments if isinstance(arguments, str) else as_json(arguments)
        return Call(self.call_id or self.id, "tool_search", text)


def _loaded(tools: Any) -> Any:
    """Return tools without defer_loading, which says that a tool is not loaded before a search."""
    if not isinstance(tools, list):
        return tools
    loaded: list[Any] = []
    # One more than allowed, so that the limit of the field refuses a longer list.
    for tool in tools[: MAX_TOOLS + 1]:
        if isinstance(tool, Mapping):
            tool = {key: value for key, value in tool.items() if key != "defer_loading"}
            if tool.get("type") == "namespace":
                tool["tools"] = _loaded(tool.get("tools"))
        loaded.append(tool)
    return loaded


LoadedTools = Annotated[
    list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS), BeforeValidator(_loaded)
]


class InputToolSearchOutput(InputItem):
    """Tools that a search returned; the model may call them from here on."""

    WITHOUT_EFFECT = CALL_ANNOTATIONS - {"id"}

    type: Literal["tool_search_output"]
    id: CallId = ""
    call_id: CallId = ""
    tools: LoadedTools

    def result(self) -> Result:
        """See InputItem."""
        # The prompt declares the tools, so their names are enough here.
        names = [callee.function_name for callee in callees(self.tools, "input")]
        return Result(self.call_id or self.id, as_json({"tools": names}))

    def added_tools(self) -> list[Any]:
        """See InputItem."""
        return self.tools


class InputTools(InputItem):
    """Tools that the client adds during a conversation."""

    WITHOUT_EFFECT = ITEM_ANNOTATIONS | {"role"}

    type: Literal["additional_tools"]
    tools: LoadedTools

    def added_tools(self) -> list[Any]:
        """See InputItem."""
        return self.tools


CallItem = (
    InputCall
    | InputCustomCall
    | InputCallOutput
    | InputCustomCallOutput
    | InputLocalShellCall
    | InputLocalShellCallOutput
    | InputShellCall
    | InputShellCallOutput
    | InputPatchCall
    | InputPatchCallOutput
    | InputMcpCall
    | InputToolSearchCall
    | InputToolSearchOutput
    | InputTools
)
