"""Writers of quantized weights as checkpoints store them, in numpy, independent of lockstep.

Each draws codes and scales, and returns the tensors of a linear layer by suffix, and the weight [N,
K] in fp32 that they represent.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


class Stored(NamedTuple):
    """tensors: by suffix; value: [N, K] fp32."""

    tensors: dict[str, Tensor]
    value: Tensor


Writer = Callable[[int, int, int], Stored]
"""n, k, seed -> a weight."""


def e4m3(codes: Codes) -> Floats:
    """Return the values of e4m3fn codes by definition: sign, 4 bits of exponent, 3 of mantissa."""
    exponent = (codes >> 3 & 15).astype(np.int32)
    mantissa = (codes & 7).astype(np.float32) / 8
    small = mantissa * np.float32(2.0**-6)
    large = (1 + mantissa) * np.exp2((exponent - 7).astype(np.float32))
    size = np.where(exponent == 0, small, large).astype(np.float32)
    return np.where(codes >> 7 == 1, -size, size)


def e2m1(codes: Codes) -> Floats:
    """Return the values of e2m1 codes."""
    size = E2M1[codes & 7]
    return np.where(codes >> 3 == 1, -size, size)


def fp8_codes(draw: np.random.Generator, n: int, k: int) -> Codes:
    """Return codes [n, k] below 2^4, without NaN."""
    return (draw.integers(0, 0x58, (n, k)) | draw.integers(0, 2, (n, k)) << 7).astype(np.uint8)


def scales(draw: np.random.Generator, k: int, size: float, *shape: int) -> Floats:
    """Return scales with which codes of this magnitude have the size of trained weights."""
    middle = 0.7 * k**-0.5 / size
    return draw.uniform(0.7 * middle, 1.3 * middle, shape).astype(np.float32)


def rounded(values: Floats, dtype: torch.dtype) -> tuple[Tensor, Floats]:
    """Return values in a dtype, and converted back to fp32."""
    stored = torch.from_numpy(values).to(dtype)
    return stored, stored.float().numpy()


def tensor(values: Floats) -> Tensor:
    """Return a weight's value as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def fp8(codes: Codes) -> Tensor:
    """Return codes as a tensor of e4m3fn."""
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def fp8_weight(
    grain: str, scale: str = "weight_scale", dtype: torch.dtype = torch.float32, four: bool = False
) -> Writer:
    """Return a writer of e4m3fn with a scale per tensor ("scalar": of no dimension), channel or
    block."""

    def write(n: int, k: int, seed: int) -> Stored:
        draw = np.random.default_rng(seed)
        codes = fp8_codes(draw, n, k)
        rows = -(-n // 128)
        columns = -(-k // 128)
        shape = {"tensor": (1,), "scalar": (), "channel": (n, 1), "block": (rows, columns)}[grain]
        stored, factors = rounded(np.asarray(scales(draw, k, 3.0, *shape)), dtype)
        if grain == "block":
            wide = np.repeat(np.repeat(factors, 128, 0), 128, 1)[:n, :k]
            stored = stored.reshape(rows, 1, columns, 1) if four else stored
        else:
            wide = factors
        return Stored({"weight": fp8(codes), scale: stored}, tensor(e4m3(codes) * wide))

    return write


def words(codes: Codes, bits: int) -> Tensor:
    """Pack codes [n, k] in int32 words along k, the lowest bits first."""
    per = 32 // bits
    (n, k) = codes.shape
    padded = np.zeros((n, -(-k // per) * per), np.uint64)
    padded[:, :k] = codes
    shifts = np.arange(per, dtype=np.uint64) * np.uint64(bits)
    packed = (padded.reshape(n, -1, per) << shifts).sum(-1, dtype=np.uint64)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def int_weight(
    bits: int = 4,
    group: int = 32,
    *,
    zeros: str = "",
    ordered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    in_words: bool = True,
    single: bool = False,
) -> Writer:
    """Return a writer of compressed-tensors' integers.

    group 0: one scale per output; single: one for all. zeros: "words" along N or "int8"; ordered:
    with weight_g_idx.
    """

    def write(n: int, k: int, seed: int) -> Stored:
        draw = np.random.default_rng(seed)
        half = 2 ** (bits - 1)
        q = draw.integers(-half, half, (n, k))
        size = group or k
        groups = -(-k // size)
        of = draw.permutation(np.arange(k) // size) if ordered else np.arange(k) // size
        shape = (1,) if single else (n, groups)
        stored, factors = rounded(scales(draw, k, half / 1.7, *shape), dtype)
        tensors = {"weight_scale": stored}
        zero = np.zeros((n, groups), np.int64)
        if zeros:
            zero = draw.integers(-3, 4, zero.shape)
            codes = (zero + half).astype(np.uint8)
            packed = words(codes.T, bits).T.contiguous()
            plain = torch.from_numpy(zero.astype(np.int8))
            tensors["weight_zero_point"] = packed if zeros == "words" else plain
        if in_words:
            tensors["weight_packed"] = words((q + half).astype(np.uint8), bits)
            tensors["weight_shape"] = torch.tensor([n, k])
        else:
            tensors["weight"] = torch.from_numpy(q.astype(np.int8))
        if ordered:
            tensors["weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
        factors = np.broadcast_to(factors, (n, groups))
        value = (q - zero[:, of]).astype(np.float32) * factors[:, of]
        return Stored(tensors, tensor(value))

    return write


def nvfp4_weight(weight: str, factor: str, *, divides: bool, shape: tuple[int, ...]) -> Writer:
    """Return a writer of NVFP4 of ModelOpt (a multiplier) or compressed-tensors (a divisor)."""

    def write(n: int, k: int, seed: int) -> Stored:
        draw = np.random.default_rng(seed)
        codes = draw.integers(0, 16, (n, k)).astype(np.uint8)
        padded = np.pad(codes, ((0, 0), (0, k % 2)))
        data = padded[:, ::2] | padded[:, 1::2] << 4
        small = draw.integers(0x30, 0x48, (n, -(-k // 16))).astype(np.uint8)
        number = scales(draw, k, 6.0, 1)[0]
        stored = np.float32(1) / number if divides else number
        multiplier = np.float32(1) / stored if divides else number
        tensors = {
            weight: torch.from_numpy(data),
            "weight_scale": fp8(small),
            factor: torch.full(shape, float(stored)),
        }
        block = np.repeat(e4m3(small), 16, 1)[:, :k]
        return Stored(tensors, tensor(e2m1(codes) * block * multiplier))

    return write


MODELOPT_FP4 = nvfp4_weight("weight", "weight_scale_2", divides=False, shape=())
TENSORS_FP4 = nvfp4_weight("weight_packed", "weight_global_scale", divides=True, shape=(1,))
