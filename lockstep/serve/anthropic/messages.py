"""/v1/messages, Anthropic's API: content blocks in, content blocks out."""

import asyncio
import json
from collections.abc import Iterator
from math import isfinite
from typing import Any, Self

from lockstep.errors import ComputeError
from lockstep.serve.anthropic.protocol import SENT_NAMES, CountRequest, MessagesRequest
from lockstep.serve.anthropic.schema import (
    BlockAddition,
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageDelta,
    MessageEnd,
    MessageObject,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputBlock,
    TokenCount,
)
from lockstep.serve.http.errors import MessagesError, messages_error, status_and_body
from lockstep.serve.journal.saved_answer import SavedAnswer
from lockstep.serve.requests.active_request import ActiveRequest, OutputDelta, Usage
from lockstep.serve.requests.body_models import renamed_fields
from lockstep.serve.requests.content_blocks import BlockChange, ContentBlock, ContentBlocks
from lockstep.serve.requests.response_writer import ResponseWriter
from lockstep.serve.requests.service import Service
from lockstep.serve.requests.update_parser import UpdateParser

ID_PREFIX = "msg_"
CALL_PREFIX = "toolu_"
"""Beginning of the ids of tool calls, as Anthropic's API writes them."""
MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError
)


async def count_tokens(service: Service, body: CountRequest) -> TokenCount:
    """Return the number of tokens of a prompt. Raises RequestError."""
    chat = body.chat()
    with renamed_fields(SENT_NAMES):
        service.check_model(chat.model)
        conversation = await asyncio.to_thread(chat.render, service.processor)
    return {"input_tokens": len(conversation.ids)}


class MessagesWriter(ResponseWriter):
    """Writer of a message."""

    NAMED_EVENTS = True
    KIND = "messages"

    def __init__(
        self,
        active: ActiveRequest,
        body: MessagesRequest,
        include_reasoning: bool,
        parallel_tool_calls: bool,
    ) -> None:
        super().__init__(active, body.ignored_fields())
        self._parser = UpdateParser(active, include_reasoning, parallel_tool_calls, CALL_PREFIX)
        self._blocks = ContentBlocks()
        self._errors: tuple[str, ...] = ()
        self._end: MessageEnd = {"stop_reason": None, "stop_sequence": None}

    @classmethod
    async def start(cls, service: Service, body: MessagesRequest, is_small: bool = False) -> Self:
        """Submit a request and return its writer. Raises as Service.submit does."""
        chat = body.chat()
        with renamed_fields(SENT_NAMES):
            active = await service.submit(chat, ID_PREFIX, is_small)
        return cls(active, body, chat.include_reasoning, chat.parallel_tool_calls)

    @classmethod
    async def restore(cls, service: Service, saved: SavedAnswer) -> Self:
        """Return the writer of an answer of an earlier process. Raises RequestError."""
        body = MessagesRequest.model_validate(saved.request.json())
        chat = body.chat()
        active = await service.resume(chat, ID_PREFIX, saved)
        return cls(active, body, chat.include_reasoning, chat.parallel_tool_calls)

    async def response(self) -> MessageObject:
        """Return the message."""
        await self.read_all()
        return self._message()

    def start_events(self) -> Iterator[MessageEvent]:
        """Yield the message without content."""
        yield {"type": "message_start", "message": self._message()}

    def delta_events(self, delta: OutputDelta) -> Iterator[MessageEvent]:
        """Yield the events of a delta, in Anthropic's order. Raises ComputeError for a fault."""
        parsed = self._parser.parse(delta)
        self._errors = parsed.errors
        for change in self._blocks.push(parsed.events):
            yield self._block_event(change)
        max_tokens = self.active.parsed.params.max_tokens or 0
        self._end = _message_end(delta, parsed.num_calls, max_tokens)

    def end_events(self) -> Iterator[MessageEvent]:
        """Yield the end of the open block and of the message."""
        for change in self._blocks.close():
            yield self._block_event(change)
        yield {
            "type": "message_delta",
            "delta": self._end,
            "usage": _usage_object(self._parser.usage),
            "tool_call_parse_error": self._parse_errors(),
        }
        yield {"type": "message_stop"}

    def error_events(self, error: Exception) -> list[MessagesError]:
        """Return the event of an error."""
        return [messages_error(*status_and_body(error))]

    def _message(self) -> MessageObject:
        """Return the message as it is now."""
        blocks = [self._complete_block(block) for block in self._blocks.blocks]
        return {
            "id": self.active.parsed.id,
            "type": "message",
            "role": "assistant",
            "model": self.active.model_name,
            "content": [block for block in blocks if block is not None],
            "stop_reason": self._end["stop_reason"],
            "stop_sequence": self._end["stop_sequence"],
            "usage": _usage_object(self._parser.usage),
            "system_fingerprint": self.active.service.fingerprint,
            "tool_call_parse_error": self._parse_errors(),
        }

    def _parse_errors(self) -> str | None:
        return "; ".join(self._errors) or None

    def _block_event(self, change: BlockChange) -> BlockStart | BlockDelta | BlockStop:
        match change.action:
            case "open":
                block = self._block(change.block)
                return {
                    "type": "content_block_start",
                    "index": change.index,
                    "content_block": block,
                }
            case "grow":
                return {
                    "type": "content_block_delta",
                    "index": change.index,
                    "delta": _addition(change),
                }
        return {"type": "content_block_stop", "index": change.index}

    def _complete_block(self, block: ContentBlock) -> OutputBlock | None:
        """Return a block of a message that is sent as one object.

        The input of an incomplete call is not valid JSON. The last call of a cut message becomes
        text, so that it is not lost. The text of a call that broke its grammar follows it anyway.
        """
        if block.kind != "call" or block.is_complete:
            return self._block(block)
        if block is self._blocks.blocks[-1]:
            return {"type": "text", "text": f"{block.name} {block.text}"}
        return None

    def _block(self, block: ContentBlock) -> OutputBlock:
        """Return a block in Anthropic's form. The input of an incomplete call is empty."""
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        arguments = _input_object(block.text) if block.is_complete else {}
        call_id = self._parser.call_id(0, block.number, block.id)
        return {"type": "tool_use", "id": call_id, "name": block.name, "input": arguments}


def _addition(change: BlockChange) -> BlockAddition:
    """Return the delta object of a block that grows."""
    match change.block.kind:
        case "text":
            return {"type": "text_delta", "text": change.text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": change.text}
    return {"type": "input_json_delta", "partial_json": change.text}


def _input_object(arguments: str) -> Any:
    """Return a call's arguments as a JSON object that any client can parse.

    Half of a surrogate pair becomes U+FFFD. A number beyond all floats (1e999) becomes text.
    """
    value = json.loads(arguments, parse_float=_float_or_text)
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _float_or_text(text: str) -> float | str:
    value = float(text)
    return value if isfinite(value) else text


def _message_end(delta: OutputDelta, num_calls: int, max_tokens: int) -> MessageEnd:
    """Return the stop reason of a message; nulls before its end. Raises ComputeError for a fault.

    max_tokens: limit of the request. The model's context may have ended the message earlier.
    """
    new = delta.update
    reason = new.finish_reason
    if reason in ("error", "abort"):
        raise ComputeError(delta.error or "the request was aborted.")
    if reason == "length":
        if new.num_tokens < max_tokens:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if reason == "stop" and num_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason == "stop" and isinstance(new.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": new.stop_reason}
    return {"stop_reason": "end_turn" if reason else None, "stop_sequence": None}


def _usage_object(usage: Usage) -> MessagesUsage:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }
