# mypy: ignore-errors
"""The kernel of linear with a packed weight for few tokens: every warp works alone.

A tensor here has one element per thread. A lane loads the words of its own rows from global memory,
16 bytes at a time and AHEAD blocks of 128 columns ahead, decodes them in registers and gives them
to mma.sync m16n8k16 as the left operand. Nothing passes through shared memory, and warps never
wait for each other.

Fragments are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point types":
with g = lane / 4 and q = lane % 4,

    A   a0: row g, columns 2q and 2q + 1     a1: row g + 8, the same     a2, a3: columns 8 further
    B   b0: rows 2q and 2q + 1 of column g   b1: rows 8 further
    C   c0, c1: row g, columns 2q, 2q + 1    c2, c3: row g + 8

A's rows are outputs, columns of B are tokens. Those past the end are copies of the last one: they
are computed and not stored, and columns of a product do not meet.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.dequantize import (
    BY_WORD,
    E2M1,
    E2M1_BF16,
    E2M1_FP16,
    E4M3,
    E4M3_PAIRS,
    FP4,
    GGUF,
    HIGH,
    MINUS_136,
    MINUS_1032,
    SAME,
    SAME_BF16,
    SAME_FP16,
    SPLIT,
    SPLIT_BF16,
    STEPS,
    decode,
    decode_e4m3,
    decode_gguf,
    twice,
)
from lockstep.kernels.formats.weights.dequantize_tile import BLOCK, gguf_pairs
from lockstep.kernels.formats.weights.gguf_ptx import halves_text, steps_text

LOAD16 = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.b32 live, $5, 0;
    @live ld.global.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];
}
""")
"""16 bytes at an address, or nothing. L1 keeps the line: with 8 bits a lane's next load has it."""
LOAD16_ONCE = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.b32 live, $5, 0;
    @live ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];
}
""")
"""The same where a load takes whole sectors."""
LOAD8 = tl.constexpr("""
{
    .reg .pred live;
    setp.ne.b32 live, $3, 0;
    @live ld.global.v2.b32 {$0, $1}, [$2];
}
""")
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
"""Opens a block: the four numbers of a word of e4m3 times $3, in e, f, g, i."""


def _mma_text(kind: str) -> tl.constexpr:
    """D = A B + C of 16 x 8 x 16; A and B are of this kind, C and D are fp32."""
    return tl.constexpr(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )


def _pair_text(kind: str) -> tl.constexpr:
    """Two numbers of fp32, rounded -> one word."""
    return tl.constexpr(f"cvt.rn.{kind}x2.f32 $0, $2, $1;")


def _e4m3_text(kind: str) -> tl.constexpr:
    """A word of e4m3 and its scale in fp32 -> its two pairs of this kind."""
    return tl.constexpr(
        E4M3_TIMES_SCALE
        + f"""
    cvt.rn.{kind}x2.f32 $0, g, e;
    cvt.rn.{kind}x2.f32 $1, i, f;
}}
"""
    )


MMA_BF16 = _mma_text("bf16")
MMA_FP16 = _mma_text("f16")
PAIR_BF16 = _pair_text("bf16")
PAIR_FP16 = _pair_text("f16")
E4M3_BF16 = _e4m3_text("bf16")
E4M3_FP16 = _e4m3_text("f16")


@triton.jit
def _load16(place, live, ONCE: tl.constexpr):
    """Four words at each address of int64; unset where not live, which is the same for all."""
    TEXT: tl.constexpr = LOAD16_ONCE if ONCE else LOAD16
    return tl.inline_asm_elementwise(
        TEXT, "=r,=r,=r,=r,l,r", [place, live],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _pin(number):
    """Loads that stand before this are made before what loads behind it. ptxas would sink those of
    a whole iteration to its end, where the next one waits for them. No instruction is left of it.
    """
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [tl.full((32,), number, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _pair(low, high, DTYPE: tl.constexpr):
    """Two numbers of fp32 -> a word, each rounded once."""
    TEXT: tl.constexpr = PAIR_BF16 if DTYPE == tl.bfloat16 else PAIR_FP16
    return tl.inline_asm_elementwise(
        TEXT, "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _product(a0, a1, a2, a3, b0, b1, c, DTYPE: tl.constexpr):
    """One m16n8k16 added to c, a tuple of four: the matrix unit's own addition."""
    TEXT: tl.constexpr = MMA_BF16 if DTYPE == tl.bfloat16 else MMA_FP16
    return tl.inline_asm_elementwise(
        TEXT, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _fetch(words, scales, zeros, block, live, FORM: tl.constexpr, COUNT: tl.constexpr,
           ZEROS: tl.constexpr):  # fmt: skip
    """What a lane needs of one row in one block: a tuple of words, then scales, then zeros.

    words: int64 addresses of the lane's first word of the row; scales, zeros: pointers to the row's
    first ones, zeros only where ZEROS. block: which one of 128 columns. Nothing is read where not
    live. COUNT: scales of a block.
    """
    BITS: tl.constexpr = FORM[1]
    place = words + block * (BLOCK * BITS // 8)
    wanted = live.to(tl.int32)
    found = _load16(place, wanted, BITS == 4)
    if BITS == 8:
        found = found + _load16(place + 16, wanted, False)
    if FORM[0] == FP4:
        at = scales.to(tl.int64) + block * COUNT
        found = found + tl.inline_asm_elementwise(
            LOAD8, "=r,=r,l,r", [at, wanted], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        if FORM[2] == 0:
            first = block * 0
        elif FORM[2] >= BLOCK:
            first = block // (FORM[2] // BLOCK)
        else:
            first = block * COUNT
        for i in tl.static_range(COUNT):
            found = found + (tl.load(scales + first + i, mask=live),)
        if ZEROS:
            for i in tl.static_range(COUNT):
                found = found + (tl.load(zeros + first + i, mask=live),)
    return found


@triton.jit
def _plane_words(words, block, live, BITS: tl.constexpr):
    """Load a lane's words of one plane in one block: a tuple of BITS. words: int64 addresses."""
    place = words + block * (BLOCK * BITS // 8)
    wanted = live.to(tl.int32)
    if BITS == 4:
        return _load16(place, wanted, True)
    elif BITS == 2:
        return tl.inline_asm_elementwise(
            LOAD8, "=r,=r,l,r", [place, wanted], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        return (tl.load(place.to(tl.pointer_type(tl.int32)), mask=live),)


@triton.jit
def _fetch_gguf(words, scales, minima, more, block, live, FORM: tl.constexpr,
                COUNT: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """Load what a lane needs of one row of a GgufWeight in one block: a tuple of the words of both
    planes, the words of scales and of minima, and the bases.

    scales, minima: pointers to int32 words of the row's numbers. more: see _row.
    """
    WORDS: tl.constexpr = COUNT // 4 if FORM[STEPS] else COUNT // 2
    found = _plane_words(words, block, live, FORM[1])
    if FORM[HIGH] > 0:
        found = found + _plane_words(more[0], block, live, FORM[HIGH])
    for i in tl.static_range(WORDS):
        found = found + (tl.load(scales + block * WORDS + i, mask=live),)
    if ZEROS:
        for i in tl.static_range(WORDS):
            found = found + (tl.load(minima + block * WORDS + i, mask=live),)
    if FORM[STEPS]:
        # Two blocks share a superblock: the second load of a base comes from L1.
        found = found + (tl.load(more[1] + block // 2, mask=live),)
        if ZEROS:
            found = found + (tl.load(more[2] + block // 2, mask=live),)
    return found


@triton.jit
def _steps(word, base, FORM: tl.constexpr):
    """Multiply the four int8 of a word by a base: a tuple of four, in fp32."""
    if FORM[6] == BY_WORD:
        TEXT: tl.constexpr = steps_text()
        return tl.inline_asm_elementwise(
            TEXT, "=&f,=&f,=&f,=&f,r,f", [word, base],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = ()
        for i in tl.static_range(4):
            found = found + (((word << (24 - i * 8)) >> 24).to(tl.float32) * base,)
        return found


@triton.jit
def _two_halves(word, FORM: tl.constexpr):
    """Widen the two numbers of 16 bits in a word: a tuple of two, in fp32."""
    if FORM[6] == BY_WORD:
        TEXT: tl.constexpr = halves_text(FORM[5] == tl.bfloat16)
        return tl.inline_asm_elementwise(
            TEXT, "=&f,=&f,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        low = word.to(tl.int16).to(FORM[5], bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(FORM[5], bitcast=True).to(tl.float32)
        return low, high


@triton.jit
def _numbers_gguf(slot, BASE: tl.constexpr, FORM: tl.constexpr, COUNT: tl.constexpr,
                  ZEROS: tl.constexpr):  # fmt: skip
    """Return (scale, minimum) of each group of a row in a block, in fp32."""
    WORDS: tl.constexpr = COUNT // 4 if FORM[STEPS] else COUNT // 2
    LAST: tl.constexpr = BASE + WORDS * (2 if ZEROS else 1)
    scales = ()
    minima = ()
    for i in tl.static_range(WORDS):
        if FORM[STEPS]:
            scales = scales + _steps(slot[BASE + i], slot[LAST].to(tl.float32), FORM)
        else:
            scales = scales + _two_halves(slot[BASE + i], FORM)
        if ZEROS:
            word = slot[BASE + WORDS + i]
            if FORM[STEPS]:
                minima = minima + _steps(word, slot[LAST + 1].to(tl.float32), FORM)
            else:
                minima = minima + _two_halves(word, FORM)
    found = ()
    for i in tl.static_range(COUNT):
        found = found + ((scales[i], minima[i] if ZEROS else scales[i]),)
    return found


@triton.jit
def _codes(slot, BASE: tl.constexpr, INDEX: tl.constexpr, BITS: tl.constexpr):
    """Return eight codes of a plane, from bit 0 on: those of 32 columns, the INDEX-th of four."""
    EACH: tl.constexpr = 4 // BITS
    word = slot[BASE + INDEX // EACH]
    if INDEX % EACH > 0:
        word = word >> (INDEX % EACH * 4 * BITS)
    return word


@triton.jit
def _pair_gguf(word, high, BIT: tl.constexpr, scale, minimum, FORM: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize two neighbouring columns: see _slow and decode_gguf."""
    low = decode_gguf(word, high, BIT, scale, minimum, FORM, tl.float32)
    upper = decode_gguf(word, high, BIT + 16, scale, minimum, FORM, tl.float32)
    return _pair(low, upper, DTYPE)


@triton.jit
def _decoded_gguf(slot, BASE: tl.constexpr, INDEX: tl.constexpr, first, second,
                  FORM: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Dequantize 32 columns of a GgufWeight's row, the INDEX-th of a block: four pairs.

    BASE: where the row's words begin in the slot; first, second: numbers of 16 columns each.
    """
    word = _codes(slot, BASE, INDEX, FORM[1])
    high = word
    if FORM[HIGH] > 0:
        high = _codes(slot, BASE + FORM[1], INDEX, FORM[HIGH])
    if FORM[6] == BY_WORD:
        return gguf_pairs(
            word, high, first[0], second[0], first[1], second[1], FORM, ZEROS, DTYPE
        )  # fmt: skip
    else:
        m0 = first[1] if ZEROS else 0.0
        m1 = second[1] if ZEROS else 0.0
        return (
            _pair_gguf(word, high, 0, first[0], m0, FORM, DTYPE),
            _pair_gguf(word, high, 4, first[0], m0, FORM, DTYPE),
            _pair_gguf(word, high, 8, second[0], m1, FORM, DTYPE),
            _pair_gguf(word, high, 12, second[0], m1, FORM, DTYPE),
        )


@triton.jit
def _prepared(scale, zero, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """A group's scale and zero as `_decoded` takes them: three numbers. zero: None for the middle
    of the codes."""
    BASE: tl.constexpr = 128.0 if DTYPE == tl.bfloat16 else 1024.0
    if FORM[6] == SAME or FORM[6] == SPLIT:
        if zero is None:
            MIDDLE: tl.constexpr = MINUS_136 if DTYPE == tl.bfloat16 else MINUS_1032
            offset = tl.full(scale.shape, MIDDLE, tl.int32)
        else:
            offset = twice((-BASE - zero.to(tl.float32)).to(DTYPE))
        if FORM[6] == SPLIT:
            wide = scale.to(tl.float32)
            high = wide.to(tl.bfloat16)
            rest = wide - high.to(tl.float32)
            rest = tl.where(rest == rest, rest, 0.0).to(tl.bfloat16)
            return twice(high), twice(rest), offset
        else:
            return twice(scale), offset, offset
    else:
        wide = scale.to(tl.float32)
        if zero is None:
            middle = tl.full(scale.shape, (1 << FORM[1]) / 2.0, tl.float32)
        else:
            middle = zero.to(tl.float32)
        return wide, middle, middle


@triton.jit
def _prepared_fp4(pair, FORM: tl.constexpr):
    """The eight scales of a row in a block, in two words -> each as `_decoded` takes them."""
    found = ()
    for i in tl.static_range(2):
        if FORM[6] == E2M1:
            found = found + tl.inline_asm_elementwise(
                E4M3_PAIRS, "=r,=r,=r,=r,r", [pair[i]],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            for byte in tl.static_range(4):
                code = (pair[i] >> (8 * byte)) & 0xFF
                found = found + (decode_e4m3(code) * 3.32306998946229e35,)
    return found


@triton.jit
def _slow(word, BIT: tl.constexpr, scale, zero, factor, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """The pair of codes from bit BIT on, and from 16 bits further: fp32, rounded to a word."""
    low = decode(word, BIT, scale, zero, factor, FORM, tl.float32)
    high = decode(word, BIT + 16, scale, zero, factor, FORM, tl.float32)
    return _pair(low, high, DTYPE)


@triton.jit
def _decoded(word, first, second, factor, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """A word's pairs, in the order of columns: four with 4 bits, two with 8.

    first, second: of the word's first and its second 16 columns, as prepared.
    """
    WHOLE: tl.constexpr = DTYPE == tl.bfloat16
    if FORM[6] == SPLIT:
        return tl.inline_asm_elementwise(
            SPLIT_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
            [word, first[0], second[0], first[1], second[1], first[2], second[2]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORM[6] == SAME:
        TEXT: tl.constexpr = SAME_BF16 if WHOLE else SAME_FP16
        return tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, first[0], second[0], first[1], second[1]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORM[6] == E2M1:
        TEXT: tl.constexpr = E2M1_BF16 if WHOLE else E2M1_FP16
        return tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,r,r,r,f", [word, first, second, factor],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORM[6] == E4M3:
        TEXT: tl.constexpr = E4M3_BF16 if WHOLE else E4M3_FP16
        return tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,r,f", [word, first[0]],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    elif FORM[0] == FP4:
        return (
            _slow(word, 0, first, 0.0, factor, FORM, DTYPE),
            _slow(word, 4, first, 0.0, factor, FORM, DTYPE),
            _slow(word, 8, second, 0.0, factor, FORM, DTYPE),
            _slow(word, 12, second, 0.0, factor, FORM, DTYPE),
        )
    elif FORM[1] == 4:
        return (
            _slow(word, 0, first[0], first[1], 1.0, FORM, DTYPE),
            _slow(word, 4, first[0], first[1], 1.0, FORM, DTYPE),
            _slow(word, 8, second[0], second[1], 1.0, FORM, DTYPE),
            _slow(word, 12, second[0], second[1], 1.0, FORM, DTYPE),
        )
    else:
        return (
            _slow(word, 0, first[0], first[1], 1.0, FORM, DTYPE),
            _slow(word, 8, first[0], first[1], 1.0, FORM, DTYPE),
        )


@triton.jit
def _row_scales(slot, BASE: tl.constexpr, FORM: tl.constexpr, COUNT: tl.constexpr,
                ZEROS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """The scales of a row that stand in a slot from BASE on, prepared: a tuple of COUNT."""
    if FORM[0] == FP4:
        return _prepared_fp4((slot[BASE], slot[BASE + 1]), FORM)
    elif FORM[0] == GGUF:
        return _numbers_gguf(slot, BASE, FORM, COUNT, ZEROS)
    else:
        found = ()
        for i in tl.static_range(COUNT):
            if ZEROS:
                own = _prepared(slot[BASE + i], slot[BASE + COUNT + i], FORM, DTYPE)
            else:
                own = _prepared(slot[BASE + i], None, FORM, DTYPE)
            found = found + (own,)
        return found


@triton.jit
def _columns(x, block, STEP: tl.constexpr, STEPS: tl.constexpr, BATCH: tl.constexpr):
    """The lane's words of x in STEPS groups of 16 columns of a block: [step, eight tokens, half].

    x: pointers to the lane's first word of each eight tokens, a tuple of BATCH.
    """
    found = ()
    for step in tl.static_range(STEPS):
        for j in tl.static_range(BATCH):
            place = x[j] + block * (BLOCK // 2) + (STEP + step) * 8
            found = found + (tl.load(place), tl.load(place + 4))
    _pin(STEPS)
    return found


@triton.jit
def _block(
    total, slot, x, after, block, last, factors, FORM: tl.constexpr, COUNT: tl.constexpr,
    ZEROS: tl.constexpr, PER: tl.constexpr, TILES: tl.constexpr, BATCH: tl.constexpr,
    STEPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A block of 128 columns: -> the sums, and x's words of the columns that come after.

    total: four numbers for each of TILES x BATCH products; slot: what was fetched, PER for each of
    2 TILES rows; after: x's words of the next STEPS groups of 16 columns, oldest first.
    """
    WORDS: tl.constexpr = FORM[1] + FORM[HIGH]
    HALVES: tl.constexpr = 2 if FORM[0] == GGUF else 8 // FORM[1]
    GROUPS: tl.constexpr = 8 // COUNT
    scales = ()
    for r in tl.static_range(2 * TILES):
        scales = scales + (_row_scales(slot, r * PER + WORDS, FORM, COUNT, ZEROS, DTYPE),)
    following = tl.minimum(block + 1, last)
    pairs = ()
    for step in tl.static_range(8):
        if step % HALVES == 0:
            pairs = ()
            for r in tl.static_range(2 * TILES):
                first = scales[r][step // GROUPS]
                second = scales[r][(step + HALVES - 1) // GROUPS]
                if FORM[0] == GGUF:
                    own = _decoded_gguf(
                        slot, r * PER, step // HALVES, first, second, FORM, ZEROS, DTYPE
                    )  # fmt: skip
                else:
                    word = slot[r * PER + step // HALVES]
                    own = _decoded(word, first, second, factors[r], FORM, DTYPE)
                pairs = pairs + (own,)
        if step % STEPS == 0:
            now = after
            if step + STEPS < 8:
                after = _columns(x, block, step + STEPS, STEPS, BATCH)
            else:
                after = _columns(x, following, 0, STEPS, BATCH)
        made = ()
        for t in tl.static_range(TILES):
            for j in tl.static_range(BATCH):
                low = pairs[2 * t]
                high = pairs[2 * t + 1]
                made = made + (
                    _product(
                        low[2 * (step % HALVES)], high[2 * (step % HALVES)],
                        low[2 * (step % HALVES) + 1], high[2 * (step % HALVES) + 1],
                        now[2 * ((step % STEPS) * BATCH + j)],
                        now[2 * ((step % STEPS) * BATCH + j) + 1],
                        total[t * BATCH + j], DTYPE,
                    ),
                )  # fmt: skip
        total = made
    return total, after


@triton.jit
def _slot(
    words, scales, zeros, more, block, live, FORM: tl.constexpr, COUNT: tl.constexpr,
    ZEROS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """_fetch of all rows of a lane, one behind the other."""
    found = ()
    for r in tl.static_range(2 * TILES):
        if FORM[0] == GGUF:
            own = _fetch_gguf(
                words[r], scales[r], zeros[r], more[r], block, live, FORM, COUNT, ZEROS
            )  # fmt: skip
        else:
            own = _fetch(words[r], scales[r], zeros[r], block, live, FORM, COUNT, ZEROS)
        found = found + own
    return found


@triton.jit
def _row(weight, row, q, FORM: tl.constexpr, ZEROS: tl.constexpr):
    """Where a row begins: its words for lanes of this q, its scales and its zeros; and its factor.
    row: int64. Of a GgufWeight also (address of its high words, its bases, its minima's bases)."""
    words = (weight[0] + row * weight[4] + FORM[1] * q).to(tl.int64)
    lines = row
    if FORM[3] == 0:
        lines = row * 0
    elif FORM[3] > 1:
        lines = (row + weight[6]) // FORM[3]
    scales = weight[1] + lines * weight[5]
    zeros = scales
    if ZEROS:
        zeros = weight[2] + lines * weight[5]
    factor = 1.0
    if FORM[0] == FP4:
        factor = tl.load(weight[3] + row) * (128.0 if FORM[6] == E2M1 else 256.0)
    high = words
    bases = scales
    min_bases = scales
    if FORM[HIGH] > 0:
        high = (weight[7] + row * weight[8] + FORM[HIGH] * q).to(tl.int64)
    if FORM[STEPS]:
        bases = weight[9] + row * weight[11]
        if ZEROS:
            min_bases = weight[10] + row * weight[11]
    return words, scales, zeros, factor, (high, bases, min_bases)


@triton.jit
def _store(
    out, total, first, tokens, N, out_stride, q, TILES: tl.constexpr, BATCH: tl.constexpr
):  # fmt: skip
    """Stores the sums of a segment, rounded once. first: the lane's first output."""
    out += tl.program_id(2).to(tl.int64) * tokens * N
    for t in tl.static_range(TILES):
        for j in tl.static_range(BATCH):
            for c in tl.static_range(4):
                n = first + 16 * t + 8 * (c // 2)
                m = tl.program_id(1) * (8 * BATCH) + 8 * j + 2 * q + c % 2
                place = out + m.to(tl.int64) * out_stride + n
                value = total[t * BATCH + j][c].to(out.dtype.element_ty)
                tl.store(place, value, mask=(n < N) & (m < tokens))


@triton.constexpr_function
def _held(form, count, zeros):
    """Return how many registers a slot has for one row: words, scales, zeros or minima, bases."""
    scales = count
    bases = 0
    if form[0] == FP4:
        scales = 2
    elif form[0] == GGUF:
        scales = count // 4 if form[STEPS] else count // 2
        bases = int(form[STEPS])
    return form[1] + form[HIGH] + (scales + bases) * (2 if zeros else 1)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def lanes_kernel(
    x, weight, out, tokens, N, blocks, x_stride, out_stride, FORM: tl.constexpr,
    COUNT: tl.constexpr, TILES: tl.constexpr, BATCH: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, REST: tl.constexpr, WARPS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One segment of 16 x TILES x WARPS outputs and 8 x BATCH tokens: of out [parts, tokens, N],
    rows out_stride apart.

    blocks: of 128 columns per segment; REST: what is left of them by AHEAD. COUNT: scales of a row
    in a block. STEPS: groups of 16 columns whose x is loaded ahead. x: pairs, x_stride pairs per
    row.
    """
    ZEROS: tl.constexpr = weight[2] is not None
    PER: tl.constexpr = _held(FORM, COUNT, ZEROS)
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
    more = ()
    for r in tl.static_range(2 * TILES):
        row = tl.minimum(first + 8 * r, N - 1).to(tl.int64)
        own = _row(weight, row, q, FORM, ZEROS)
        words = words + (own[0],)
        scales = scales + (own[1],)
        zeros = zeros + (own[2],)
        factors = factors + (own[3],)
        more = more + (own[4],)
    columns = ()
    for j in tl.static_range(BATCH):
        m = tl.minimum(tl.program_id(1) * (8 * BATCH) + 8 * j + g, tokens - 1)
        columns = columns + (x + m.to(tl.int64) * x_stride + q,)
    total = ()
    zero = tl.zeros((32 * WARPS,), tl.float32)
    for _ in tl.static_range(TILES * BATCH):
        total = total + ((zero, zero, zero, zero),)
    slots = ()
    for i in tl.static_range(AHEAD):
        live = begin + i < end
        slot = _slot(words, scales, zeros, more, begin + i, live, FORM, COUNT, ZEROS, TILES)
        slots = slots + (slot,)
    after = _columns(columns, begin, 0, STEPS, BATCH)
    for block in range(begin, end - REST, AHEAD):
        fresh = ()
        for i in tl.static_range(AHEAD):
            total, after = _block(
                total, slots[i], columns, after, block + i, end - 1, factors,
                FORM, COUNT, ZEROS, PER, TILES, BATCH, STEPS, DTYPE,
            )  # fmt: skip
            later = block + i + AHEAD
            live = later < end
            slot = _slot(words, scales, zeros, more, later, live, FORM, COUNT, ZEROS, TILES)
            fresh = fresh + (slot,)
            _pin(AHEAD)
        slots = fresh
    for i in tl.static_range(REST):
        total, after = _block(
            total, slots[i], columns, after, end - REST + i, end - 1, factors,
            FORM, COUNT, ZEROS, PER, TILES, BATCH, STEPS, DTYPE,
        )  # fmt: skip
    _store(out, total, first, tokens, N, out_stride, q, TILES, BATCH)
