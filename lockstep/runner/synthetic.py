"""Synthetic acceptance: drafts accepted by coin, so that dummy weights give comparable figures.

It changes what is emitted, so it stands in the place of the sampler only where an engine of random
weights is asked for it (SpeculativeConfig.synthetic_acceptance).
"""

import torch
from torch import Tensor

from lockstep.kernels.sampling import uniform
from lockstep.layers.build import Build
from lockstep.runner.sampler import Sampler
from lockstep.runner.table import RowTable
from lockstep.step import Step, Verdict

COINS, STRIDE = 1 << 16, 7919


class SyntheticSampler(Sampler):
    """A draft behind accepted ones is accepted with this probability: the coin of (seed, position).

    Coins are drawn once from the counter-based hash; a seed is a place among them to begin at.
    """

    def __init__(self, table: RowTable, build: Build, vocab: int, probability: float) -> None:
        super().__init__(table, build, vocab)
        zero = torch.zeros(1, dtype=torch.int64, device=build.device)
        places = torch.arange(COINS, device=build.device)
        self.coins = uniform(zero, places, zero)[:, 0] < probability

    def verify(self, logits: Tensor, step: Step) -> Verdict:
        """Accepted drafts are what the rows emit, so that tokens and cache agree."""
        verdict, drafts = super().verify(logits, step), step.drafts
        positions = step.positions[step.logit_rows].view_as(verdict.tokens)[:, 1:]
        begins = self.table.sampling.seed[step.row_ids] * STRIDE
        coins = self.coins[(begins[:, None] + positions) % COINS] & (drafts >= 0)
        chain = coins.int().cumprod(1, dtype=torch.int32)
        verdict.tokens[:, :-1] = torch.where(chain > 0, drafts, verdict.tokens[:, :-1])
        return Verdict(verdict.tokens, chain.sum(1, dtype=torch.int32), verdict.logits)
