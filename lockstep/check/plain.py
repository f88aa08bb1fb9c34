"""Plain runs: every request alone, on an engine without drafts, cache, chunks or graphs.

They are what all others must equal, so they are judged themselves: every token, ending and
log-probability is compared with what lockstep.check.naive makes of the raw logits.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lockstep.check import naive
from lockstep.check.answers import Answer, Mismatch
from lockstep.check.digests import RawLogits, digest
from lockstep.check.harness import ONE_TOKEN, CheckEngine, Completion
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request

PROMPT_CLOSE = {"float32": 1e-3}
"""By dtype: how far a prompt token's log-probability may be from the one behind a shorter prompt,
whose last chunk is cut elsewhere. 0.1 in formats of 16 bits."""
FLATTEST = 8
"""How many raw logits are kept to draw from: those with the highest entropy."""


@dataclass(frozen=True)
class Fault:
    """A plain run that is wrong by itself. completion: which of the request's n."""

    prompt: tuple[int, ...]
    params: SamplingParams
    completion: int
    position: int
    what: str


class PlainRuns:
    """Answers of one plain engine, kept by prompt and parameters; `faults` of them."""

    def __init__(self, engine: CheckEngine) -> None:
        self.engine = engine
        self.llm = engine.llm
        self.faults: list[Fault] = []
        self.flattest: list[tuple[float, Tensor]] = []
        self._kept: dict[str, list[Answer]] = {}
        self._runs = 0
        self._spelled: list[bytes] = []

    def answers(self, prompt: Sequence[int], params: SamplingParams) -> list[Answer]:
        """The n completions of a request, each run alone."""
        key = json.dumps([list(prompt), asdict(params)], default=str)
        if key not in self._kept:
            self._runs += 1
            completions = self.engine.completions(f"plain-{self._runs}", prompt, params)
            self._kept[key] = [self._run(c, i, params) for i, c in enumerate(completions)]
        return self._kept[key]

    def judged(self, prompt: Sequence[int], params: SamplingParams) -> Fault | None:
        """What is wrong with the plain run of a request by itself, or None."""
        self.answers(prompt, params)
        same = (f for f in self.faults if f.prompt == tuple(prompt) and f.params == params)
        return next(same, None)

    def _run(self, completion: Completion, index: int, params: SamplingParams) -> Answer:
        """One completion, run and judged."""
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

    def _choices(self, request: Request) -> naive.Choices | None:
        """The texts of which the answer must be one, where it must be."""
        wanted = request.params.structured_outputs
        tokenizer = self.llm.tokenizer
        if wanted is None or wanted.choice is None or tokenizer is None:
            return None
        if not self._spelled:
            silent = tokenizer.special_ids
            known = range(len(tokenizer))
            self._spelled = [b"" if i in silent else tokenizer.token_bytes(i) for i in known]
        return naive.Choices(tuple(text.encode() for text in wanted.choice), self._spelled)

    def _serve(self, completion: Completion) -> RawLogits:
        """Runs a completion alone to its end; the logits of its tokens."""
        logits = RawLogits()
        with self.engine.observed(logits):
            self.engine.serve([completion])
        return logits

    def _wrong_prompt_logprob(self, request: Request, answer: Answer) -> Mismatch | None:
        """Whether a prompt token's log-probability is another than behind that much of the prompt
        alone; two tokens are tried."""
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
        """The raw logits [V] behind a prompt."""
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
    choices: naive.Choices | None,
) -> Mismatch | None:
    """The first position at which an answer is not what its raw logits [N, V] give, and why."""
    params = request.params
    scores = raw.double().numpy()
    given = request.seed if seed is None else (seed + 2**63) % 2**64 - 2**63
    for index, token in enumerate(answer.tokens):
        before = answer.tokens[:index]
        place = naive.Place(request.prompt_token_ids, before, request.eos_token_ids, choices)
        wrong = naive.wrong_token(scores[index], token, place, params, given)
        if wrong is None and params.logprobs is not None:
            found = {t: (float.fromhex(v), rank) for t, v, rank in answer.bits[index]}
            wrong = naive.wrong_logprobs(scores[index], token, found, params.logprobs)
        if wrong is not None:
            return index, wrong
    room = request.max_total_tokens - len(request.prompt_token_ids)
    wrong = naive.wrong_end(answer.tokens, answer.ending, request.eos_token_ids, params, room)
    if wrong is None and params.prompt_logprobs is not None:
        wrong = _wrong_prompt(answer, request)
    return None if wrong is None else (len(answer.tokens) - 1, wrong)


def _wrong_prompt(answer: Answer, request: Request) -> str | None:
    """What is wrong with the log-probabilities of the prompt, as far as they show it."""
    due = request.prompt_token_ids[1:]
    most = request.params.prompt_logprobs or 0
    if len(answer.prompt_bits) != len(due):
        return f"{len(answer.prompt_bits)} prompt logprobs for {len(due)} tokens"
    for index, (token, entry) in enumerate(zip(due, answer.prompt_bits, strict=True)):
        given = [t for t, _, _ in entry]
        if token not in given or len(entry) not in (most, most + 1):
            return f"prompt logprobs of {given} for token {index + 1}, {token}"
    return None
