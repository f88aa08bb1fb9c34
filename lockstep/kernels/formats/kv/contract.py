"""What a KV format is, and one side of a cache in it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lockstep.kernels.formats.kv.hadamard import Turn


class KVDevice(NamedTuple):
    """A codec's device functions, in Triton; the kernels that call them pass them as constants.

    store(values, codes, numbers, constant, live, lanes, D): values [HEADS, BLOCK] fp32, 0 behind D,
    of heads of which live [HEADS, 1] are there; codes and numbers point to each head's first
    element [HEADS, 1]; lanes [1 or HEADS, BLOCK] count the columns.
    fetch(codes, numbers, columns, live, D) -> a tuple of what it loaded, 0 where not live
    [TILE, 1]; codes and numbers point to each token's first element [TILE, 1]; columns [1, N] count
    from 0 to the head's numbers over `share`, at least one.
    unpack(found, columns, constant, D) -> [TILE, N share] fp32: found is what fetch gave.
    unpack_bf16: the same by inline assembly, in bf16 and with the same bits; None: there is none.
    unpack_native: the same by instructions that sm_89 and later have; None: there is none.
    numbers is None where the codec has none, constant where it is.
    fetch and unpack serve Gluon too: they make no ranges, and join what has one layout.
    """

    store: Any
    share: int
    fetch: Any
    unpack: Any
    unpack_bf16: Any = None
    unpack_native: Any = None


class KVFragments(NamedTuple):
    """A codec's device functions that unpack in the registers of one warp's mma.sync, in Gluon, in
    bf16. A tile of 64 tokens lies in shared memory as it does in a page: codes [planes, 64, W] in
    int32, W = D / share; where there are numbers of 16 bits, numbers [N, 64] in int32, the words
    that hold those of KV head kv.

    keys(codes, numbers, i, kv, HKV, D) -> tokens 16 i .. 16 i + 15 [16, D], columns of 16 in the
    order of _mma_layouts.column_of.
    values(codes, numbers, i, kv, HKV, D) -> the columns [D, 16] of these tokens in any order.
    place(i, D): the column that stands at i.
    rows: (token, head of a group) rows up to which this is the fastest way.
    """

    planes: int
    share: int
    keys: Any
    values: Any
    place: Any
    rows: int


@dataclass(frozen=True)
class Codec(ABC):
    """How the D numbers of one token and head lie in a page. Its fields are all it depends on."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the codes."""

    @property
    def constant(self) -> float | int | None:
        """A number of the layer that its device functions are given: what every code is multiplied
        by, or a rotation's seed; None for nothing."""
        return None

    @property
    def turn(self) -> Turn | None:
        """The rotation that decoded numbers are left in, None where they are in none."""
        return None

    @property
    def number_dtype(self) -> torch.dtype:
        """Of the numbers beside the codes."""
        return torch.float32

    def count(self, dim: int) -> int:
        """Numbers beside the codes of one token and head."""
        return 0

    def width(self, dim: int) -> int:
        """Codes of one token and head, in elements of `dtype`."""
        return dim

    def refusal(self, dim: int) -> str | None:
        """Why heads of this dim cannot be stored, or None."""
        return None

    def of_layer(self, layer: str) -> Self:
        """The same for the layer of this name, "layers.3": rotations differ by layer."""
        return self

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [..., D] of the model's dtype -> codes [..., width] and, if any, numbers [..., count].

        What is not finite must be found when it is decoded: as NaN.
        """

    @abstractmethod
    def decode(self, codes: Tensor, numbers: Tensor | None) -> Tensor:
        """codes [..., width], numbers [..., count] -> [..., D] in fp32, to be rounded once. Rotated
        by `turn`, where there is one."""

    @property
    def device_at(self) -> str | None:
        """Module and name of its KVDevice, "a.b:C"; None where no kernel reads it."""
        return None

    @property
    def fragments_at(self) -> str | None:
        """Module and name of its KVFragments; None where it has none."""
        return None

    def device(self) -> KVDevice:
        """Its device functions, where device_at says that there are any. Needs Triton."""
        found: KVDevice = _named(self.device_at)
        return found

    def fragments(self) -> KVFragments:
        """Those of fragments_at, where it says that there are any. Needs Triton."""
        found: KVFragments = _named(self.fragments_at)
        return found


def _named(at: str | None) -> Any:
    """What stands at "module:name"."""
    assert at is not None, "the codec has device functions"
    (module, name) = at.split(":")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class KVFormat:
    """A format: what keys and values are stored as. name: what numerics call it. scaled: whether a
    checkpoint's static k_scale and v_scale are its codecs' field `scale`. latent: of a latent, key
    and value at once; None: it stores none."""

    name: str
    k: Codec
    v: Codec
    scaled: bool = False
    latent: Codec | None = None

    def refusal(self, dim: int) -> str | None:
        """Why heads of this dim cannot be stored, or None."""
        return self.v.refusal(dim) or self.k.refusal(dim)

    def of_layer(self, layer: str) -> "KVFormat":
        """The same for the layer of this name."""
        latent = None if self.latent is None else self.latent.of_layer(layer)
        return replace(self, k=self.k.of_layer(layer), v=self.v.of_layer(layer), latent=latent)


@dataclass(frozen=True)
class PackedKV:
    """Keys, or values, of one layer: codes [pages, page_size, Hkv, width] and, where the codec has
    any, numbers [pages, page_size, Hkv, count], contiguous. dim: D. Latents: the same without
    Hkv."""

    codec: Codec
    dim: int
    codes: Tensor
    numbers: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[pages, page_size, Hkv, D], as of an unpacked cache."""
        return torch.Size((*self.codes.shape[:-1], self.dim))

    def tensors(self) -> list[Tensor]:
        """What it holds, each indexed by page first."""
        return [self.codes] if self.numbers is None else [self.codes, self.numbers]


KVCache = Tensor | PackedKV
"""One side of a layer's cache, [pages, page_size, Hkv, D], or its latents, [pages, page_size, C],
of the model's dtype, or packed."""
