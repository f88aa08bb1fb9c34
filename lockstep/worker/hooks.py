"""Replacements of engine parts for checks. Users have no setting for them."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.scheduling.draft_length import DraftLengthPolicy
from lockstep.spec.drafter import DraftContext
from lockstep.worker.program import Drafter
from lockstep.worker.rank_pool import RankPool


@dataclass(frozen=True)
class CheckHooks:
    """Engine parts that a check replaces. No answer may depend on them.

    drafter: makes the drafter instead of the configured method; speculative_config must be set and
    gives K. draft_policy: makes the draft length policy, from the draft lengths of a step in
    ascending order. preempt_every: preempt one row every Nth schedule; 0 for never. rank_pool: of
    processes that join the engine as ranks, and return to it when the engine ends.
    """

    drafter: Callable[[DraftContext], Drafter] | None = None
    draft_policy: Callable[[tuple[int, ...]], DraftLengthPolicy] | None = None
    preempt_every: int = 0
    rank_pool: RankPool | None = None


NO_HOOKS = CheckHooks()
"""Hooks of users' engines: none."""
