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
        self.sample_op = build.at("sampler").op(sample, vocab=vocab)

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
        arguments = (logits, positions, drafts, row_ids, table.tokens, table.sampling)
        return self.sample_op(*arguments, ids, allowed, shard)

    def sample_target(self, logits: Tensor, step: StepContext) -> Tensor:
        """Sample the target's token at each logit row: this rank's logits [N, n] -> [S, N / S]."""
        rows, width = step.sample_at.shape
        logits = logits.view(rows, width, -1)
        allowed = self.table.allowed[: rows * width].view(rows, width, -1)
        arguments = (logits, step.sample_at, step.drafts, step.row_ids)
        return self.sample(*arguments, allowed=allowed, shard=self.shard)


def logprobs(logits: Tensor, tokens: list[int], count: int) -> list[dict[int, Logprob]]:
    """Return per position the log-probabilities of the chosen token and of the `count` likeliest.

    logits [N, V] are raw. One log_softmax per row, so that the bits depend on that row alone; equal
    values share a rank.
    """
    entries = []
    # On the CPU: ranks and values do not depend on the GPU's reduction kernels.
    for row, token in zip(logits.float().cpu(), tokens, strict=True):
        scores = torch.log_softmax(row, -1)
        rank = int((scores > scores[token]).sum()) + 1
        entry = {token: Logprob(float(scores[token]), rank)}
        values, ids = scores.topk(count) if count else (scores[:0], scores[:0])
        likeliest = zip(values.tolist(), ids.tolist(), strict=True)
        for next_rank, (value, index) in enumerate(likeliest, 1):
            entry.setdefault(int(index), Logprob(value, next_rank))
        entries.append(entry)
    return entries
