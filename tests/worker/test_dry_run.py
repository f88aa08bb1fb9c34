"""Dry runs count allocations as torch makes them, and index like torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.config import EngineConfig
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
from lockstep.worker.build import largest_prompt_step, sized, step_limits
from lockstep.worker.dry_run import (
    BLOCK_BYTES,
    AllocationCounter,
    _indexed,
    _WithoutDevice,
    allocated,
    dry,
    step_bytes,
)
from lockstep.worker.joint_steps import LARGEST_GRAPHS, MAX_GRAPHS
from lockstep.worker.memory_estimate import DryEngine, graph_bytes
from lockstep.worker.program import Forwarded, Program
from lockstep.worker.step_shapes import padded_prompt_step
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
    _, kept = step_bytes(ProgramWithAuxiliaryStates(), StepShape.uniform(1, 1))
    assert kept == 3 * BLOCK_BYTES


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
    small, long, wide = (engine.working(*size) for size in ((8, 64), (8, 4096), (32, 64)))
    assert long["step"] > small["step"] and long["table"] == small["table"]
    assert wide["table"] > small["table"] and wide["graphs"] > small["graphs"]
    assert set(small) == {"table", "step", "graphs"}
    parameters = {id(p): p.nbytes for p in engine.model.parameters()}
    assert engine.fixed["weights"] >= sum(parameters.values())


def test_dry_run_leaves_no_state(folder: Path) -> None:
    """Neither choices for explain nor fake tensors remain."""
    engine = dry_engine_of(folder)
    before = len(engine.build.choices)
    engine.working(2, 64)
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
    pattern = rf"dry run of a prompt step: op silu_mul of .*test_dry_run.py:\d+ in {fault.__name__}"
    with pytest.raises(CaptureError, match=pattern):
        engine.working(2, 64)


def test_dry_run_without_graphs_has_no_graph_memory(folder: Path) -> None:
    parts = dry_engine_of(folder, cuda_graph_mode="none").working(32, 64)
    assert set(parts) == {"table", "step"}


def test_joint_steps_before_their_captures_have_memory(folder: Path) -> None:
    """They run eagerly next to the memory of the graphs, and many rows take more than prompts."""
    engine = dry_engine_of(folder)
    limits = sized(engine.limits, engine.config, 64, 64)
    decode = StepShape.uniform(64, limits.query_len)
    with engine.mode, dry(engine.card):
        program = engine.program(limits, engine.build)
        joint, _ = step_bytes(program, decode, padded_prompt_step(limits, 64))
        prompt, _ = step_bytes(program, largest_prompt_step(limits)[1])
    assert prompt < joint <= engine.working(64, 64)["step"]


def test_graphs_share_memory_except_results(folder: Path) -> None:
    engine = dry_engine_of(folder)
    limits = sized(engine.limits, engine.config, 4, 64)
    shapes = len(limits.row_buckets) * len(limits.draft_lengths) + len(FORCED_WINDOWS)
    tokens = sum(limits.row_buckets) * sum(k + 1 for k in limits.draft_lengths)
    tokens += sum(FORCED_WINDOWS)
    shapes += len(limits.prompt_buckets) + 2 * MAX_GRAPHS
    assert limits.prompt_buckets == (64,)
    working = 10_000
    kept = 1600
    padded_kept = 300
    expected = working + kept * tokens // 16 + padded_kept + LARGEST_GRAPHS * (kept + padded_kept)
    graphs = graph_bytes(limits, working, kept, kept + padded_kept)
    assert graphs - shapes * (2 << 20) == expected
