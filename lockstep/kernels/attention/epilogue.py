# mypy: ignore-errors
"""How what attention found becomes its output: rotated back where a format leaves values rotated,
rounded, times its gate.

A rotation adds numbers of a whole head, so it is for kernels in which one warp has all of them:
Triton 3.6 loses some of a sum over reshaped numbers that lie across warps of two dimensions, as
those of a product by 8 warps do. Kernels that multiply leave fp32 instead, and finished() does the
rest.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.device.activations import sigmoid
from lockstep.kernels.device.hadamard import turned_back
from lockstep.kernels.formats.kv.launch import Opened

TOKENS = 16
"""Of a program that rotates back."""
COLUMNS = 64
"""Of such a program: a block of values."""


@triton.jit
def store_output(
    out, gates, place, gate_at, d, result, mine, seed, D: tl.constexpr, GATED: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """result [columns, ROWS] rounded, then times its rounded output gate where there is one.
    TURNED: numbers of a value that are rotated together, and are rotated back first; 0: none."""
    if TURNED > 0:
        result = turned_back(result, seed, d, TURNED)
    mask = mine[None, :] & (d < D)[:, None]
    values = result.to(out.dtype.element_ty)
    if GATED:
        gate = tl.load(gates + (gate_at[None, :] + d[:, None]), mask=mask, other=0.0)
        gate = sigmoid(gate.to(tl.float32)).to(gates.dtype.element_ty).to(tl.float32)
        values = (values.to(tl.float32) * gate).to(out.dtype.element_ty)
    tl.store(out + (place[None, :] + d[:, None]), values, mask=mask)


@triton.jit(do_not_specialize=["tokens", "gate_stride", "seed"])
def _finish_kernel(
    found, gates, out, tokens, gate_stride, seed, H: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of TOKENS tokens and a head: rotated back, rounded, times their gate."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mine = token < tokens
    place = (token * H + head) * D
    mask = mine[None, :] & (d < D)[:, None]
    result = tl.load(found + (place[None, :] + d[:, None]), mask=mask, other=0.0)
    gate_at = token * gate_stride + (head * 2 + 1) * D
    store_output(out, gates, place, gate_at, d, result, mine, seed, D, GATED, TURNED)


def finished(found: Tensor, gates: Tensor | None, v: Opened, out: Tensor) -> Tensor:
    """found [T, H, D] fp32, rotated as values of v are -> out: rotated back, rounded, gated."""
    tokens, heads, dim = found.shape
    _finish_kernel[(triton.cdiv(tokens, TOKENS), heads, triton.cdiv(dim, COLUMNS))](
        found, gates, out, tokens, 0 if gates is None else gates.stride(0), v.constant, heads,
        dim, TOKENS, COLUMNS, gates is not None, v.block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
