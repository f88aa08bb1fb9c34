"""/v1/completions: prompts in, their continuations out."""

import asyncio
from collections.abc import Iterable, Iterator

from lockstep.outputs import Logprob
from lockstep.sampling_params import SamplingParams
from lockstep.serve.openai.logprobs import (
    Places,
    completion_logprobs,
    prompt_logprobs,
    prompt_places,
)
from lockstep.serve.openai.protocol import CompletionRequest
from lockstep.serve.requests.response_writer import Answer, Json
from lockstep.serve.requests.service import (
    Answers,
    Asked,
    Meter,
    Piece,
    PromptLogprobs,
    Run,
    Service,
    Tokens,
)


class CompletionAnswer(Answer):
    """Completions of one prompt or several."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.service = service
        self.body = body
        self._run: Run
        self._prompts: list[str | list[int]] = []
        self._echoes: list[str] = []
        self._shown: list[_Shown] = []
        self._meter: Meter
        self._tells_tokens = False

    @property
    def run(self) -> Run:
        """The request in the engine."""
        return self._run

    async def start(self, brief: bool = False) -> None:
        """Tokenises and begins; raises what is wrong before anything is sent."""
        self._prompts = self.body.prompts()
        count = len(self._prompts)
        self._run = await self.service.start("cmpl-", self.body, count, self._ask, brief)
        self._shown = [_Shown(self._places(index)) for index in range(len(self.run.job.requests))]
        self._tells_tokens = self.run.job.tells_tokens(self.body)
        self._meter = Meter(self.run.job)

    async def rendered(self) -> list[Json]:
        """Return each prompt's token ids and what would be generated with. Raises RequestError."""
        self._prompts = self.body.prompts()
        return await self.service.render("cmpl-", self.body, len(self._prompts), self._ask)

    def _ask(self) -> Asked:
        processor = self.service.processor
        params = self.body.params(processor)
        prompts = self._prompts
        special = self.body.add_special_tokens
        cut = params.truncate_prompt_tokens is not None
        if cut or not special:
            prompts = [processor.prompt_ids(prompt, params, special) for prompt in prompts]
        # An echo shows the tokens that the model read, not those that were cut.
        echoed = prompts if cut else self._prompts
        self._echoes = [self._shown_prompt(prompt, params) for prompt in echoed]
        return Asked(prompts, params, self.body.only_prompt)

    def close(self) -> None:
        """Aborts what still runs."""
        self.run.close()

    async def whole(self) -> Json:
        """The answer as one object, made beside the event loop where it spells many tokens."""
        answers = Answers(self.run.job)
        async for pieces in self.run:
            for piece in pieces:
                self._meter.add(piece)
                answers.add(piece)
        if self.run.job.spells:
            return await asyncio.to_thread(self._whole, answers)
        return self._whole(answers)

    def _whole(self, answers: Answers) -> Json:
        choices = [self._choice(answers, index) for index in range(len(answers.completions))]
        return {**self._head(), "choices": choices, "usage": self._meter.usage().to_json()}

    def begin(self) -> Iterable[Json]:
        """There are no chunks before the first text."""
        return ()

    def hear(self, piece: Piece) -> Iterator[Json]:
        """The chunk of a piece; none while its text is held back."""
        self._meter.add(piece)
        choice = self._piece(piece, self._shown[piece.index])
        if choice is None:
            return
        chunk = {**self._head(), "choices": [choice]}
        options = self.body.stream_options
        if options and options.include_usage:
            each = options.continuous_usage_stats
            chunk["usage"] = self._meter.usage().to_json() if each else None
        yield chunk

    def end(self) -> Iterator[Json]:
        """The chunks behind all pieces: what was used, where that is asked for."""
        options = self.body.stream_options
        if options and options.include_usage:
            yield {**self._head(), "choices": [], "usage": self._meter.usage().to_json()}

    def _head(self) -> Json:
        return self.service.head(self.run.job, "text_completion")

    def _shown_prompt(self, prompt: str | list[int], params: SamplingParams) -> str:
        """Return a prompt's text where the client wants it in front of the answer.

        Raises RequestError.
        """
        processor = self.service.processor
        if not self.body.echo or processor.tokenizer is None:
            return ""
        if isinstance(prompt, str):
            return prompt
        # A prompt that does not fit is refused in the same words with and without echo.
        return processor.decode(processor.prompt_ids(prompt, params), field="prompt")

    def _echo(self, index: int) -> str:
        """What stands in front of a completion."""
        return self._echoes[index // self.run.job.params.n]

    def _places(self, index: int) -> Places:
        """Where a completion's tokens begin in its text, which log-probabilities tell."""
        tokenizer = None if self.body.logprobs is None else self.service.processor.tokenizer
        hides = self.run.job.params.skip_special_tokens
        return Places(tokenizer, hides, len(self._echo(index)))

    def _choice(self, answers: Answers, index: int) -> Json:
        done = answers.completions[index]
        asked = answers.prompt_logprobs.get(index // self.run.job.params.n)
        text = self._echo(index) + done.text
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, done, True, asked),
            **self.run.job.ending(index, done.finish_reason, done.stop_reason, done.error),
        }
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(asked)
        return choice | done.told(self.body) | self._prompt_ids(index, True)

    def _piece(self, piece: Piece, shown: "_Shown") -> Json | None:
        """A chunk's choice; None while the text is held back, and its tokens with it."""
        index = piece.index
        new = piece.text
        first = not shown.begun
        if self._tells_tokens:
            shown.tokens.add(piece)
        shown.asked = piece.prompt_logprobs or shown.asked
        text = (self._echo(index) if first else "") + new.delta
        if not text and new.finish_reason is None:
            return None
        tokens = shown.tokens
        shown.begun = True
        choice = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens, first, shown.asked),
            **self.run.job.ending(index, new.finish_reason, new.stop_reason, piece.error),
            **tokens.told(self.body),
            **self._prompt_ids(index, first),
        }
        tokens.clear()
        return choice

    def _prompt_ids(self, index: int, first: bool) -> Json:
        """The prompt's token ids, where they are asked for, with what comes first."""
        if not (first and self.body.return_token_ids):
            return {}
        return {"prompt_token_ids": self.run.job.prompts[index // self.run.job.params.n]}

    def _logprobs(
        self, index: int, tokens: Tokens, first: bool, asked: PromptLogprobs | None
    ) -> Json | None:
        """Those of the tokens; the prompt's go in front where it is echoed."""
        echoed = self.body.echo and first
        if self.body.logprobs is None or (tokens.logprobs is None and not echoed):
            return None
        tokenizer = self.service.processor.tokenizer
        ids = list(tokens.token_ids)
        entries: list[dict[int, Logprob] | None] = [*(tokens.logprobs or ())]
        places = self._shown[index].places.of(ids)
        if echoed:
            prompt = self.run.job.prompts[index // self.run.job.params.n]
            ids = prompt + ids
            entries = [*(asked or [None] * len(prompt)), *entries]
            places = prompt_places(tokenizer, prompt, self._echo(index)) + places
        as_ids = self.body.return_tokens_as_token_ids
        return completion_logprobs(tokenizer, ids, entries, self.body.logprobs, places, as_ids)


class _Shown:
    """What of one completion waits to be sent, and where its tokens begin in its text."""

    def __init__(self, places: Places) -> None:
        self.tokens = Tokens()
        self.places = places
        self.begun = False
        self.asked: PromptLogprobs | None = None
