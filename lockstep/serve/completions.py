"""/v1/completions: prompts in, their continuations out."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from lockstep.outputs import Logprob
from lockstep.serve.logprobs import completion_logprobs, prompt_logprobs
from lockstep.serve.protocol import CompletionRequest
from lockstep.serve.service import Job, Piece, Service

Json = dict[str, Any]


class CompletionAnswer:
    """One call of the endpoint: prepare() first, then whole() or stream()."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.service, self.body = service, body
        self.job: Job
        self._shown: list[int] = []

    async def prepare(self) -> "CompletionAnswer":
        """Tokenises; raises RequestError before anything is sent."""
        self.service.check(self.body)
        params = self.body.params(self.service.processor)
        prompts = self.body.prompts()
        self.job = await self.service.job("cmpl", prompts, params, self.body.priority)
        self._shown = [0] * len(self.job.texts)
        return self

    async def whole(self) -> Json:
        """The answer as one object."""
        job = await self.service.finish(self.job)
        choices = [self._choice(index) for index in range(len(job.texts))]
        return {**self._head(), "choices": choices, "usage": job.usage()}

    async def stream(self) -> AsyncGenerator[Json, None]:
        """The answer as chunks."""
        options = self.body.stream_options
        usage = bool(options and options.include_usage)
        async with contextlib.aclosing(self.service.run(self.job)) as pieces:
            async for piece in pieces:
                chunk = {**self._head(), "choices": [self._piece(piece)]}
                if usage:
                    each = options and options.continuous_usage_stats
                    chunk["usage"] = self.job.usage() if each else None
                yield chunk
        if usage:
            yield {**self._head(), "choices": [], "usage": self.job.usage()}

    def _head(self) -> Json:
        return {
            "id": self.job.id,
            "object": "text_completion",
            "created": self.job.created,
            "model": self.service.model_name,
            "system_fingerprint": self.service.fingerprint,
        }

    def _echo(self, index: int) -> str:
        """The prompt's text where the client wants it in front of the answer."""
        if not self.body.echo or self.service.processor.tokenizer is None:
            return ""
        prompt = self.body.prompts()[index // self.job.params.n]
        if isinstance(prompt, str):
            return prompt
        return self.service.processor.tokenizer.decode(prompt, skip_special_tokens=False)

    def _choice(self, index: int) -> Json:
        output = self.job.texts[index].output
        return self._form(index, self._echo(index), output.text, output.token_ids, output.logprobs)

    def _piece(self, piece: Piece) -> Json:
        index = piece.text.output.index
        first = not self._shown[index]
        echo = self._echo(index) if first else ""
        offset = self._shown[index]
        form = self._form(index, echo, piece.delta, piece.token_ids, piece.logprobs, offset, first)
        self._shown[index] += max(len(form["text"]), 1)
        return form

    def _form(
        self,
        index: int,
        echo: str,
        text: str,
        token_ids: list[int],
        scores: list[dict[int, Logprob]] | None,
        offset: int = 0,
        first: bool = True,
    ) -> Json:
        output = self.job.texts[index].output
        asked = self.job.prompt_logprobs.get(index // self.job.params.n)
        logprobs = None
        if self.body.logprobs is not None and scores is not None:
            ids = list(token_ids)
            entries: list[dict[int, Logprob] | None] = [*scores]
            if self.body.echo and first:
                prompt = self.job.prompts[index // self.job.params.n]
                ids, entries = prompt + ids, [*(asked or [None] * len(prompt)), *entries]
            logprobs = completion_logprobs(
                self.service.processor.tokenizer, ids, entries, self.body.logprobs, offset
            )
        form = {
            "index": index,
            "text": echo + text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "seed": output.seed,
        }
        if self.body.prompt_logprobs is not None and first:
            form["prompt_logprobs"] = prompt_logprobs(asked)
        return form
