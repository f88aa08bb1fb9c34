# mypy: ignore-errors
"""fp8_e4m3 without a scale as register operands of mma.sync, in Gluon: see KVMmaFunctions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.device.mma_layouts import LEFT_OPERAND, join_pairs, layout_bases, log2
from lockstep.kernels.formats.kv import KVMmaFunctions
from lockstep.kernels.formats.kv.fp8_triton import E4M3_TO_BF16_NATIVE_PTX

TOKEN_PAIRS_TO_BF16 = gl.constexpr("""
{
    .reg .b32 x, y, s, t, u, v;
    .reg .b16 a, b, c, d, e, f, g, h;
    .reg .f32 i, j, k, l, m, n, o, p;
    prmt.b32 x, $4, $5, 0x5140;
    prmt.b32 y, $4, $5, 0x7362;
    mov.b32 {a, b}, x;
    mov.b32 {c, d}, y;
    cvt.rn.f16x2.e4m3x2 s, a;
    cvt.rn.f16x2.e4m3x2 t, b;
    cvt.rn.f16x2.e4m3x2 u, c;
    cvt.rn.f16x2.e4m3x2 v, d;
    mov.b32 {a, b}, s;
    mov.b32 {c, d}, t;
    mov.b32 {e, f}, u;
    mov.b32 {g, h}, v;
    cvt.f32.f16 i, a;
    cvt.f32.f16 j, b;
    cvt.f32.f16 k, c;
    cvt.f32.f16 l, d;
    cvt.f32.f16 m, e;
    cvt.f32.f16 n, f;
    cvt.f32.f16 o, g;
    cvt.f32.f16 p, h;
    cvt.rn.bf16x2.f32 $0, j, i;
    cvt.rn.bf16x2.f32 $1, l, k;
    cvt.rn.bf16x2.f32 $2, n, m;
    cvt.rn.bf16x2.f32 $3, p, o;
}
""")
"""PTX block: a word of four e4m3 values of each of two tokens -> four bf16 pairs, each of both
tokens' numbers of one column. mma.sync's A operand of P V wants pairs along the tokens."""


@gluon.constexpr_function
def _k_layout(words):
    """Return the layout of key words [16, words]: four lanes share a group of 16
    columns, a word each."""
    lanes = layout_bases(2, (1, 1), (1, 2), (0, 1), (0, 2), (0, 4))
    registers = layout_bases(2, (0, 8), *((1, 1 << i) for i in range(2, log2(words))))
    return gl.DistributedLinearLayout(registers, lanes, [], [], [16, words])


@gluon.constexpr_function
def _v_layout(words):
    """Return the layout of value words [words, 16]: a thread has pairs of tokens."""
    lanes = layout_bases(2, (1, 2), (1, 4), (0, 1), (0, 2), (0, 4))
    registers = layout_bases(
        2, (1, 1), (0, 8), (1, 8), *((0, 1 << i) for i in range(4, log2(words)))
    )
    return gl.DistributedLinearLayout(registers, lanes, [], [], [words, 16])


@gluon.jit
def load_k(qdata, scales, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """Load 16 keys as the left operand of Q K^T. See KVMmaFunctions."""
    word = qdata.index(0).slice(16 * i, 16).load(_k_layout(D // 4))
    p0, p1 = gl.inline_asm_elementwise(
        E4M3_TO_BF16_NATIVE_PTX, "=&r,=&r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True,
        pack=1,
    )  # fmt: skip
    joined = gl.reshape(join_pairs(p0, p1), (16, D // 16, 4, 2, 2))
    # Only registers are renamed: the permutation matches the operand's layout, so no shuffle is
    # emitted.
    return gl.convert_layout(gl.reshape(gl.permute(joined, (0, 1, 4, 2, 3)), (16, D)), LEFT_OPERAND)


@gluon.jit
def load_v(qdata, scales, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """Load 16 values as the left operand of P V: value c of word w is row c D / 4 + w. See
    KVMmaFunctions."""
    word = qdata.index(0).slice(16 * i, 16).permute((1, 0)).load(_v_layout(D // 4))
    a, b, c, d = gl.inline_asm_elementwise(
        TOKEN_PAIRS_TO_BF16, "=&r,=&r,=&r,=&r,r,r", [word],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    # Rows in the order (value of a word, word): any order serves, since v_column undoes it at the
    # store.
    joined = gl.join(gl.join(a, c), gl.join(b, d))
    return gl.convert_layout(gl.reshape(gl.permute(joined, (2, 3, 0, 1)), (D, 16)), LEFT_OPERAND)


@gluon.jit
def v_column(i, D: gl.constexpr):
    """Return the column that row i of load_v contains. See KVMmaFunctions."""
    return i % (D // 4) * 4 + i // (D // 4)


E4M3 = KVMmaFunctions(1, 4, load_k, load_v, v_column, max_rows=16)
"""max_rows: measured as in turboquant_mma.py. With 16 rows this path takes 118 us, and
quantized_hopper.py 127."""
