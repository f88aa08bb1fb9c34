"""What checks may put in the place of an engine's parts. Users have no setting for any of it."""

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.scheduling.draft_length import DraftLengthPolicy
from lockstep.spec.drafter import DraftContext
from lockstep.worker.program import Drafter


@dataclass(frozen=True)
class CheckHooks:
    """Parts that a check gives an engine. No answer may depend on any of them.

    drafter: makes the drafter, instead of the configured method's; the number of drafts stays that
    of speculative_config, which must be set.
    draft_policy: from the numbers of drafts that a step may bring, ascending, who chooses among
    them, instead of what speculative_config says.
    preempt_every: a running row is moved to host memory every so many steps, each in turn; 0: none.
    """

    drafter: Callable[[DraftContext], Drafter] | None = None
    draft_policy: Callable[[tuple[int, ...]], DraftLengthPolicy] | None = None
    preempt_every: int = 0


NO_HOOKS = CheckHooks()
"""The engine as users have it."""
