"""Schedules are plain data: pickled schedules give the same tokens as live ones, on every
worker."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.engine.engine import Engine
from lockstep.llm import LLM
from lockstep.scheduling.draft_length import FixedDraftLength
from lockstep.scheduling.grammar import FillMasks, MaskQuery
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Results, RowSpec, Schedule
from lockstep.worker.build import graphs_of, sized
from lockstep.worker.executor import InProcessExecutor
from lockstep.worker.hooks import NO_HOOKS
from lockstep.worker.memory_planner import PromptGraphs
from lockstep.worker.plain_data import decode_plain
from lockstep.worker.startup import WorkerStartup, smallest_fit
from lockstep.worker.worker import Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED
from tests.tiny_model import TWO_LAYERS, make_model
from tests.worker.test_grammar_masks import HistoryGrammar

DRAFTS = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Return settings under which rows are preempted, and pages are evicted and fetched back."""
    drafts = {"method": "suffix", "num_speculative_tokens": DRAFTS, "adaptive": False}
    return EngineConfig.read(
        model=str(make_model(tmp_path_factory.mktemp("tiny"), **TWO_LAYERS)),
        load_format="dummy",
        max_model_len=512,
        max_num_seqs=3,
        num_gpu_blocks=9,
        num_snapshots=2,
        kv_offloading_size=0.1,
        speculative_config=drafts,
    )


def through_pickle(message: Any) -> Any:
    return pickle.loads(pickle.dumps(message))


class RecordedMasks:
    """Grammar masks that the host fills once per step, replayed for every other worker."""

    def __init__(self, fill_masks: FillMasks) -> None:
        self.fill_masks = fill_masks
        self.answers: list[tuple[list[MaskQuery], bytes, frozenset[str]]] = []

    def ask(self, queries: Sequence[MaskQuery], memory: memoryview) -> frozenset[str]:
        free = self.fill_masks(through_pickle(queries), memory)
        self.answers.append((list(queries), memory.tobytes(), free))
        return free

    def replay(self, queries: Sequence[MaskQuery], memory: memoryview) -> frozenset[str]:
        requested, masks, free = self.answers.pop(0)
        assert list(queries) == requested, "workers with equal state send equal queries"
        memory.cast("B")[:] = masks
        return free


class RankedResults:
    def __init__(self, pending: list[Any]) -> None:
        self.pending = pending

    def result(self) -> Results:
        first, *rest = (through_pickle(one.result()) for one in self.pending)
        for other in rest:
            assert other.rows == first.rows, "a rank emitted other tokens"
        return first


class PickledExecutor(InProcessExecutor):
    """Executor of two workers, like ranks, that receive copies of every schedule."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, lambda what, done, of: None, NO_HOOKS)
        self.other = InProcessExecutor(config, lambda what, done, of: None, NO_HOOKS)
        self.schedules: list[Schedule] = []

    def execute(self, schedule: Schedule, fill_masks: FillMasks) -> Any:
        data = pickle.dumps(schedule)
        assert decode_plain(data) == schedule, "as ranks on other hosts read it"
        self.schedules.append(pickle.loads(data))
        masks = RecordedMasks(fill_masks)
        first = super().execute(pickle.loads(data), masks.ask)
        second = self.other.execute(pickle.loads(data), masks.replay)
        return RankedResults([first, second])


def answers(executor: InProcessExecutor) -> list[Any]:
    """Return the answers of a workload with preemption, grammars, penalties and
    log-probabilities."""
    engine = Engine(executor, FixedDraftLength(DRAFTS), preempt_every=4)
    llm = LLM.from_engine(engine)
    requests: list[Request] = []
    short_of_a_page = {"prompt_token_ids": list(range(1, 61))}
    long = [PROMPTS[0] * 20, PROMPTS[1] * 12, PROMPTS[0] * 20]
    for index, prompt in enumerate([*PROMPTS, *long, short_of_a_page]):
        params = replace(
            SEEDED if index % 2 else GREEDY,
            max_tokens=20,
            logprobs=1,
            prompt_logprobs=0 if index == 3 else None,
            presence_penalty=0.5,
        )
        (request,) = llm.processor.requests(f"r{index}", prompt, params)
        if index in (1, 2):
            request.grammar = HistoryGrammar(index, engine.vocab_size, free_at=9)
        requests.append(request)
    engine.run(requests, lambda request: None)
    engine.run([again := Request("again", requests[4].prompt_token_ids, GREEDY)], lambda _: None)
    return [
        (r.output_token_ids, r.finish_reason, r.logprobs, r.prompt_logprobs)
        for r in (*requests, again)
    ]


@pytest.mark.slow
def test_pickled_schedules_give_the_same_answers(config: EngineConfig) -> None:
    executor = PickledExecutor(config)
    expected = answers(InProcessExecutor(config, lambda what, done, of: None, NO_HOOKS))
    assert answers(executor) == expected
    seen = executor.schedules
    for name in ("admissions", "swap_out", "swap_in", "grants", "masked", "answers", "evicted"):
        assert any(getattr(schedule, name) for schedule in seen), f"no schedule had {name}"


def test_plan_uses_the_smallest_rank(config: EngineConfig) -> None:
    """Each rank measures separately; the plan is made once and every rank starts with it."""
    startup = WorkerStartup(config, lambda what, done, of: None, NO_HOOKS)
    fit = startup.fit_memory()
    smaller = replace(
        fit,
        limits=replace(fit.limits, max_num_seqs=2, max_num_batched_tokens=256),
        num_pages=7,
        num_slots=5,
    )
    chosen = smallest_fit([fit, smaller], config)
    plan = startup.plan(chosen)
    assert (plan.max_num_seqs, plan.row_buckets[-1], plan.max_num_batched_tokens) == (2, 2, 256)
    assert (plan.num_pages, plan.num_slots) == (7, 5)
    worker, _ = startup.start(plan, lambda what, done, of: None)
    assert isinstance(worker, Worker) and worker.table.tokens.shape[0] == 3


def test_ranks_capture_the_graphs_that_all_have_memory_for(config: EngineConfig) -> None:
    startup = WorkerStartup(config, lambda what, done, of: None, NO_HOOKS)
    fit = startup.fit_memory()
    limits = replace(fit.limits, graph_mode="full")
    fits = [
        replace(fit, limits=sized(limits, config, 2, 1024, PromptGraphs(*graphs)))
        for graphs in ((1024, 2), (256, 6))
    ]
    assert graphs_of(smallest_fit(fits, config).limits) == PromptGraphs(256, 2)


@pytest.mark.parametrize("field", ["prompt_token_ids", "params", "seed"])
def test_row_spec_keeps_request_data(field: str) -> None:
    request = Request("r", [1, 2, 3], SEEDED, seed=5)
    assert getattr(through_pickle(RowSpec.of(request)), field) == getattr(request, field)
