"""/v1/completions: prompts in, their continuations out."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

from lockstep.outputs import Logprob
from lockstep.serve.journal.saved_answer import SavedAnswer
from lockstep.serve.openai.choices import (
    choice_end,
    response_head,
    token_fields,
    usage_object,
    wants_tokens,
)
from lockstep.serve.openai.logprobs import (
    TextOffsets,
    prompt_logprobs,
    prompt_offsets,
    text_logprobs,
)
from lockstep.serve.openai.protocol import CompletionRequest
from lockstep.serve.openai.schema import (
    Completion,
    CompletionChunk,
    PromptTokenIds,
    TextChoice,
    TextLogprobs,
)
from lockstep.serve.requests.accumulators import RequestAccumulator, TokenBuffer
from lockstep.serve.requests.active_request import (
    ActiveRequest,
    OutputDelta,
    PromptLogprobs,
    Usage,
)
from lockstep.serve.requests.response_writer import ResponseWriter
from lockstep.serve.requests.service import Service

ID_PREFIX = "cmpl-"


@dataclass
class _StreamState:
    """State of one completion.

    offsets: positions of its tokens in its text. unsent: tokens whose text was not sent yet.
    prompt_logprobs: log-probabilities of its prompt, once the engine has reported them.
    """

    offsets: TextOffsets
    unsent: TokenBuffer = field(default_factory=TokenBuffer)
    has_started: bool = False
    prompt_logprobs: PromptLogprobs | None = None


class CompletionWriter(ResponseWriter):
    """Writer of the completions of one prompt or several."""

    KIND = "completions"

    def __init__(self, active: ActiveRequest, body: CompletionRequest) -> None:
        super().__init__(active, body.ignored_fields())
        self.body = body
        self._usage = Usage(active.parsed.num_prompt_tokens)
        self._head = response_head(active)
        self._wants_tokens = wants_tokens(active, body)
        self._states = [
            _StreamState(self._text_offsets(index)) for index in range(len(active.requests))
        ]

    @classmethod
    async def start(cls, service: Service, body: CompletionRequest, is_small: bool = False) -> Self:
        """Submit a request and return its writer. Raises as Service.submit does."""
        return cls(await service.submit(body, ID_PREFIX, is_small), body)

    @classmethod
    async def restore(cls, service: Service, saved: SavedAnswer) -> Self:
        """Return the writer of an answer of an earlier process. Raises RequestError."""
        body = CompletionRequest.model_validate(saved.request.json())
        return cls(await service.resume(body, ID_PREFIX, saved), body)

    async def response(self) -> Completion:
        """Return the completions, made in a thread where they have many log-probabilities."""
        accumulator = RequestAccumulator(self.active.parsed)
        async for deltas in self.active:
            for delta in deltas:
                self._usage = delta.usage
                accumulator.add(delta)
        if self.active.parsed.has_logprobs:
            return await asyncio.to_thread(self._completion, accumulator)
        return self._completion(accumulator)

    def _completion(self, accumulator: RequestAccumulator) -> Completion:
        choices = [
            self._choice(accumulator, index) for index in range(len(accumulator.completions))
        ]
        head = self._head
        return {
            "id": head["id"],
            "object": "text_completion",
            "created": head["created"],
            "model": head["model"],
            "system_fingerprint": head["system_fingerprint"],
            "choices": choices,
            "usage": usage_object(self._usage),
        }

    def start_events(self) -> Iterable[CompletionChunk]:
        """Return no chunks: the first one has text."""
        return ()

    def delta_events(self, delta: OutputDelta) -> Iterator[CompletionChunk]:
        """Yield the chunk of a delta; none while its text is incomplete."""
        self._usage = delta.usage
        choice = self._chunk_choice(delta)
        if choice is not None:
            options = self.body.stream_options
            yield self._chunk([choice], bool(options and options.continuous_usage_stats))

    def end_events(self) -> Iterator[CompletionChunk]:
        """Yield the chunk with the usage, where the request asks for it."""
        options = self.body.stream_options
        if options and options.include_usage:
            yield self._chunk([], include_usage=True)

    def _chunk(self, choices: list[TextChoice], include_usage: bool) -> CompletionChunk:
        """Return a chunk; where any chunk has a usage, those without it have null."""
        head = self._head
        chunk: CompletionChunk = {
            "id": head["id"],
            "object": "text_completion",
            "created": head["created"],
            "model": head["model"],
            "system_fingerprint": head["system_fingerprint"],
            "choices": choices,
        }
        options = self.body.stream_options
        if options and options.include_usage:
            chunk["usage"] = usage_object(self._usage) if include_usage else None
        return chunk

    def _prompt_index(self, index: int) -> int:
        """Return the index of a completion's prompt."""
        return index // self.active.parsed.params.n

    def _echo(self, index: int) -> str:
        """Return the text that a completion repeats of its prompt."""
        return self.active.parsed.echoes[self._prompt_index(index)]

    def _text_offsets(self, index: int) -> TextOffsets:
        """Return the counter of text offsets, which log-probabilities contain."""
        processor = self.active.service.processor
        tokenizer = None if self.body.logprobs is None else processor.tokenizer
        skips_special = self.active.parsed.params.skip_special_tokens
        return TextOffsets(tokenizer, skips_special, len(self._echo(index)))

    def _choice(self, accumulator: RequestAccumulator, index: int) -> TextChoice:
        completion = accumulator.completions[index]
        of_prompt = accumulator.prompt_logprobs.get(self._prompt_index(index))
        choice: TextChoice = {
            "index": index,
            "text": self._echo(index) + completion.text,
            "logprobs": self._logprobs(index, completion, True, of_prompt),
            **choice_end(
                self.active,
                index,
                completion.finish_reason,
                completion.stop_reason,
                completion.error,
            ),
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(of_prompt)
        return {
            **choice,
            **token_fields(self.body, completion),
            **self._prompt_token_ids(index, True),
        }

    def _chunk_choice(self, delta: OutputDelta) -> TextChoice | None:
        """Return the choice of a chunk; None while the text, and so the tokens, must wait."""
        index = delta.index
        state = self._states[index]
        new = delta.update
        is_first = not state.has_started
        if self._wants_tokens:
            state.unsent.add(delta)
        # The first delta has them, but its text may have to wait for a later one.
        state.prompt_logprobs = delta.prompt_logprobs or state.prompt_logprobs
        text = (self._echo(index) if is_first else "") + new.delta
        if not text and new.finish_reason is None:
            return None
        tokens = state.unsent
        state.has_started = True
        choice: TextChoice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens, is_first, state.prompt_logprobs),
            **choice_end(self.active, index, new.finish_reason, new.stop_reason, delta.error),
            **token_fields(self.body, tokens),
            **self._prompt_token_ids(index, is_first),
        }
        tokens.clear()
        return choice

    def _prompt_token_ids(self, index: int, is_first: bool) -> PromptTokenIds:
        """Return the prompt's token ids, for the first choice of a completion."""
        if not (is_first and self.body.return_token_ids):
            return {}
        return {"prompt_token_ids": self.active.parsed.prompts[self._prompt_index(index)]}

    def _logprobs(
        self, index: int, tokens: TokenBuffer, is_first: bool, of_prompt: PromptLogprobs | None
    ) -> TextLogprobs | None:
        """Return the log-probabilities of tokens, after those of an echoed prompt."""
        is_echo = self.body.echo and is_first
        if self.body.logprobs is None or (tokens.logprobs is None and not is_echo):
            return None
        tokenizer = self.active.service.processor.tokenizer
        token_ids = list(tokens.token_ids)
        entries: list[dict[int, Logprob] | None] = [*(tokens.logprobs or ())]
        offsets = self._states[index].offsets.advance(token_ids)
        if is_echo:
            prompt = self.active.parsed.prompts[self._prompt_index(index)]
            token_ids = prompt + token_ids
            entries = [*(of_prompt or [None] * len(prompt)), *entries]
            offsets = prompt_offsets(tokenizer, prompt, self._echo(index)) + offsets
        as_ids = self.body.return_tokens_as_token_ids
        return text_logprobs(tokenizer, token_ids, entries, self.body.logprobs, offsets, as_ids)
