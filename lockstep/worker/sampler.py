"""The sampler: logits to the target's own tokens. Verifying zero drafts is sampling."""

import torch
from torch import Tensor

from lockstep.kernels.sampling import sample
from lockstep.layers.build_context import BuildContext
from lockstep.outputs import Logprob
from lockstep.step import StepContext
from lockstep.worker.row_table import RowTable


class Sampler:
    """The target has one token for every position, whatever drafts stand there."""

    def __init__(self, table: RowTable, build: BuildContext, vocab: int) -> None:
        self.table = table
        self.sample_op = build.at("sampler").op(sample, vocab=vocab)

    def sample(
        self,
        logits: Tensor,
        positions: Tensor,
        drafts: Tensor,
        row_ids: Tensor,
        ids: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """logits [S, Q, V] of the tokens `ids` [V] (None: all), positions [S, Q] of the sampled
        tokens, allowed as in `kernels.sampling` -> tokens [S, Q]."""
        table = self.table
        given = (logits, positions, drafts, row_ids, table.tokens, table.sampling, ids, allowed)
        return self.sample_op(*given)

    def sample_target(self, logits: Tensor, step: StepContext) -> Tensor:
        """logits [N, V] at the step's logit rows -> the token to emit at each, [S, N / S]."""
        rows, width = step.sample_at.shape
        logits = logits.view(rows, width, -1)
        allowed = self.table.allowed[: rows * width].view(rows, width, -1)
        return self.sample(logits, step.sample_at, step.drafts, step.row_ids, allowed=allowed)


def logprobs(logits: Tensor, tokens: list[int], most: int) -> list[dict[int, Logprob]]:
    """logits [N, V] raw, the N chosen tokens -> per position: the token and the `most` likeliest.

    One log_softmax per row, so that the bits depend on that row alone; ties in rank count once.
    """
    found = []
    for row, token in zip(logits.float().cpu(), tokens, strict=True):
        scores = torch.log_softmax(row, -1)
        rank = int((scores > scores[token]).sum()) + 1
        entry = {token: Logprob(float(scores[token]), rank)}
        values, ids = scores.topk(most) if most else (scores[:0], scores[:0])
        for place, (value, index) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
            entry.setdefault(int(index), Logprob(value, place + 1))
        found.append(entry)
    return found
