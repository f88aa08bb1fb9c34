"""/v1/completions: prompts in, their continuations out."""

import asyncio
from collections.abc import AsyncIterator

from lockstep.outputs import Logprob
from lockstep.serve.answer import Answer, Json
from lockstep.serve.logprobs import completion_logprobs, prompt_logprobs
from lockstep.serve.protocol import CompletionRequest
from lockstep.serve.service import (
    Answers,
    Asked,
    Piece,
    PromptLogprobs,
    Run,
    Service,
    Tokens,
    gather,
)


class CompletionAnswer(Answer):
    """Completions of one prompt or several."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.service = service
        self.body = body
        self.run: Run
        self._prompts: list[str | list[int]] = []

    async def start(self) -> None:
        """Tokenises and begins; raises what is wrong before anything is sent."""
        self._prompts = self.body.prompts()
        self.run = await self.service.start("cmpl-", self.body, len(self._prompts), self._ask)

    def _ask(self) -> Asked:
        params = self.body.params(self.service.processor)
        return Asked(self._prompts, params, self.body.only_prompt)

    def close(self) -> None:
        """Aborts what still runs."""
        self.run.close()

    async def whole(self) -> Json:
        """The answer as one object, made beside the event loop where it spells many tokens."""
        answers = await gather(self.run.job, self.run)
        if self.run.job.spells:
            return await asyncio.to_thread(self._whole, answers)
        return self._whole(answers)

    def _whole(self, answers: Answers) -> Json:
        choices = [self._choice(answers, index) for index in range(len(answers.completions))]
        return {**self._head(), "choices": choices, "usage": answers.usage.to_json()}

    async def stream(self) -> AsyncIterator[Json]:
        """The answer as chunks; each depends on the pieces before it, not on when it is read."""
        options = self.body.stream_options
        with_usage = bool(options and options.include_usage)
        each = bool(options and options.continuous_usage_stats)
        usage = self.run.job.usage
        shown = [_Shown() for _ in self.run.job.requests]
        async for piece in self.run:
            usage = piece.usage
            choice = self._piece(piece, shown[piece.index])
            if choice is None:
                continue
            chunk = {**self._head(), "choices": [choice]}
            if with_usage:
                chunk["usage"] = usage.to_json() if each else None
            yield chunk
        if with_usage:
            yield {**self._head(), "choices": [], "usage": usage.to_json()}

    def _head(self) -> Json:
        return self.service.head(self.run.job, "text_completion")

    def _echo(self, index: int) -> str:
        """The prompt's text where the client wants it in front of the answer."""
        if not self.body.echo or self.service.processor.tokenizer is None:
            return ""
        prompt = self._prompts[index // self.run.job.params.n]
        return prompt if isinstance(prompt, str) else self.service.processor.decode(prompt)

    def _choice(self, answers: Answers, index: int) -> Json:
        done = answers.completions[index]
        asked = answers.prompt_logprobs.get(index // self.run.job.params.n)
        text = self._echo(index) + done.text
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, done, 0, True, asked),
            **self.run.job.ending(index, done.finish_reason, done.stop_reason, done.error),
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(asked)
        return choice | done.told(self.body) | self._prompt_ids(index, True)

    def _piece(self, piece: Piece, shown: "_Shown") -> Json | None:
        """A chunk's choice; None while the text is held back, and its tokens with it."""
        index = piece.index
        new = piece.text
        first = shown.characters == 0
        shown.tokens.add(piece)
        shown.asked = piece.prompt_logprobs or shown.asked
        text = (self._echo(index) if first else "") + new.delta
        if not text and new.finish_reason is None:
            return None
        tokens = shown.tokens.take()
        offset = shown.characters
        shown.characters += max(len(text), 1)
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens, offset, first, shown.asked),
            **self.run.job.ending(index, new.finish_reason, new.stop_reason, piece.error),
            **tokens.told(self.body),
            **self._prompt_ids(index, first),
        }

    def _prompt_ids(self, index: int, first: bool) -> Json:
        """The prompt's token ids, where they are asked for, with what comes first."""
        if not (first and self.body.return_token_ids):
            return {}
        return {"prompt_token_ids": self.run.job.prompts[index // self.run.job.params.n]}

    def _logprobs(
        self,
        index: int,
        tokens: Tokens,
        offset: int,
        first: bool,
        asked: PromptLogprobs | None,
    ) -> Json | None:
        """Those of the tokens; the prompt's go in front where it is echoed. offset: characters."""
        echoed = self.body.echo and first
        if self.body.logprobs is None or (tokens.logprobs is None and not echoed):
            return None
        ids = list(tokens.token_ids)
        entries: list[dict[int, Logprob] | None] = [*(tokens.logprobs or ())]
        if echoed:
            prompt = self.run.job.prompts[index // self.run.job.params.n]
            ids = prompt + ids
            entries = [*(asked or [None] * len(prompt)), *entries]
        return completion_logprobs(
            self.service.processor.tokenizer, ids, entries, self.body.logprobs, offset
        )


class _Shown:
    """How much of one completion was sent, and what waits."""

    def __init__(self) -> None:
        self.tokens = Tokens()
        self.characters = 0
        self.asked: PromptLogprobs | None = None
