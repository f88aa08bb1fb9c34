# mypy: ignore-errors
"""TurboQuant as register operands of mma.sync, in Gluon: see KVMmaFunctions.

An octet is 8 consecutive columns of a head. In 4 bits one 32-bit word has the codes of an octet; in
3 bits three words (planes) have those of four octets (lockstep.kernels.formats.kv.bit_packing).
Octets 2 g and 2 g + 1 are the g-th group of 16 columns, which one mma.sync multiplies. For keys,
each of four lanes decodes half a word, so that the values are in the registers that mma.sync reads.
For values, a thread decodes the words of two tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.device.mma_layouts import LEFT_OPERAND, join_pairs, layout_bases, log2
from lockstep.kernels.formats.kv import KVMmaFunctions
from lockstep.kernels.formats.kv.turboquant import CENTROIDS
from lockstep.kernels.formats.kv.turboquant_triton import SIGNED_CENTROIDS, centroid_bytes


def _ptx_block(centroids, declared, lines):
    """Return a PTX block with the centroids' bytes in registers: lower ones in l0 and l1, upper
    ones in h0 and h1."""
    table = [
        f"mov.b32 {name}, {centroid_bytes(centroids[first : first + 4], upper):#010x};"
        for name, first, upper in (("l0", 0, 0), ("l1", 4, 0), ("h0", 0, 1), ("h1", 4, 1))
    ]
    registers = f".reg .b32 l0, l1, h0, h1, none, lo, hi, s, t, {declared};"
    # none = -0 twice: the fma's addend keeps the sign of zeros.
    body = [registers, *table, "mov.b32 none, 0x80008000;", *lines]
    return gl.constexpr("\n".join(("{", *body, "}")))


def _lookup_ptx(selectors, signs=None, shift=0):
    """Return PTX that looks up the bytes of four centroids.

    signs: register of signs, which is shifted left by `shift` first.
    """
    lines = [f"prmt.b32 lo, l0, l1, {selectors};", f"prmt.b32 hi, h0, h1, {selectors};"]
    if signs:
        lines.append(f"shl.b32 s, {signs}, {shift};")
        # hi ^= signs & 0x80 of each byte (truth table a & b ^ c = 0x6a).
        lines.append("lop3.b32 hi, s, 0x80808080, hi, 0x6a;")
    return lines


def _scale_ptx(out, order, scale):
    """Return PTX that multiplies a pair of centroids by a scale that a word contains twice."""
    return [f"prmt.b32 t, lo, hi, {order};", f"fma.rn.bf16x2 ${out}, t, {scale}, none;"]


HALF_WORD_4_PTX = _ptx_block(
    CENTROIDS[4],
    "u",
    [
        "shr.u32 u, $2, $4;",
        "and.b32 u, u, 0x7777;",
        *_lookup_ptx("u", "$2", "$5"),
        *_scale_ptx(0, "0x5140", "$3"),
        *_scale_ptx(1, "0x7362", "$3"),
    ],
)
"""PTX: half a word of 4-bit codes -> two bf16 pairs.

$0, $1: the pairs; $2: the word; $3: the scale, twice in a word; $4: first bit of the half; $5:
shift of its signs to the upper bits of bytes.
"""
HALF_WORD_3_PTX = _ptx_block(
    SIGNED_CENTROIDS,
    "u",
    [
        "shr.u32 u, $2, $4;",
        "and.b32 u, u, 0x7777;",
        *_lookup_ptx("u"),
        *_scale_ptx(0, "0x5140", "$3"),
        *_scale_ptx(1, "0x7362", "$3"),
    ],
)
"""PTX: half a word of 3-bit codes with their signs -> two bf16 pairs. $0 to $4: as in 4 bits."""


def _token_pair_ptx(first, second, scale, signs):
    """Return PTX that decodes the words of two tokens into eight pairs of both tokens' values."""
    lines = [f"prmt.b32 z0, {first}, {second}, 0x5410;", f"prmt.b32 z1, {first}, {second}, 0x7632;"]
    for half, order in enumerate(("0x5140", "0x7362")):
        lines.append(f"prmt.b32 u, {first}, {second}, {order};")
        lines.append("and.b32 u, u, 0x77777777;")
        for quarter in range(2):
            word_index = 4 * half + 2 * quarter
            lines += _lookup_ptx("u", f"z{quarter}", 4 * half) if signs else _lookup_ptx("u")
            lines += _scale_ptx(word_index, "0x6240", scale)
            lines += _scale_ptx(word_index + 1, "0x7351", scale)
            if quarter == 0:
                lines.append("shr.u32 u, u, 16;")
    return lines


TOKEN_PAIR_4_PTX = _ptx_block(
    CENTROIDS[4], "u, z0, z1", _token_pair_ptx("$8", "$9", "$10", signs=True)
)
"""PTX: words of 4-bit codes of two tokens -> eight bf16 pairs.

$0 to $7: the pairs, each of both tokens; $8, $9: the words; $10: the scales of both tokens.
"""
TOKEN_PAIR_3_PTX = _ptx_block(
    SIGNED_CENTROIDS,
    "u, v",
    [
        "shr.u32 u, $4, $7;",
        "shr.u32 v, $5, $7;",
        "prmt.b32 u, u, v, 0x5140;",
        "and.b32 u, u, 0x77777777;",
        *_lookup_ptx("u"),
        *_scale_ptx(0, "0x6240", "$6"),
        *_scale_ptx(1, "0x7351", "$6"),
        "shr.u32 u, u, 16;",
        *_lookup_ptx("u"),
        *_scale_ptx(2, "0x6240", "$6"),
        *_scale_ptx(3, "0x7351", "$6"),
    ],
)
"""PTX: half words of 3-bit codes of two tokens -> four bf16 pairs.

$0 to $3: the pairs, each of both tokens; $4, $5: the words; $6: the scales of both tokens; $7:
first bit of the half.
"""


@gluon.constexpr_function
def _k_word_layout(words, first):
    """Return the layout of half words [16, words, 2]: four lanes hold both halves of words `first`
    apart."""
    lanes = layout_bases(3, (2, 1), (1, first), (0, 1), (0, 2), (0, 4))
    rest = [(1, 1 << i) for i in range(log2(words)) if 1 << i != first]
    return gl.DistributedLinearLayout(layout_bases(3, (0, 8), *rest), lanes, [], [], [16, words, 2])


@gluon.constexpr_function
def _k_half_layout(num_groups):
    """Return the layout of half words [16, D / 32, 4, 2]: groups of 32 codes, words, halves."""
    lanes = layout_bases(4, (3, 1), (1, 1), (0, 1), (0, 2), (0, 4))
    rest = [(1, 1 << i) for i in range(1, log2(num_groups))]
    registers = layout_bases(4, (0, 8), (2, 1), (2, 2), *rest)
    return gl.DistributedLinearLayout(registers, lanes, [], [], [16, num_groups, 4, 2])


@gluon.constexpr_function
def _v_word_layout(words):
    """Return the layout of words [words, 16]: a thread has pairs of tokens, lanes eight words."""
    lanes = layout_bases(2, (1, 2), (1, 4), (0, 1), (0, 2), (0, 4))
    rest = [(0, 1 << i) for i in range(3, log2(words))]
    return gl.DistributedLinearLayout(
        layout_bases(2, (1, 1), (1, 8), *rest), lanes, [], [], [words, 16]
    )


@gluon.constexpr_function
def _v_plane_layout(num_groups):
    """Return the layout of half words [D / 32, 16, 2] of a plane: threads have pairs of tokens."""
    lanes = layout_bases(3, (1, 2), (1, 4), (0, 1), (0, 2), (2, 1))
    rest = [(0, 1 << i) for i in range(2, log2(num_groups))]
    return gl.DistributedLinearLayout(
        layout_bases(3, (1, 1), (1, 8), *rest), lanes, [], [], [num_groups, 16, 2]
    )


@gluon.constexpr_function
def _v_half_layout(num_groups):
    """Return the layout of half words [D / 32, 4, 16, 2]: groups of 32 codes, words, tokens,
    halves."""
    lanes = layout_bases(4, (2, 2), (2, 4), (0, 1), (0, 2), (3, 1))
    rest = [(0, 1 << i) for i in range(2, log2(num_groups))]
    registers = layout_bases(4, (2, 1), (1, 1), (2, 8), (1, 2), *rest)
    return gl.DistributedLinearLayout(registers, lanes, [], [], [num_groups, 4, 16, 2])


@gluon.constexpr_function
def _slice_layout(layout, *dimensions):
    """Return the layout without these dimensions, which are given from the last to the first."""
    for dimension in dimensions:
        layout = gl.SliceLayout(dimension, layout)
    return layout


@gluon.jit
def _fourth_word(a, b, c):
    """Return the words whose codes are spread over the fourth bits of three planes."""
    return ((a >> 3) & 0x11111111) | ((b >> 2) & 0x22222222) | ((c >> 1) & 0x44444444)


@gluon.jit
def _load_k_words(qdata, i: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """Load the words of 16 keys [16, D / 32, 4, 2], the same in both halves."""
    GROUPS: gl.constexpr = D // 32
    if BITS == 4:
        layout: gl.constexpr = _k_word_layout(4 * GROUPS, 4)
        word = qdata.index(0).slice(16 * i, 16).load(gl.SliceLayout(2, layout))[:, :, None]
        # Both halves' lanes keep the whole word and select their half by a shift in the PTX.
        twice = word | gl.zeros((16, 4 * GROUPS, 2), gl.int32, layout)
        words = gl.reshape(twice, (16, GROUPS, 4, 2))
    else:
        layout: gl.constexpr = _k_word_layout(GROUPS, 1)
        none = gl.zeros((16, GROUPS, 2), gl.int32, layout)
        inner: gl.constexpr = gl.SliceLayout(2, layout)
        a = qdata.index(0).slice(16 * i, 16).load(inner)[:, :, None]
        b = qdata.index(1).slice(16 * i, 16).load(inner)[:, :, None]
        c = qdata.index(2).slice(16 * i, 16).load(inner)[:, :, None]
        d = _fourth_word(a, b, c)
        joined = gl.join(gl.join(a | none, c | none), gl.join(b | none, d | none))
        words = gl.permute(gl.reshape(joined, (16, GROUPS, 2, 4)), (0, 1, 3, 2))
    return gl.convert_layout(words, _k_half_layout(GROUPS))


@gluon.jit
def _load_k(qdata, scales, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr,
          BITS: gl.constexpr):  # fmt: skip
    """Load 16 keys as the left operand of Q K^T. See KVMmaFunctions."""
    GROUPS: gl.constexpr = D // 32
    layout: gl.constexpr = _k_half_layout(GROUPS)
    word = _load_k_words(qdata, i, D, BITS)
    inner: gl.constexpr = _slice_layout(layout, 3, 2, 1)
    token = 16 * i + gl.arange(0, 16, inner)
    scale = scales.index(0).slice(16 * i, 16).load(inner)
    # A key has one 16-bit scale: a word contains those of two (token, head) pairs.
    scale = (scale >> ((token * HKV + kv) % 2 * 16)) & 0xFFFF
    scale = (scale | (scale << 16))[:, None][:, :, None][:, :, :, None]
    half = gl.arange(0, 2, _slice_layout(layout, 2, 1, 0))[None, :][:, None, :][:, :, None, :]
    if BITS == 4:
        p0, p1 = gl.inline_asm_elementwise(
            HALF_WORD_4_PTX, "=&r,=&r,r,r,r,r", [word, scale, 16 * half, 4 * half],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        p0, p1 = gl.inline_asm_elementwise(
            HALF_WORD_3_PTX, "=&r,=&r,r,r,r", [word, scale, 16 * half],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    joined = gl.reshape(join_pairs(p0, p1), (16, GROUPS // 2, 2, 4, 2, 2, 2))
    words = gl.reshape(gl.permute(joined, (0, 3, 1, 6, 2, 4, 5)), (16, D))
    # The layouts agree up to register order: neither shuffles nor shared memory (PTX of sm_90).
    return gl.convert_layout(words, LEFT_OPERAND)


@gluon.jit
def _v_scales(scales, i: gl.constexpr, word, layout: gl.constexpr, D: gl.constexpr):
    """Return the bf16 scales [W, 16] of 16 tokens for words [W, 1], 0 .. 3 of a group of 32 codes.

    layout: of [W, 16].
    """
    inner: gl.constexpr = gl.SliceLayout(0, layout)
    words = scales.index(0).slice(16 * i, 16).load(inner)[None, :]
    block = word * (D // 64) // 4
    # More than two blocks of 64 columns: two words of scales.
    if D > 128:
        second = scales.index(1).slice(16 * i, 16).load(inner)[None, :]
        words = gl.where(block < 2, words, second)
    words = (words >> (block % 2 * 16)).to(gl.int16)
    return words.to(gl.bfloat16, bitcast=True)


@gluon.jit
def load_v_4(qdata, scales, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """Load 16 values: number c of word w is row c D / 8 + w. See KVMmaFunctions."""
    WORDS: gl.constexpr = D // 8
    layout: gl.constexpr = _v_word_layout(WORDS)
    word = qdata.index(0).slice(16 * i, 16).permute((1, 0)).load(layout)
    word_index = gl.arange(0, WORDS, gl.SliceLayout(1, layout))[:, None] % 4
    scale = _v_scales(scales, i, word_index, layout, D)
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        TOKEN_PAIR_4_PTX, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [word, scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip
    even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    # (number of a word, word, token): v_column_4 undoes this order at the store.
    joined = gl.permute(gl.join(even, odd), (2, 3, 4, 0, 1))
    return gl.convert_layout(gl.reshape(joined, (D, 16)), LEFT_OPERAND)


@gluon.jit
def v_column_4(i, D: gl.constexpr):
    """Return the column that row i of load_v_4 contains. See KVMmaFunctions."""
    word = i % (D // 8)
    return 8 * (word % 4 * (D // 32) + word // 4) + i // (D // 8)


@gluon.jit
def load_v_3(qdata, scales, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """Load 16 values: numbers 4 h + c of words j, four groups at a time. See KVMmaFunctions."""
    GROUPS: gl.constexpr = D // 32
    plane: gl.constexpr = _v_plane_layout(GROUPS)
    inner: gl.constexpr = gl.SliceLayout(2, plane)
    none = gl.zeros((GROUPS, 16, 2), gl.int32, plane)
    a = qdata.index(0).slice(16 * i, 16).permute((1, 0)).load(inner)[:, :, None]
    b = qdata.index(1).slice(16 * i, 16).permute((1, 0)).load(inner)[:, :, None]
    c = qdata.index(2).slice(16 * i, 16).permute((1, 0)).load(inner)[:, :, None]
    d = _fourth_word(a, b, c)
    joined = gl.join(gl.join(a | none, c | none), gl.join(b | none, d | none))
    layout: gl.constexpr = _v_half_layout(GROUPS)
    word = gl.permute(gl.reshape(joined, (GROUPS, 16, 2, 4)), (0, 3, 1, 2))
    word = gl.convert_layout(word, layout)
    half = gl.arange(0, 2, _slice_layout(layout, 2, 1, 0))[None, :][:, None, :][:, :, None, :]
    word_layout: gl.constexpr = _slice_layout(layout, 3, 0)
    word_index = gl.arange(0, 4, gl.SliceLayout(1, word_layout))[:, None]
    scale = _v_scales(scales, i, word_index, word_layout, D)[None, :, :][:, :, :, None]
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        TOKEN_PAIR_3_PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, scale, 16 * half],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    words = gl.join(gl.join(v0, v2), gl.join(v1, v3))
    words = gl.reshape(words, (GROUPS // 4, 4, 4, 16, 2, 2, 2))
    # (number of a word, group, word, token): v_column_3 undoes this order at the store.
    words = gl.permute(words, (5, 6, 0, 2, 4, 1, 3))
    return gl.convert_layout(gl.reshape(words, (D, 16)), LEFT_OPERAND)


@gluon.jit
def v_column_3(i, D: gl.constexpr):
    """Return the column that row i of load_v_3 contains. See KVMmaFunctions."""
    group = i % 4 + i // 32 % (D // 128) * 4
    octet = i // 8 % 4 * (D // 32) + group
    return 8 * octet + i // 4 % 2 * 4 + i // (D // 4)


@gluon.jit
def load_k_4(qdata, scales, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """Load 16 keys of 4 bits. See KVMmaFunctions."""
    return _load_k(qdata, scales, i, kv, HKV, D, 4)


@gluon.jit
def load_k_3(qdata, scales, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """Load 16 keys of 3 bits. See KVMmaFunctions."""
    return _load_k(qdata, scales, i, kv, HKV, D, 3)


BITS_4 = KVMmaFunctions(1, 8, load_k_4, load_v_4, v_column_4, max_rows=8)
BITS_3 = KVMmaFunctions(3, 32, load_k_3, load_v_3, v_column_3, max_rows=16)
"""max_rows: from the times of the attention and combine kernels together. H200, an 8B model, 8 rows
of 4 tokens (16 rows per KV head), context 16,384. us of this path and of quantized_hopper.py: 4bit
165 and 145, k8v4 158 and 137, 3bit 124 and 169.
"""
