"""/v1/chat/completions: messages in; content, reasoning and tool calls out."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from lockstep.serve.logprobs import chat_logprobs, prompt_logprobs
from lockstep.serve.protocol import ChatRequest
from lockstep.serve.service import Job, Piece, Service
from lockstep.text.parsers import ReplyParser
from lockstep.text.parsers.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    ToolCall,
)

Json = dict[str, Any]


class ChatAnswer:
    """One call of the endpoint: prepare() first, then whole() or stream()."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self.service, self.body = service, body
        self.job: Job
        self.parsers: list[ReplyParser] = []
        self._calls: list[int] = []

    async def prepare(self) -> "ChatAnswer":
        """Renders and tokenises; raises RequestError before anything is sent."""
        body, processor = self.body, self.service.processor
        self.service.check(body)
        params, tools = body.params(processor), body.callable_tools(processor)
        shown = None if body.tool_choice == "none" else body.tools
        text = await asyncio.to_thread(
            processor.render_text,
            body.messages,
            shown,
            **{"add_generation_prompt": body.add_generation_prompt, **body.chat_template_kwargs},
        )
        ids = await asyncio.to_thread(processor.encode, text, False)
        self.job = await self.service.job("chatcmpl", [ids], params, body.priority)
        self.parsers = [processor.reply_parser(text, tools) for _ in self.job.texts]
        self._calls = [0] * len(self.parsers)
        return self

    async def whole(self) -> Json:
        """The answer as one object."""
        job = await self.service.finish(self.job)
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(i) for i in range(len(job.texts))],
            "usage": job.usage(),
            "prompt_logprobs": prompt_logprobs(job.prompt_logprobs.get(0)),
        }

    async def stream(self) -> AsyncGenerator[Json, None]:
        """The answer as chunks."""
        for i in range(len(self.parsers)):
            yield self._chunk(i, {"role": "assistant", "content": ""})
        async with contextlib.aclosing(self.service.run(self.job)) as pieces:
            async for piece in pieces:
                for chunk in self._chunks(piece):
                    yield chunk
        options = self.body.stream_options
        if options and options.include_usage:
            head = self._head("chat.completion.chunk")
            yield {**head, "choices": [], "usage": self.job.usage()}

    def _head(self, kind: str) -> Json:
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.job.created,
            "model": self.service.model_name,
            "system_fingerprint": self.service.fingerprint,
        }

    def _choice(self, index: int) -> Json:
        output = self.job.texts[index].output
        reply = self.parsers[index].parse(output.text)
        calls = reply.tool_calls[: None if self.body.parallel_tool_calls is not False else 1]
        message: Json = {"role": "assistant", "content": reply.content, "refusal": None}
        if calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [_whole_call(call) for call in calls]
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        return {
            "index": index,
            "message": message,
            "finish_reason": _reason(output.finish_reason, len(calls)),
            "stop_reason": output.stop_reason,
            "logprobs": self._logprobs(output.token_ids, output.logprobs),
            "seed": output.seed,
        }

    def _chunks(self, piece: Piece) -> Iterable[Json]:
        """The chunks of one piece: logprobs go with the first, the finish reason with the last."""
        output = piece.text.output
        index, parser = output.index, self.parsers[output.index]
        events = parser.feed(piece.delta)
        if piece.text.finished:
            events += parser.finish()
        deltas = [delta for event in events if (delta := self._delta(index, event))]
        scores = self._logprobs(piece.token_ids, piece.logprobs) if piece.token_ids else None
        if scores and not deltas:
            deltas.append({})
        for i, delta in enumerate(deltas):
            yield self._chunk(index, delta, scores if i == 0 else None)
        if piece.text.finished:
            last = self._chunk(index, {})
            last["choices"][0]["finish_reason"] = _reason(output.finish_reason, self._calls[index])
            last["choices"][0]["stop_reason"] = output.stop_reason
            last["choices"][0]["seed"] = output.seed
            yield last

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        options = self.body.stream_options
        if options and options.include_usage:
            chunk["usage"] = self.job.usage() if options.continuous_usage_stats else None
        return chunk

    def _delta(self, index: int, event: Event) -> Json:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
        if event.index > 0 and self.body.parallel_tool_calls is False:
            return {}
        match event:
            case CallStart(number, name):
                self._calls[index] += 1
                return {"tool_calls": [{"index": number, **_whole_call(ToolCall(name))}]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _logprobs(self, token_ids: list[int], entries: Any) -> Json | None:
        if entries is None or not self.body.logprobs:
            return None
        most = self.body.top_logprobs or 0
        return chat_logprobs(self.service.processor.tokenizer, token_ids, entries, most)


def _whole_call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _reason(finish_reason: str | None, calls: int) -> str | None:
    return "tool_calls" if calls and finish_reason == "stop" else finish_reason
