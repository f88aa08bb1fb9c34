"""Sampling parameters of the rows of the table, on the device."""

import struct
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

BIAS = 1
PENALTIES = 2
MIN_TOKENS = 4
BAD_WORDS = 8
FILTERS = 16
NOISE = 32
ALLOWED = 64
"""Bits of `flags`: features that a row uses. A row without flags is a plain argmax."""


@dataclass(frozen=True)
class RowParameters:
    """Scalar sampling parameters of one row, with defaults that change nothing.

    A field's type gives its 32-bit words in SamplingState.scalars. flags: bits BIAS .. ALLOWED.
    top_k: 0 is off. min_position: before this position the row's stop ids are not allowed.
    """

    seed: int = field(default=0, metadata={"format": "q"})
    flags: int = 0
    top_k: int = 0
    min_position: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def words(self) -> Tensor:
        """Pack the parameters as a row of SamplingState.scalars: [WORDS] int32.

        Raises struct.error or OverflowError where a value does not fit.
        """
        packed = struct.pack(_FORMAT, *(getattr(self, name) for name in _FORMATS))
        return torch.frombuffer(bytearray(packed), dtype=torch.int32)


_DTYPES = {"q": torch.int64, "i": torch.int32, "f": torch.float32}
_FORMATS = {
    f.name: f.metadata.get("format", "i" if f.type is int else "f") for f in fields(RowParameters)
}
"""Format character of each parameter, for the struct module."""
_PLAIN = "=" + "".join(_FORMATS.values())
_FORMAT = _PLAIN + "4x" * (struct.calcsize(_PLAIN) // 4 % 2)
WORDS = struct.calcsize(_FORMAT) // 4
"""32-bit words of a row. An even number aligns the 64-bit seed of every row."""
COLUMNS = {name: struct.calcsize(_PLAIN[: i + 1]) // 4 for i, name in enumerate(_FORMATS)}
"""First word of each parameter."""


@dataclass
class SamplingState:
    """Sampling parameters of all rows of the table: R rows, V tokens; row 0 is the null row.

    scalars [R, WORDS] int32: RowParameters, packed so that a row takes one upload. Each parameter
    is also an attribute, a view [R] of its column. bias [R, V] fp32 (-inf: not allowed). counts [R,
    V] int32: generated tokens. in_prompt [R, V] bool. stop_ids [R, N] int64 (-1: none). bad_words
    [R, W, L] int64: W words of up to L tokens, right-aligned and padded with -1; a word's last
    token is banned after its other tokens.
    """

    scalars: Tensor
    bias: Tensor
    counts: Tensor
    in_prompt: Tensor
    stop_ids: Tensor
    bad_words: Tensor

    def __getattr__(self, name: str) -> Tensor:
        """Return a parameter's column of scalars, created at its first use."""
        if name not in COLUMNS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        dtype = _DTYPES[_FORMATS[name]]
        column = self.scalars.view(dtype)[:, COLUMNS[name] * 4 // dtype.itemsize]
        setattr(self, name, column)
        return column

    @classmethod
    def empty(
        cls, rows: int, vocab: int, stop_ids: int, bad_words: tuple[int, int], device: str
    ) -> "SamplingState":
        """Return rows with default parameters: greedy, no penalties, no masks."""

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        return cls(
            scalars=RowParameters().words().repeat(rows, 1).to(device),
            bias=full(0.0, torch.float32, vocab),
            counts=full(0, torch.int32, vocab),
            in_prompt=full(0, torch.bool, vocab),
            stop_ids=full(-1, torch.int64, stop_ids),
            bad_words=full(-1, torch.int64, *bad_words),
        )

    def parts(self) -> dict[str, Tensor]:
        """Return all tensors by name, each indexed by row first."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        return list(self.parts().values())
