"""Synthetic acceptance: drafts accepted by coin, so that dummy weights give comparable figures.

It changes what is emitted, so it stands in the place of the sampler only where an engine of random
weights is asked for it (SpeculativeConfig.synthetic_acceptance).
"""

import torch
from torch import Tensor

from lockstep.kernels.sampling import uniform
from lockstep.layers.build_context import BuildContext
from lockstep.step import StepContext
from lockstep.worker.row_table import RowTable
from lockstep.worker.sampler import Sampler

COINS = 1 << 16
STRIDE = 7919


class SyntheticSampler(Sampler):
    """A draft behind accepted ones is accepted with this probability: the coin of (seed, position).

    So is one that the target emits by itself. Coins are drawn once from the counter-based hash; a
    seed is a place among them to begin at.
    """

    def __init__(
        self, table: RowTable, build: BuildContext, vocab: int, probability: float
    ) -> None:
        super().__init__(table, build, vocab)
        zero = torch.zeros(1, dtype=torch.int64, device=build.device)
        places = torch.arange(COINS, device=build.device)
        self.coins = uniform(zero, places, zero)[:, 0] < probability

    def sample_target(self, logits: Tensor, step: StepContext) -> Tensor:
        """The drafts that are to be accepted, then what the target emits."""
        tokens = super().sample_target(logits, step)
        drafts = step.drafts
        begins = self.table.sampling.seed[step.row_ids] * STRIDE
        coins = self.coins[(begins[:, None] + step.sample_at[:, :-1]) % COINS] & (drafts >= 0)
        chain = coins.int().cumprod(1, dtype=torch.int32)
        tokens[:, :-1] = torch.where(chain > 0, drafts, tokens[:, :-1])
        return tokens
