"""Bytes, exchanges and floors of tensor-parallel ranks, without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import LLM
from lockstep.config import EngineConfig
from lockstep.kernels.architecture import architecture_by_name
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.exchange.group import DryGroup
from lockstep.models.checkpoint import Checkpoint
from lockstep.spec import passes_of
from lockstep.step import StepShape
from lockstep.worker import executor
from lockstep.worker.build import find_model, step_limits
from lockstep.worker.device_rates import EXCHANGE_RATES, H200, Rates
from lockstep.worker.dry_run import dry
from lockstep.worker.explain import exchange_backend, explain_architecture, rank_bytes
from lockstep.worker.memory_estimate import DryEngine, weight_bytes
from lockstep.worker.memory_planner import PromptGraphs
from lockstep.worker.roofline import Exchanged, StepCosts, StepFloors
from tests.thread_ranks import ThreadRanks

ASSETS = Path(__file__).parents[1] / "assets"
MTP = {"method": "mtp", "num_speculative_tokens": 2}
NGRAM = {**MTP, "method": "ngram"}
CARD = architecture_by_name("sm_90")


class Recorded(DryGroup):
    """Group without values that records the bytes that a rank sends in each exchange."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)
        self.sent: list[int] = []

    def all_gather(self, local: Tensor) -> Tensor:
        self.sent.append(local.nbytes)
        return super().all_gather(local)


def dry_engine(model: str | None, size: int) -> DryEngine:
    """Return a rank of an engine that drafts with the checkpoint's module."""
    load_backends()
    folder = None if model is None else str(ASSETS / model)
    config = EngineConfig.read(model=folder, tensor_parallel_size=size, speculative_config=MTP)
    checkpoint = Checkpoint.read(find_model(folder))
    limits = step_limits(config, checkpoint, "cuda", None, assumed_numerics=CARD.name)
    return DryEngine(config, checkpoint, limits, None, CARD, weights_known=True)


@pytest.mark.parametrize("model", [None, "moe", "nemotron_h", "deepseek_v3"])
def test_costs_count_the_exchanges_of_a_step(
    model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.worker.memory_estimate.DryGroup", Recorded)
    engine = dry_engine(model, 2)
    group: Any = engine.build.group
    # Of the blocks that the dry engine keeps.
    costs = StepCosts.of(engine.model, engine.draft, passes_of(engine.config.speculative_config))
    step = costs.step(3, 2, 0)
    with engine.mode, dry(CARD):
        program = engine.program(engine.limits, engine.build)
        (forwarded,) = program.forward(StepShape.uniform(3, 3))
        # The head's two exchanges are the sampler's.
        assert len(group.sent) == step.verify.exchanged.count - 2
        program.decide(forwarded)
    assert len(group.sent) == step.exchanged.count
    if model is None:  # others have columns that do not divide evenly, or experts' tiles
        # A library sends all rows of logits, not only those that need it: of 3 x 3 and 2 x 3 rows.
        rows = 15 * engine.model.head.logit_shard.width * engine.build.dtype.itemsize
        assert sum(group.sent) - rows == step.exchanged.bytes


def test_floor_adds_exchanges_to_the_time_of_a_rank() -> None:
    one_rank = dry_engine(None, 1).costs
    rank = dry_engine(None, 2).costs
    assert one_rank.step(8, 2, 100).exchanged == Exchanged()
    step = rank.step(8, 2, 100)
    assert step.verify.total.bytes < 0.6 * one_rank.step(8, 2, 100).verify.total.bytes
    push = EXCHANGE_RATES["push"]
    expected = 1e3 * push.seconds(step.exchanged.count, step.exchanged.bytes)
    assert step.ms - step.verify.device_ms - step.drafts.device_ms == pytest.approx(expected)
    assert 1e3 * StepFloors(rank, H200).seconds(8, 2, 800) == pytest.approx(step.ms)
    free = StepFloors(rank, Rates(H200.memory, H200.matrix)).seconds(8, 2, 800)
    assert 1e3 * free == pytest.approx(step.ms - expected)


def test_ranks_of_an_absent_gpu_share_the_weights() -> None:
    # With both sizes given, one size of steps runs dry instead of two.
    sizes_of_steps = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
    config = EngineConfig.read(
        model=str(ASSETS / "qwen3"), tensor_parallel_size=4, **sizes_of_steps
    )
    explanation = explain_architecture(config, "sm_90", 24 * 10**9)
    ranks = explanation["ranks"]
    assert ranks["exchange_backend"] == "push or nccl"
    assert [sizes["rank"] for sizes in ranks["bytes"]] == [0, 1, 2, 3]
    plan = explanation["plan"]
    for sizes in ranks["bytes"]:
        parts = ("weights", "pages", "state", "buffers")
        assert sizes["total_bytes"] == sum(sizes[f"{part}_bytes"] for part in parts)
        assert sizes["weights_bytes"] <= plan["weights_bytes"]
        assert sizes["pages_bytes"] == plan["pages_bytes"]
    layers = next(group for group in ranks["exchanges"] if "layers.1" in group["layers"])
    assert len(layers["token_bytes"]) == 4
    assert [step["rows"] for step in ranks["steps"]] == [1, 8, 64, 256]
    for step in ranks["steps"]:
        assert step["floor_ms"]["nccl"] > step["exchange_ms"]["nccl"] > 0.01 * step["exchanges"]


class SharedEngine:
    """Dry engine whose tensors have one width. runs: widths that ran dry."""

    page = 2
    slot = 0

    def __init__(self, width: int, runs: list[int]) -> None:
        self.width = width
        self.runs = runs
        self.fixed = {"weights": width, "overhead": 1}

    def tensor_shapes(self) -> tuple[torch.Size, ...]:
        return (torch.Size([self.width]),)

    def working(self, rows: int, tokens: int, graphs: PromptGraphs) -> dict[str, int]:
        self.runs.append(self.width)
        return {"step": rows * tokens * self.width}


def test_ranks_with_the_same_shapes_share_dry_runs() -> None:
    runs: list[int] = []
    engines: Any = [SharedEngine(width, runs) for width in (8, 7, 8, 7)]
    planned = {"max_num_seqs": 2, "max_num_batched_tokens": 5, "pages_bytes": 6}
    ranks = list(rank_bytes(engines, planned, PromptGraphs(0, 0)))
    assert runs == [8, 7]
    assert [rank.weights for rank in ranks] == [8, 7, 8, 7]
    assert [rank.buffers for rank in ranks] == [81, 71, 81, 71]


def test_engine_explains_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    sizes = dict(max_model_len=256, max_num_seqs=4)
    llm = LLM(tensor_parallel_size=2, speculative_config=NGRAM, **sizes)
    ranks = llm.engine.explain()["ranks"]
    assert ranks["exchange_backend"] == "cpu"
    worker = executor.worker_of(llm.engine)
    first, second = ranks["bytes"]
    assert first["weights_bytes"] == second["weights_bytes"] == weight_bytes(worker.model)
    assert first["buffers_bytes"] is None
    plan = llm.engine.plan
    assert first["pages_bytes"] == plan.num_pages * plan.page_bytes
    assert first["state_bytes"] == plan.num_slots * plan.slot_bytes


def test_ranks_of_several_nodes_exchange_by_nccl() -> None:
    load_backends()
    config = EngineConfig.read(tensor_parallel_size=4, nnodes=2)
    assert exchange_backend(config) == "nccl"
