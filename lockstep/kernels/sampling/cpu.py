"""sample on a CPU: the reference, with Numba kernels that have its bits in place of long chains of
torch, and a faster sort.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.backends import numba_trait
from lockstep.kernels.sampling import numba_kernels, sample
from lockstep.kernels.sampling.reference import (
    ScoreFunctions,
    position_keys,
    sample_by,
    sort_scores,
)
from lockstep.kernels.simd.strides import address


def _find_best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.sampling.reference._best."""
    scores = scores.contiguous()
    indices = torch.empty(scores.shape[:-1], dtype=torch.int64)
    tops = torch.empty(scores.shape[:-1], dtype=torch.float32)
    numba_kernels.find_best(
        address("scores", scores, torch.float32, scores.numel()), indices.data_ptr(),
        tops.data_ptr(), tops.numel(), scores.shape[-1],
    )  # fmt: skip
    return indices, tops


def _uniform(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """See lockstep.kernels.sampling.uniform."""
    out = torch.empty(len(positions), len(ids), dtype=torch.float32)
    ids = ids.contiguous()
    ids_address = address("ids", ids, torch.int64, len(ids))
    for key, numbers in zip(position_keys(seed, positions), out, strict=True):
        numba_kernels.uniform(key, ids_address, numbers.data_ptr(), len(ids))
    return out


def _sort(scores: Tensor) -> tuple[Tensor, Tensor]:
    """See lockstep.kernels.sampling.reference.sort_scores."""
    if bool(scores.isnan().any()):
        return sort_scores(scores)
    # Numpy sorts integers with vector instructions, in half of the time of torch's stable sort. A
    # key is the score's order, inverted, and its index. Adding 0 makes -0 equal to 0.
    bits = (scores + 0.0).numpy().view(np.int32)
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    keys = (~order).astype(np.int64) << 32 | np.arange(scores.shape[-1])
    keys.sort(axis=-1)
    indices = torch.from_numpy(keys & 0xFFFFFFFF)
    return scores.gather(-1, indices), indices


FUNCTIONS = ScoreFunctions(_find_best, _uniform, _sort)
sample.backend("cpu", supports=numba_trait)(partial(sample_by, FUNCTIONS))
