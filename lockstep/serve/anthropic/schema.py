"""What /v1/messages answers, as types: see answers.py."""

from typing import Any, Literal

from lockstep.serve.openai.schema import Said


class MessageError(Said):
    """What is wrong, in Anthropic's words."""

    type: str
    message: str


class MessagesError(Said):
    """Anthropic's error object; in a stream, the last event."""

    type: Literal["error"]
    error: MessageError


class AnsweredText(Said):
    """Text."""

    type: Literal["text"]
    text: str


class AnsweredThinking(Said):
    """Reasoning. It is not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(Said):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse
StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class MessagesUsage(Said):
    """Tokens: input_tokens are those that no prefix cache had."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class MessageObject(Said):
    """A message: its blocks, in order. system_fingerprint stands for the numerics."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    system_fingerprint: str
    tool_call_parse_error: str | None


class TokenCount(Said):
    """Tokens of a prompt."""

    input_tokens: int


class MessageStart(Said):
    """The first event: a message without content."""

    type: Literal["message_start"]
    message: MessageObject


class BlockStart(Said):
    """A block begins, empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnsweredBlock


class BlockTextDelta(Said):
    """More text."""

    type: Literal["text_delta"]
    text: str


class BlockThinkingDelta(Said):
    """More reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class BlockInputDelta(Said):
    """More of a call's input, as JSON text."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Said):
    """A block grows."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockTextDelta | BlockThinkingDelta | BlockInputDelta


class BlockStop(Said):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Said):
    """Why the message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(Said):
    """The message ended; usage: of all of it."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessagesUsage
    tool_call_parse_error: str | None


class MessageStop(Said):
    """The last event."""

    type: Literal["message_stop"]


EVENTS: tuple[type[Said], ...] = (
    MessageStart,
    BlockStart,
    BlockDelta,
    BlockStop,
    MessageDelta,
    MessageStop,
    MessagesError,
)
