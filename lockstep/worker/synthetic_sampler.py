"""Synthetic acceptance: drafts are accepted at random, so that random weights give comparable
figures.

It changes what is emitted, so it replaces the sampler only where an engine of random weights is
configured so (SpeculativeConfig.synthetic_acceptance).
"""

import torch
from torch import Tensor

from lockstep.kernels.sampling import LogitShard, uniform
from lockstep.layers.build_context import BuildContext
from lockstep.step import StepContext
from lockstep.worker.row_table import RowTable
from lockstep.worker.sampler import Sampler

COINS = 1 << 16
"""Hashes that are drawn once; all rows read them, from different ones on."""
STRIDE = 7919
"""Coins between the beginnings of rows whose seeds follow each other; a prime."""


class SyntheticSampler(Sampler):
    """Sampler that accepts each next draft with probability p, from a hash of (seed, position).

    Drafts equal to the target's token are decided by the same hash. The hashes are drawn once; a
    seed selects where a row starts in them.
    """

    def __init__(
        self,
        table: RowTable,
        build: BuildContext,
        vocab: int,
        shard: LogitShard,
        probability: float,
    ) -> None:
        super().__init__(table, build, vocab, shard)
        zero = torch.zeros(1, dtype=torch.int64, device=build.device)
        indices = torch.arange(COINS, device=build.device)
        self.coins = uniform(zero, indices, zero)[:, 0] < probability

    def sample_target(self, logits: Tensor, step: StepContext) -> Tensor:
        """Return the drafts that are accepted, then the target's tokens."""
        tokens = super().sample_target(logits, step)
        drafts = step.drafts
        begins = self.table.sampling.seed[step.row_ids] * STRIDE
        coins = self.coins[(begins[:, None] + step.sample_at[:, :-1]) % COINS] & (drafts >= 0)
        # A draft counts only if all drafts before it were accepted.
        chain = coins.int().cumprod(1, dtype=torch.int32)
        tokens[:, :-1] = torch.where(chain > 0, drafts, tokens[:, :-1])
        return tokens
