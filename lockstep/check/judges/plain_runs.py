"""Plain runs: every request alone, on an engine without drafts, cache, chunks or graphs.

All other runs must equal them, so they are judged themselves: numpy_sampler checks every token,
ending and log-probability against the raw logits.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lockstep.check.engines import ONE_TOKEN, CheckEngine, Completion
from lockstep.check.judges import numpy_sampler
from lockstep.check.judges.answers import Answer, Mismatch
from lockstep.check.judges.digests import RawLogits, digest
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request

PROMPT_CLOSE = {"float32": 1e-3}
"""Tolerance by dtype between a prompt token's log-probability and that after a shorter prompt,
whose last chunk has another length. 0.1 in 16-bit dtypes."""
FLATTEST = 8
"""Number of stored logit rows with the highest entropy, for the distribution tests."""


@dataclass(frozen=True)
class Fault:
    """Fault of a plain run. completion: index among the request's n."""

    prompt: tuple[int, ...]
    params: SamplingParams
    completion: int
    position: int
    what: str


class PlainRuns:
    """Outputs of one plain engine, cached by prompt and parameters, and their faults."""

    def __init__(self, engine: CheckEngine) -> None:
        self.engine = engine
        self.llm = engine.llm
        self.faults: list[Fault] = []
        self.flattest: list[tuple[float, Tensor]] = []
        self._kept: dict[str, list[Answer]] = {}
        self._runs = 0
        self._spelled: list[bytes] = []

    def answers(self, prompt: Sequence[int], params: SamplingParams) -> list[Answer]:
        """Return the n completions of a request, each run alone."""
        key = json.dumps([list(prompt), asdict(params)], default=str)
        if key not in self._kept:
            self._runs += 1
            completions = self.engine.completions(f"plain-{self._runs}", prompt, params)
            self._kept[key] = [self._run(c, i, params) for i, c in enumerate(completions)]
        return self._kept[key]

    def judged(self, prompt: Sequence[int], params: SamplingParams) -> Fault | None:
        """Return the fault of a request's plain run, or None."""
        self.answers(prompt, params)
        same = (f for f in self.faults if f.prompt == tuple(prompt) and f.params == params)
        return next(same, None)

    def _run(self, completion: Completion, index: int, params: SamplingParams) -> Answer:
        """Run and judge one completion."""
        logits = self._serve(completion)
        raw = logits.behind(len(completion.text.output.token_ids))
        answer = completion.answer(digest(raw).tolist())
        request = completion.request
        seed = None if params.seed is None else params.seed + index
        place = _first_fault(answer, raw, request, seed, self._choices(request))
        if place is None and answer.prompt_bits:
            place = self._wrong_prompt_logprob(request, answer)
        if place is not None:
            given = tuple(request.prompt_token_ids)
            self.faults.append(Fault(given, params, index, *place))
        self._keep_flattest(raw)
        return answer

    def _choices(self, request: Request) -> numpy_sampler.Choices | None:
        """Return the choices of a structured output, or None."""
        wanted = request.params.structured_outputs
        tokenizer = self.llm.tokenizer
        if wanted is None or wanted.choice is None or tokenizer is None:
            return None
        if not self._spelled:
            silent = tokenizer.special_ids
            known = range(len(tokenizer))
            self._spelled = [b"" if i in silent else tokenizer.token_bytes(i) for i in known]
        return numpy_sampler.Choices(tuple(text.encode() for text in wanted.choice), self._spelled)

    def _serve(self, completion: Completion) -> RawLogits:
        """Run a completion alone to its end, and return the logits of its tokens."""
        logits = RawLogits()
        with self.engine.observed(logits):
            self.engine.serve([completion])
        return logits

    def _wrong_prompt_logprob(self, request: Request, answer: Answer) -> Mismatch | None:
        """Compare the log-probabilities of two prompt tokens with runs of the shorter prompts."""
        prompt = request.prompt_token_ids
        close = PROMPT_CLOSE.get(self.engine.engine.plan.dtype, 0.1)
        for length in sorted({len(prompt) // 2, len(prompt) - 1} - {0}):
            scores = torch.log_softmax(self._logits_behind(prompt[:length]).double(), -1)
            token = prompt[length]
            given = {t: float.fromhex(v) for t, v, _ in answer.prompt_bits[length - 1]}[token]
            due = float(scores[token])
            if not abs(given - due) <= close * (1 + abs(due)):
                return 0, f"prompt logprob {given} of token {length} instead of {due}"
        return None

    def _logits_behind(self, prompt: Sequence[int]) -> Tensor:
        """Return the raw logits [V] after a prompt."""
        (completion,) = self.engine.completions("plain-prefix", prompt, ONE_TOKEN)
        return self._serve(completion).behind(1)[0]

    def _keep_flattest(self, raw: Tensor) -> None:
        shares = torch.softmax(raw.double(), -1)
        entropy = -torch.special.xlogy(shares, shares).sum(-1)
        at = int(entropy.argmax())
        self.flattest.append((float(entropy[at]), raw[at].clone()))
        self.flattest = sorted(self.flattest, key=lambda e: -e[0])[:FLATTEST]


def _first_fault(
    answer: Answer,
    raw: Tensor,
    request: Request,
    seed: int | None,
    choices: numpy_sampler.Choices | None,
) -> Mismatch | None:
    """Return the first position that contradicts the raw logits [N, V] and the reason, or None."""
    params = request.params
    scores = raw.double().numpy()
    given = request.seed if seed is None else (seed + 2**63) % 2**64 - 2**63
    for index, token in enumerate(answer.tokens):
        before = answer.tokens[:index]
        place = numpy_sampler.Place(
            request.prompt_token_ids, before, request.eos_token_ids, choices
        )
        wrong = numpy_sampler.wrong_token(scores[index], token, place, params, given)
        if wrong is None and params.logprobs is not None:
            found = {t: (float.fromhex(v), rank) for t, v, rank in answer.bits[index]}
            wrong = numpy_sampler.wrong_logprobs(scores[index], token, found, params.logprobs)
        if wrong is not None:
            return index, wrong
    room = request.max_total_tokens - len(request.prompt_token_ids)
    wrong = numpy_sampler.wrong_end(
        answer.tokens, answer.ending, request.eos_token_ids, params, room
    )
    if wrong is None and params.prompt_logprobs is not None:
        wrong = _wrong_prompt(answer, request)
    return None if wrong is None else (len(answer.tokens) - 1, wrong)


def _wrong_prompt(answer: Answer, request: Request) -> str | None:
    """Return what is wrong with the number and tokens of prompt log-probabilities, or None."""
    due = request.prompt_token_ids[1:]
    most = request.params.prompt_logprobs or 0
    if len(answer.prompt_bits) != len(due):
        return f"{len(answer.prompt_bits)} prompt logprobs for {len(due)} tokens"
    for index, (token, entry) in enumerate(zip(due, answer.prompt_bits, strict=True)):
        given = [t for t, _, _ in entry]
        if token not in given or len(entry) not in (most, most + 1):
            return f"prompt logprobs of {given} for token {index + 1}, {token}"
    return None
