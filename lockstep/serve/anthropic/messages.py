"""/v1/messages: Anthropic's API. Content blocks in, content blocks out."""

import asyncio
import json
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from lockstep.errors import ComputeError
from lockstep.serve.anthropic.protocol import NAMES, CountRequest, MessagesRequest
from lockstep.serve.http.errors import messages_error, status_and_body
from lockstep.serve.openai.chat_session import Turn
from lockstep.serve.openai.protocol import named_as, system_named
from lockstep.serve.requests.content_blocks import Block, Blocks, Change
from lockstep.serve.requests.response_writer import Answer, Json
from lockstep.serve.requests.service import Piece, Run, Service, Usage

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""A block's kind -> the type of its deltas, and the field of their text."""


async def count_tokens(service: Service, body: CountRequest) -> Json:
    """The tokens of a prompt. Raises RequestError."""
    turn = Turn(service, body.chat(), "msg_")
    with named_as(NAMES), system_named("messages", body.roles):
        service.check_name(turn.body.model)
        prompt = await asyncio.to_thread(turn.render)
    return {"input_tokens": len(prompt.ids)}


class MessagesAnswer(Answer):
    """A message while it is made."""

    NAMED = True

    def __init__(self, service: Service, body: MessagesRequest) -> None:
        self.service = service
        self.body = body
        self.turn = Turn(service, body.chat(), "msg_")
        self._blocks = Blocks()
        self._notes: tuple[str, ...] = ()
        self._end: Json = {"stop_reason": None, "stop_sequence": None}

    @property
    def run(self) -> Run:
        """The request in the engine."""
        return self.turn.run

    async def start(self, brief: bool = False) -> None:
        """Begins; raises what is wrong before anything is sent."""
        with named_as(NAMES), system_named("messages", self.body.roles):
            await self.turn.start(brief)

    def close(self) -> None:
        """Aborts what still runs."""
        self.turn.close()

    async def whole(self) -> Json:
        """The answer as one object."""
        await self.read()
        return self._message()

    def begin(self) -> Iterator[Json]:
        """The events before anything has come."""
        yield {"type": "message_start", "message": self._message()}

    def hear(self, piece: Piece) -> Iterator[Json]:
        """The events of a piece, in Anthropic's order. Raises ComputeError where it failed."""
        heard = self.turn.hear(piece)
        self._notes = heard.errors
        for change in self._blocks.push(heard.events):
            yield self._changed(change)
        self._end = _ending(piece, heard.calls, self.turn.job.params.max_tokens or 0)

    def end(self) -> Iterator[Json]:
        """The events behind all pieces."""
        for change in self._blocks.close():
            yield self._changed(change)
        yield {
            "type": "message_delta",
            "delta": self._end,
            "usage": _usage(self.turn.usage),
            "tool_call_parse_error": self._note(),
        }
        yield {"type": "message_stop"}

    def failure(self, error: Exception) -> Iterable[Json]:
        """The event that tells of an error."""
        return [messages_error(*status_and_body(error))]

    def _message(self) -> Json:
        """The message as it stands."""
        blocks = [self._whole(block) for block in self._blocks.blocks]
        return {
            "id": self.turn.job.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.model_name,
            "content": [block for block in blocks if block is not None],
            **self._end,
            "usage": _usage(self.turn.usage),
            "system_fingerprint": self.service.fingerprint,
            "tool_call_parse_error": self._note(),
        }

    def _note(self) -> str | None:
        return "; ".join(self._notes) or None

    def _changed(self, change: Change) -> Json:
        place = {"index": change.index}
        match change.what:
            case "open":
                block = self._block(change.block)
                return {"type": "content_block_start", **place, "content_block": block}
            case "grow":
                kind, field = _DELTAS[change.block.kind]
                delta = {"type": kind, field: change.text}
                return {"type": "content_block_delta", **place, "delta": delta}
        return {"type": "content_block_stop", **place}

    def _whole(self, block: Block) -> Json | None:
        """Return a block of a message that is sent as one object.

        A call that is not complete has no input that could be sent as an object. Where it was cut
        it is text, so that it is not lost; where it broke its grammar its text follows it anyway.
        """
        if block.kind != "call" or block.complete:
            return self._block(block)
        if block is self._blocks.blocks[-1]:
            return {"type": "text", "text": f"{block.name} {block.text}"}
        return None

    def _block(self, block: Block) -> Json:
        """A block as Anthropic writes it, or a call at its beginning."""
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        arguments = _input(block.text) if block.complete else {}
        call_id = self.turn.call_id(0, block.number, block.id)
        return {"type": "tool_use", "id": call_id, "name": block.name, "input": arguments}


def _input(arguments: str) -> Any:
    """A call's arguments as an object that can be sent.

    JSON text may say what no answer can: half a surrogate pair becomes U+FFFD, and a number beyond
    all floats (1e999) a text.
    """
    found = json.loads(arguments, parse_float=_number)
    text = json.dumps(found, ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _number(text: str) -> float | str:
    value = float(text)
    return value if isfinite(value) else text


def _ending(piece: Piece, calls: int, max_tokens: int) -> Json:
    """Return why a message ended, or nothing. Raises ComputeError for one that failed.

    max_tokens: limit of the request; the model's context may have ended the message earlier.
    """
    reason = piece.text.finish_reason
    stopped = piece.text.stop_reason
    if reason in ("error", "abort"):
        raise ComputeError(piece.error or "the request was aborted.")
    if reason == "length":
        full = piece.text.num_tokens < max_tokens
        limit = "model_context_window_exceeded" if full else "max_tokens"
        return {"stop_reason": limit, "stop_sequence": None}
    if reason == "stop" and calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if reason == "stop" and isinstance(stopped, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
    return {"stop_reason": "end_turn" if reason else None, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.written,
    }
