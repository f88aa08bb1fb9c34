"""The engines of a check: built, given requests, watched, and compared with the plain answers.

An engine is what users build, but for what lockstep.worker.hooks lets a check put in. Nothing of it
is replaced while it runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep.cache.cache import CacheConfig
from lockstep.check.answer_oracle import AnswerOracle
from lockstep.check.answers import Answer, Mismatch, as_bits, took_place
from lockstep.check.cases import Batch, Case
from lockstep.check.digests import LogitDigests
from lockstep.check.drafters import WatchedDrafter, settings_with
from lockstep.check.matrix import PLAIN, Setup
from lockstep.check.report import Report
from lockstep.config import GRAPH_MODES, EngineConfig
from lockstep.engine.scheduler_factory import make_scheduler
from lockstep.engine.token_update import token_update
from lockstep.engine_builder import build_engine
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.scheduler import Scheduler
from lockstep.text.processor import CompletionText
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import NO_HOOKS, CheckHooks
from lockstep.worker.step_observer import StepObserver

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""The parameters of a prompt that only has to be cached."""


@dataclass
class Completion:
    """One completion of a request while it runs. aborted: ended from outside."""

    request: Request
    text: CompletionText
    aborted: bool = False

    def take(self) -> bool:
        """Takes the request's new tokens; True if it ended on a stop string."""
        request = self.request
        if self.text.finished:
            return False
        update = token_update(request, len(self.text.output.token_ids))
        self.text.push(update.token_ids, update.logprobs, update.finish_reason, update.stop_reason)
        return self.text.finished and request.finish_reason is None

    def answer(self, digests: Sequence[int] = ()) -> Answer:
        """What has come of it. digests: of the logits in front of each of its tokens."""
        done = self.text.output
        request = self.request
        has_prompt_bits = request.params.prompt_logprobs is not None and bool(done.token_ids)
        return Answer(
            tuple(done.token_ids),
            as_bits(done.logprobs),
            request.metrics,
            tuple(digests[: len(done.token_ids)]),
            (done.finish_reason, done.stop_reason),
            done.text,
            as_bits(request.prompt_logprobs) if has_prompt_bits else (),
        )


class CheckEngine:
    """An engine of a check, and its text side."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.engine = llm.engine

    @property
    def drafter(self) -> WatchedDrafter | None:
        """The drafter, where the engine was built with the hooks of a check and has one."""
        found = worker_of(self.engine).program.drafter
        return found if isinstance(found, WatchedDrafter) else None

    @property
    def graphs(self) -> tuple[str, ...]:
        """The graph modes of this device, the product's default first."""
        return GRAPH_MODES if self.engine.plan.device == "cuda" else ("none",)

    def tell(self, texts: list[list[int]]) -> None:
        """Gives an engine's answer oracle whole rows, prompt and answer."""
        assert self.drafter is not None
        assert isinstance(self.drafter.inner, AnswerOracle)
        self.drafter.inner.tell(texts)

    def completions(
        self, name: str, prompt: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> list[Completion]:
        """The n completions of a request, whose ids begin with its name; none runs yet."""
        processor = self.llm.processor
        given = {"prompt_token_ids": list(prompt)}
        requests = processor.requests(name, given, params, priority)
        return [Completion(r, processor.completion(r, i)) for i, r in enumerate(requests)]

    def serve(self, completions: Sequence[Completion]) -> None:
        """Runs completions to their ends, stop strings included."""
        by_id = {completion.request.id: completion for completion in completions}

        def update(request: Request) -> None:
            if by_id[request.id].take():
                self.engine.abort(request.id)

        self.engine.run([completion.request for completion in completions], update)

    def answers(self, cases: Sequence[Case], digests: LogitDigests | None = None) -> list[Answer]:
        """Runs cases all at once. digests: watches their logits, for the answers to have them."""
        completions = [
            completion
            for index, case in enumerate(cases)
            for completion in self.completions(f"case-{index}", case.prompt, case.params)
        ]
        if digests is None:
            self.serve(completions)
            return [completion.answer() for completion in completions]
        with self.observed(digests):
            self.serve(completions)
        found = digests.by_request()
        return [each.answer(found.get(each.request.id, ())) for each in completions]

    def cache(self, prompts: Sequence[Sequence[int]]) -> None:
        """Puts prompts into the prefix cache, by generating a token behind each, all at once."""
        self.serve(
            [
                completion
                for index, prompt in enumerate(prompts)
                for completion in self.completions(f"cached-{index}", prompt, ONE_TOKEN)
            ]
        )

    def renew(
        self,
        cache: CacheConfig | None = None,
        scheduler: type[Scheduler] = Scheduler,
        **changed: Any,
    ) -> None:
        """Ends every request, and gives the engine another scheduler with an empty cache.

        cache: other sizes than the engine's own; changed: arguments of the scheduler that are.
        """
        engine = self.engine
        old = engine.scheduler
        engine.clear()
        kept = {
            "draft_policy": old.draft_policy,
            "policy": old.policy,
            "preempt_every": old.preempt_every,
        }
        engine.scheduler = make_scheduler(
            engine.plan, cache or old.cache.config, scheduler, **{**kept, **changed}
        )

    @contextmanager
    def observed(self, observer: StepObserver) -> Iterator[None]:
        """The observer sees every step that is launched meanwhile."""
        observers = worker_of(self.engine).observers
        observers.append(observer)
        try:
            yield
        finally:
            observers.remove(observer)


def build(model: str | None, settings: dict[str, Any], hooks: CheckHooks = NO_HOOKS) -> CheckEngine:
    """An engine of these settings and hooks. Raises what LLM raises."""
    config = EngineConfig.read(model=model, **settings)
    return CheckEngine(LLM.over(build_engine(config, hooks=hooks)))


def build_plain(model: str | None, settings: dict[str, Any]) -> CheckEngine:
    """The engine of plain runs. Raises what LLM raises."""
    return build(model, settings_with(PLAIN.settings(small_chunks=False), settings))


@dataclass
class Comparison:
    """Runs batches of cases, and compares every answer with the plain one.

    expected: the plain answers by the names of their cases; difference: what of two answers is
    compared; compared: how many answers were.
    """

    expected: dict[str, Answer]
    report: Report
    difference: Callable[[Answer, Answer], Mismatch | None]
    compared: int = 0

    def run(
        self, engine: CheckEngine, setup: Setup, batch: Batch, digests: LogitDigests | None = None
    ) -> list[Answer]:
        """Runs a batch, and adds to the report's failures and to what took place."""
        answers = engine.answers(batch.cases, digests)
        self.report.count(took_place(answers))
        for case, answer in zip(batch.cases, answers, strict=True):
            found = self.difference(answer, self.expected[case.name])
            if found is not None:
                self.report.fail(setup, batch.name, found[1], case.name, case.sampling, found[0])
            self.compared += 1
        return answers
