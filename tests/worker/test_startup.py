"""GPU memory is planned before a model is built, and again if a measured step needs more. The GPU's
answers are faked."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.config import EngineConfig
from lockstep.errors import CapacityError
from lockstep.kernels.architecture import architecture_by_name
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.exchange import ALONE
from lockstep.kernels.formats.weights import Fp4Weight, IntWeight, QuantizedWeight
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Weight
from lockstep.models.checkpoint import Checkpoint
from lockstep.step import StepShape
from lockstep.worker import startup
from lockstep.worker.build import graphs_of, largest_prompt_step, step_limits
from lockstep.worker.dry_run import PassBytes
from lockstep.worker.memory_estimate import GraphBytes
from lockstep.worker.memory_planner import Planner, UserSizes
from lockstep.worker.row_table import StepInputs
from lockstep.worker.startup import (
    Fitting,
    Planned,
    agree_on_scales,
    dry_engine_of,
    plan_memory,
)
from lockstep.worker.step_shapes import padded_prompt_step
from tests.thread_ranks import ThreadGroup
from tests.tiny_model import make_model
from tests.worker.test_memory_planner import COLUMNS, GB, FixedCosts


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fake GPU whose free and total bytes a test sets."""
    state = SimpleNamespace(free=24 * GB, total=24 * GB)
    monkeypatch.setattr(startup, "architecture_of", lambda _: architecture_by_name("sm_86"))
    cuda = {
        "mem_get_info": lambda: (state.free, state.total),
        "memory_reserved": lambda: 0,
        "empty_cache": lambda: None,
    }
    for name, answer in cuda.items():
        monkeypatch.setattr(f"torch.cuda.{name}", answer)
    return state


def plan_of(folder: Path, **settings: Any) -> Planned:
    """Return the plan of a tiny model."""
    settings = {"max_model_len": 512, "load_format": "dummy", **settings}
    config = EngineConfig.read(model=str(folder), **settings)
    checkpoint = Checkpoint.read(folder, None)
    limits = step_limits(config, checkpoint, "cuda", None, assumed_numerics="sm_86")
    load_backends()
    return plan_memory(config, limits, dry_engine_of(config, checkpoint, limits, None), ALONE)


def agree(ranks: Sequence[Sequence[QuantizedWeight]]) -> None:
    """Let ranks with these finalized weights agree on what launches read of them."""
    barrier = threading.Barrier(len(ranks))
    parts: list[Any] = [None] * len(ranks)

    def run(index: int) -> None:
        model = nn.ModuleList()
        for weight in ranks[index]:
            weight.finalize()
            holder = Weight(BuildContext("cpu", torch.bfloat16, 1, 1), weight.k, [(None, 2)])
            holder.quantized = weight
            model.append(holder)
        agree_on_scales(ThreadGroup(index, parts, barrier), model, None)

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(run, range(len(ranks))))


def test_ranks_agree_on_the_largest_scales() -> None:
    """A rank has some rows of a weight: the largest scale of all ranks counts, and NaN if there is
    one. A weight whose launches do not depend on its scales is left out."""
    ranks = []
    for rows in (((0.25, 0.001), (0.5, 0.125)), ((0.5, 0.25), (0.125, float("nan")))):
        weights = [IntWeight.empty(2, 256) for _ in range(2)]
        for weight, scales in zip(weights, rows, strict=True):
            weight.scales.copy_(torch.tensor(scales)[:, None].expand(2, 2))
        ranks.append([IntWeight.empty(2, 256, zeros=True), *weights])
    agree(ranks)
    for other, first, second in ranks:
        assert "max_scale" not in vars(other)
        assert first.rows(0, 1).max_scale == 0.5
        assert isnan(second.rows(0, 1).max_scale)


def test_ranks_agree_on_factors_that_split() -> None:
    """1.7083332538604736 in bf16 hi + lo would change a product: see has_split_factors."""
    ranks = [[Fp4Weight.empty(2, 64) for _ in range(2)] for _ in range(2)]
    for weight in (*ranks[0], *ranks[1]):
        weight.fill_dummy(torch.Generator().manual_seed(0))
    ranks[1][1].factors[0] = 1.7083332538604736
    agree(ranks)
    assert [[w.has_split_factors for w in weights] for weights in ranks] == [[True, False]] * 2


def test_ranks_agree_on_scales_before_a_pass_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are measured launch the same kernels on all ranks, as those of a warm-up do."""
    calls: list[str] = []

    def record(name: str, result: object) -> Any:
        def call(*arguments: object) -> object:
            calls.append(name)
            return result

        return call

    fitted = (limits_of(), None, SimpleNamespace(pages=1, slots=1), startup.Used({}, ()))
    replaced = {
        "agree_on_scales": record("agree", None),
        "weight_bytes": lambda *models: 0,
        "Fitting": lambda *parts: SimpleNamespace(fit=record("measure", fitted)),
        "host_room": lambda build: None,
    }
    for name, function in replaced.items():
        monkeypatch.setattr(startup, name, function)
    monkeypatch.setattr(startup.memory, "host_pages", lambda *parts: 0)
    one = object.__new__(startup.WorkerStartup)
    names = ("config", "model", "draft", "layers", "cost", "compiler")
    build = SimpleNamespace(group=ALONE)
    vars(one).update(dict.fromkeys(names), build=build, limits=limits_of(), device="cpu")
    one.planned = object()  # type: ignore[assignment]
    one.fit_memory()
    assert calls == ["agree", "measure"]


def test_other_processes_and_utilization_bound_available_memory(gpu: Any, tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    gpu.free = 20 * GB
    plan = plan_of(folder, gpu_memory_utilization=0.5)
    assert plan.available == 12 * GB - 4 * GB
    assert (plan.plan.entry.rows, plan.plan.entry.tokens) == (256, 2048)
    gpu.free = gpu.total = 10**9
    with pytest.raises(CapacityError, match="GB are missing"):
        plan_of(folder)


class MeasuredFitting(Fitting):
    """Fitting with costs by a formula, whose measured steps need `surprise` more bytes."""

    surprise = 0

    def _measure(self, limits: Any, program: Any) -> tuple[dict[str, int], int]:
        costs = self.planned.planner.costs
        sizes = (limits.max_num_seqs, limits.max_num_batched_tokens)
        working = costs.working(*sizes, graphs_of(limits))
        parts = dict(costs.fixed) | working
        parts["step"] += self.surprise
        return parts, 24 * GB - sum(parts.values())


def fitting(monkeypatch: pytest.MonkeyPatch, surprise: int, **user_sizes: int) -> MeasuredFitting:
    """Return a fitting on a GPU of 24 GB."""
    costs: Any = FixedCosts()
    planner = Planner(UserSizes(**user_sizes), costs, COLUMNS)
    monkeypatch.setattr(MeasuredFitting, "surprise", surprise)
    cost = SimpleNamespace(page=costs.page, slot=costs.slot)
    monkeypatch.setattr(startup.memory, "cache_bytes", lambda _: cost)
    build: Any = SimpleNamespace(choices=["kept"], group=ALONE)

    def make_program(limits: Any) -> Any:
        build.choices.append(limits.max_num_seqs)
        return limits.max_num_seqs

    plan = Planned(planner, planner.plan(24 * GB), 24 * GB, Any)
    config = EngineConfig.read()
    return MeasuredFitting(config, build, {}, plan, make_program, 0)


def limits_of() -> Any:
    """Return the limits of a step on a GPU."""
    config = EngineConfig.read()
    checkpoint = Checkpoint.read(startup.find_model(None), None)
    return step_limits(config, checkpoint, "cuda", None, assumed_numerics="sm_86")


@pytest.mark.usefixtures("gpu")
def test_correct_estimate_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one = fitting(monkeypatch, surprise=0)
    limits, program, size, used = one.fit(limits_of())
    plan = one.planned.plan
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (
        plan.entry.rows,
        plan.entry.tokens,
    )
    assert (size.pages, size.slots) == (plan.pages, plan.slots) and program == plan.entry.rows
    assert sum(used.parts.values()) <= 24 * GB and used.notes == plan.notes
    assert one.build.choices == ["kept", plan.entry.rows]


@pytest.mark.usefixtures("gpu")
def test_underestimated_step_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = fitting(monkeypatch, surprise=GB)
    limits, _, size, used = one.fit(limits_of())
    assert limits.max_num_seqs < one.planned.plan.entry.rows
    assert size.pages > COLUMNS and sum(used.parts.values()) <= 24 * GB
    assert one.build.choices == ["kept", limits.max_num_seqs], "only of the last program"


@pytest.mark.usefixtures("gpu")
def test_measured_misfit_is_refused_with_measured_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CapacityError, match=r"step 5\.\d\d GB.*GB are missing"):
        fitting(monkeypatch, surprise=5 * GB).fit(limits_of())
    user_sizes = fitting(monkeypatch, surprise=3 * GB, rows=9, tokens=256)
    with pytest.raises(CapacityError, match="or change max_num_seqs=9, max_num_batched_tokens=256"):
        user_sizes.fit(limits_of())


class MeasuredProgram:
    """Program that records the passes it runs, with the bytes that the GPU reports for them.

    prompt_lengths: prompt tokens of the rows of each pass, by its steps.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        inputs = [StepInputs(rows + 1, "cpu") for _ in range(2)]
        self.table = SimpleNamespace(inputs=inputs[0], pass_inputs=inputs)
        self.passes: list[tuple[StepShape, ...]] = []
        self.prompt_lengths: list[list[list[int]]] = []
        self.allocated = 0
        self.peak = 0
        cuda = {
            "synchronize": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "memory_reserved": lambda: self.allocated,
            "memory_allocated": lambda: self.allocated,
            "max_memory_reserved": lambda: self.peak,
        }
        for name, answer in cuda.items():
            monkeypatch.setattr(f"torch.cuda.{name}", answer)

    def run(self, shape: StepShape) -> None:
        self.passes.append((shape,))

    def forward(self, *shapes: StepShape) -> tuple[str, ...]:
        """Take 100 bytes for each token, of which 10 are results."""
        tokens = sum(shape.tokens for shape in shapes)
        self.allocated = 10 * tokens
        self.peak = 100 * tokens
        self.passes.append(shapes)
        lengths = [inputs.query_lens.tolist() for inputs in self.table.pass_inputs]
        self.prompt_lengths.append([[n for n in row if n] for row in lengths[: len(shapes)]])
        self.table.pass_inputs[0].fill()
        return ("",) * len(shapes)

    def decide(self, forwarded: str) -> None:
        pass


def measured(monkeypatch: pytest.MonkeyPatch, estimated: int) -> tuple[Any, Any, int]:
    """Measure the largest passes -> (program, parts, bytes left for the cache).

    estimated: bytes of a pass in the dry run.
    """
    sizes = {"row_buckets": (8, 16), "prompt_buckets": (64, 256), "joint_graphs": 2}
    limits = replace(limits_of(), max_model_len=900, graph_mode="full", **sizes)
    padded = padded_prompt_step(limits, 256)
    shapes = (StepShape.uniform(16, 1), padded)
    estimate = GraphBytes(shapes, working=estimated, results=20, driver=300)
    dry_engine: Any = SimpleNamespace(
        largest_pass=lambda limits: (largest_prompt_step(limits)[1],),
        graphs=lambda limits: estimate,
        pass_bytes=lambda *shapes: PassBytes(estimated, 0),
    )
    plan = replace(fitting(monkeypatch, surprise=0).planned, dry_engine=dry_engine)
    program: Any = MeasuredProgram(monkeypatch, limits.max_num_seqs)
    monkeypatch.setattr(startup.memory, "allocate", lambda *arguments, **options: None)
    build: Any = SimpleNamespace(choices=[], group=ALONE)
    one = Fitting(EngineConfig.read(), build, {}, plan, lambda limits: program, 5)
    parts, budget = one._measure(limits, program)
    return program, parts, budget


def test_passes_with_the_highest_peaks_are_measured(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the graphs' estimated bytes, those that they share are replaced by the measured ones."""
    program, parts, budget = measured(monkeypatch, 1000)
    ((prompts,), (decode, padded)) = program.passes[-2:]
    assert (prompts.tokens, decode.tokens, padded.tokens) == (2048, 16, 256)
    assert program.prompt_lengths == [[[900, 900, 248]], [[], [256]]]
    assert parts["step"] == 100 * 2048
    assert parts["graphs"] == 320 + 90 * (16 + 256)
    assert budget == int(24 * GB * 0.9) - sum(parts.values())


def test_passes_count_with_their_estimate_at_least(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, parts, _ = measured(monkeypatch, GB)
    assert parts["step"] == GB
    assert parts["graphs"] == 320 + GB
