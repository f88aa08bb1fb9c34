"""Drafters of a check: those that a checkpoint supports, and wrappers that check their contract."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.check.oracle_drafter import NAME, PLACEHOLDER_METHOD, OracleDrafter
from lockstep.check.scenarios.invariants import InvariantError
from lockstep.models.checkpoint import Checkpoint
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec import drafter_module, refusals, with_method
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepContext, Verdict
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.program import Drafter

MIN_MATCH_KEYS = {"ngram": "prompt_lookup_min", "suffix": "suffix_lookup_min"}
"""Method -> its configuration key for the minimum match length."""
ANSWERS_KEPT = 65536
"""Tokens of ended answers that the suffix drafter keeps by default."""
NO_DRAFTER = "none"
"""Name of an engine without drafts in setups, scenarios and reports."""


def prediction_of(tokens: Sequence[int]) -> list[int]:
    """Return a predicted text that an answer follows, leaves and meets again.

    Every seventh token is wrong, three tokens are missing, and three others are inserted.
    """
    predicted = [token ^ 1 if index % 7 == 6 else token for index, token in enumerate(tokens)]
    third = len(tokens) // 3
    return predicted[:third] + predicted[third + 3 : 2 * third] + [1, 2, 3] + predicted[2 * third :]


def unequal_draft_counts(drafter: str) -> str:
    """Return the counter of steps whose rows got different numbers of drafts."""
    return f"steps with unequal draft counts ({drafter})"


class WatchedDrafter:
    """Wrapper of a drafter that checks its contract: rows have no drafts when it is called.

    The check waits for the device, so it is only for eager engines, and off while `events` is None.
    Steps whose rows get different numbers of drafts are counted in `events`.
    """

    def __init__(self, context: DraftContext, inner: Drafter) -> None:
        self.context = context
        self.inner = inner
        self.events: Counter[str] | None = None

    @property
    def name(self) -> str:
        """Return the name of the drafter in setups, scenarios and reports."""
        return NAME if isinstance(self.inner, OracleDrafter) else self.context.config.method

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Propose as the inner drafter. Raises InvariantError if a row already has drafts."""
        if self.events is None:
            self.inner.propose(step, hidden, aux_hidden_states, verdict)
            return
        drafts = self.context.drafts
        # Row 0 is the null row: padding of a bucket, which no request reads.
        rows = step.row_ids[step.row_ids > 0]
        if bool((drafts[rows] >= 0).any()):
            raise InvariantError("a step left drafts in its rows")
        self.inner.propose(step, hidden, aux_hidden_states, verdict)
        counts = (drafts[rows] >= 0).sum(1)
        self.events[unequal_draft_counts(self.name)] += int((counts != counts[:1]).any())


def create_watched(context: DraftContext) -> WatchedDrafter:
    """Create the drafter that speculative_config names, wrapped."""
    return WatchedDrafter(context, drafter_module(context.config.method).create(context))


def create_oracle(context: DraftContext) -> WatchedDrafter:
    """Create the oracle drafter, wrapped, instead of the one that speculative_config names."""
    return WatchedDrafter(context, OracleDrafter(context))


def hooks_of(drafter: str, changing: bool, preempt_every: int = 0) -> CheckHooks:
    """Return the hooks for an engine with this drafter.

    changing: the number of drafts varies per step. preempt_every: steps between forced preemptions,
    0 for none.
    """
    make_drafter = create_oracle if drafter == NAME else create_watched
    return CheckHooks(
        drafter=None if drafter == NO_DRAFTER else make_drafter,
        draft_policy=RandomDraftLength if changing else None,
        preempt_every=preempt_every,
    )


def speculative_config(
    drafter: str, count: int, changing: bool = False, lookup: int = 1, kept: int = ANSWERS_KEPT
) -> dict[str, Any] | None:
    """Return the speculative_config of a drafter, None without drafts.

    count: maximum drafts per step. changing: whether steps may have fewer. lookup: minimum match
    length of a lookup drafter. kept: tokens of ended answers that the suffix drafter keeps.
    """
    if not count:
        return None
    # The oracle drafter has no configuration: hooks_of() replaces the drafter of this method by it.
    method = PLACEHOLDER_METHOD if drafter == NAME else drafter
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": count}
    config["adaptive"] = changing
    if method in MIN_MATCH_KEYS:
        config[MIN_MATCH_KEYS[method]] = lookup
    if method == "suffix":
        config["suffix_cache_tokens"] = kept
    return config


def requested_drafter(shared: dict[str, Any]) -> dict[str, Any] | None:
    """Return the user's speculative_config with its method, or None. Raises ConfigError.

    shared: the user's settings for all engines of the check.
    """
    requested = shared.get("speculative_config")
    return None if requested is None else with_method(requested)


def settings_with(engine_settings: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Merge an engine's settings with the user's settings, which all engines of a check share.

    The user's speculative_config names one more drafter to check. Its keys, such as a folder, apply
    only to the engines of that method.
    """
    requested = requested_drafter(shared) or {}
    drafting = engine_settings["speculative_config"]
    if drafting and drafting["method"] == requested.get("method"):
        # The setup decides K; the user's other keys, such as a folder, stay.
        drafting = {**requested, **drafting}
    return {**engine_settings, **shared, "speculative_config": drafting}


def drafters_of(
    checkpoint: Checkpoint, requested: dict[str, Any] | None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the drafters that the checkpoint supports, and the reason against each other one.

    requested: the user's speculative_config; its method is always among the drafters.
    """
    reasons = refusals(checkpoint)
    if requested is not None:
        reasons[requested["method"]] = None
    allowed = tuple(name for name, why in reasons.items() if why is None)
    return allowed, {name: why for name, why in reasons.items() if why is not None}
