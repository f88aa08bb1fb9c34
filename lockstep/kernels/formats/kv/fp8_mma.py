# mypy: ignore-errors
"""fp8.py, e4m3 without a scale, as operands of mma.sync, in Gluon: see KVFragments."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.device.mma_layouts import LEFT, bases, four_of, log2
from lockstep.kernels.formats.kv import KVFragments
from lockstep.kernels.formats.kv.fp8_triton import NATIVE_E4M3

PAIRS = gl.constexpr("""
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
"""Four codes of each of two tokens -> four pairs of both tokens' numbers."""


@gluon.constexpr_function
def _of_keys(words):
    """Words [16, words]: four of a group of 16 columns in four lanes."""
    lanes = bases(2, (1, 1), (1, 2), (0, 1), (0, 2), (0, 4))
    registers = bases(2, (0, 8), *((1, 1 << i) for i in range(2, log2(words))))
    return gl.DistributedLinearLayout(registers, lanes, [], [], [16, words])


@gluon.constexpr_function
def _of_values(words):
    """Words [words, 16]: pairs of tokens in a thread."""
    lanes = bases(2, (1, 2), (1, 4), (0, 1), (0, 2), (0, 4))
    registers = bases(2, (1, 1), (0, 8), (1, 8), *((0, 1 << i) for i in range(4, log2(words))))
    return gl.DistributedLinearLayout(registers, lanes, [], [], [words, 16])


@gluon.jit
def keys(codes, numbers, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """See KVFragments."""
    word = codes.index(0).slice(16 * i, 16).load(_of_keys(D // 4))
    p0, p1 = gl.inline_asm_elementwise(
        NATIVE_E4M3, "=&r,=&r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    four = gl.reshape(four_of(p0, p1), (16, D // 16, 4, 2, 2))
    return gl.convert_layout(gl.reshape(gl.permute(four, (0, 1, 4, 2, 3)), (16, D)), LEFT)


@gluon.jit
def values(codes, numbers, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """See KVFragments: number c of word w at c D / 4 + w."""
    word = codes.index(0).slice(16 * i, 16).permute((1, 0)).load(_of_values(D // 4))
    a, b, c, d = gl.inline_asm_elementwise(
        PAIRS, "=&r,=&r,=&r,=&r,r,r", [word],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    four = gl.join(gl.join(a, c), gl.join(b, d))
    return gl.convert_layout(gl.reshape(gl.permute(four, (2, 3, 0, 1)), (D, 16)), LEFT)


@gluon.jit
def place(i, D: gl.constexpr):
    """See KVFragments."""
    return i % (D // 4) * 4 + i // (D // 4)


E4M3 = KVFragments(1, 4, keys, values, place, rows=16)
"""rows: as in _turboquant_fragments.py, 118 and 127 us."""
