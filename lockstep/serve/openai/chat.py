"""/v1/chat/completions: messages in; content, reasoning and tool calls out."""

import asyncio
from collections.abc import Iterator, Sequence

from lockstep.serve.openai.chat_session import Replies, Turn
from lockstep.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from lockstep.serve.openai.protocol import ChatRequest, system_named
from lockstep.serve.requests.response_writer import Answer, Json
from lockstep.serve.requests.service import Piece, Run, Service, Tokens
from lockstep.text.parsers.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Reasoning,
    ToolCall,
)


class ChatAnswer(Answer):
    """A chat answer, of n completions."""

    def __init__(self, service: Service, body: ChatRequest) -> None:
        self.service = service
        self.body = body
        self.turn = Turn(service, body, "chatcmpl-")
        self._waiting: list[Tokens] = []
        self._chunk_head: Json = {}
        self._tells_tokens = False

    @property
    def run(self) -> Run:
        """The request in the engine."""
        return self.turn.run

    async def start(self, brief: bool = False) -> None:
        """Begins; raises what is wrong before anything is sent."""
        with system_named("messages", [message.role for message in self.body.messages]):
            await self.turn.start(brief)
        job = self.turn.job
        self._waiting = [Tokens() for _ in job.requests]
        self._chunk_head = self._head("chat.completion.chunk")
        self._tells_tokens = job.tells_tokens(self.body)

    def close(self) -> None:
        """Aborts what still runs."""
        self.turn.close()

    async def whole(self) -> Json:
        """The answer as one object, made beside the event loop where it spells many tokens."""
        found = await self.turn.replies()
        if self.turn.job.spells:
            return await asyncio.to_thread(self._whole, found)
        return self._whole(found)

    def _whole(self, found: Replies) -> Json:
        answers = found.answers
        return {
            **self._head("chat.completion"),
            "choices": [self._choice(found, i) for i in range(len(found.replies))],
            "usage": self.turn.usage.to_json(),
            "prompt_logprobs": prompt_logprobs(answers.prompt_logprobs.get(0)),
            **self._prompt_ids(),
        }

    def begin(self) -> Iterator[Json]:
        """The chunks before anything has come: the role."""
        for index in range(len(self.turn.job.requests)):
            first = self._chunk(index, {"role": "assistant", "content": ""}, Tokens())
            yield first | self._prompt_ids()

    def hear(self, piece: Piece) -> Iterator[Json]:
        """The chunks of one piece: tokens go with the first, the finish reason with the last."""
        heard = self.turn.hear(piece)
        text = piece.text
        index = piece.index
        waiting = self._waiting[index]
        if self._tells_tokens:
            waiting.add(piece)
        for event in heard.events:
            if not isinstance(event, CallEnd):
                yield self._chunk(index, self._delta(index, event), waiting)
        if text.finish_reason is not None:
            chunk = self._chunk(index, {}, waiting)
            reason = _reason(text.finish_reason, heard.calls)
            ending = self.turn.job.ending(index, reason, text.stop_reason, piece.error)
            chunk["choices"][0] |= {**ending, **_errors(heard.errors)}
            yield chunk

    def end(self) -> Iterator[Json]:
        """The chunks behind all pieces: what was used, where that is asked for."""
        options = self.body.stream_options
        if options and options.include_usage:
            yield {**self._chunk_head, "choices": [], "usage": self.turn.usage.to_json()}

    def _head(self, kind: str) -> Json:
        return self.service.head(self.turn.job, kind)

    def _prompt_ids(self) -> Json:
        wanted = self.body.return_token_ids
        return {"prompt_token_ids": self.turn.job.prompts[0]} if wanted else {}

    def _choice(self, found: Replies, index: int) -> Json:
        done = found.answers.completions[index]
        reply = found.replies[index]
        calls = reply.tool_calls
        message: Json = {"role": "assistant", "content": reply.content, "refusal": None}
        if calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                self._call(index, number, call) for number, call in enumerate(calls)
            ]
        if reply.reasoning:
            message |= _thought(reply.reasoning)
        reason = _reason(done.finish_reason, sum(call.complete for call in calls))
        return {
            "index": index,
            "message": message,
            **self.turn.job.ending(index, reason, done.stop_reason, done.error),
            **self._tokens(done),
            **_errors(reply.errors),
        }

    def _chunk(self, index: int, delta: Json, tokens: Tokens) -> Json:
        """A chunk with what waits of tokens; nothing does from here on."""
        choice = {"index": index, "delta": delta, "finish_reason": None, **self._tokens(tokens)}
        tokens.clear()
        chunk = {**self._chunk_head, "choices": [choice]}
        options = self.body.stream_options
        if options and options.include_usage:
            each = options.continuous_usage_stats
            chunk["usage"] = self.turn.usage.to_json() if each else None
        return chunk

    def _delta(self, index: int, event: Content | Reasoning | CallStart | CallArguments) -> Json:
        """What a chunk says of an event."""
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return _thought(text)
            case CallStart(number, name, own):
                call = self._call(index, number, ToolCall(name, id=own))
                return {"tool_calls": [{"index": number, **call}]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _call(self, index: int, number: int, call: ToolCall) -> Json:
        """A tool call as OpenAI writes it."""
        return {
            "id": self.turn.call_id(index, number, call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _tokens(self, tokens: Tokens) -> Json:
        """What a choice says of tokens: log-probabilities, and more where it is asked for."""
        logprobs = None
        if tokens.logprobs and self.body.logprobs:
            most = self.body.top_logprobs or 0
            tokenizer = self.service.processor.tokenizer
            as_ids = self.body.return_tokens_as_token_ids
            logprobs = chat_logprobs(tokenizer, tokens.token_ids, tokens.logprobs, most, as_ids)
        return {"logprobs": logprobs, **tokens.told(self.body)}


def _thought(text: str) -> Json:
    """Reasoning, under the name that DeepSeek gave it, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


def _errors(errors: Sequence[str]) -> Json:
    """Why text that looked like a tool call is none."""
    return {"tool_call_parse_error": "; ".join(errors)} if errors else {}


def _reason(finish_reason: str | None, calls: int) -> str | None:
    """Return "tool_calls" for an answer that ended naturally with complete calls."""
    return "tool_calls" if calls and finish_reason == "stop" else finish_reason
