"""Dry runs count allocations as torch makes them, and index like torch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import EngineConfig, StepLimits
from lockstep.errors import CaptureError
from lockstep.kernels.activations import silu_mul
from lockstep.kernels.architecture import (
    architecture_by_name,
    assume_architecture,
    is_architecture_assumed,
    multiprocessor_count,
    sm_number,
)
from lockstep.kernels.backends import load as load_backends
from lockstep.models.checkpoint import Checkpoint
from lockstep.scheduling.chunks import FORCED_WINDOWS
from lockstep.step import StepShape
from lockstep.worker import joint_steps, memory_estimate
from lockstep.worker.build import largest_prompt_step, sized, step_limits
from lockstep.worker.dry_run import (
    BLOCK_BYTES,
    AllocationCounter,
    PassBytes,
    _indexed,
    _WithoutDevice,
    allocated,
    dry,
    step_bytes,
)
from lockstep.worker.joint_steps import JointSteps
from lockstep.worker.memory_estimate import (
    DryEngine,
    graph_bytes,
    keep_distinct_blocks,
)
from lockstep.worker.memory_planner import PROMPT_GRAPHS, PromptGraphs
from lockstep.worker.program import Forwarded, Program
from lockstep.worker.step_shapes import forced_shape, padded_prompt_step, uniform_shapes
from tests.tiny_model import make_model


def test_allocation_counter_tracks_live_and_peak() -> None:
    kept = torch.zeros(1000)
    with AllocationCounter() as counter:
        first = kept + 1
        assert counter.live == counter.peak == 8 * BLOCK_BYTES, "4,000 bytes, rounded up"
        view = first[10:]
        second = first * 2
        del first
        assert counter.live == 16 * BLOCK_BYTES, "a view keeps its storage"
        del view, second
        kept += 1
    assert counter.live == 0 and counter.peak == 16 * BLOCK_BYTES


def test_allocated_counts_returned_tensors() -> None:
    assert allocated(lambda: torch.ones(128).neg()) == BLOCK_BYTES


class ProgramWithAuxiliaryStates(Program):
    """Program of which each tensor takes one block. decide returns no auxiliary hidden state."""

    def __init__(self) -> None:
        pass

    def forward(self, *shapes: StepShape) -> tuple[Forwarded, ...]:
        hidden, auxiliary, logits = (torch.ones(128) for _ in range(3))
        return (Forwarded(None, hidden, (auxiliary,), logits, shapes),)  # type: ignore[arg-type]

    def decide(self, forwarded: Forwarded) -> Any:
        return None, forwarded.hidden, forwarded.logits, None


def test_results_of_a_step_include_auxiliary_hidden_states() -> None:
    """The graph of forward keeps them for that of decide."""
    size = step_bytes(ProgramWithAuxiliaryStates(), StepShape.uniform(1, 1))
    assert size.results == 3 * BLOCK_BYTES


@pytest.mark.parametrize(
    "index",
    [
        3,
        slice(1, 4),
        slice(None, None, 2),
        (slice(None), 2),
        (Ellipsis, slice(0, 2)),
        (slice(None), None),
        (None, 1, Ellipsis, 0),
        torch.tensor([4, 0, 4]),
        (slice(None), torch.tensor([1, 1])),
    ],
    ids=str,
)
def test_indexing_without_device_equals_torch(index: Any) -> None:
    x = torch.arange(5 * 3 * 4).view(5, 3, 4)
    assert torch.equal(_indexed(x, index), x[index])


def test_views_have_the_alignment_that_they_have_on_a_gpu() -> None:
    """Kernels are specialized on it: a view of a fused projection may begin at any element."""
    rows = torch.empty(4, 1030, dtype=torch.bfloat16, device="meta")
    with _WithoutDevice():
        assert rows.data_ptr() % BLOCK_BYTES == 0
        assert rows[:, 1024:].data_ptr() % 16 == 0
        assert rows[:, 1027:].data_ptr() % 16 == 6


def test_assumed_architecture_replaces_gpu_queries() -> None:
    with assume_architecture(architecture_by_name("sm_86")):
        assert is_architecture_assumed() and sm_number("cuda:0") == 86
        assert multiprocessor_count(torch.device("cuda:0")) > 0
    assert not is_architecture_assumed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny hybrid model's folder."""
    return make_model(tmp_path_factory.mktemp("dry"))


def dry_engine_of(folder: Path, **settings: Any) -> DryEngine:
    """Return the tiny model's dry engine on an absent GPU."""
    load_backends()
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    config = EngineConfig.read(
        model=str(folder), load_format="dummy", dtype="bfloat16", speculative_config=spec,
        max_model_len=512, **settings,
    )  # fmt: skip
    checkpoint = Checkpoint.read(folder, None)
    limits = step_limits(config, checkpoint, "cuda", None, assumed_numerics="sm_86")
    return DryEngine(
        config, checkpoint, limits, None, architecture_by_name("sm_86"), weights_known=False
    )


@pytest.mark.slow
def test_working_memory_grows_with_tokens_and_rows(folder: Path) -> None:
    engine = dry_engine_of(folder)
    sizes = ((8, 64), (8, 4096), (32, 64))
    small, long, wide = (engine.working(*size, PROMPT_GRAPHS[0]) for size in sizes)
    assert long["step"] > small["step"] and long["table"] == small["table"]
    assert wide["table"] > small["table"] and wide["graphs"] > small["graphs"]
    assert set(small) == {"table", "step", "graphs"}
    parameters = {id(p): p.nbytes for p in engine.model.parameters()}
    assert engine.fixed["weights"] >= sum(parameters.values())


def test_dry_run_leaves_no_state(folder: Path) -> None:
    """Neither choices for explain nor fake tensors remain."""
    engine = dry_engine_of(folder)
    before = len(engine.build.choices)
    engine.working(2, 64, PROMPT_GRAPHS[0])
    assert len(engine.build.choices) == before and not is_architecture_assumed()
    assert type(torch.zeros(3)[1:]) is Tensor and torch.zeros(3).data_ptr()


def wait(x: Tensor) -> None:
    x.sum().item()


def allocate_on_the_host(x: Tensor) -> None:
    torch.zeros(1000).pin_memory()


@pytest.mark.parametrize("fault", [wait, allocate_on_the_host])
def test_dry_run_fault_names_op(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], None]
) -> None:
    load_backends()
    plain = silu_mul.backends["triton"]

    def faulty(gate_up: Tensor) -> Tensor:
        fault(gate_up)
        return plain.run(gate_up)

    monkeypatch.setitem(silu_mul.backends, "triton", plain._replace(run=faulty))
    engine = dry_engine_of(folder)
    pattern = (
        rf"dry run of a decoding step: op silu_mul of .*test_dry_run.py:\d+ in {fault.__name__}"
    )
    with pytest.raises(CaptureError, match=pattern):
        engine.working(2, 64, PROMPT_GRAPHS[0])


def test_dry_run_without_graphs_has_no_graph_memory(folder: Path) -> None:
    parts = dry_engine_of(folder, cuda_graph_mode="none").working(32, 64, PROMPT_GRAPHS[0])
    assert set(parts) == {"table", "step"}


def test_bytes_of_a_step_depend_on_its_shape_alone(folder: Path) -> None:
    """One program, with the most rows, runs the steps of all plans."""
    engine = dry_engine_of(folder)
    limits = sized(engine.limits, engine.config, 4, 64)
    with engine.mode, dry(engine.card):
        program = engine.program(limits, engine.build)
        for shape in (StepShape.uniform(4, 4), padded_prompt_step(limits, 64)):
            assert step_bytes(program, shape) == engine.pass_bytes(shape)


@pytest.mark.parametrize("aux_hidden_layers", [(), (2, 8)])
def test_one_block_of_each_kind_takes_as_much_as_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aux_hidden_layers: tuple[int, ...]
) -> None:
    folder = make_model(tmp_path, num_hidden_layers=8)

    def engine_of(keep: Callable[[Any], None]) -> DryEngine:
        def set_and_keep(model: Any) -> None:
            model.aux_hidden_layers = aux_hidden_layers
            keep(model)

        monkeypatch.setattr(memory_estimate, "keep_distinct_blocks", set_and_keep)
        return dry_engine_of(folder)

    distinct = engine_of(keep_distinct_blocks)
    whole = engine_of(lambda model: None)
    assert len(distinct.model.blocks) < len(whole.model.blocks)
    shapes = (StepShape.uniform(4, 4), padded_prompt_step(whole.limits, 256))
    for passes in (shapes[:1], shapes[1:], shapes):
        assert distinct.pass_bytes(*passes) == whole.pass_bytes(*passes)


HIDDEN = 1000
"""Assumed bytes of a token's hidden state."""
LOGITS = 10_000
"""Assumed bytes of a row of logits."""


def assumed_bytes(*shapes: StepShape) -> PassBytes:
    """Return bytes of a pass whose results are hidden states and logits. 16 rows take the most."""
    logits = sum(LOGITS * (shape.rows if shape.prompt else shape.tokens) for shape in shapes)
    results = HIDDEN * sum(shape.tokens for shape in shapes) + logits
    working = 5_000_000 if shapes[0].rows == 16 else 1_000_000
    return PassBytes(results + working * len(shapes), results)


def limits_of(engine: DryEngine, rows: int, graphs: PromptGraphs) -> StepLimits:
    """Return the limits of an engine with these rows and graphs of prompts."""
    return sized(engine.limits, engine.config, rows, 512, graphs)


def test_graphs_share_memory_except_results(folder: Path) -> None:
    limits = limits_of(dry_engine_of(folder), 4, PromptGraphs(512, 0))
    estimate = graph_bytes(limits, assumed_bytes)
    shapes = [*uniform_shapes(limits), *(forced_shape(limits, 1, n) for n in FORCED_WINDOWS)]
    shapes += [padded_prompt_step(limits, tokens) for tokens in (64, 128, 192, 256, 384, 512)]
    assert estimate.results == sum(assumed_bytes(shape).results for shape in shapes)
    assert estimate.working == 1_000_000
    assert estimate.driver == len(shapes) * (2 << 20)
    assert estimate.total == estimate.working + estimate.results + estimate.driver


def test_shared_memory_of_graphs_is_that_of_the_largest(folder: Path) -> None:
    """Attention at a few rows splits their KV, so that it takes more memory than at many."""
    limits = limits_of(dry_engine_of(folder), 64, PromptGraphs(0, 0))
    estimate = graph_bytes(limits, assumed_bytes)
    assert (estimate.working, estimate.largest[0].rows) == (5_000_000, 16)
    joint = graph_bytes(replace(limits, prompt_buckets=(64,), joint_graphs=1), assumed_bytes)
    assert joint.working == 10_000_000
    assert [shape.rows for shape in joint.largest] == [16, 8]


def test_largest_step_is_one_that_runs_without_a_graph(folder: Path) -> None:
    engine = dry_engine_of(folder)
    engine.pass_bytes = assumed_bytes  # type: ignore[assignment]

    def largest_pass(graphs: PromptGraphs, **settings: Any) -> list[tuple[int, int]]:
        limits = replace(limits_of(engine, 16, graphs), **settings)
        shapes = engine.largest_pass(limits)
        return [(shape.rows, shape.tokens) for shape in shapes]

    assert largest_pass(PromptGraphs(512, 0)) == [(4, 256)], "forced tokens have the most logits"
    # A joint step runs once before it is captured.
    assert largest_pass(PromptGraphs(512, 2)) == [(16, 64), (8, 512)]
    for mode in ("none", "piecewise"):
        assert largest_pass(PromptGraphs(0, 0), graph_mode=mode) == [(16, 64)]


def test_joint_steps_before_their_captures_have_memory(folder: Path) -> None:
    """They run eagerly next to the memory of the graphs, and many rows take more than prompts."""
    engine = dry_engine_of(folder)
    limits = sized(engine.limits, engine.config, 64, 64)
    decode = StepShape.uniform(64, limits.query_len)
    joint = engine.pass_bytes(decode, padded_prompt_step(limits, 64)).peak
    prompt = engine.pass_bytes(largest_prompt_step(limits)[1]).peak
    assert prompt < joint <= engine.working(64, 64, PROMPT_GRAPHS[0])["step"]


@pytest.mark.parametrize("tokens", [128, 256, 512])
def test_planned_memory_holds_the_results_of_joint_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Their logits follow rows, which a step of few prompt tokens has as many of."""
    monkeypatch.setattr(joint_steps, "USES_BEFORE_CAPTURE", 0)
    limits = limits_of(dry_engine_of(folder), 16, PromptGraphs(512, 6))
    without = graph_bytes(replace(limits, joint_graphs=0), assumed_bytes)
    planned = graph_bytes(limits, assumed_bytes).results - without.results
    steps = JointSteps(limits)
    for decode in uniform_shapes(limits):
        for length in range(tokens, 0, -64):
            pair = steps.join(decode, [length])
            if pair is not None:
                steps.graphs.add(pair)
    results = [assumed_bytes(*pair).results for pair in steps.graphs]
    assert len(results) > 6 and sum(results) <= planned
