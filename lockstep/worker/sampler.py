"""Sampler: logits to the target's tokens. A step without drafts samples by the same op."""

import torch
from torch import Tensor

from lockstep.kernels.sampling import LogitShard, sample
from lockstep.layers.build_context import BuildContext
from lockstep.outputs import Logprob
from lockstep.step import StepContext
from lockstep.worker.row_table import RowTable


class Sampler:
    """Sampler of the target. Every position has one target token, whatever its draft is.

    shard: share of the target's logits that this rank computes.
    """

    def __init__(self, table: RowTable, build: BuildContext, vocab: int, shard: LogitShard) -> None:
        self.table = table
        self.shard = shard
        self.sample_op = build.for_layer("sampler").op(sample, vocab=vocab)

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        drafts: Tensor,
        row_ids: Tensor,
        ids: Tensor | None = None,
        allowed: Tensor | None = None,
        shard: LogitShard | None = None,
    ) -> Tensor:
        """Sample tokens [S, Q].

        logits [S, Q, n]: this rank's `shard` (None: whole rows) of the logits [V] of the tokens
        `ids` [V] (None for all). positions [S, Q] of the sampled tokens, allowed: see
        `kernels.sampling`.
        """
        table = self.table
        return self.sample_op(
            logits, positions, drafts, row_ids, table.tokens, table.sampling, ids, allowed, shard
        )

    def sample_target(self, logits: Tensor, step: StepContext) -> Tensor:
        """Sample the target's token at each logit row: this rank's logits [N, n] -> [S, N / S]."""
        rows, width = step.sample_at.shape
        logits = logits.view(rows, width, -1)
        allowed = self.table.allowed[: rows * width].view(rows, width, -1)
        return self.sample(
            logits, step.sample_at, step.drafts, step.row_ids, allowed=allowed, shard=self.shard
        )


def logprobs(logits: Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
    """Return per position the log-probabilities of the chosen token and of the `count` likeliest.

    logits [N, V] are raw. One log_softmax per row, so that the bits depend on that row alone. The
    chosen token shares its rank with equal values. Of equal values the smaller id is likelier, as
    for the sampler.
    """
    entries = []
    # On the CPU: ranks and values do not depend on the GPU's reduction kernels.
    for row, token in zip(logits.float().cpu(), tokens, strict=True):
        scores = torch.log_softmax(row, -1)
        rank = int((scores > scores[token]).sum()) + 1
        entry = {token: Logprob(float(scores[token]), rank)}
        for next_rank, (index, value) in enumerate(_likeliest(scores, count).items(), 1):
            entry.setdefault(index, Logprob(value, next_rank))
        entries.append(entry)
    return entries


def _likeliest(scores: Tensor, count: int) -> dict[int, float]:
    """Return the `count` largest scores [V] by id: largest first, of equal ones the smaller id."""
    if not count:
        return {}
    # topk gives the threshold only: which of equal scores it returns depends on `count`.
    ids = (scores >= scores.topk(count).values[-1]).nonzero().flatten()
    values, order = scores[ids].sort(descending=True, stable=True)
    return dict(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
