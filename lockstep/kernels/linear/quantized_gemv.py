# mypy: ignore-errors
"""Register-only GEMV with a quantized weight, for few tokens: mma.sync without shared memory.

Tensors here have one element per thread, so that a tensor's index is the hardware's lane. A lane
loads the words of its rows from global memory, 16 bytes at a time, AHEAD blocks of 128 columns in
advance, dequantizes them in registers and passes them to mma.sync m16n8k16 as the left operand.
Nothing goes through shared memory, and warps never wait for each other.

Fragments are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point types":
with g = lane / 4 and q = lane % 4,

    A   a0: row g, columns 2q and 2q + 1     a1: row g + 8, the same     a2, a3: columns 8 further
    B   b0: rows 2q and 2q + 1 of column g   b1: rows 8 further
    C   c0, c1: row g, columns 2q, 2q + 1    c2, c3: row g + 8

Rows of A are outputs, columns of B are tokens. Those past the end repeat the last one: they are
computed and not stored, and columns of a product do not mix.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.dequantize import (
    CVT_E4M3,
    E2M1_TO_BF16,
    E2M1_TO_FP16,
    E4M3_TO_FP16_TWICE,
    FP4,
    FP16_E2M1,
    GGUF,
    INT4_SPLIT_TO_BF16,
    INT4_TO_BF16,
    INT4_TO_FP16,
    MINUS_136,
    MINUS_1032,
    PAIRED_INT4,
    SPLIT_SCALE_INT4,
    WORD_GGUF,
    dequantize_code,
    dequantize_gguf_code,
    duplicate_16bit,
    e4m3_to_fp32,
)
from lockstep.kernels.formats.weights.dequantize_tile import K_BLOCK, dequantize_gguf_ptx
from lockstep.kernels.formats.weights.gguf_ptx import steps_ptx, widen_ptx

LOAD16 = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.b32 live, $5, 0;
    @live ld.global.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];
}
""")
"""Predicated 16-byte load. L1 keeps the line: with 8-bit codes a lane's next load hits it."""
LOAD16_STREAMING = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.b32 live, $5, 0;
    @live ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];
}
""")
"""Predicated 16-byte load that bypasses L1: with 4-bit codes a load takes whole sectors."""
LOAD8 = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.b32 live, $3, 0;
    @live ld.global.v2.b32 {$0, $1}, [$2];
}
""")
"""Predicated 8-byte load."""
E4M3_TIMES_SCALE = """
{
    .reg .b16 l, h, a, b, c, d;
    .reg .b32 s, t;
    .reg .f32 e, f, g, i;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 s, l;
    cvt.rn.f16x2.e4m3x2 t, h;
    mov.b32 {a, b}, s;
    mov.b32 {c, d}, t;
    cvt.f32.f16 e, a;
    cvt.f32.f16 f, b;
    cvt.f32.f16 g, c;
    cvt.f32.f16 i, d;
    mul.rn.f32 e, e, $3;
    mul.rn.f32 f, f, $3;
    mul.rn.f32 g, g, $3;
    mul.rn.f32 i, i, $3;"""
"""Begin of a PTX block: the four e4m3 codes of word $2 times scale $3, in e, f, g and i."""


def _mma_ptx(kind: str) -> tl.constexpr:
    """Return the PTX of D = A B + C, m16n8k16: A and B of this kind, C and D fp32."""
    return tl.constexpr(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )


def _pair_ptx(kind: str) -> tl.constexpr:
    """Return the PTX that rounds two fp32 numbers into one register."""
    return tl.constexpr(f"cvt.rn.{kind}x2.f32 $0, $2, $1;")


def _e4m3_ptx(kind: str) -> tl.constexpr:
    """Return the PTX that dequantizes a word of e4m3 to two pairs of this kind."""
    return tl.constexpr(
        E4M3_TIMES_SCALE
        + f"""
    cvt.rn.{kind}x2.f32 $0, g, e;
    cvt.rn.{kind}x2.f32 $1, i, f;
}}
"""
    )


MMA_BF16 = _mma_ptx("bf16")
MMA_FP16 = _mma_ptx("f16")
PAIR_BF16 = _pair_ptx("bf16")
PAIR_FP16 = _pair_ptx("f16")
E4M3_BF16 = _e4m3_ptx("bf16")
E4M3_FP16 = _e4m3_ptx("f16")


@triton.jit
def _load16(address, live, STREAMING: tl.constexpr):
    """Load four words at each int64 address; undefined where not live (uniform over the CTA)."""
    PTX: tl.constexpr = LOAD16_STREAMING if STREAMING else LOAD16
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,=r,=r,l,r", [address, live],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _pin_loads(number):
    """Keep the loads before this call before the loads after it; it compiles to no instruction.

    Without it ptxas sinks the loads of a whole iteration to its end, where the next iteration waits
    for them.
    """
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [tl.full((32,), number, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _round_pair(low, high, DTYPE: tl.constexpr):
    """Round two fp32 numbers to DTYPE and put them into one register."""
    PTX: tl.constexpr = PAIR_BF16 if DTYPE == tl.bfloat16 else PAIR_FP16
    return tl.inline_asm_elementwise(
        PTX, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _mma(a0, a1, a2, a3, b0, b1, c, DTYPE: tl.constexpr):
    """Add one m16n8k16 product to c, a tuple of four accumulators, in the tensor core."""
    PTX: tl.constexpr = MMA_BF16 if DTYPE == tl.bfloat16 else MMA_FP16
    return tl.inline_asm_elementwise(
        PTX, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_row(words, scales, zeros, block, live, FORMAT: tl.constexpr, COUNT: tl.constexpr,
           ZEROS: tl.constexpr):  # fmt: skip
    """Load what a lane needs of one row in one block: a tuple of words, then scales, then zeros.

    words: int64 address of the lane's first word of the row. scales, zeros: pointers to the row's
    first scale and, where ZEROS, zero point. block: index of 128 columns. COUNT: scales per block.
    Nothing is read where not live.
    """
    BITS: tl.constexpr = FORMAT.bits
    address = words + block * (K_BLOCK * BITS // 8)
    predicate = live.to(tl.int32)
    values = _load16(address, predicate, BITS == 4)
    if BITS == 8:
        values = values + _load16(address + 16, predicate, False)
    if FORMAT.kind == FP4:
        address = scales.to(tl.int64) + block * COUNT
        values = values + tl.inline_asm_elementwise(
            LOAD8,
            "=r,=r,l,r",
            [address, predicate],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        if FORMAT.group_size == 0:
            first = block * 0
        elif FORMAT.group_size >= K_BLOCK:
            first = block // (FORMAT.group_size // K_BLOCK)
        else:
            first = block * COUNT
        for i in tl.static_range(COUNT):
            values = values + (tl.load(scales + first + i, mask=live),)
        if ZEROS:
            for i in tl.static_range(COUNT):
                values = values + (tl.load(zeros + first + i, mask=live),)
    return values


@triton.jit
def _load_plane_words(words, block, live, BITS: tl.constexpr):
    """Load a lane's words of one bit plane in one block: BITS words. words: int64 address."""
    address = words + block * (K_BLOCK * BITS // 8)
    predicate = live.to(tl.int32)
    if BITS == 4:
        return _load16(address, predicate, True)
    elif BITS == 2:
        return tl.inline_asm_elementwise(
            LOAD8,
            "=r,=r,l,r",
            [address, predicate],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        return (tl.load(address.to(tl.pointer_type(tl.int32)), mask=live),)


@triton.jit
def _load_gguf_row(words, scales, minima, extra, block, live, FORMAT: tl.constexpr,
                COUNT: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Load what a lane needs of one row of a GgufWeight in one block.

    scales, minima: pointers to int32 words of the row's scales and minima. extra: see
    _row_pointers.

    Returns: tuple of the words of both bit planes, the words of scales and of minima, the bases.
    """
    WORDS: tl.constexpr = COUNT // 4 if FORMAT.two_level_scales else COUNT // 2
    values = _load_plane_words(words, block, live, FORMAT.bits)
    if FORMAT.high_bits > 0:
        values = values + _load_plane_words(extra[0], block, live, FORMAT.high_bits)
    for i in tl.static_range(WORDS):
        values = values + (tl.load(scales + block * WORDS + i, mask=live),)
    if ZEROS:
        for i in tl.static_range(WORDS):
            values = values + (tl.load(minima + block * WORDS + i, mask=live),)
    if FORMAT.two_level_scales:
        # Two blocks share a superblock: the second load of a base comes from L1.
        values = values + (tl.load(extra[1] + block // 2, mask=live),)
        if ZEROS:
            values = values + (tl.load(extra[2] + block // 2, mask=live),)
    return values


@triton.jit
def _scale_steps(word, base, FORMAT: tl.constexpr):
    """Multiply the four int8 steps of a word by a base: four fp32 numbers."""
    if FORMAT.decoder == WORD_GGUF:
        PTX: tl.constexpr = steps_ptx()
        return tl.inline_asm_elementwise(
            PTX, "=&f,=&f,=&f,=&f,r,f", [word, base],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        values = ()
        for i in tl.static_range(4):
            values = values + (((word << (24 - i * 8)) >> 24).to(tl.float32) * base,)
        return values


@triton.jit
def _widen(word, FORMAT: tl.constexpr):
    """Widen the two 16-bit numbers of a word to fp32."""
    if FORMAT.decoder == WORD_GGUF:
        PTX: tl.constexpr = widen_ptx(FORMAT.scale_dtype == tl.bfloat16)
        return tl.inline_asm_elementwise(
            PTX, "=&f,=&f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        low = word.to(tl.int16).to(FORMAT.scale_dtype, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(FORMAT.scale_dtype, bitcast=True).to(tl.float32)
        return low, high


@triton.jit
def _gguf_scales(fetched, BASE: tl.constexpr, FORMAT: tl.constexpr, COUNT: tl.constexpr,
                  ZEROS: tl.constexpr):  # fmt: skip
    """Return (scale, minimum) of each group of a row in a block, in fp32."""
    WORDS: tl.constexpr = COUNT // 4 if FORMAT.two_level_scales else COUNT // 2
    LAST: tl.constexpr = BASE + WORDS * (2 if ZEROS else 1)
    scales = ()
    minima = ()
    for i in tl.static_range(WORDS):
        if FORMAT.two_level_scales:
            scales = scales + _scale_steps(fetched[BASE + i], fetched[LAST].to(tl.float32), FORMAT)
        else:
            scales = scales + _widen(fetched[BASE + i], FORMAT)
        if ZEROS:
            word = fetched[BASE + WORDS + i]
            if FORMAT.two_level_scales:
                minima = minima + _scale_steps(word, fetched[LAST + 1].to(tl.float32), FORMAT)
            else:
                minima = minima + _widen(word, FORMAT)
    values = ()
    for i in tl.static_range(COUNT):
        values = values + ((scales[i], minima[i] if ZEROS else scales[i]),)
    return values


@triton.jit
def _plane_codes(fetched, BASE: tl.constexpr, INDEX: tl.constexpr, BITS: tl.constexpr):
    """Return eight codes of a plane, from bit 0 on: those of 32 columns, the INDEX-th of four."""
    EACH: tl.constexpr = 4 // BITS
    word = fetched[BASE + INDEX // EACH]
    if INDEX % EACH > 0:
        word = word >> (INDEX % EACH * 4 * BITS)
    return word


@triton.jit
def _dequantize_gguf_pair(word, high, BIT: tl.constexpr, scale, minimum, FORMAT: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize two neighbouring columns: see dequantize_gguf_code."""
    low = dequantize_gguf_code(word, high, BIT, scale, minimum, FORMAT, tl.float32)
    upper = dequantize_gguf_code(word, high, BIT + 16, scale, minimum, FORMAT, tl.float32)
    return _round_pair(low, upper, DTYPE)


@triton.jit
def _dequantize_gguf_word(fetched, BASE: tl.constexpr, INDEX: tl.constexpr, first, second,
                  FORMAT: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize 32 columns of a GgufWeight's row, the INDEX-th of a block: four pairs.

    BASE: index of the row's first word; first, second: (scale, minimum) of 16 columns each.
    """
    word = _plane_codes(fetched, BASE, INDEX, FORMAT.bits)
    high = word
    if FORMAT.high_bits > 0:
        high = _plane_codes(fetched, BASE + FORMAT.bits, INDEX, FORMAT.high_bits)
    if FORMAT.decoder == WORD_GGUF:
        return dequantize_gguf_ptx(
            word, high, first[0], second[0], first[1], second[1], FORMAT, ZEROS, DTYPE
        )  # fmt: skip
    else:
        m0 = first[1] if ZEROS else 0.0
        m1 = second[1] if ZEROS else 0.0
        return (
            _dequantize_gguf_pair(word, high, 0, first[0], m0, FORMAT, DTYPE),
            _dequantize_gguf_pair(word, high, 4, first[0], m0, FORMAT, DTYPE),
            _dequantize_gguf_pair(word, high, 8, second[0], m1, FORMAT, DTYPE),
            _dequantize_gguf_pair(word, high, 12, second[0], m1, FORMAT, DTYPE),
        )


@triton.jit
def _prepare_scale(scale, zero, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Return a group's scale and zero point as three operands of _dequantize_word.

    zero: None for the middle of the codes.
    """
    BASE: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 1024.0
    if FORMAT.decoder == PAIRED_INT4 or FORMAT.decoder == SPLIT_SCALE_INT4:
        if zero is None:
            MIDDLE: tl.constexpr = MINUS_136 if DTYPE == tl.bfloat16 else MINUS_1032
            offset = tl.full(scale.shape, MIDDLE, tl.int32)
        else:
            offset = duplicate_16bit((-BASE - zero.to(tl.float32)).to(DTYPE))
        if FORMAT.decoder == SPLIT_SCALE_INT4:
            wide = scale.to(tl.float32)
            high = wide.to(tl.bfloat16)
            rest = wide - high.to(tl.float32)
            rest = tl.where(rest == rest, rest, 0.0).to(tl.bfloat16)
            return duplicate_16bit(high), duplicate_16bit(rest), offset
        else:
            return duplicate_16bit(scale), offset, offset
    else:
        wide = scale.to(tl.float32)
        if zero is None:
            middle = tl.full(scale.shape, (1 << FORMAT.bits) / 2.0, tl.float32)
        else:
            middle = zero.to(tl.float32)
        return wide, middle, middle


@triton.jit
def _prepare_fp4_scales(pair, FORMAT: tl.constexpr):
    """Convert the eight e4m3 scales of a row in a block, two words, for _dequantize_word."""
    values = ()
    for i in tl.static_range(2):
        if FORMAT.decoder == FP16_E2M1:
            values = values + tl.inline_asm_elementwise(
                E4M3_TO_FP16_TWICE, "=r,=r,=r,=r,r", [pair[i]],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            for byte in tl.static_range(4):
                code = (pair[i] >> (8 * byte)) & 0xFF
                values = values + (e4m3_to_fp32(code) * 3.32306998946229e35,)
    return values


@triton.jit
def _dequantize_pair(word, BIT: tl.constexpr, scale, zero, factor, FORMAT: tl.constexpr,
                     DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize the codes at bits BIT and BIT + 16 in fp32 and round them to one register."""
    low = dequantize_code(word, BIT, scale, zero, factor, FORMAT, tl.float32)
    high = dequantize_code(word, BIT + 16, scale, zero, factor, FORMAT, tl.float32)
    return _round_pair(low, high, DTYPE)


@triton.jit
def _dequantize_word(word, first, second, factor, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantize a word to pairs in the order of columns: four with 4 bits, two with 8.

    first, second: prepared scales of the word's first and second 16 columns.
    """
    WHOLE: tl.constexpr = DTYPE == tl.bfloat16
    if FORMAT.decoder == SPLIT_SCALE_INT4:
        return tl.inline_asm_elementwise(
            INT4_SPLIT_TO_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            [word, first[0], second[0], first[1], second[1], first[2], second[2]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.decoder == PAIRED_INT4:
        PTX: tl.constexpr = INT4_TO_BF16 if WHOLE else INT4_TO_FP16
        return tl.inline_asm_elementwise(
            PTX, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, first[0], second[0], first[1], second[1]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.decoder == FP16_E2M1:
        PTX: tl.constexpr = E2M1_TO_BF16 if WHOLE else E2M1_TO_FP16
        return tl.inline_asm_elementwise(
            PTX, "=&r,=&r,=&r,=&r,r,r,r,f", [word, first, second, factor],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.decoder == CVT_E4M3:
        PTX: tl.constexpr = E4M3_BF16 if WHOLE else E4M3_FP16
        return tl.inline_asm_elementwise(
            PTX, "=&r,=&r,r,f", [word, first[0]],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.kind == FP4:
        return (
            _dequantize_pair(word, 0, first, 0.0, factor, FORMAT, DTYPE),
            _dequantize_pair(word, 4, first, 0.0, factor, FORMAT, DTYPE),
            _dequantize_pair(word, 8, second, 0.0, factor, FORMAT, DTYPE),
            _dequantize_pair(word, 12, second, 0.0, factor, FORMAT, DTYPE),
        )
    elif FORMAT.bits == 4:
        return (
            _dequantize_pair(word, 0, first[0], first[1], 1.0, FORMAT, DTYPE),
            _dequantize_pair(word, 4, first[0], first[1], 1.0, FORMAT, DTYPE),
            _dequantize_pair(word, 8, second[0], second[1], 1.0, FORMAT, DTYPE),
            _dequantize_pair(word, 12, second[0], second[1], 1.0, FORMAT, DTYPE),
        )
    else:
        return (
            _dequantize_pair(word, 0, first[0], first[1], 1.0, FORMAT, DTYPE),
            _dequantize_pair(word, 8, first[0], first[1], 1.0, FORMAT, DTYPE),
        )


@triton.jit
def _prepare_row_scales(fetched, BASE: tl.constexpr, FORMAT: tl.constexpr, COUNT: tl.constexpr,
                ZEROS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Prepare the COUNT scales of a row, which begin at BASE in the prefetched values."""
    if FORMAT.kind == FP4:
        return _prepare_fp4_scales((fetched[BASE], fetched[BASE + 1]), FORMAT)
    elif FORMAT.kind == GGUF:
        return _gguf_scales(fetched, BASE, FORMAT, COUNT, ZEROS)
    else:
        values = ()
        for i in tl.static_range(COUNT):
            if ZEROS:
                zero = fetched[BASE + COUNT + i]
                prepared = _prepare_scale(fetched[BASE + i], zero, FORMAT, DTYPE)
            else:
                prepared = _prepare_scale(fetched[BASE + i], None, FORMAT, DTYPE)
            values = values + (prepared,)
        return values


@triton.jit
def _load_x(x, block, STEP: tl.constexpr, STEPS: tl.constexpr, BATCH: tl.constexpr):
    """Load the lane's words of x for STEPS k16 steps of a block: (step, eight tokens, half).

    x: pointers to the lane's first word of each eight tokens, a tuple of BATCH.
    """
    values = ()
    for step in tl.static_range(STEPS):
        for j in tl.static_range(BATCH):
            address = x[j] + block * (K_BLOCK // 2) + (STEP + step) * 8
            values = values + (tl.load(address), tl.load(address + 4))
    _pin_loads(STEPS)
    return values


@triton.jit
def _multiply_block(
    acc, fetched, x, after, block, last, factors, FORMAT: tl.constexpr, COUNT: tl.constexpr,
    ZEROS: tl.constexpr, PER: tl.constexpr, TILES: tl.constexpr, BATCH: tl.constexpr,
    STEPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the products of a block of 128 columns: (accumulators, x words of the next k16 steps).

    Args:
        acc: four accumulators for each of TILES x BATCH products.
        fetched: prefetched values of the block, PER for each of 2 TILES rows.
        after: x words of the next STEPS k16 steps, oldest first.
        last: last block of the partition; x is prefetched no further.
    """
    WORDS: tl.constexpr = FORMAT.bits + FORMAT.high_bits
    HALVES: tl.constexpr = 2 if FORMAT.kind == GGUF else 8 // FORMAT.bits
    GROUPS: tl.constexpr = 8 // COUNT
    scales = ()
    for r in tl.static_range(2 * TILES):
        row_scales = _prepare_row_scales(
            fetched, r * PER + WORDS, FORMAT, COUNT, ZEROS, DTYPE
        )  # fmt: skip
        scales = scales + (row_scales,)
    following = tl.minimum(block + 1, last)
    pairs = ()
    for step in tl.static_range(8):
        if step % HALVES == 0:
            pairs = ()
            for r in tl.static_range(2 * TILES):
                first = scales[r][step // GROUPS]
                second = scales[r][(step + HALVES - 1) // GROUPS]
                if FORMAT.kind == GGUF:
                    row_pairs = _dequantize_gguf_word(
                        fetched, r * PER, step // HALVES, first, second, FORMAT, ZEROS, DTYPE
                    )  # fmt: skip
                else:
                    word = fetched[r * PER + step // HALVES]
                    row_pairs = _dequantize_word(word, first, second, factors[r], FORMAT, DTYPE)
                pairs = pairs + (row_pairs,)
        if step % STEPS == 0:
            # x of the next steps is loaded before the products of these.
            now = after
            if step + STEPS < 8:
                after = _load_x(x, block, step + STEPS, STEPS, BATCH)
            else:
                after = _load_x(x, following, 0, STEPS, BATCH)
        products = ()
        for t in tl.static_range(TILES):
            for j in tl.static_range(BATCH):
                low = pairs[2 * t]
                high = pairs[2 * t + 1]
                products = products + (
                    _mma(
                        low[2 * (step % HALVES)], high[2 * (step % HALVES)],
                        low[2 * (step % HALVES) + 1], high[2 * (step % HALVES) + 1],
                        now[2 * ((step % STEPS) * BATCH + j)],
                        now[2 * ((step % STEPS) * BATCH + j) + 1],
                        acc[t * BATCH + j], DTYPE,
                    ),
                )  # fmt: skip
        acc = products
    return acc, after


@triton.jit
def _load_rows(
    words, scales, zeros, extra, block, live, FORMAT: tl.constexpr, COUNT: tl.constexpr,
    ZEROS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Load one block of all rows of a lane: their values, concatenated."""
    values = ()
    for r in tl.static_range(2 * TILES):
        if FORMAT.kind == GGUF:
            row_values = _load_gguf_row(
                words[r], scales[r], zeros[r], extra[r], block, live, FORMAT, COUNT, ZEROS
            )  # fmt: skip
        else:
            row_values = _load_row(
                words[r], scales[r], zeros[r], block, live, FORMAT, COUNT, ZEROS
            )  # fmt: skip
        values = values + row_values
    return values


@triton.jit
def _row_pointers(weight, row, q, FORMAT: tl.constexpr, ZEROS: tl.constexpr):
    """Return the start of a row: (address of its words for lanes of this q, pointer to its scales,
    pointer to its zero points, its factor, extra).

    row: int64. extra: of a GgufWeight, (address of its high words, pointers to its bases and to the
    bases of its minima).
    """
    words = (weight.words + row * weight.row_stride + FORMAT.bits * q).to(tl.int64)
    scale_row = row
    if FORMAT.scale_rows == 0:
        scale_row = row * 0
    elif FORMAT.scale_rows > 1:
        scale_row = (row + weight.scale_row_offset) // FORMAT.scale_rows
    scales = weight.scales + scale_row * weight.scale_stride
    zeros = scales
    if ZEROS:
        zeros = weight.zeros + scale_row * weight.scale_stride
    factor = 1.0
    if FORMAT.kind == FP4:
        factor = tl.load(weight.factors + row) * (128.0 if FORMAT.decoder == FP16_E2M1 else 256.0)
    high = words
    bases = scales
    min_bases = scales
    if FORMAT.high_bits > 0:
        high = (weight.high_words + row * weight.high_stride + FORMAT.high_bits * q).to(tl.int64)
    if FORMAT.two_level_scales:
        bases = weight.bases + row * weight.base_stride
        if ZEROS:
            min_bases = weight.min_bases + row * weight.base_stride
    return words, scales, zeros, factor, (high, bases, min_bases)


@triton.jit
def _store_outputs(
    out_ptr, acc, first, tokens, N, out_stride, q, TILES: tl.constexpr, BATCH: tl.constexpr
):  # fmt: skip
    """Round the accumulators of a partition once and store them. first: the lane's first output."""
    out_ptr += tl.program_id(2).to(tl.int64) * tokens * N
    for t in tl.static_range(TILES):
        for j in tl.static_range(BATCH):
            for c in tl.static_range(4):
                n = first + 16 * t + 8 * (c // 2)
                m = tl.program_id(1) * (8 * BATCH) + 8 * j + 2 * q + c % 2
                ptrs = out_ptr + m.to(tl.int64) * out_stride + n
                value = acc[t * BATCH + j][c].to(out_ptr.dtype.element_ty)
                tl.store(ptrs, value, mask=(n < N) & (m < tokens))


@triton.constexpr_function
def _values_per_row(form, count, zeros):
    """Return the registers of one row's prefetched words, scales, zeros or minima, and bases."""
    scales = count
    bases = 0
    if form.kind == FP4:
        scales = 2
    elif form.kind == GGUF:
        scales = count // 4 if form.two_level_scales else count // 2
        bases = int(form.two_level_scales)
    return form.bits + form.high_bits + (scales + bases) * (2 if zeros else 1)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def quantized_gemv_kernel(
    x_ptr, weight, out_ptr, tokens, N, blocks, x_stride, out_stride, FORMAT: tl.constexpr,
    COUNT: tl.constexpr, TILES: tl.constexpr, BATCH: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute 16 x TILES x WARPS outputs of 8 x BATCH tokens over one split-K partition.

    out [parts, tokens, N], rows out_stride apart.

    Args:
        x_ptr: words of two columns, x_stride words per row.
        blocks: blocks of 128 columns per partition. REST: blocks % AHEAD.
        COUNT: scales of a row in a block.
        STEPS: k16 steps whose x is prefetched.
        AHEAD: blocks of the weight that are prefetched.
    """
    pdl_start()
    ZEROS: tl.constexpr = weight.zeros is not None
    PER: tl.constexpr = _values_per_row(FORMAT, COUNT, ZEROS)
    thread = tl.arange(0, 32 * WARPS)
    g = thread % 32 // 4
    q = thread % 4
    begin = tl.program_id(2) * blocks
    end = begin + blocks
    first = tl.program_id(0) * (16 * TILES * WARPS) + thread // 32 * (16 * TILES) + g
    words = ()
    scales = ()
    zeros = ()
    factors = ()
    extra = ()
    for r in tl.static_range(2 * TILES):
        row = tl.minimum(first + 8 * r, N - 1).to(tl.int64)  # repeat the last row past the end
        pointers = _row_pointers(weight, row, q, FORMAT, ZEROS)
        words = words + (pointers[0],)
        scales = scales + (pointers[1],)
        zeros = zeros + (pointers[2],)
        factors = factors + (pointers[3],)
        extra = extra + (pointers[4],)
    columns = ()
    for j in tl.static_range(BATCH):
        m = tl.minimum(tl.program_id(1) * (8 * BATCH) + 8 * j + g, tokens - 1)
        columns = columns + (x_ptr + m.to(tl.int64) * x_stride + q,)
    acc = ()
    zero = tl.zeros((32 * WARPS,), tl.float32)
    for _ in tl.static_range(TILES * BATCH):
        acc = acc + ((zero, zero, zero, zero),)
    # Prologue: fill all stages of the register pipeline.
    stages = ()
    for i in tl.static_range(AHEAD):
        fetched = _load_rows(
            words, scales, zeros, extra, begin + i, begin + i < end, FORMAT, COUNT, ZEROS, TILES
        )  # fmt: skip
        stages = stages + (fetched,)
    after = _load_x(columns, begin, 0, STEPS, BATCH)
    for block in range(begin, end - REST, AHEAD):
        refilled = ()
        for i in tl.static_range(AHEAD):
            acc, after = _multiply_block(
                acc, stages[i], columns, after, block + i, end - 1, factors,
                FORMAT, COUNT, ZEROS, PER, TILES, BATCH, STEPS, DTYPE,
            )  # fmt: skip
            later = block + i + AHEAD
            # Refill the stage that was just read: its words arrive AHEAD blocks later.
            fetched = _load_rows(
                words, scales, zeros, extra, later, later < end, FORMAT, COUNT, ZEROS, TILES
            )  # fmt: skip
            refilled = refilled + (fetched,)
            _pin_loads(AHEAD)
        stages = refilled
    # Drain: the last REST blocks are loaded already.
    for i in tl.static_range(REST):
        acc, after = _multiply_block(
            acc, stages[i], columns, after, end - REST + i, end - 1, factors,
            FORMAT, COUNT, ZEROS, PER, TILES, BATCH, STEPS, DTYPE,
        )  # fmt: skip
    _store_outputs(out_ptr, acc, first, tokens, N, out_stride, q, TILES, BATCH)
