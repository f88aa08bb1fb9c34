"""Requests of one prompt, and the RequestOutput that the engine's updates build."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.engine.async_engine import Update
from lockstep.outputs import CompletionOutput, RequestOutput
from lockstep.sampling_params import SamplingParams
from lockstep.text.parsers import ReplyParser
from lockstep.text.parsers.events import call_id
from lockstep.text.processor import Processor, Prompt, Rendered, TextUpdate, name_tokens
from lockstep.text.scored_prompt import scored_prompt


@dataclass(frozen=True)
class ReplyReader:
    """Parser of a chat's answer: it separates reasoning and tool calls from the text.

    tools: tools that the model may call. parallel_calls: keep calls after the first one.
    """

    processor: Processor
    prompt: Rendered
    tools: list[dict[str, Any]] | None
    params: SamplingParams
    parallel_calls: bool = True

    def read(self, request_id: str, done: CompletionOutput) -> None:
        """Fill the parsers' results into a completion that has ended."""
        form = self.params.structured_outputs
        parser: ReplyParser = self.processor.reply_parser(self.prompt.text, self.tools, form)
        end = self.processor.text_end(done.finish_reason, done.stop_reason, self.params)
        reply = parser.parse(done.text, end)
        done.content = reply.content
        done.reasoning = reply.reasoning or None
        done.tool_calls = reply.tool_calls if self.parallel_calls else reply.tool_calls[:1]
        done.parser_errors = reply.errors
        for number, call in enumerate(done.tool_calls):
            call.id = call_id(request_id, done.index, number, call.id)


class RequestGroup:
    """The n requests of one prompt, and what they have generated so far.

    shown: special tokens that become text. reader: parses completions that have ended, for a chat.
    engine_id: beginning of the ids of the engine's requests; request_id where it is left out.
    """

    def __init__(
        self,
        processor: Processor,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        shown: Collection[int] = (),
        reader: ReplyReader | None = None,
        adapter: str = "",
        engine_id: str | None = None,
    ) -> None:
        self.id = request_id
        engine_id = request_id if engine_id is None else engine_id
        self.requests = processor.requests(engine_id, prompt, params, priority=priority)
        now = time.monotonic()
        for request in self.requests:
            request.metrics.arrival_time = now
            request.adapter = adapter
        self._tokenizer = processor.tokenizer
        self._reader = reader
        self._texts = [processor.completion(r, i, shown) for i, r in enumerate(self.requests)]
        self._scored_prompts = [scored_prompt(request) for request in self.requests]
        self._num_open = len(self._texts)
        first = self.requests[0]
        scored_ids = first.scored.token_ids if first.scored else []
        self._output = RequestOutput(
            request_id=request_id,
            prompt=_text_of(prompt),
            prompt_token_ids=[*first.prompt_token_ids, *scored_ids],
            outputs=[text.output for text in self._texts],
            metrics=first.metrics.copy(),
        )

    @property
    def output(self) -> RequestOutput:
        """Return what the requests have generated so far, always the same object."""
        self._output.outputs[:] = [text.output for text in self._texts]
        return self._output

    @property
    def finished(self) -> bool:
        """Return whether all requests have ended."""
        return self._num_open == 0

    def has_ended(self, index: int) -> bool:
        """Return whether the request with this index has ended."""
        return self._texts[index].finished

    def push(self, index: int, update: Update) -> TextUpdate | None:
        """Take an update of one completion -> its final text and tokens; None after its end, and
        where an update only has scored tokens of the prompt.

        Raises the engine's error: ComputeError where the engine fails again and again.
        """
        if isinstance(update, Exception):
            raise update
        text = self._texts[index]
        if text.finished:
            return None
        scored = self._scored_prompts[index]
        if scored is not None:
            converted = scored.convert(update)
            if converted is None:
                return None
            update = converted
        if index == 0:
            self._output.metrics = update.metrics
        if update.prompt_logprobs is not None and self._output.prompt_logprobs is None:
            name_tokens(self._tokenizer, update.prompt_logprobs)
            self._output.prompt_logprobs = update.prompt_logprobs
        text_update = text.push(
            update.token_ids, update.logprobs, update.finish_reason, update.stop_reason
        )
        if update.error is not None:
            text.output.error = update.error
        if text.finished:
            self._num_open -= 1
            self._output.finished = self.finished
            if self._reader is not None:
                self._reader.read(self.id, text.output)
        return text_update

    def snapshot(self) -> RequestOutput:
        """Return a copy of the output."""
        return replace(
            self.output, outputs=[_copy(completion) for completion in self.output.outputs]
        )

    def delta(self, updates: Mapping[int, Sequence[TextUpdate]]) -> RequestOutput:
        """Return an output of these updates only, by the completions' indices."""
        parts = [self._texts[index].part(updates[index]) for index in sorted(updates)]
        return replace(self._output, outputs=parts)


def _copy(done: CompletionOutput) -> CompletionOutput:
    scores = done.logprobs
    copied = None if scores is None else list(scores)
    return replace(done, token_ids=list(done.token_ids), logprobs=copied)


def _text_of(prompt: Prompt) -> str | None:
    """Return a prompt's text, None where it has token ids."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt", "")
    if isinstance(prompt, Rendered):
        return prompt.text
    return prompt if isinstance(prompt, str) and prompt else None
