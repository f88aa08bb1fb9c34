# mypy: ignore-errors
"""The kernel of linear with a packed weight on Hopper, in Gluon: unpacked in registers, wgmma.

A program is ROWS outputs, some tokens and one segment of K. The bulk copy engine brings blocks of
128 columns of words and of x into a ring in shared memory. A warpgroup unpacks a block into
registers, in the order of wgmma's left operand, while the product of the block before runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

def _int4_text(split: bool) -> gl.constexpr:
    """Two words of a row, scales, -(128 + zero) -> eight pairs."""
    lines = [
        "{",
        ".reg .b32 t, one, none, w, d, l;",
        "mov.b32 one, 0x3f803f80;",
        "mov.b32 none, 0x80008000;",
    ]
    for word in range(2):
        for pair in range(4):
            out = f"${4 * word + pair}"
            source = f"${8 + word}"
            if pair:
                lines.append(f"shr.u32 w, {source}, {4 * pair};")
                source = "w"
            lines.append(f"lop3.b32 t, {source}, 0x000f000f, 0x43004300, 0xea;")
            lines.append("fma.rn.bf16x2 d, t, one, $12;")
            if split:
                lines.append("fma.rn.bf16x2 l, d, $14, none;")
                lines.append(f"fma.rn.bf16x2 {out}, d, $10, l;")
            else:
                lines.append(f"fma.rn.bf16x2 {out}, d, $10, none;")
    lines.append("}")
    return gl.constexpr("\n".join(lines))


INT4 = _int4_text(False)
INT4_SPLIT = _int4_text(True)
OUTPUTS = ",".join(["=&r"] * 8)
INPUTS3 = gl.constexpr(OUTPUTS + ",r" * 6)
INPUTS4 = gl.constexpr(OUTPUTS + ",r" * 8)
SPLIT_SCALE = gl.constexpr("""
{
    .reg .b32 h;
    .reg .f32 f, g, o;
    .reg .pred p;
    cvt.f32.f16 f, $3;
    cvt.rn.bf16x2.f32 h, f, f;
    mov.b32 $0, h;
    and.b32 h, h, 0xffff0000;
    mov.b32 g, h;
    sub.rn.f32 g, f, g;
    setp.eq.f32 p, g, g;
    selp.f32 g, g, 0f00000000, p;
    cvt.rn.bf16x2.f32 $1, g, g;
    cvt.f32.f16 o, $4;
    sub.rn.f32 o, 0fC3000000, o;
    cvt.rn.bf16x2.f32 $2, o, o;
}
""")
"""A scale and a zero in fp16 -> the scale's upper and lower part in bf16, -(128 + zero), twice in a
word each."""


@gluon.constexpr_function
def words_layout(bits, warps):
    """Which words [16 warps, 4 bits] of a block a lane needs for its part of the left operand."""
    registers = [[0, 1], [0, 2]] + ([[0, 4]] if bits == 8 else []) + [[8, 0]]
    lanes = [[0, bits], [0, 2 * bits], [1, 0], [2, 0], [4, 0]]
    groups = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [16 * warps, 4 * bits])


@gluon.constexpr_function
def half_layout(bits, warps):
    """The same of 64 columns."""
    registers = [[0, 1]] + ([[0, 2]] if bits == 8 else []) + [[8, 0]]
    lanes = [[0, bits // 2], [0, bits], [1, 0], [2, 0], [4, 0]]
    groups = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [16 * warps, 2 * bits])


@gluon.constexpr_function
def eight(dtype):
    return (dtype,) * 8


@gluon.jit
def _halves(words, BITS: gl.constexpr, layout: gl.constexpr):
    """Words of 128 columns -> those of the first and of the second 64."""
    ROWS: gl.constexpr = words.shape[0]
    parts = words.reshape([ROWS, 4, 2, BITS // 2]).permute((0, 1, 3, 2))
    low, high = gl.split(parts)
    low = gl.convert_layout(low.reshape([ROWS, 2 * BITS]), layout, assert_trivial=True)
    high = gl.convert_layout(high.reshape([ROWS, 2 * BITS]), layout, assert_trivial=True)
    return low, high


@gluon.jit
def _group(scales, zeros, group, live):
    return gl.load(scales + group, mask=live), gl.load(zeros + group, mask=live)


@gluon.jit
def _prepared(scale, zero):
    high, low, offset = gl.inline_asm_elementwise(
        SPLIT_SCALE, "=&r,=&r,=&r,h,h", [scale, zero], dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=True, pack=1,
    )
    return high[:, None], low[:, None], offset[:, None]


@gluon.jit
def _unpack(words, high, low, offset, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Words of 64 columns -> [ROWS, 64]."""
    ROWS: gl.constexpr = words.shape[0]
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        INT4_SPLIT, INPUTS4, [words, high, offset, low],
        dtype=eight(DTYPE), is_pure=True, pack=2,
    )
    a = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    b = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    c = gl.join(a, b).reshape([ROWS, 4, 2, 2, 2, 2])
    c = c.permute((0, 3, 4, 5, 1, 2)).reshape([ROWS, 64])
    return gl.convert_layout(c, layout, assert_trivial=True)


@gluon.jit
def _load(
    w_map, x_map, w_ring, x_ring, full, empty, n, m, begin, blocks, BITS: gl.constexpr
):
    """The warp that brings blocks: each into its slot once that is free."""
    SLOTS: gl.constexpr = w_ring.shape[0]
    SIZE: gl.constexpr = w_ring.shape[1] * 16 * BITS + x_ring.shape[1] * 256
    for i in range(blocks):
        slot = i % SLOTS
        mbarrier.wait(empty.index(slot), (i // SLOTS & 1) ^ 1)
        ready = full.index(slot)
        mbarrier.expect(ready, SIZE)
        at = begin + i
        tma.async_copy_global_to_shared(w_map, [n, at * (4 * BITS)], ready, w_ring.index(slot))
        tma.async_copy_global_to_shared(x_map, [m, at * 128], ready, x_ring.index(2 * slot))
        tma.async_copy_global_to_shared(
            x_map, [m, at * 128 + 64], ready, x_ring.index(2 * slot + 1)
        )


@gluon.jit
def _multiply(
    w_ring, x_ring, full, empty, scales, zeros, out, tokens, N, n, m, begin, blocks,
    scale_stride, out_stride, BITS: gl.constexpr, DTYPE: gl.constexpr,
):
    """The warpgroups that unpack and multiply."""
    SLOTS: gl.constexpr = w_ring.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = 16 * WARPS
    TOKENS: gl.constexpr = x_ring.shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    w_layout: gl.constexpr = words_layout(BITS, WARPS)
    h_layout: gl.constexpr = half_layout(BITS, WARPS)
    row_layout: gl.constexpr = gl.SliceLayout(1, h_layout)
    row = gl.minimum(n + gl.arange(0, ROWS, row_layout), N - 1).to(gl.int64) * scale_stride + begin
    scales += row
    zeros += row
    acc = gl.zeros((ROWS, TOKENS), gl.float32, acc_layout)
    scale, zero = _group(scales, zeros, 0, True)
    for i in range(blocks):
        high, low, offset = _prepared(scale, zero)
        scale, zero = _group(scales, zeros, i + 1, i + 1 < blocks)
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), i // SLOTS & 1)
        first, second = _halves(w_ring.index(slot).load(w_layout), BITS, h_layout)
        a = _unpack(first, high, low, offset, DTYPE, a_layout)
        acc = warpgroup_mma(a, x_ring.index(2 * slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index((i + SLOTS - 1) % SLOTS), pred=i > 0)
        b = _unpack(second, high, low, offset, DTYPE, a_layout)
        acc = warpgroup_mma(b, x_ring.index(2 * slot + 1).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    rows = n + gl.arange(0, ROWS, gl.SliceLayout(1, acc_layout))
    columns = m + gl.arange(0, TOKENS, gl.SliceLayout(0, acc_layout))
    place = gl.program_id(2).to(gl.int64) * tokens * N + columns.to(gl.int64)[None, :] * out_stride
    mask = (rows < N)[:, None] & (columns < tokens)[None, :]
    gl.store(out + place + rows[:, None], acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["tokens", "blocks"])
def hopper_kernel(
    x_map, w_map, scales, zeros, out, tokens, N, blocks, scale_stride, out_stride,
    BITS: gl.constexpr, TOKENS: gl.constexpr, SLOTS: gl.constexpr, DTYPE: gl.constexpr,
):
    ROWS: gl.constexpr = 16 * gl.num_warps()
    w_ring = gl.allocate_shared_memory(gl.int32, [SLOTS, ROWS, 4 * BITS], w_map.layout)
    x_ring = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, TOKENS, 64], x_map.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    n = gl.program_id(0) * ROWS
    m = gl.program_id(1) * TOKENS
    begin = gl.program_id(2) * blocks
    gl.warp_specialize(
        [
            (_multiply, (
                w_ring, x_ring, full, empty, scales, zeros, out, tokens, N, n, m, begin, blocks,
                scale_stride, out_stride, BITS, DTYPE,
            )),
            (_load, (w_map, x_map, w_ring, x_ring, full, empty, n, m, begin, blocks, BITS)),
        ],
        [1],
        [24],
    )


def trial(x, weight, segments, tokens, warps, slots, registers):
    """A launch for measurements: partials [segments, T, N] fp32, or [T, N] of x's dtype."""
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    n, k = weight.shape
    t = x.shape[0]
    if segments > 1:
        out = torch.empty(segments, t, n, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(t, n, dtype=x.dtype, device=x.device)
    bits = weight.bits
    rows = 16 * warps
    x_map = TensorDescriptor.from_tensor(x, [tokens, 64], gl.NVMMASharedLayout(128, 16, 2))
    w_map = TensorDescriptor.from_tensor(
        weight.words, [rows, 4 * bits], gl.NVMMASharedLayout(16 * bits, 32, 2)
    )
    grid = (-(-n // rows), -(-t // tokens), segments)
    hopper_kernel[grid](
        x_map, w_map, weight.scales, weight.zeros, out, t, n, k // segments // 128,
        weight.scales.stride(0), n, bits, tokens, slots, gl.bfloat16,
        num_warps=warps, maxnreg=registers or None, enable_fp_fusion=False,
    )  # fmt: skip
    return out
