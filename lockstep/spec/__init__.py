"""Drafters. One file and one table line each; no drafter can change an answer.

A drafter module has `create(context) -> Drafter`. Drafts are written to the table: -1 is
none, and all are -1 before a drafter writes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lockstep.config import SpeculativeConfig
from lockstep.errors import ConfigError, choice_error
from lockstep.kernels import Op
from lockstep.step import Step, Verdict

DRAFTERS = {
    "ngram": "lockstep.spec.ngram",
    "mtp": "lockstep.spec.mtp",
}


@dataclass
class DraftContext:
    """What a drafter may use. drafts [R, K] and tokens [R, L] are the table's, by row.

    module: the checkpoint's own draft module, where the drafter asked for one.
    sample(logits [S, 1, V], positions [S, 1], no drafts [S, 0], row_ids [S]) -> [S, 1], where V are
    the tokens that the module's head knows.
    op: the function that serves an op on this device.
    """

    config: SpeculativeConfig
    drafts: Tensor
    tokens: Tensor
    computed: Tensor
    page_size: int
    module: Any
    sample: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    op: Callable[[Op], Callable[..., Any]]


def draft_lengths(config: SpeculativeConfig | None) -> tuple[int, ...]:
    """The numbers of drafts that a step may bring, ascending."""
    if config is None:
        return (0,)
    most = config.num_speculative_tokens
    return tuple(sorted({0, 1, min(3, most), most})) if config.adaptive else (most,)


class NoDrafter:
    """Proposes nothing, ever."""

    def propose(
        self, step: Step, hidden: Tensor, aux_hidden_states: tuple[Tensor, ...], verdict: Verdict
    ) -> None:
        """Leaves the table's (empty) drafts alone."""


def drafter_module(config: SpeculativeConfig | None) -> Any:
    """The module that makes this drafter, or None. Raises ConfigError on an unknown method."""
    if config is None:
        return None
    if config.method not in DRAFTERS:
        raise choice_error(
            ConfigError,
            "speculative_config method",
            config.method,
            ", ".join(DRAFTERS),
            "Choose one of them.",
        )
    return import_module(DRAFTERS[config.method])


def no_drafts(rows: Tensor) -> Tensor:
    """[S, 0]: sampling with no draft in front."""
    return torch.empty(rows.shape[0], 0, dtype=torch.int64, device=rows.device)
