"""Construction of engines: the only module that joins the control plane and a worker."""

from lockstep.config import EngineConfig, Plan
from lockstep.engine.engine import Engine
from lockstep.progress import Progress, ignore_progress
from lockstep.scheduling.draft_length import (
    DraftLengthPolicy,
    FixedDraftLength,
    draft_length_policy,
)
from lockstep.worker.executor import InProcessExecutor
from lockstep.worker.hooks import NO_HOOKS, CheckHooks


def build_engine(
    config: EngineConfig, progress: Progress = ignore_progress, hooks: CheckHooks = NO_HOOKS
) -> Engine:
    """Load a model and return its engine. Raises ConfigError, CheckpointError or CapacityError.

    progress: called while weights are loaded, in bytes, and while warming up, in shapes.
    """
    executor = InProcessExecutor(config, progress, hooks)
    policy = pick_policy(config, executor.plan, hooks, executor.step_ms)
    return Engine(executor, policy, hooks.preempt_every)


def pick_policy(
    config: EngineConfig,
    plan: Plan,
    hooks: CheckHooks,
    step_ms: dict[tuple[int, int], float],
) -> DraftLengthPolicy:
    """Return the draft length policy. step_ms: (rows, drafts) -> ms of a step of null rows."""
    if hooks.draft_policy:
        return hooks.draft_policy(plan.draft_lengths)
    if config.speculative_config is None:
        return FixedDraftLength(0)
    return draft_length_policy(config.speculative_config.adaptive, plan.draft_lengths, step_ms)
