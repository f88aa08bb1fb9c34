"""QuantizedWeight: a weight that stays in 2 to 8 bits on the device.

Every format is row-major in the outputs N, so that a range of rows is a view of each of its
tensors, and dequantizes elementwise, so that it adds no numerics beyond its values. Codes are int32
words in the order of word_order.py. Whatever a checkpoint's layout, its loader brings it to one of
these classes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lockstep.kernels.formats.weights.word_order import unpack_codes

DUMMY_SCALE = 0.7
"""Standard deviation of a dummy weight, times sqrt(K)."""
CHUNK = 1 << 24
"""Values that are dequantized, repacked, quantized or drawn at once."""


class GroupedCodes(NamedTuple):
    """A quantized weight [N, K] as 4-bit or 8-bit codes, with two fp32 numbers per group along K.

    words: codes in the order of pack_codes. scales, offsets: [N, G]; column k belongs to group
    k // group. minima: whether a value is scale * code - offset, where the product is exact;
    otherwise it is (code - offset) * scale. All operations are in fp32.
    """

    words: Tensor
    bits: int
    scales: Tensor
    offsets: Tensor
    group: int
    minima: bool


@dataclass(frozen=True)
class QuantizedWeight(ABC):
    """Weight [N, K] in fewer bits. words [N, W] int32: its codes; k: K, without padding."""

    words: Tensor
    k: int

    @property
    def derived(self) -> tuple[str, ...]:
        """Names of the cached properties that launches read."""
        return ()

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the dequantized weight: (N, K)."""
        return torch.Size((self.words.shape[0], self.k))

    @property
    def device(self) -> torch.device:
        """Device of all of its tensors."""
        return self.words.device

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @abstractmethod
    def rows(self, begin: int, end: int) -> Self:
        """Return the outputs begin .. end as views, 0 <= begin < end <= N."""

    def finalize(self) -> None:
        """Compute, once the weight is filled, what launches need to know of its values.

        A captured step may be the first to launch the weight, and a capture cannot wait for the
        device.
        """
        for name in self.derived:
            getattr(self, name)

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill it so that its values are random at the scale of trained weights (DUMMY_SCALE)."""

    @abstractmethod
    def _values(self, codes: Tensor) -> Tensor:
        """Return the values [N, K] fp32 of codes [N, K] uint8."""

    def codes(self) -> Tensor:
        """Return the codes: [N, K] uint8."""
        return unpack_codes(self.words, self.bits, self.k)

    def grouped(self) -> GroupedCodes | None:
        """Return the weight as GroupedCodes; None where the format has other arithmetic."""
        return None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the values [N, K], each computed in fp32 and rounded once to dtype."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        # In chunks, so that the fp32 values of a whole weight are never in memory.
        for begin, end in row_chunks(*self.shape):
            part = self.rows(begin, end)
            out[begin:end] = part._values(part.codes())
        return out

    @abstractmethod
    def gather(self, ids: Tensor) -> Self:
        """Return a copy of the outputs with these ids [M]."""

    @abstractmethod
    def reorder(self, order: Tensor) -> None:
        """Move output order[i] to i, in place. order [N] is a permutation."""

    def copy_rows(self, source: Self, ids: Tensor) -> None:
        """Copy the outputs with these ids [N] of a weight of the same format."""
        self.copy_(source.gather(ids))

    def copy_(self, other: Self) -> None:
        """Copy the tensors of a weight of the same layout. Raises ValueError for another one."""
        targets = self.tensors()
        sources = other.tensors()
        if type(self) is not type(other) or targets.keys() != sources.keys():
            raise ValueError(
                f"cannot copy a {type(other).__name__} of {sorted(sources)} into a"
                f" {type(self).__name__} of {sorted(targets)}"
            )
        for name, tensor in targets.items():
            if tensor.shape != sources[name].shape:
                raise ValueError(
                    f"{name} has shape {list(sources[name].shape)}, expected {list(tensor.shape)}"
                )
            tensor.copy_(sources[name])


def row_chunks(n: int, k: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut the rows of a weight [n, k] into ranges of about CHUNK values, at multiples of `unit`."""
    step = max(CHUNK // max(k, 1) // unit, 1) * unit
    return [(begin, min(begin + step, n)) for begin in range(0, n, step)]
