# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Epilogue of attention: rotate the output back, round it, multiply it by its gate.

A rotation adds numbers of a whole block of columns, so it runs in kernels in which one warp has
them all. Hazard: Triton 3.6 loses part of a sum over reshaped values if these are spread across
warps in two dimensions. A product by 8 warps has such a layout. Kernels that multiply therefore
store fp32, and finish_rotated rotates, rounds and gates it.
"""

import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.device.activations import sigmoid
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.hadamard import rotate_back
from lockstep.kernels.formats.kv.launch import KVOperand
from lockstep.kernels.integers import ceil_div

CTA_TOKENS = 16
"""Tokens of a CTA that rotates back."""
CTA_COLUMNS = 64
"""Columns of such a CTA: a rotation block of values."""


@triton.jit
def store_output(
    out, gates, offsets, gate_offsets, column, result, row_mask, seed, D: tl.constexpr,
    GATED: tl.constexpr, ROTATION_BLOCK: tl.constexpr,
):  # fmt: skip
    """Round result [columns, ROWS] and multiply it by its rounded output gate, if there is one.

    ROTATION_BLOCK: columns that one rotation covers; the result is rotated back before it is
    rounded. 0: no rotation.
    """
    if ROTATION_BLOCK > 0:
        result = rotate_back(result, seed, column, ROTATION_BLOCK)
    mask = row_mask[None, :] & (column < D)[:, None]
    # Output, sigmoid and product are each rounded to the model's dtype, as in the reference.
    values = result.to(out.dtype.element_ty)
    if GATED:
        gate = tl.load(gates + (gate_offsets[None, :] + column[:, None]), mask=mask, other=0.0)
        gate = sigmoid(gate.to(tl.float32)).to(gates.dtype.element_ty).to(tl.float32)
        values = (values.to(tl.float32) * gate).to(out.dtype.element_ty)
    tl.store(out + (offsets[None, :] + column[:, None]), values, mask=mask)


@triton.jit(do_not_specialize=["tokens", "gate_stride", "seed"])
def _rotate_back_kernel(
    attended, gates, out, tokens, gate_stride, seed, H: tl.constexpr, D: tl.constexpr,
    CTA_TOKENS: tl.constexpr, CTA_COLUMNS: tl.constexpr, GATED: tl.constexpr,
    ROTATION_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate back, round and gate CTA_COLUMNS columns of CTA_TOKENS tokens and a head."""
    pdl_start()
    token = tl.program_id(0).to(tl.int64) * CTA_TOKENS + tl.arange(0, CTA_TOKENS)
    head = tl.program_id(1)
    column = tl.program_id(2) * CTA_COLUMNS + tl.arange(0, CTA_COLUMNS)
    row_mask = token < tokens
    offsets = (token * H + head) * D
    mask = row_mask[None, :] & (column < D)[:, None]
    result = tl.load(attended + (offsets[None, :] + column[:, None]), mask=mask, other=0.0)
    gate_offsets = token * gate_stride + (head * 2 + 1) * D
    store_output(
        out, gates, offsets, gate_offsets, column, result, row_mask, seed, D, GATED, ROTATION_BLOCK
    )


def finish_rotated(attended: Tensor, gates: Tensor | None, v: KVOperand, out: Tensor) -> Tensor:
    """Rotate attended [T, H, D] fp32 back out of v's rotation, round and gate it into out."""
    tokens, heads, dim = attended.shape
    _rotate_back_kernel[(ceil_div(tokens, CTA_TOKENS), heads, ceil_div(dim, CTA_COLUMNS))](
        attended, gates, out, tokens, 0 if gates is None else gates.stride(0), v.layer_constant,
        heads, dim, CTA_TOKENS, CTA_COLUMNS, gates is not None, v.rotation_block, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
