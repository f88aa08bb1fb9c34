"""Plain runs: every request alone, on an engine without drafts, cache, chunks or graphs.

All other runs must equal them, so they are judged themselves: numpy_sampler checks every token,
ending and log-probability against the raw logits.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lockstep.answer import Answer, Mismatch
from lockstep.check.engines import ONE_TOKEN, CheckEngine, Completion, Conversation, rendered
from lockstep.check.judges import numpy_sampler, texts
from lockstep.check.judges.digests import RawLogits, digest
from lockstep.llm import LLM
from lockstep.outputs import CompletionOutput
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request

SERVED = "served"
"""Name of the model that the user checks, among the models of a check."""
PROMPT_LOGPROB_TOLERANCES = {"float32": 1e-3}
"""Relative tolerance by dtype, 0.1 for 16-bit dtypes, of a prompt token's log-probability. It is
compared with a run of a shorter prompt, whose last chunk has another length."""
PROBABILITY_TOLERANCE = 1e-5
"""Slack of a sum of probabilities: float32 against float64."""
MAX_FLATTEST_ROWS = 8
"""Maximum stored logit rows with the highest entropy, for the distribution tests."""


class EngineKind(Protocol):
    """Kind of an engine, as far as its plain runs depend on it."""

    @property
    def model(self) -> str: ...

    @property
    def numerics(self) -> str: ...


@dataclass(frozen=True)
class Fault:
    """Fault of a plain run. completion: index among the request's n."""

    prompt: tuple[int, ...]
    params: SamplingParams
    completion: int
    position: int
    what: str


class PlainRuns:
    """Outputs of one plain engine, cached by prompt and parameters, and their faults.

    adapter: name of the LoRA adapter of all requests, "" for the base model. build_adapted: builds
    the plain engine with adapters; base models are judged on an engine without. companion: returns
    the plain runs of a companion by its name and numerics.
    """

    def __init__(
        self,
        engine: CheckEngine,
        build_adapted: Callable[[], CheckEngine] | None = None,
        adapter: str = "",
        companion: Callable[[str, str], "PlainRuns"] | None = None,
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self._build_adapted = build_adapted
        self._companion = companion
        self._adapted: dict[str, PlainRuns] = {}
        self.llm = engine.llm
        self.faults: list[Fault] = []
        self.flattest: list[tuple[float, Tensor]] = []
        self._answers: dict[str, list[Answer]] = {}
        self._probes: dict[str, CompletionOutput] = {}
        self._logprobs: dict[tuple[int, ...], float] = {}
        self._runs = 0
        self._is_effective = not adapter
        self._token_bytes: list[bytes] = []

    @property
    def has_adapters(self) -> bool:
        """Return whether an engine with adapters can be built."""
        return self._build_adapted is not None

    def of(self, adapter: str) -> "PlainRuns":
        """Return the plain runs of an adapter: these for the base model."""
        if adapter == self.adapter:
            return self
        if not self._adapted:
            assert self._build_adapted is not None, "a check with adapters can build their engine"
            engine = self._build_adapted()
            names = engine.engine.plan.adapters
            self._adapted = {name: PlainRuns(engine, adapter=name) for name in names}
        return self._adapted[adapter]

    def for_kind(self, kind: EngineKind) -> "PlainRuns":
        """Return the plain runs of the model and the numerics of an engine's kind."""
        if self._companion is None or kind.model == SERVED:
            return self
        return self._companion(kind.model, kind.numerics)

    def without_outputs(self) -> "PlainRuns":
        """Return plain runs of the same engine and adapter without any output."""
        return PlainRuns(self.engine, adapter=self.adapter)

    def answers(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        conversation: Conversation | None = None,
    ) -> list[Answer]:
        """Return the n completions of a request, each run alone."""
        key = _key(prompt, params, conversation)
        if key not in self._answers:
            completions = self._completions(prompt, params, conversation)
            thought = None if conversation is None else thought_of(self.llm, conversation)
            self._answers[key] = [
                self._run(completion, index, params, thought)
                for index, completion in enumerate(completions)
            ]
        return self._answers[key]

    def probe(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        conversation: Conversation | None = None,
    ) -> CompletionOutput:
        """Return the first completion of a request, run alone and not judged.

        It serves to choose parameters. Answers that are compared come from `answers`.
        """
        key = _key(prompt, params, conversation)
        if key not in self._probes:
            completion = self._completions(prompt, params, conversation)[0]
            completion.request.adapter = self.adapter
            self.engine.serve([completion])
            self._probes[key] = completion.text.output
        return self._probes[key]

    def _completions(
        self, prompt: Sequence[int], params: SamplingParams, conversation: Conversation | None
    ) -> list[Completion]:
        """Return the n completions of a request, under an id of their own."""
        self._runs += 1
        return self.engine.completions(
            f"plain-{self._runs}", prompt, params, conversation=conversation
        )

    def fault_of(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        conversation: Conversation | None = None,
    ) -> Fault | None:
        """Return the fault of a request's plain run, or None."""
        self.answers(prompt, params, conversation)
        faults = (
            fault
            for fault in self.faults
            if fault.prompt == tuple(prompt) and fault.params == params
        )
        return next(faults, None)

    def _run(
        self,
        completion: Completion,
        index: int,
        params: SamplingParams,
        thought: numpy_sampler.Thought | None,
    ) -> Answer:
        """Run and judge one completion. thought: with which it begins or may begin."""
        logits = self._serve(completion)
        raw = logits.first_rows(len(completion.text.output.token_ids))
        answer = completion.answer(digest(raw).tolist())
        request = completion.request
        thought = _within_budget(thought, request)
        mismatch = _first_fault(
            answer,
            raw,
            request,
            self._written(params, request, index),
            self._context(request, thought),
            self.engine.engine.plan.max_model_len,
        )
        if mismatch is None:
            mismatch = self._wrong_form(answer, request, thought)
        if mismatch is None:
            mismatch = self._wrong_output(completion, params)
        if mismatch is None and answer.prompt_logprobs:
            mismatch = self._wrong_prompt_logprob(request, answer)
        if mismatch is None and len(raw) and not self._is_effective:
            mismatch = self._wrong_adapter(request, raw[0])
        if mismatch is not None:
            prompt = tuple(request.prompt_token_ids)
            self.faults.append(Fault(prompt, params, index, *mismatch))
        self._record_flattest(raw)
        return answer

    def _context(
        self, request: Request, thought: numpy_sampler.Thought | None
    ) -> numpy_sampler.TokenContext:
        """Return the context of an answer's first token."""
        choices = self._choices(request)
        return numpy_sampler.TokenContext(
            request.prompt_token_ids,
            (),
            request.eos_token_ids,
            choices,
            thought,
            request.params.structured_outputs is not None and choices is None,
        )

    @staticmethod
    def _written(params: SamplingParams, request: Request, index: int) -> SamplingParams:
        """Return the parameters of a completion, of which the engine tokenized only bad words."""
        seed = seed_of(params, request, index)
        return replace(params, bad_words_ids=request.params.bad_words_ids, seed=seed)

    def _wrong_output(self, completion: Completion, params: SamplingParams) -> Mismatch | None:
        """Return what is wrong with the text, and with the names and the sum of scores."""
        output = completion.text.output
        tokenizer = self.llm.tokenizer
        fault = texts.wrong_text(tokenizer, output, params)
        fault = fault or texts.wrong_scores(tokenizer, output)
        return None if fault is None else (len(output.token_ids) - 1, fault)

    def _wrong_form(
        self, answer: Answer, request: Request, thought: numpy_sampler.Thought | None
    ) -> Mismatch | None:
        """Return what is wrong with the text of a complete answer of a structured output."""
        form = request.params.structured_outputs
        tokenizer = self.llm.tokenizer
        if form is None or tokenizer is None or answer.ending != ("stop", None):
            return None
        content: Sequence[int] | None = answer.tokens[:-1]
        if thought is not None:
            content = thought.content(answer.tokens[:-1])
        if content is None:  # the answer ended inside of the thought
            return None
        text = tokenizer.decode(content, skip_special_tokens=False)
        fault = numpy_sampler.wrong_form(text, form.regex, form.json)
        return None if fault is None else (len(answer.tokens) - 1, fault)

    def _choices(self, request: Request) -> numpy_sampler.Choices | None:
        """Return the choices of a structured output, or None."""
        structured = request.params.structured_outputs
        tokenizer = self.llm.tokenizer
        # Choices are the only structured output that can be judged without a grammar engine.
        if structured is None or structured.choice is None or tokenizer is None:
            return None
        if not self._token_bytes:
            special_ids = tokenizer.special_ids
            token_ids = range(len(tokenizer))
            self._token_bytes = [
                b"" if token in special_ids else tokenizer.token_bytes(token) for token in token_ids
            ]
        return numpy_sampler.Choices(
            tuple(text.encode() for text in structured.choice), self._token_bytes
        )

    def _serve(self, completion: Completion) -> RawLogits:
        """Run a completion alone to its end, and return the logits of its tokens."""
        completion.request.adapter = self.adapter
        logits = RawLogits()
        with self.engine.observed(logits):
            self.engine.serve([completion])
        return logits

    def _wrong_prompt_logprob(self, request: Request, answer: Answer) -> Mismatch | None:
        """Compare the log-probabilities of two prompt tokens with runs of the shorter prompts."""
        prompt = request.prompt_token_ids
        tolerance = PROMPT_LOGPROB_TOLERANCES.get(self.engine.engine.plan.dtype, 0.1)
        # Each length costs a separate run: the middle and the last but one suffice.
        for length in sorted({len(prompt) // 2, len(prompt) - 1} - {0}):
            token = prompt[length]
            actual = {t: float.fromhex(v) for t, v, _ in answer.prompt_logprobs[length - 1]}[token]
            expected = self._logprob_after(prompt[:length], token)
            if not abs(actual - expected) <= tolerance * (1 + abs(expected)):
                return 0, f"prompt logprob {actual} of token {length} instead of {expected}"
        return None

    def _wrong_adapter(self, request: Request, logits: Tensor) -> Mismatch | None:
        """Compare an adapter's first logits [V] with those of the base model.

        All runs of an adapter are alike if it changes nothing.
        """
        (completion,) = self.engine.completions("plain-base", request.prompt_token_ids, ONE_TOKEN)
        base = PlainRuns(self.engine)._serve(completion).first_rows(1)[0]
        self._is_effective = not torch.equal(base, logits)
        return None if self._is_effective else (0, f"the adapter {self.adapter} changes no logit")

    def _logprob_after(self, prompt: Sequence[int], token: int) -> float:
        """Return the log-probability of a token after a prompt, which runs once."""
        key = (*prompt, token)
        if key not in self._logprobs:
            (completion,) = self.engine.completions("plain-prefix", prompt, ONE_TOKEN)
            logits = self._serve(completion).first_rows(1)[0]
            self._logprobs[key] = float(torch.log_softmax(logits.double(), -1)[token])
        return self._logprobs[key]

    def _record_flattest(self, raw: Tensor) -> None:
        """Store the row of raw logits [N, V] with the highest entropy, if it is among the top."""
        if not len(raw):
            return
        probabilities = torch.softmax(raw.double(), -1)
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(-1)
        flattest = int(entropy.argmax())
        self.flattest.append((float(entropy[flattest]), raw[flattest].clone()))
        self.flattest = sorted(self.flattest, key=lambda e: -e[0])[:MAX_FLATTEST_ROWS]


def _key(prompt: Sequence[int], params: SamplingParams, conversation: Conversation | None) -> str:
    """Return the key of a request's outputs."""
    talk = None if conversation is None else asdict(conversation)
    return json.dumps([list(prompt), asdict(params), talk], default=str)


def seed_of(params: SamplingParams, request: Request, index: int) -> int:
    """Return the seed that a completion must have. index: its index among the request's n."""
    seed = request.seed if params.seed is None else params.seed + index
    # Engines store seeds as int64: they wrap around.
    return (seed + 2**63) % 2**64 - 2**63


def thought_tags(llm: LLM) -> tuple[int, int] | None:
    """Return the tokens that begin and end a thought, None if the model has none."""
    processor = llm.processor
    tags = getattr(processor._reasoning, "TAGS", None)
    if processor.template is None or tags is None or processor.tokenizer is None:
        return None
    begin, end = (processor.tokenizer.fast.token_to_id(tag) for tag in tags)
    return None if begin is None or end is None else (begin, end)


def closing_tag(llm: LLM) -> int | None:
    """Return the token that ends a thought, None if no prompt begins one."""
    thought = thought_of(llm, Conversation("a", thinks=True))
    return None if thought is None or thought.opening is not None else thought.closing


def thought_of(llm: LLM, conversation: Conversation) -> numpy_sampler.Thought | None:
    """Return the thought with which the answer to a conversation begins or may begin.

    Where the prompt ends with neither tag, the answer may write the first one. The prompt decides
    and not `thinks`, since templates of models that always think ignore it.
    """
    tokens = thought_tags(llm)
    if tokens is None:
        return None
    opening, closing = tokens
    begin, end = llm.processor._reasoning.TAGS
    prompt = rendered(llm, conversation).text.rstrip()
    if prompt.endswith(begin):
        return numpy_sampler.Thought(closing)
    if prompt.endswith(end):
        return None
    return numpy_sampler.Thought(closing, opening=opening)


def _within_budget(
    thought: numpy_sampler.Thought | None, request: Request
) -> numpy_sampler.Thought | None:
    """Return a thought that the prompt began, with the budget of the request."""
    budget = request.params.thinking_token_budget
    max_tokens = request.max_total_tokens - len(request.prompt_token_ids)
    is_limited = budget is not None and 0 <= budget < max_tokens
    if thought is None or thought.opening is not None or not is_limited:
        return thought
    return replace(thought, budget=budget)


def _first_fault(
    answer: Answer,
    raw: Tensor,
    request: Request,
    params: SamplingParams,
    first: numpy_sampler.TokenContext,
    max_model_len: int,
) -> Mismatch | None:
    """Return the first position that contradicts the raw logits [N, V] and the reason, or None.

    params: the client's parameters with the seed of this completion. first: context of the answer's
    first token.
    """
    scores = raw.double().numpy()
    seed = params.seed or 0
    for index, token in enumerate(answer.tokens):
        previous = answer.tokens[:index]
        context = replace(first, answer=previous)
        fault = numpy_sampler.wrong_token(scores[index], token, context, params, seed)
        if fault is None and params.logprobs is not None:
            logprobs = {t: (float.fromhex(v), rank) for t, v, rank in answer.logprobs[index]}
            fault = numpy_sampler.wrong_logprobs(scores[index], token, logprobs, params.logprobs)
        if fault is not None:
            return index, fault
    max_output_tokens = max_model_len - len(request.prompt_token_ids)
    max_output_tokens = min(params.max_tokens or max_output_tokens, max_output_tokens)
    may_fail = answer.ending[0] == "error" and numpy_sampler.may_allow_no_token(
        replace(first, answer=answer.tokens), params, raw.shape[1]
    )
    fault = numpy_sampler.wrong_end(
        answer.tokens, answer.ending, request.eos_token_ids, params, max_output_tokens, may_fail
    )
    if fault is None and params.prompt_logprobs is not None:
        fault = _wrong_prompt(answer, request, params.prompt_logprobs)
    return None if fault is None else (len(answer.tokens) - 1, fault)


def _wrong_prompt(answer: Answer, request: Request, num_logprobs: int) -> str | None:
    """Return what is wrong with the number and tokens of prompt log-probabilities, or None."""
    expected_tokens = request.prompt_token_ids[1:]
    if len(answer.prompt_logprobs) != len(expected_tokens):
        return f"{len(answer.prompt_logprobs)} prompt logprobs for {len(expected_tokens)} tokens"
    for index, (token, entry) in enumerate(
        zip(expected_tokens, answer.prompt_logprobs, strict=True)
    ):
        scores = {t: float.fromhex(value) for t, value, _ in entry}
        if token not in scores or len(entry) not in (num_logprobs, num_logprobs + 1):
            return f"prompt logprobs of {list(scores)} for token {index + 1}, {token}"
        # Equal logits may have one rank or several.
        by_score = sorted(entry, key=lambda one: (-scores[one[0]], one[2]))
        ranks = [rank for _, _, rank in by_score]
        if ranks != sorted(ranks) or (num_logprobs and ranks[0] != 1):
            return f"prompt logprobs of token {index + 1} have the ranks {ranks} in their order"
        if not sum(map(math.exp, scores.values())) <= 1 + PROBABILITY_TOLERANCE:
            return f"prompt logprobs of token {index + 1} have probabilities above 1: {scores}"
    return None
