"""/v1/chat/completions: messages in; content, reasoning and tool calls out."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Self

from lockstep.serve.journal.saved_answer import SavedAnswer
from lockstep.serve.openai.choices import (
    choice_end,
    response_head,
    token_fields,
    usage_object,
    wants_tokens,
)
from lockstep.serve.openai.conversation import naming_late_system_message
from lockstep.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from lockstep.serve.openai.protocol import ChatRequest
from lockstep.serve.openai.schema import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessageDelta,
    ParseErrors,
    PromptTokenIds,
    ToolCallObject,
    UsageObject,
)
from lockstep.serve.requests.accumulators import (
    CompletionAccumulator,
    RequestAccumulator,
    TokenBuffer,
)
from lockstep.serve.requests.active_request import ActiveRequest, OutputDelta
from lockstep.serve.requests.response_writer import ResponseWriter
from lockstep.serve.requests.service import Service
from lockstep.serve.requests.update_parser import UpdateParser
from lockstep.text.parsers.events import (
    AnswerEvent,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Reasoning,
    Reply,
    ToolCall,
)

ID_PREFIX = "chatcmpl-"


class ChatWriter(ResponseWriter):
    """Writer of a chat completion."""

    KIND = "chat"

    def __init__(self, active: ActiveRequest, body: ChatRequest) -> None:
        super().__init__(active, body.ignored_fields())
        self.body = body
        self._parser = UpdateParser(active, body.include_reasoning, body.parallel_tool_calls)
        self._head = response_head(active)
        self._wants_tokens = wants_tokens(active, body)
        self._counts_drafts = body.prediction is None or active.service.drafts_predictions
        self._unsent_tokens = [TokenBuffer() for _ in active.requests]

    @classmethod
    async def start(cls, service: Service, body: ChatRequest, is_small: bool = False) -> Self:
        """Submit a request and return its writer. Raises as Service.submit does."""
        with naming_late_system_message([message.role for message in body.messages]):
            active = await service.submit(body, ID_PREFIX, is_small)
        return cls(active, body)

    @classmethod
    async def restore(cls, service: Service, saved: SavedAnswer) -> Self:
        """Return the writer of an answer of an earlier process. Raises RequestError."""
        body = ChatRequest.model_validate(saved.request.json())
        return cls(await service.resume(body, ID_PREFIX, saved), body)

    async def response(self) -> ChatCompletion:
        """Return the completion, made in a thread where it has many log-probabilities."""
        accumulator = RequestAccumulator(self.active.parsed)
        events: list[list[AnswerEvent]] = [[] for _ in self.active.requests]
        async for deltas in self.active:
            for delta in deltas:
                events[delta.index] += self._parser.parse(delta).events
                accumulator.add(delta)
        if self.active.parsed.has_logprobs:
            return await asyncio.to_thread(self._completion, accumulator, events)
        return self._completion(accumulator, events)

    def _completion(
        self, accumulator: RequestAccumulator, events: list[list[AnswerEvent]]
    ) -> ChatCompletion:
        choices = [
            self._choice(index, completion, Reply().add(events[index]))
            for index, completion in enumerate(accumulator.completions)
        ]
        return {
            "id": self._head["id"],
            "object": "chat.completion",
            "created": self._head["created"],
            "model": self._head["model"],
            "system_fingerprint": self._head["system_fingerprint"],
            "choices": choices,
            "usage": self._usage_object(),
            "prompt_logprobs": prompt_logprobs(accumulator.prompt_logprobs.get(0)),
            **self._prompt_token_ids(),
        }

    def start_events(self) -> Iterator[ChatChunk]:
        """Yield a chunk with the role for each completion."""
        for index in range(len(self.active.requests)):
            chunk = self._chunk(index, {"role": "assistant", "content": ""}, TokenBuffer())
            yield {**chunk, **self._prompt_token_ids()}

    def delta_events(self, delta: OutputDelta) -> Iterator[ChatChunk]:
        """Yield the chunks of a delta. The first has the tokens, the last the finish reason."""
        parsed = self._parser.parse(delta)
        new = delta.update
        index = delta.index
        tokens = self._unsent_tokens[index]
        if self._wants_tokens:
            tokens.add(delta)
        for event in parsed.events:
            # OpenAI has no event for the end of a call.
            if not isinstance(event, CallEnd):
                yield self._chunk(index, self._message_delta(index, event), tokens)
        if new.finish_reason is not None:
            chunk = self._chunk(index, {}, tokens)
            reason = _finish_reason(new.finish_reason, parsed.num_calls)
            end = choice_end(self.active, index, reason, new.stop_reason, delta.error)
            (choice,) = chunk["choices"]
            chunk["choices"] = [{**choice, **end, **_parse_errors(parsed.errors)}]
            yield chunk

    def end_events(self) -> Iterator[ChatChunk]:
        """Yield the chunk with the usage, where the request asks for it."""
        options = self.body.stream_options
        if options and options.include_usage:
            yield self._with_choices([], include_usage=True)

    def _usage_object(self) -> UsageObject:
        return usage_object(self._parser.usage, self._counts_drafts)

    def _prompt_token_ids(self) -> PromptTokenIds:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.active.parsed.prompts[0]}

    def _choice(self, index: int, completion: CompletionAccumulator, reply: Reply) -> ChatChoice:
        calls = reply.tool_calls
        message: AssistantMessage = {
            "role": "assistant",
            "content": reply.content,
            "refusal": None,
        }
        if calls:
            # OpenAI has null, not an empty text, in a message with calls.
            message["content"] = reply.content or None
            message["tool_calls"] = [
                self._tool_call(index, number, call) for number, call in enumerate(calls)
            ]
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
            message["reasoning"] = reply.reasoning
        num_calls = sum(call.complete for call in calls)
        reason = _finish_reason(completion.finish_reason, num_calls)
        return {
            "index": index,
            "message": message,
            **choice_end(self.active, index, reason, completion.stop_reason, completion.error),
            "logprobs": self._logprobs(completion),
            **token_fields(self.body, completion),
            **_parse_errors(self._parser.errors(index)),
        }

    def _chunk(self, index: int, delta: ChatMessageDelta, tokens: TokenBuffer) -> ChatChunk:
        """Return a chunk with the unsent tokens, and clear them."""
        choice: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "finish_reason": None,
            "logprobs": self._logprobs(tokens),
            **token_fields(self.body, tokens),
        }
        # Each token is in one chunk only.
        tokens.clear()
        options = self.body.stream_options
        return self._with_choices([choice], bool(options and options.continuous_usage_stats))

    def _with_choices(self, choices: list[ChatChunkChoice], include_usage: bool) -> ChatChunk:
        """Return a chunk; where any chunk has a usage, those without it have null."""
        head = self._head
        chunk: ChatChunk = {
            "id": head["id"],
            "object": "chat.completion.chunk",
            "created": head["created"],
            "model": head["model"],
            "system_fingerprint": head["system_fingerprint"],
            "choices": choices,
        }
        options = self.body.stream_options
        if options and options.include_usage:
            chunk["usage"] = self._usage_object() if include_usage else None
        return chunk

    def _message_delta(
        self, index: int, event: Content | Reasoning | CallStart | CallArguments
    ) -> ChatMessageDelta:
        """Return the addition of an event to the message."""
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallStart(number, name, model_id):
                call = self._tool_call(index, number, ToolCall(name, id=model_id))
                return {
                    "tool_calls": [
                        {
                            "index": number,
                            "id": call["id"],
                            "type": "function",
                            "function": {**call["function"]},
                        }
                    ]
                }
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}

    def _tool_call(self, index: int, number: int, call: ToolCall) -> ToolCallObject:
        return {
            "id": self._parser.call_id(index, number, call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def _logprobs(self, tokens: TokenBuffer) -> ChatLogprobs | None:
        if not tokens.logprobs or not self.body.logprobs:
            return None
        num_top = self.body.top_logprobs or 0
        tokenizer = self.active.service.processor.tokenizer
        as_ids = self.body.return_tokens_as_token_ids
        return chat_logprobs(tokenizer, tokens.token_ids, tokens.logprobs, num_top, as_ids)


def _parse_errors(errors: Sequence[str]) -> ParseErrors:
    return {"tool_call_parse_error": "; ".join(errors)} if errors else {}


def _finish_reason(finish_reason: str | None, num_calls: int) -> str | None:
    """Return "tool_calls" for a completion that ended naturally with complete calls."""
    return "tool_calls" if num_calls and finish_reason == "stop" else finish_reason
