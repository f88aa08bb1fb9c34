"""Response objects and events of /v1/messages, which the writer builds."""

from typing import Any, Literal

from typing_extensions import TypedDict

from lockstep.serve.http.errors import MessagesError


class OutputTextBlock(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class OutputThinkingBlock(TypedDict):
    """Reasoning. It has no signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class OutputToolUseBlock(TypedDict):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = OutputTextBlock | OutputThinkingBlock | OutputToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class MessagesUsage(TypedDict):
    """Token counts: input_tokens are those that were no prefix cache hits."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageObject(TypedDict):
    """A message with its content blocks in order. system_fingerprint names the numerics."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    system_fingerprint: str
    tool_call_parse_error: str | None


class TokenCount(TypedDict):
    """Number of tokens of a prompt."""

    input_tokens: int


class MessageStart(TypedDict):
    """The first event: a message without content."""

    type: Literal["message_start"]
    message: MessageObject


class BlockStart(TypedDict):
    """Beginning of a block, which is empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class TextBlockDelta(TypedDict):
    """Addition to a text."""

    type: Literal["text_delta"]
    text: str


class ThinkingBlockDelta(TypedDict):
    """Addition to reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonBlockDelta(TypedDict):
    """Addition to the input of a call, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockAddition = TextBlockDelta | ThinkingBlockDelta | InputJsonBlockDelta


class BlockDelta(TypedDict):
    """Addition to a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockAddition


class BlockStop(TypedDict):
    """End of a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """Reason why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """End of the message, with the usage of the whole request."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessagesUsage
    tool_call_parse_error: str | None


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


EVENTS: tuple[type, ...] = (
    MessageStart,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    MessagesError,
)
"""Events of a stream, in the order in which they come."""
RESPONSE_TYPES: tuple[type, ...] = (MessageObject, TokenCount, *EVENTS)
