"""Dry runs: allocations are counted as torch makes them, and indexing is torch's own."""

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
from lockstep.worker.build import sized, step_limits
from lockstep.worker.dry_run import BLOCK_BYTES, AllocationCounter, _indexed, allocated
from lockstep.worker.memory_estimate import DryEngine, graph_bytes
from tests.tiny_model import make_model


def test_a_counter_knows_what_lives_and_the_peak() -> None:
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


def test_allocated_counts_what_is_returned() -> None:
    assert allocated(lambda: torch.ones(128).neg()) == BLOCK_BYTES


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
def test_indexing_without_a_device_is_torchs(index: Any) -> None:
    x = torch.arange(5 * 3 * 4).view(5, 3, 4)
    assert torch.equal(_indexed(x, index), x[index])


def test_a_planned_card_takes_the_place_of_every_gpu() -> None:
    with assume_architecture(architecture_by_name("sm_86")):
        assert is_architecture_assumed() and sm_number("cuda:0") == 86
        assert multiprocessor_count(torch.device("cuda:0")) > 0
    assert not is_architecture_assumed()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid's folder."""
    return make_model(tmp_path_factory.mktemp("dry"))


def engine(folder: Path, **settings: Any) -> DryEngine:
    """The tiny model on a GPU that is not there."""
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


def test_steps_take_more_with_more_tokens_and_more_rows(folder: Path) -> None:
    dry_engine = engine(folder)
    small, long, wide = (dry_engine.working(*size) for size in ((2, 64), (2, 512), (32, 64)))
    assert long["step"] > small["step"] and long["table"] == small["table"]
    assert wide["table"] > small["table"] and wide["graphs"] > small["graphs"]
    assert set(small) == {"table", "step", "graphs"}
    parameters = {id(p): p.nbytes for p in dry_engine.model.parameters()}
    assert dry_engine.fixed["weights"] >= sum(parameters.values())


def test_dry_runs_leave_nothing_behind(folder: Path) -> None:
    """Neither choices for explain, nor tensors without memory."""
    dry_engine = engine(folder)
    before = len(dry_engine.build.choices)
    dry_engine.working(2, 64)
    assert len(dry_engine.build.choices) == before and not is_architecture_assumed()
    assert type(torch.zeros(3)[1:]) is Tensor and torch.zeros(3).data_ptr()


def wait(x: Tensor) -> None:
    x.sum().item()


def allocate_on_the_host(x: Tensor) -> None:
    torch.zeros(1000).pin_memory()


@pytest.mark.parametrize("fault", [wait, allocate_on_the_host])
def test_a_step_that_needs_a_device_names_the_op(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], None]
) -> None:
    load_backends()
    plain = silu_mul.backends["triton"]

    def faulty(gate_up: Tensor) -> Tensor:
        fault(gate_up)
        return plain.run(gate_up)

    monkeypatch.setitem(silu_mul.backends, "triton", plain._replace(run=faulty))
    dry_engine = engine(folder)
    pattern = rf"dry run of a prompt step: op silu_mul of .*test_dry_run.py:\d+ in {fault.__name__}"
    with pytest.raises(CaptureError, match=pattern):
        dry_engine.working(2, 64)


def test_without_graphs_the_larger_step_counts(folder: Path) -> None:
    parts = engine(folder, cuda_graph_mode="none").working(32, 64)
    assert set(parts) == {"table", "step"}


def test_graphs_share_memory_but_for_their_results(folder: Path) -> None:
    dry_engine = engine(folder)
    limits = sized(dry_engine.limits, dry_engine.config, 4, 64)
    shapes = len(limits.row_buckets) * len(limits.draft_lengths)
    tokens = sum(limits.row_buckets) * sum(k + 1 for k in limits.draft_lengths)
    peak, kept = 10_000, 1600
    expected = peak - kept + kept * tokens // 16
    assert graph_bytes(limits, peak, kept) - shapes * (2 << 20) == expected
