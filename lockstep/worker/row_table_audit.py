"""Row table audit: comparison of the row tables of all ranks.

Ranks compute the same tokens and never send them, so nothing else would notice a difference. The
audit of whole answers is another thing: see lockstep.engine.auditor.
"""

import torch
from torch import Tensor

from lockstep.errors import RankError
from lockstep.worker.worker import Worker

TENSORS = ("tokens", "forced_end", "computed", "folded", "drafts", "page_table", "state_slots")
"""Tensors of the row table that must be equal on all ranks, next to the column of adapters."""


@torch.inference_mode()
def compare_ranks(worker: Worker) -> None:
    """Compare digests of this rank's row table with those of all ranks. Every rank calls it.

    Raises:
        RankError: a rank has another table; names the first one and its tensors.
    """
    table = worker.table
    # Another adapter on one rank changes the logits of all, and leaves the tokens equal.
    compared = [(name, getattr(table, name)) for name in TENSORS]
    compared += [("adapters", tensor) for tensor in table.adapters.tensors()]
    digests = torch.stack([digest(tensor) for _, tensor in compared])
    first, *digests_of_peers = worker.group.all_gather(digests).tolist()
    for rank, other in enumerate(digests_of_peers, 1):
        if other != first:
            pairs = zip(compared, first, other, strict=True)
            names = ", ".join(name for (name, _), a, b in pairs if a != b)
            raise RankError(
                f"rank {rank} has another row table than rank 0 ({names}): its steps gave other "
                "bits. Run `lockstep check` with this tensor_parallel_size, and report this."
            )


def digest(table: Tensor) -> Tensor:
    """Return a digest [] int64 of the rows after the null row: a sum with odd weights, mod 2^64.

    Padding rows write the null row in any order.
    """
    numbers = table[1:].flatten().to(torch.int64)
    weights = 2 * torch.arange(len(numbers), device=table.device) + 1
    return (numbers * weights * weights).sum()
