"""The drafters of a check: which a checkpoint has, and how an engine gets one that is watched."""

from collections import Counter
from typing import Any

from torch import Tensor

from lockstep.check.answer_oracle import NAME, STAND_IN, AnswerOracle
from lockstep.check.rules import WorldError
from lockstep.models.checkpoint import Checkpoint
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec import drafter_module, refusals, with_method
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepContext, Verdict
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.program import Drafter

SHORTEST = {"ngram": "prompt_lookup_min", "suffix": "suffix_lookup_min"}
"""Method -> its key of the shortest text that is looked up."""
NONE = "none"
"""What setups, worlds and reports call an engine without drafts."""


class WatchedDrafter:
    """A drafter and its contract: it finds no drafts of the rows that it drafts for.

    Watching waits for the device, so it is only for eager engines, and off unless a Counter stands
    in `seen`. It counts uneven steps there, whose rows get different numbers of drafts.
    """

    def __init__(self, context: DraftContext, inner: Drafter) -> None:
        self.context = context
        self.inner = inner
        self.seen: Counter[str] | None = None

    @property
    def name(self) -> str:
        """What setups, worlds and reports call the drafter."""
        return NAME if isinstance(self.inner, AnswerOracle) else self.context.config.method

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Drafts as the inner one. Raises WorldError where a row of the step has drafts."""
        if self.seen is None:
            self.inner.propose(step, hidden, aux_hidden_states, verdict)
            return
        drafts = self.context.drafts
        rows = step.row_ids[step.row_ids > 0]
        if bool((drafts[rows] >= 0).any()):
            raise WorldError("a step has left drafts in its rows")
        self.inner.propose(step, hidden, aux_hidden_states, verdict)
        made = (drafts[rows] >= 0).sum(1)
        self.seen[f"uneven steps of {self.name}"] += int((made != made[:1]).any())


def watched(context: DraftContext) -> WatchedDrafter:
    """The drafter that speculative_config names."""
    return WatchedDrafter(context, drafter_module(context.config.method).create(context))


def watched_oracle(context: DraftContext) -> WatchedDrafter:
    """The answer oracle, in the place of the drafter that speculative_config names."""
    return WatchedDrafter(context, AnswerOracle(context))


def hooks_of(drafter: str, changing: bool, preempt_every: int = 0) -> CheckHooks:
    """What an engine of this drafter needs. changing: every step brings another number of drafts;
    preempt_every: steps between forced preemptions, 0 for none."""
    make = watched_oracle if drafter == NAME else watched
    return CheckHooks(
        drafter=None if drafter == NONE else make,
        draft_policy=RandomDraftLength if changing else None,
        preempt_every=preempt_every,
    )


def speculative_config(
    drafter: str, count: int, changing: bool = False, lookup: int = 1
) -> dict[str, Any] | None:
    """The setting of this name, None without drafts. count: the most drafts of a step; changing:
    whether steps may bring fewer; lookup: the shortest text that a drafter looks up,
    1 for more drafts and more wrong ones than the product has."""
    if not count:
        return None
    method = STAND_IN if drafter == NAME else drafter
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": count}
    config["adaptive"] = changing
    if method in SHORTEST:
        config[SHORTEST[method]] = lookup
    return config


def asked_drafter(shared: dict[str, Any]) -> dict[str, Any] | None:
    """The speculative_config among the settings that all engines of a check share, its method named
    as it is here. Raises ConfigError."""
    asked = shared.get("speculative_config")
    return None if asked is None else with_method(asked)


def settings_with(own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The settings of an engine: its own, and those that all engines of a check share.

    A speculative_config among those names a drafter that is checked too: its keys, such as a
    folder, go to the engines of that method alone.
    """
    asked = asked_drafter(shared) or {}
    drafting = own["speculative_config"]
    if drafting and drafting["method"] == asked.get("method"):
        drafting = {**asked, **drafting}
    return {**own, **shared, "speculative_config": drafting}


def drafters_of(
    checkpoint: Checkpoint, asked: dict[str, Any] | None
) -> tuple[tuple[str, ...], list[str]]:
    """The drafters that this checkpoint allows, and why others are left out. asked: the shared
    speculative_config, whose method is one of them."""
    found = refusals(checkpoint)
    if asked is not None:
        found[asked["method"]] = None
    allowed = tuple(name for name, why in found.items() if why is None)
    return allowed, [f"{name}: {why}" for name, why in found.items() if why is not None]
