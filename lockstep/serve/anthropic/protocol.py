"""Request bodies of /v1/messages, Anthropic's API, and their conversion to a ChatRequest."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from lockstep.serve.anthropic.tool_changes import (
    DefinedTool,
    NamedTool,
    OfferedTools,
    SentTool,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
)
from lockstep.serve.openai.conversation import (
    MAX_MESSAGES,
    MAX_NAME,
    MAX_PARTS,
    MAX_TOOLS,
    Effort,
    merge_system_messages,
)
from lockstep.serve.openai.protocol import ChatRequest, chat_request
from lockstep.serve.openai.responses.call_items import shallow
from lockstep.serve.openai.responses.client_tools import function_name
from lockstep.serve.openai.sampling_fields import GenerationFields
from lockstep.serve.requests.body_models import ANNOTATION_FIELDS, Body, Nested
from lockstep.serve.requests.unsupported_fields import MESSAGES, refuse_unsupported, without_effect

MAX_ID = 256
"""Maximum characters of a call's id."""
SAME_FIELDS = (*GenerationFields.model_fields, "chat_template_kwargs")
"""Fields that have the same name in a ChatRequest."""
SENT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
}
"""Field of a ChatRequest -> the field of the body that it was made from."""
BILLING_MARK = "x-anthropic-billing-header:"
"""Beginning of a line of metadata for Anthropic's billing, the first line of a system prompt."""


class TextBlock(Nested):
    """Text."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS

    type: Literal["text"]
    text: str


def _require_text(kind: Any) -> Any:
    if kind != "text":
        raise ValueError("this server reads text only; allowed: text. Send text in its place")
    return kind


class PlainText(TextBlock):
    """Text of the system prompt, where no other block is allowed."""

    type: Annotated[Literal["text"], BeforeValidator(_require_text)]


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


TextList = Annotated[list[PlainText], Field(fail_fast=True, max_length=MAX_PARTS)]
Texts = Annotated[TextList, BeforeValidator(_as_blocks, json_schema_input_type=str | TextList)]


class ToolUseBlock(Nested):
    """A tool call of the model."""

    WITHOUT_EFFECT = (ANNOTATION_FIELDS - {"id"}) | {"caller", "partial_json"}

    type: Literal["tool_use"]
    id: str = Field(max_length=MAX_ID)
    name: str = Field(min_length=1, max_length=MAX_NAME)
    input: dict[str, Any]


ResultPart = Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")]
ResultParts = Annotated[list[ResultPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class ToolResultBlock(Nested):
    """Result of a call. Chat templates cannot express is_error."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS | {"caller"}

    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=MAX_ID)
    content: Annotated[
        ResultParts, BeforeValidator(_as_blocks, json_schema_input_type=str | ResultParts)
    ] = Field(default_factory=list)
    is_error: bool = False


class ServerCallBlock(Nested):
    """Call of a tool that another server ran."""

    WITHOUT_EFFECT = (ANNOTATION_FIELDS - {"id"}) | {"caller"}

    type: Literal["server_tool_use", "mcp_tool_use"]
    id: str = Field(max_length=MAX_ID)
    name: str = Field(min_length=1, max_length=MAX_NAME)
    server_name: str | None = Field(None, max_length=MAX_NAME)
    input: dict[str, Any]


def _text_result(value: Any) -> Any:
    """Return a result without encrypted fields. Raises ValueError for content that is no text."""
    return _without_encrypted(shallow(value))


def _without_encrypted(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_encrypted(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") in ("base64", "image"):
        raise ValueError("this server reads text only; allowed: text. Send text in its place")
    # Clients move their cache marks with every turn, which would prevent prefix cache hits.
    return {
        key: _without_encrypted(entry)
        for key, entry in value.items()
        if entry is not None and key != "cache_control" and not key.startswith("encrypted_")
    }


_LISTS = ("content", "tool_references", "lines")
_VALUES = (
    *("type", "url", "title", "text", "page_age", "retrieved_at", "error_code", "error_message"),
    *("stdout", "stderr", "return_code", "file_type", "is_file_update", "num_lines", "start_line"),
    *("total_lines", "new_lines", "new_start", "old_lines", "old_start"),
)
_FIELDS: dict[str, Any] = {**dict.fromkeys(_VALUES, {}), **dict.fromkeys(_LISTS, {"items": {}})}
RESULT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": _FIELDS},
        {"type": "array", "items": {"type": "object", "properties": _FIELDS}},
    ]
}
"""Results of tools of other servers, with the fields that Anthropic's API publishes."""


class ServerResultBlock(Nested):
    """Result of a call that another server ran. The model reads it as JSON, without is_error."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS | {"caller"}

    type: Literal[
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "mcp_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]
    tool_use_id: str = Field(max_length=MAX_ID)
    content: Annotated[Any, BeforeValidator(_text_result), WithJsonSchema(RESULT_SCHEMA)]
    is_error: bool = False


class RedactedThinkingBlock(Nested):
    """Reasoning that another server encrypted. Only that server can read it, so prompts omit it."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS | {"data"}

    type: Literal["redacted_thinking"]


class ThinkingBlock(Nested):
    """Reasoning of an earlier response."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[
    TextBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ServerCallBlock
    | ServerResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock,
    Field(discriminator="type"),
]
BlockList = Annotated[list[Block], Field(fail_fast=True, max_length=MAX_PARTS)]


class SentMessage(Nested):
    """A message of the user, of the assistant, or of the system during a conversation."""

    WITHOUT_EFFECT = ANNOTATION_FIELDS | {
        "container",
        "context_management",
        "diagnostics",
        "model",
        "parsed_output",
        "stop_details",
        "stop_reason",
        "stop_sequence",
        "system_fingerprint",
        "tool_call_parse_error",
        "type",
        "usage",
    }

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        BlockList, BeforeValidator(_as_blocks, json_schema_input_type=str | BlockList)
    ]


class ToolChoice(Nested):
    """Tools that the model may call, or must call."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = Field(None, max_length=MAX_NAME)
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> "ToolChoice":
        if self.type == "tool" and not self.name:
            raise ValueError("type tool needs a name; send that of one of the tools")
        return self


class Thinking(Nested):
    """Switch of reasoning and its maximum number of tokens; adaptive: the template decides."""

    WITHOUT_EFFECT = frozenset({"display"})

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0, lt=2**31)


class OutputFormat(Nested):
    """Form of the answer: JSON that matches a schema."""

    type: str
    schema_: Any = Field(None, alias="schema")


class OutputConfig(Nested):
    """Effort of reasoning, and form of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """The body of /v1/messages/count_tokens."""

    OWN_NAMES = {}
    messages: list[SentMessage] = Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    model: str | None = None
    system: Texts | None = None
    tools: list[SentTool] | None = Field(None, fail_fast=True, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def ignored_fields(self) -> list[str]:
        """Return the sorted names of sent fields that have no effect."""
        names = [*without_effect(self.model_extra or (), MESSAGES), *self._generation_only()]
        blocks = [block for message in self.messages for block in message.content]
        results = [b for b in blocks if isinstance(b, (ToolResultBlock, ServerResultBlock))]
        names += {f"{result.type}.is_error" for result in results if result.is_error}
        if any(isinstance(block, RedactedThinkingBlock) for block in blocks):
            names.append("redacted_thinking")
        if self.system and self.system[0].text.startswith(BILLING_MARK):
            names.append("system.x-anthropic-billing-header")
        return sorted(names)

    def chat(self) -> ChatRequest:
        """Convert the body to a ChatRequest. Raises RequestError."""
        unused = self._generation_only()
        extra = self.model_extra or {}
        refuse_unsupported({name: extra[name] for name in extra if name not in unused}, MESSAGES)
        messages = merge_system_messages(list(self._messages()))
        # The assistant's last block may be a result of another server's tool, which becomes a
        # message of the role tool: the model then begins a new message.
        last_role = messages[-1]["role"] if messages else None
        continues = self.messages[-1].role == last_role == "assistant"
        choice = self.tool_choice
        config = self.output_config
        output_format = config.format if config else None
        fields = {
            "messages": messages,
            "tools": [_chat_tool(tool) for tool in self.offered_tools()],
            "tool_choice": _chat_choice(choice) if choice else "auto",
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "reasoning_effort": self._effort(),
            "thinking_token_budget": self.thinking.budget_tokens if self.thinking else None,
            "response_format": _chat_format(output_format) if output_format else None,
            **self._other_fields(),
        }
        return chat_request(fields, SENT_NAMES)

    def offered_tools(self) -> list[SentTool]:
        """Return the tools that the model may call after the last message. Raises RequestError."""
        offered = OfferedTools(self.tools or ())
        for i, message in enumerate(self.messages):
            for k, block in enumerate(message.content):
                path = f"messages[{i}].content[{k}]"
                match block:
                    case ToolAdditionBlock(tool=DefinedTool(definition=tool)):
                        offered.define(tool)
                    case ToolAdditionBlock(tool=NamedTool(name=name)):
                        offered.add(name, path)
                    case ToolRemovalBlock(tool=NamedTool(name=name)):
                        offered.remove(name, path)
                    case ToolResultBlock(content=parts):
                        for n, part in enumerate(parts):
                            if isinstance(part, ToolReferenceBlock):
                                offered.add(part.tool_name, f"{path}.content[{n}]")
        return offered.tools()

    def _generation_only(self) -> list[str]:
        """Return the sent fields that only MessagesRequest has; a token count ignores them."""
        return [name for name in self.model_extra or () if name in MessagesRequest.model_fields]

    def _other_fields(self) -> dict[str, Any]:
        """Return the fields of the ChatRequest that do not change the prompt."""
        return {"model": self.model, "chat_template_kwargs": self.chat_template_kwargs}

    def _effort(self) -> str | None:
        """Return the reasoning effort; None, as with adaptive thinking, lets the model decide."""
        kind = self.thinking.type if self.thinking else "adaptive"
        if kind == "disabled":
            return "none"
        effort = self.output_config.effort if self.output_config else None
        return effort or ("high" if kind == "enabled" else None)

    def _messages(self) -> Iterator[dict[str, Any]]:
        system = _without_billing(self.system or [])
        if system:
            yield {"role": "system", "content": _parts(system)}
        for message in self.messages:
            if message.role == "assistant":
                yield from _assistant_messages(message.content)
            else:
                yield from _user_messages(message.role, message.content)


class MessagesRequest(GenerationFields, CountRequest):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = Field(None, fail_fast=True, max_length=MAX_PARTS)
    metadata: dict[str, Any] | None = None

    def _other_fields(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in SAME_FIELDS}
        return {**same, "max_completion_tokens": self.max_tokens, "stop": self.stop_sequences}


def _without_billing(system: Sequence[TextBlock]) -> Sequence[TextBlock]:
    """Return the system's blocks without a first line for Anthropic's billing.

    Claude Code changes that line with every request, so no later token could be a prefix hit.
    """
    if not system or not system[0].text.startswith(BILLING_MARK):
        return system
    rest = system[0].text.partition("\n")[2]
    first = [TextBlock(type="text", text=rest)] if rest.strip() else []
    return [*first, *system[1:]]


def _parts(blocks: Sequence[TextBlock]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": block.text} for block in blocks]


def _result_part(part: TextBlock | ToolReferenceBlock) -> dict[str, Any]:
    """Convert a part of a result. A reference to a tool is shown as JSON."""
    text = part.text if isinstance(part, TextBlock) else part.model_dump_json()
    return {"type": "text", "text": text}


def _assistant_messages(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Convert an assistant's blocks to messages. Results of other servers divide them."""
    begin = 0
    for i, block in enumerate(blocks):
        # Templates have results in messages of the role tool, after the message with the call.
        if isinstance(block, ServerResultBlock):
            if blocks[begin:i]:
                yield _assistant_message(blocks[begin:i])
            begin = i + 1
            content = block.content
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if blocks[begin:] or not blocks:
        yield _assistant_message(blocks[begin:])


def _assistant_message(blocks: Sequence[Any]) -> dict[str, Any]:
    """Convert an assistant's blocks to one message."""
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": _called_name(block), "arguments": block.input},
        }
        for block in blocks
        if isinstance(block, (ToolUseBlock, ServerCallBlock))
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return {
        "role": "assistant",
        "content": _parts([block for block in blocks if isinstance(block, TextBlock)]),
        "tool_calls": calls or None,
        "reasoning_content": "".join(thoughts) or None,
    }


def _called_name(block: ToolUseBlock | ServerCallBlock) -> str:
    """Return the name of the function that a block calls."""
    server = block.server_name if isinstance(block, ServerCallBlock) else None
    return function_name(block.name, server)


def _user_messages(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Convert blocks of a user or the system to messages; each result of a tool is a message."""
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            if texts:
                yield {"role": role, "content": _parts(texts)}
                texts = []
            content = [_result_part(part) for part in block.content]
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if texts or not blocks:
        yield {"role": role, "content": _parts(texts)}


def _chat_tool(tool: SentTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    known = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": known}


def _chat_format(output_format: OutputFormat) -> dict[str, Any]:
    """Convert `output_config.format` to `response_format`, which needs a name."""
    if output_format.type != "json_schema":
        return {"type": output_format.type}
    schema = {"name": "output", "schema": output_format.schema_}
    return {"type": "json_schema", "json_schema": schema}


def _chat_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)
