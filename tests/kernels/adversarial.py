"""Adversarial inputs for row independence: any op's cases with harder values, subsets of rows and
moved storage.

Rows describes an op once, by its per-row arguments. All transformations follow from it.
"""

import copy

import torch
from torch import Tensor

from lockstep.kernels import Op
from lockstep.kernels.formats.kv.cases import UNWRITTEN_BYTE
from lockstep.kernels.latent_attention import latent_rope_and_cache
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.row_subsets import (
    ROWS,
    Arguments,
    count_rows,
    present_names,
    row_dim,
)
from tests.kernels.backends import tensors_of


def repeat_rows(op: Op, arguments: Arguments, times: int) -> list[int]:
    """Return all rows, repeated `times` times, or once for ops whose rows write (a slot has one
    writer)."""
    rows = list(range(count_rows(op, arguments)))
    return rows * (1 if op.writes else times)


def harden_values(op: Op, arguments: Arguments, how: str, dtype: torch.dtype) -> Arguments:
    """Return the same call with other values: "spread" over 2^-40 .. 2^40, or chosen so that sums
    "cancel"."""
    spec = ROWS[op]
    changed = dict(arguments)
    generator = torch.Generator().manual_seed(7)
    bears = min(5, spec.spread) if dtype == torch.float16 else spec.spread
    for name in present_names((*spec.tokens, *spec.numbers), arguments):
        x = arguments[name]
        if isinstance(x, Tensor) and x.is_floating_point():
            exponents = torch.randint(-bears, bears + 1, x.shape, generator=generator)
            wide = x.float() * torch.exp2(exponents.float())
            if how == "cancel":
                wide = torch.where(torch.arange(x.shape[-1]) % 2 > 0, -wide.roll(1, -1), wide)
                wide = wide * (1 + (torch.rand(x.shape, generator=generator) < 0.1) * 2.0**-6)
            changed[name] = wide.to(x.dtype)
    return changed


def pad_with_poison(op: Op, arguments: Arguments) -> Arguments:
    """Return the call with its per-row arguments as views into longer tensors, padded with NaN or
    with index 1 on both sides."""
    spec = ROWS[op]
    surrounding = dict(arguments)
    for name in present_names((*spec.tokens, *spec.rows), arguments):
        x = arguments[name]
        dim = row_dim(op, arguments, name)
        shape = (*x.shape[:dim], x.shape[dim] + 8, *x.shape[dim + 1 :])
        longer = torch.full(shape, float("nan") if x.is_floating_point() else 1, dtype=x.dtype)
        surrounding[name] = longer.narrow(dim, 4, x.shape[dim]).copy_(x)
    return surrounding


def line_order(lines: int) -> Tensor:
    """Return a random permutation of a storage's lines that keeps the null line first."""
    drawn = torch.randperm(lines - 1, generator=torch.Generator().manual_seed(11)) + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64), drawn])


def permute_storage(op: Op, arguments: Arguments) -> Arguments:
    """Return the same call on storage with its lines in random order and NaN in the null line."""
    spec = ROWS[op]
    other = copy.deepcopy(arguments)
    for tensor in storage(op, other):
        tensor.copy_(tensor[line_order(len(tensor))])
        tensor[0] = float("nan") if tensor.is_floating_point() else UNWRITTEN_BYTE
    for name in spec.indices:
        first = storage(op, other)[0]
        size = first.shape[1] if op in (rope_and_cache, latent_rope_and_cache) else 1
        index = torch.argsort(line_order(len(first)))
        at = other[name].long()
        other[name] = (index[at // size] * size + at % size).to(other[name].dtype)
    return other


def storage(op: Op, arguments: Arguments) -> list[Tensor]:
    """Return the tensors whose lines are pages or slots."""
    return tensors_of(*(arguments[name] for name in ROWS[op].storage))


def restore_storage(op: Op, arguments: Arguments) -> list[Tensor]:
    """Return the storage of a permuted call in the original order."""
    return [tensor[torch.argsort(line_order(len(tensor)))] for tensor in storage(op, arguments)]
