"""Engines of a check: build them, run requests, observe steps, compare with plain outputs.

They are built like a user's engine, with the hooks of lockstep.worker.hooks in addition. No part is
replaced while an engine runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.answer import Answer, ExactLogprobs, Mismatch, exact_logprobs
from lockstep.cache.cache import CacheConfig
from lockstep.check.drafters import WatchedDrafter, prediction_of, settings_with
from lockstep.check.events import count_events
from lockstep.check.judges.digests import LogitDigests
from lockstep.check.matrix.cases import Batch, Case
from lockstep.check.matrix.setups import PLAIN, Setup
from lockstep.check.oracle_drafter import OracleDrafter
from lockstep.check.report.report import Report
from lockstep.check.scenarios.invariants import InvariantError
from lockstep.config import GRAPH_MODES, EngineConfig
from lockstep.engine.scheduler_factory import make_scheduler
from lockstep.engine.token_update import token_update
from lockstep.engine_builder import build_engine
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.scheduler import Scheduler
from lockstep.spec import prediction
from lockstep.text.processor import CompletionText, Processor, Prompt, Rendered
from lockstep.worker.capture import captured_halves
from lockstep.worker.executor import executor_of, worker_of
from lockstep.worker.hooks import NO_HOOKS, CheckHooks
from lockstep.worker.rank_pool import RankPool
from lockstep.worker.step_observer import StepObserver
from lockstep.worker.worker import Worker

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
"""Sampling parameters for a prompt that is only cached."""
Processors = dict[int, Processor]
"""Text processors of one tokenizer by max_model_len: engines share them, since a chat template and
a grammar's tokens take longer than a tiny engine."""


@dataclass(frozen=True)
class Conversation:
    """Message from which a request's prompt is rendered. thinks: the answer begins in a thought."""

    text: str
    thinks: bool = False


@dataclass
class Completion:
    """Running completion of a request, as its client receives it.

    aborted: ended by an abort. prompt_logprobs: those that came with the first tokens.
    """

    request: Request
    text: CompletionText
    aborted: bool = False
    prompt_logprobs: ExactLogprobs = ()

    def update(self) -> bool:
        """Append the request's new tokens; return True if a stop string ended it."""
        request = self.request
        if self.text.finished:
            return False
        update = token_update(request, len(self.text.output.token_ids))
        # A request that begins again after a failed step computes them again, unseen by its client.
        if update.token_ids and update.prompt_logprobs is not None:
            self.prompt_logprobs = exact_logprobs(update.prompt_logprobs[1:])
        self.text.push(update.token_ids, update.logprobs, update.finish_reason, update.stop_reason)
        return self.text.finished and request.finish_reason is None

    def answer(self, digests: Sequence[int] = ()) -> Answer:
        """Return the output. digests: digests of the logits of its tokens."""
        done = self.text.output
        return Answer(
            tuple(done.token_ids),
            exact_logprobs(done.logprobs),
            self.request.metrics,
            tuple(digests[: len(done.token_ids)]),
            (done.finish_reason, done.stop_reason),
            done.text,
            self.prompt_logprobs,
        )


def _set_texts(worker: Worker, texts: list[list[int]]) -> None:
    """Store texts in a worker's oracle drafter."""
    drafter = worker.program.drafter
    assert isinstance(drafter, WatchedDrafter) and isinstance(drafter.inner, OracleDrafter)
    drafter.inner.set_texts(texts)


class CheckEngine:
    """Engine of a check with its text processing."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.engine = llm.engine

    @property
    def drafter(self) -> WatchedDrafter | None:
        """Return the wrapped drafter, or None without drafter or hooks."""
        drafter = worker_of(self.engine).program.drafter
        return drafter if isinstance(drafter, WatchedDrafter) else None

    @property
    def graph_modes(self) -> tuple[str, ...]:
        """Return the graph modes of this device, the default first."""
        return GRAPH_MODES if self.engine.plan.device == "cuda" else ("none",)

    def set_texts(self, texts: list[list[int]]) -> None:
        """Store prompts with their outputs in the engine's oracle drafter."""
        executor_of(self.engine).collective_rpc(partial(_set_texts, texts=texts))

    def completions(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        conversation: Conversation | None = None,
    ) -> list[Completion]:
        """Create the n completions of a request without running them; `name` prefixes their ids.

        conversation: messages of which the template makes the prompt; its text then decides whether
        the answer begins with a thought. Raises InvariantError if it makes another prompt.
        """
        processor = self.llm.processor
        tokens_prompt: Prompt = {"prompt_token_ids": list(prompt)}
        if conversation is not None:
            tokens_prompt = rendered(self.llm, conversation)
            if tokens_prompt.ids != list(prompt):
                raise InvariantError("the chat template renders another prompt than before")
        requests = processor.requests(name, tokens_prompt, params, priority)
        return [Completion(r, processor.completion(r, i)) for i, r in enumerate(requests)]

    def serve(self, completions: Sequence[Completion]) -> None:
        """Run completions to their ends, including stop strings."""
        by_id = {completion.request.id: completion for completion in completions}

        def update(request: Request) -> None:
            # The engine does not see the text, so a stop string there ends the request from here.
            if by_id[request.id].update():
                self.engine.abort(request.id)

        self.engine.run([completion.request for completion in completions], update)

    def answers(self, cases: Sequence[Case], digests: LogitDigests | None = None) -> list[Answer]:
        """Run cases together. digests: observer whose digests are added to the outputs."""
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
        digests_by_id = digests.by_request()
        return [
            completion.answer(digests_by_id.get(completion.request.id, ()))
            for completion in completions
        ]

    def cache(self, prompts: Sequence[Sequence[int]]) -> None:
        """Cache prompts by generating one token after each, all together."""
        self.serve(
            [
                completion
                for index, prompt in enumerate(prompts)
                for completion in self.completions(f"cached-{index}", prompt, ONE_TOKEN)
            ]
        )

    def cache_prefix(self, prompt: Sequence[int], tokens: int, salt: str, adapter: str) -> None:
        """Cache a prompt and its greedy answer of this many tokens, for a salt and an adapter."""
        params = replace(ONE_TOKEN, max_tokens=tokens, ignore_eos=True)
        completions = self.completions("cached", prompt, params)
        for completion in completions:
            completion.request.cache_salt = salt
            completion.request.adapter = adapter
        self.serve(completions)

    def reset(
        self,
        cache: CacheConfig | None = None,
        scheduler: type[Scheduler] = Scheduler,
        **overrides: Any,
    ) -> None:
        """End every request, and install a new scheduler with an empty cache.

        cache: sizes of the cache, None for the current ones. overrides: arguments of the scheduler
        that differ from the current one's.
        """
        engine = self.engine
        old = engine.scheduler
        engine.clear()
        options = {
            "draft_policy": old.draft_policy,
            "policy": old.policy,
            "preempt_every": old.preempt_every,
        }
        # The prefix cache belongs to the scheduler: a new one is the way to an empty cache.
        engine.scheduler = make_scheduler(
            engine.plan, cache or old.cache.config, scheduler, **{**options, **overrides}
        )

    @contextmanager
    def observed(self, observer: StepObserver) -> Iterator[None]:
        """Call the observer for every step that is launched in the context."""
        executor = executor_of(self.engine)
        executor.collective_rpc(partial(count_observers, change=1))
        executor.worker.observers.append(observer)
        try:
            yield
        finally:
            executor.worker.observers.remove(observer)
            executor.collective_rpc(partial(count_observers, change=-1))


def rendered(llm: LLM, conversation: Conversation) -> Rendered:
    """Return the rendered prompt of a conversation."""
    messages = [{"role": "user", "content": conversation.text}]
    return llm.processor.conversation(messages, enable_thinking=conversation.thinks)


def count_observers(worker: Worker, change: int) -> None:
    """Change a rank's number of observers, for which all ranks gather whole logits."""
    worker.num_logit_observers += change


def capture_joint_steps_at_once(worker: Worker) -> None:
    """Let a rank capture joint steps when they are first needed: a check uses each shape rarely."""
    worker.joint_steps.uses_before_capture = 0


def start_kernels_early(worker: Worker) -> None:
    """Let all kernels of a rank's graphs start early that may.

    Users' engines do so where it is faster.
    """
    for half in captured_halves(worker.run_step):
        half.start_early()


def build(
    model: str | None,
    settings: dict[str, Any],
    hooks: CheckHooks = NO_HOOKS,
    processors: Processors | None = None,
    rank_pool: RankPool | None = None,
) -> CheckEngine:
    """Build an engine with these settings and hooks. Raises what LLM raises.

    processors: those of engines with the same tokenizer. The engine takes one of them, or adds its
    own. rank_pool: see CheckHooks.
    """
    # Ranks compare their tables. No answer is audited, since no EngineLoop runs these engines.
    config = EngineConfig.read(model=model, **{**settings, "audit": 1.0})
    engine = build_engine(config, hooks=replace(hooks, rank_pool=rank_pool))
    executor_of(engine).collective_rpc(capture_joint_steps_at_once)
    executor_of(engine).collective_rpc(start_kernels_early)
    if processors is None:
        return CheckEngine(LLM.from_engine(engine))
    length = engine.plan.max_model_len
    llm = LLM.from_engine(engine, processors.get(length))
    processors[length] = llm.processor
    return CheckEngine(llm)


def build_plain(
    model: str | None, settings: dict[str, Any], processors: Processors | None = None
) -> CheckEngine:
    """Build the engine of plain runs, on one rank. Raises what LLM raises."""
    one_rank = {**settings, "tensor_parallel_size": 1}
    plain_settings = settings_with(PLAIN.settings(small_chunks=False), one_rank)
    return build(model, plain_settings, processors=processors)


@dataclass
class Comparison:
    """Comparison of batches with plain outputs.

    expected: function that returns the plain output of a case. difference: function that returns
    the first difference of two outputs. compared: number of compared outputs.
    """

    expected: Callable[[Case], Answer]
    report: Report
    difference: Callable[[Answer, Answer], Mismatch | None]
    compared: int = 0

    def run(
        self, engine: CheckEngine, setup: Setup, batch: Batch, digests: LogitDigests | None = None
    ) -> list[Answer]:
        """Run a batch, and add failures and event counters to the report."""
        answers = engine.answers(self._with_predictions(setup, batch.cases), digests)
        self.report.count(count_events(answers))
        for case, answer in zip(batch.cases, answers, strict=True):
            mismatch = self.difference(answer, self.expected(case))
            if mismatch is not None:
                position, what = mismatch
                self.report.fail(setup, batch.name, what, case.name, case.sampling, position)
            self.compared += 1
        return answers

    def _with_predictions(self, setup: Setup, cases: Sequence[Case]) -> Sequence[Case]:
        """Return cases with predicted texts, where the engine's drafter reads them."""
        if setup.drafter != prediction.METHOD:
            return cases
        texts = [prediction_of(self.expected(case).tokens) for case in cases]
        return [
            replace(case, params=replace(case.params, prediction=text))
            for case, text in zip(cases, texts, strict=True)
        ]
