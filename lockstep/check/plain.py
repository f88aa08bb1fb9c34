"""Plain runs: every request alone, on an engine without drafts, cache, chunks or graphs.

They are what all others must equal, so they are judged themselves: every token, ending and
log-probability is compared with what lockstep.check.naive makes of the raw logits.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from lockstep.check import naive
from lockstep.check.asks import Answer, as_bits
from lockstep.check.digests import digest
from lockstep.llm import LLM
from lockstep.runner.program import Outcome
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.step import StepShape
from lockstep.text.processor import CompletionText

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

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.faults: list[Fault] = []
        self.flattest: list[tuple[float, Tensor]] = []
        self._kept: dict[str, list[Answer]] = {}
        self._runs = 0

    def answers(self, prompt: Sequence[int], params: SamplingParams) -> list[Answer]:
        """The n completions of a request, each run alone."""
        key = json.dumps([list(prompt), asdict(params)], default=str)
        if key not in self._kept:
            self._runs += 1
            name = f"plain-{self._runs}"
            asked = {"prompt_token_ids": list(prompt)}
            requests = self.llm.processor.requests(name, asked, params)
            self._kept[key] = [self._run(r, i, params) for i, r in enumerate(requests)]
        return self._kept[key]

    def judged(self, prompt: Sequence[int], params: SamplingParams) -> Fault | None:
        """What is wrong with the plain run of a request by itself, or None."""
        self.answers(prompt, params)
        same = (f for f in self.faults if f.prompt == tuple(prompt) and f.params == params)
        return next(same, None)

    def _run(self, request: Request, index: int, params: SamplingParams) -> Answer:
        """One completion, run and judged."""
        text = self.llm.processor.completion(request, index)
        with raw_logits(self.llm) as seen:
            serve(self.llm, [(request, text)])
        done = text.output
        raw = torch.cat(seen)[: len(done.token_ids)].float().cpu()
        prompt = () if params.prompt_logprobs is None else as_bits(request.prompt_logprobs)
        answer = Answer(
            tuple(done.token_ids),
            as_bits(done.logprobs),
            request.metrics,
            tuple(digest(raw).tolist()),
            (done.finish_reason, done.stop_reason),
            done.text,
            prompt,
        )
        seed = None if params.seed is None else params.seed + index
        place = _first_fault(answer, raw, request, seed)
        if place is None and prompt:
            place = self._wrong_prompt_logprob(request, answer)
        if place is not None:
            given = tuple(request.prompt_token_ids)
            self.faults.append(Fault(given, params, index, *place))
        self._keep_flattest(raw)
        return answer

    def _wrong_prompt_logprob(self, request: Request, answer: Answer) -> tuple[int, str] | None:
        """Whether a prompt token's log-probability is another than behind that much of the prompt
        alone; two tokens are tried."""
        prompt = request.prompt_token_ids
        close = PROMPT_CLOSE.get(self.llm.engine.plan.dtype, 0.1)
        for length in sorted({len(prompt) // 2, len(prompt) - 1} - {0}):
            scores = torch.log_softmax(self._logits_behind(prompt[:length]).double(), -1)
            token = prompt[length]
            given = {t: float.fromhex(v) for t, v, _ in answer.prompt_bits[length - 1]}[token]
            due = float(scores[token])
            if not abs(given - due) <= close * (1 + abs(due)):
                return 0, f"prompt logprob {given} of token {length} instead of {due}"
        return None

    def _logits_behind(self, prompt: list[int]) -> Tensor:
        """The raw logits [V] behind a prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        asked = {"prompt_token_ids": prompt}
        (request,) = self.llm.processor.requests("plain-prefix", asked, params)
        with raw_logits(self.llm) as seen:
            serve(self.llm, [(request, self.llm.processor.completion(request))])
        return seen[0][0].float().cpu()

    def _keep_flattest(self, raw: Tensor) -> None:
        shares = torch.softmax(raw.double(), -1)
        entropy = -torch.special.xlogy(shares, shares).sum(-1)
        at = int(entropy.argmax())
        self.flattest.append((float(entropy[at]), raw[at].clone()))
        self.flattest = sorted(self.flattest, key=lambda e: -e[0])[:FLATTEST]


def serve(llm: LLM, jobs: list[tuple[Request, CompletionText]]) -> None:
    """Runs requests to their ends, stop strings included."""
    texts = {request.id: text for request, text in jobs}

    def update(request: Request) -> None:
        if push(texts[request.id], request):
            llm.engine.abort(request.id)

    llm.engine.run([request for request, _ in jobs], update)


def push(text: CompletionText, request: Request) -> bool:
    """Gives a completion the request's new tokens; True if it ended on a stop string."""
    if text.finished:
        return False
    seen = len(text.output.token_ids)
    scores = request.logprobs[seen:] if request.params.logprobs is not None else None
    new = request.output_token_ids[seen:]
    text.push(new, scores, request.finish_reason, request.stop_reason)
    return text.finished and request.finish_reason is None


@contextmanager
def raw_logits(llm: LLM) -> Iterator[list[Tensor]]:
    """The first row's logits [1, V] of every step that is run meanwhile."""
    runner, seen = llm.engine.runner, []
    run_step = runner.run_step

    def watched(shape: StepShape) -> Outcome:
        outcome = run_step(shape)
        seen.append(outcome[2][:1].clone())
        return outcome

    runner.run_step = watched
    try:
        yield seen
    finally:
        runner.run_step = run_step


def _first_fault(
    answer: Answer, raw: Tensor, request: Request, seed: int | None
) -> tuple[int, str] | None:
    """The first position at which an answer is not what its raw logits [N, V] give, and why."""
    params, lines = request.params, raw.double().numpy()
    given = request.seed if seed is None else (seed + 2**63) % 2**64 - 2**63
    for index, token in enumerate(answer.tokens):
        before = answer.tokens[:index]
        place = naive.Place(request.prompt_token_ids, before, request.eos_token_ids)
        wrong = naive.wrong_token(lines[index], token, place, params, given)
        if wrong is None and params.logprobs is not None:
            found = {t: (float.fromhex(v), rank) for t, v, rank in answer.bits[index]}
            wrong = naive.wrong_logprobs(lines[index], token, found, params.logprobs)
        if wrong is not None:
            return index, wrong
    room = request.most_tokens - len(request.prompt_token_ids)
    wrong = naive.wrong_end(answer.tokens, answer.ending, request.eos_token_ids, params, room)
    if wrong is None and params.prompt_logprobs is not None:
        wrong = _wrong_prompt(answer, request)
    return None if wrong is None else (len(answer.tokens) - 1, wrong)


def _wrong_prompt(answer: Answer, request: Request) -> str | None:
    """What is wrong with the log-probabilities of the prompt, as far as they show it."""
    due, most = request.prompt_token_ids[1:], request.params.prompt_logprobs or 0
    if len(answer.prompt_bits) != len(due):
        return f"{len(answer.prompt_bits)} prompt logprobs for {len(due)} tokens"
    for index, (token, entry) in enumerate(zip(due, answer.prompt_bits, strict=True)):
        given = [t for t, _, _ in entry]
        if token not in given or len(entry) not in (most, most + 1):
            return f"prompt logprobs of {given} for token {index + 1}, {token}"
    return None
