"""GPU memory is planned before a model is built, and again if a measured step needs more. The GPU's
answers are faked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.errors import CapacityError
from lockstep.kernels.architecture import architecture_by_name
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.exchange import ALONE
from lockstep.models.checkpoint import Checkpoint
from lockstep.worker import startup
from lockstep.worker.build import graphs_of, step_limits
from lockstep.worker.memory_planner import Planner, UserSizes
from lockstep.worker.startup import Fitting, Planned, dry_engine_of, plan_memory
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
