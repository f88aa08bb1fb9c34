# mypy: ignore-errors
"""The kernel of linear with a packed weight on Hopper, in Gluon: blocks pass through a ring.

A program is 16 or 32 outputs for each of its warps, some tokens, and one segment of K. One warp has
the copy engine bring blocks of 128 columns, of words and of x, into the slots of a ring in shared
memory: the barrier `full` says that a block is there, `empty` that its readers have left. Loads
that are under way count as read only behind a fence: without it the copy engine overtakes them. The
others unpack 64 columns into registers, where they lie as a product's left operand does, and
multiply: by mma.sync, or by wgmma, whose product of the 64 columns before runs meanwhile.

Words of a lane are those of formats/weights/word_order.py: what a word holds of two columns side
by side becomes one register, and no number passes from lane to lane.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lockstep.kernels.device.dequantize import (
    FP4,
    FP8,
    IN_PARTS,
    SPLIT,
    twice,
)
from lockstep.kernels.device.gluon_compat import barrier
from lockstep.kernels.linear.quantized_ptx import (
    EVEN_AND_ODD_FP8,
    FP4_BF16,
    FP4_FP16,
    FP4_IN_PARTS,
    FP8_BF16,
    FP8_FP16,
    INT4_BF16,
    INT4_FP16,
    INT8_BF16,
    INT8_FP16,
    PAIRS_OF_FP8,
    PARTS,
    SPLIT_BF16,
    TAKES_FP4,
    TAKES_FP4_IN_PARTS,
    TAKES_FP8,
    TAKES_INT4,
    TAKES_INT8,
    TAKES_SPLIT,
    TAKES_WIDE,
    TWICE_BF16,
    TWICE_FP16,
    WIDE_BF16,
    WIDE_FP16,
    WRONG,
)

BLOCK = gl.constexpr(128)
"""Columns that _order keeps together; a slot has one such block or two."""
HALF = gl.constexpr(64)
"""Columns of a product: a row of x that the swizzle of 128 bytes covers."""
LOADING = gl.constexpr(24)
"""Registers of a thread that only starts copies: the least that there are."""


@gluon.constexpr_function
def words_layout(columns, bits, warps, rows):
    """How lanes hold words [rows, W] of so many columns, as a product's left operand needs them."""
    each = columns * bits // 128
    registers = [[0, 1 << i] for i in range(each.bit_length() - 1)] + [[8, 0]]
    lanes = [[0, each], [0, 2 * each], [1, 0], [2, 0], [4, 0]]
    groups = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    above = range(warps.bit_length() + 3, rows.bit_length() - 1)
    registers += [[1 << i, 0] for i in above]
    return gl.DistributedLinearLayout(registers, lanes, groups, [], [rows, 4 * each])


@gluon.constexpr_function
def rows_layout(bits, warps, rows):
    """How those lanes hold what belongs to a row."""
    return gl.SliceLayout(1, words_layout(64, bits, warps, rows))


@gluon.constexpr_function
def sums_layout(warps, tokens, sync):
    """How warps hold sums [16 warps, tokens]: mma.sync's, else wgmma's."""
    if sync:
        return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, tokens, 16])


@gluon.constexpr_function
def copies(dtype, count):
    """The types of as many results."""
    return (dtype,) * count


@gluon.jit
def _halves(words, layout: gl.constexpr):
    """Words of a block -> those of its first and of its last 64 columns."""
    ROWS: gl.constexpr = words.shape[0]
    EACH: gl.constexpr = words.shape[1] // 8
    low, high = gl.split(words.reshape([ROWS, 4, 2, EACH]).permute((0, 1, 3, 2)))
    low = gl.convert_layout(low.reshape([ROWS, 4 * EACH]), layout, assert_trivial=True)
    high = gl.convert_layout(high.reshape([ROWS, 4 * EACH]), layout, assert_trivial=True)
    return low, high


@gluon.jit
def fetch(scales, zeros, block, live, FORM: gl.constexpr):
    """Numbers of a block beside its words, per output, as they lie: two tensors, or one twice."""
    if FORM[0] == FP4:
        return (
            gl.load(scales + 2 * block, mask=live, other=0),
            gl.load(scales + 2 * block + 1, mask=live, other=0),
        )
    else:
        if FORM[2] == 0:
            place = block * 0
        else:
            place = block // (FORM[2] // BLOCK)
        scale = gl.load(scales + place, mask=live, other=0.0)
        zero = scale
        if zeros is not None:
            zero = gl.load(zeros + place, mask=live, other=0.0)
        return scale, zero


@gluon.jit
def _twice(number, DTYPE: gl.constexpr):
    """Numbers of fp32, rounded -> words that hold them in both halves."""
    TEXT: gl.constexpr = TWICE_BF16 if DTYPE == gl.bfloat16 else TWICE_FP16
    return gl.inline_asm_elementwise(TEXT, "=r,f", [number], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _nudged(factor, hi, lo, found, STEPS: gl.constexpr):
    """lo so many steps of its last bit on, where it serves the factor, else `found`."""
    tried = lo + STEPS * 0x10001
    wrong = gl.inline_asm_elementwise(
        WRONG, "=&r,f,r,r", [factor, hi, tried], dtype=gl.int32, is_pure=True, pack=1
    )
    return gl.where(wrong == 0, tried, found)


@gluon.jit
def parts_of(factor, FORM: gl.constexpr):
    """Factors as assembly takes them: hi and lo of bf16, each twice in a word; or one, twice."""
    if FORM[6] == IN_PARTS:
        factor = factor * 6.646139978924579e35  # 2^119
        hi = _twice(factor, gl.bfloat16)
        lo = _twice(factor - (hi & -65536).to(gl.float32, bitcast=True), gl.bfloat16)
        found = lo
        for i in gl.static_range(5):  # the last one that serves: -2, 2, -1, 1, 0
            found = _nudged(factor, hi, lo, found, (2 - i // 2) * (i % 2 * 2 - 1))
        return hi, found
    else:
        return factor * 64.0, factor * 64.0


@gluon.jit
def _ready(found, factor, PART: gl.constexpr, FORM: gl.constexpr, ZEROS: gl.constexpr,
           DTYPE: gl.constexpr):  # fmt: skip
    """What assembly takes of fetch's numbers for one half of a block: [ROWS, 1] each."""
    if FORM[0] == FP4:
        PAIRS: gl.constexpr = EVEN_AND_ODD_FP8 if FORM[6] == IN_PARTS else PAIRS_OF_FP8
        first, second = gl.inline_asm_elementwise(
            PAIRS, "=&r,=&r,r", [found[PART]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        return first[:, None], second[:, None], factor[0][:, None], factor[1][:, None]
    elif FORM[0] == FP8:
        return (found[0][:, None],)
    elif FORM[6] == 0:
        MIDDLE_CODE: gl.constexpr = (1 << FORM[1]) / 2.0
        zero = gl.full(found[0].shape, MIDDLE_CODE, gl.float32, found[0].type.layout)
        if ZEROS:
            zero = found[1].to(gl.float32)
        return found[0].to(gl.float32)[:, None], (8388608.0 + zero)[:, None]
    else:
        zero = gl.full(found[0].shape, 8.0, gl.float32, found[0].type.layout)
        if ZEROS:
            zero = found[1].to(gl.float32)
        if FORM[6] == SPLIT:
            offset = _twice(zero * (-1 / 64), DTYPE)
            high, low = gl.inline_asm_elementwise(
                PARTS, "=&r,=&r,h", [found[0]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )
            return high[:, None], offset[:, None], low[:, None]
        else:
            BASE: gl.constexpr = 128.0 if DTYPE == gl.bfloat16 else 1024.0
            return twice(found[0])[:, None], _twice(-BASE - zero, DTYPE)[:, None]


@gluon.jit
def _of_4_bits(words, ready, FORM: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Words of 64 columns, two for each lane and output, unpacked: [ROWS, 64]."""
    if FORM[6] == IN_PARTS:
        v = gl.inline_asm_elementwise(
            FP4_IN_PARTS, TAKES_FP4_IN_PARTS, [words, ready[0], ready[1], ready[2], ready[3]],
            dtype=copies(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORM[0] == FP4:
        TEXT: gl.constexpr = FP4_BF16 if DTYPE == gl.bfloat16 else FP4_FP16
        v = gl.inline_asm_elementwise(
            TEXT, TAKES_FP4, [words, ready[0], ready[1], ready[2]],
            dtype=copies(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORM[6] == SPLIT:
        v = gl.inline_asm_elementwise(
            SPLIT_BF16, TAKES_SPLIT, [words, ready[0], ready[1], ready[2]],
            dtype=copies(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    elif FORM[6] == 0:
        WIDE_TEXT: gl.constexpr = WIDE_BF16 if DTYPE == gl.bfloat16 else WIDE_FP16
        v = gl.inline_asm_elementwise(
            WIDE_TEXT, TAKES_WIDE, [words, ready[0], ready[1]],
            dtype=copies(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        SAME_TEXT: gl.constexpr = INT4_BF16 if DTYPE == gl.bfloat16 else INT4_FP16
        v = gl.inline_asm_elementwise(
            SAME_TEXT, TAKES_INT4, [words, ready[0], ready[1]],
            dtype=copies(DTYPE, 8), is_pure=True, pack=2,
        )  # fmt: skip
    # Column 32 word + 16 half + 8 e + 2 q + j of q, j, word, half, e.
    low = gl.join(gl.join(v[0], v[4]), gl.join(v[2], v[6]))
    high = gl.join(gl.join(v[1], v[5]), gl.join(v[3], v[7]))
    parts = gl.join(low, high).reshape([words.shape[0], 4, 2, 2, 2, 2])
    tile = parts.permute((0, 3, 4, 5, 1, 2)).reshape([words.shape[0], HALF])
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def _of_8_bits(words, ready, FORM: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr):
    """Words of 64 columns, four for each lane and output, unpacked: [ROWS, 64]."""
    if FORM[0] == FP8:
        TEXT: gl.constexpr = FP8_BF16 if DTYPE == gl.bfloat16 else FP8_FP16
        v = gl.inline_asm_elementwise(
            TEXT, TAKES_FP8, [words, ready[0]],
            dtype=copies(DTYPE, 4), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        INT_TEXT: gl.constexpr = INT8_BF16 if DTYPE == gl.bfloat16 else INT8_FP16
        v = gl.inline_asm_elementwise(
            INT_TEXT, TAKES_INT8, [words, ready[0], ready[1]],
            dtype=copies(DTYPE, 4), is_pure=True, pack=2,
        )  # fmt: skip
    # Column 32 pair of words + 16 word + 8 e + 2 q + j of q, pair, j, word, e.
    parts = gl.join(gl.join(v[0], v[2]), gl.join(v[1], v[3]))
    parts = parts.reshape([words.shape[0], 4, 2, 2, 2, 2])
    tile = parts.permute((0, 2, 4, 5, 1, 3)).reshape([words.shape[0], HALF])
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def _product(
    acc, words, found, factor, x, PART: gl.constexpr, FORM: gl.constexpr, ZEROS: gl.constexpr,
    DTYPE: gl.constexpr, layout: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Unpacks half a block and multiplies. wgmma: starts it and waits for all but LEFT."""
    ready = _ready(found, factor, PART, FORM, ZEROS, DTYPE)
    if FORM[1] == 4:
        tile = _of_4_bits(words, ready, FORM, DTYPE, layout)
    else:
        tile = _of_8_bits(words, ready, FORM, DTYPE, layout)
    if layout.parent.version[0] == 2:
        right: gl.constexpr = gl.DotOperandLayout(1, layout.parent, 2)
        return mma_v2(tile, x.permute((1, 0)).load(right), acc)
    else:
        acc = warpgroup_mma(tile, x.permute((1, 0)), acc, is_async=True)
        return warpgroup_mma_wait(LEFT, deps=(acc,))


@gluon.jit
def multiply_slot(
    acc, found, scales, zeros, factor, x_ring, w_ring, full, slot, phase, block,
    FORM: gl.constexpr, COUNT: gl.constexpr, DTYPE: gl.constexpr,
    whole: gl.constexpr, half: gl.constexpr, left: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """The COUNT blocks of a slot, of which `block` is the first, and the numbers of the one behind
    them. LAST: none is, and all products are done; else one of wgmma's may run on."""
    ZEROS: gl.constexpr = zeros is not None
    mbarrier.wait(full.index(slot), phase)
    for c in gl.static_range(COUNT):
        own = found
        if not LAST or c + 1 < COUNT:
            found = fetch(scales, zeros, block + c + 1, True, FORM)
        low, high = _halves(w_ring.index(slot * COUNT + c).load(whole), half)
        x = x_ring.index(2 * (slot * COUNT + c))
        acc = _product(acc, low, own, factor, x, 0, FORM, ZEROS, DTYPE, left, 1)
        x = x_ring.index(2 * (slot * COUNT + c) + 1)
        acc = _product(
            acc, high, own, factor, x, 1, FORM, ZEROS, DTYPE, left,
            0 if LAST and c + 1 == COUNT else 1,
        )  # fmt: skip
    return acc, found


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot behind this one, and the phase of its barriers."""
    slot += 1
    last = slot == SLOTS
    return gl.where(last, 0, slot), gl.where(last, phase ^ 1, phase)


@gluon.jit
def bring(
    x_map, w_map, x_ring, w_ring, full, empty, slot, phase, n, m, first, COUNT: gl.constexpr,
    STEP: gl.constexpr,
):  # fmt: skip
    """Has COUNT blocks brought into a slot, from block first * STEP on, once it is free."""
    WORDS: gl.constexpr = w_ring.shape[2]
    SIZE: gl.constexpr = COUNT * (w_ring.shape[1] * WORDS * 4 + x_ring.shape[1] * BLOCK * 2)
    mbarrier.wait(empty.index(slot), phase)
    ready = full.index(slot)
    mbarrier.expect(ready, SIZE)
    for c in gl.static_range(COUNT):
        at = first * STEP + c
        place = slot * COUNT + c
        tma.async_copy_global_to_shared(w_map, [n, at * WORDS], ready, w_ring.index(place))
        low = x_ring.index(2 * place)
        tma.async_copy_global_to_shared(x_map, [m, at * BLOCK], ready, low)
        high = x_ring.index(2 * place + 1)
        tma.async_copy_global_to_shared(x_map, [m, at * BLOCK + HALF], ready, high)


@gluon.jit
def beside(rows, first, stride, FORM: gl.constexpr):
    """Where numbers beside the words of these rows begin."""
    lines = rows
    if FORM[3] == 0:
        lines = rows * 0
    elif FORM[3] > 1:
        lines = (rows + first) // FORM[3]
    return lines * stride


@gluon.jit
def _load(
    x_map, w_map, x_ring, w_ring, full, empty, n, m, begin, blocks, COUNT: gl.constexpr
):  # fmt: skip
    """The warp that has blocks brought, COUNT into each slot once that is free."""
    SLOTS: gl.constexpr = full.shape[0]
    slot = 0
    phase = 1
    for i in range(0, blocks, COUNT):
        bring(x_map, w_map, x_ring, w_ring, full, empty, slot, phase, n, m, begin + i, COUNT, 1)
        slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def chain(
    rows, scales, zeros, factors, x_ring, w_ring, full, empty, first, begin, blocks, scale_stride,
    FORM: gl.constexpr, COUNT: gl.constexpr, SYNC: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Rows of a weight times tokens, over the blocks from `begin` on that come through a ring:
    [ROWS, TOKENS] fp32, in sums_layout. rows [ROWS] int64, in rows_layout: where scales lie. For
    the warps that unpack and multiply."""
    SLOTS: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = w_ring.shape[1]
    TOKENS: gl.constexpr = x_ring.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    ZEROS: gl.constexpr = zeros is not None
    sums: gl.constexpr = sums_layout(WARPS, TOKENS, SYNC)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    whole: gl.constexpr = words_layout(BLOCK, FORM[1], WARPS, ROWS)
    half: gl.constexpr = words_layout(HALF, FORM[1], WARPS, ROWS)
    numbers = beside(rows, first, scale_stride, FORM)
    scales += numbers
    factor = None
    if FORM[0] == FP4:
        factor = parts_of(gl.load(factors + rows), FORM)
    if ZEROS:
        zeros += numbers
    acc = gl.zeros((ROWS, TOKENS), gl.float32, sums)
    found = fetch(scales, zeros, begin, True, FORM)
    slot = 0
    phase = 0
    before = 0
    for i in range(0, blocks - COUNT, COUNT):
        acc, found = multiply_slot(
            acc, found, scales, zeros, factor, x_ring, w_ring, full, slot, phase, begin + i, FORM,
            COUNT, DTYPE, whole, half, left, False,
        )  # fmt: skip
        fence_async_shared()  # loads of this slot are over
        barrier()
        if SYNC:
            mbarrier.arrive(empty.index(slot))  # all warps have left it
        else:
            mbarrier.arrive(empty.index(before), pred=i > 0)  # what multiplies is left: this slot
        before = slot
        slot, phase = next_slot(slot, phase, SLOTS)
    # Behind the loop's end, what waits there does not keep ptxas from reading sums too early.
    total, found = multiply_slot(
        acc, found, scales, zeros, factor, x_ring, w_ring, full, slot, phase,
        begin + blocks - COUNT, FORM, COUNT, DTYPE, whole, half, left, True,
    )  # fmt: skip
    return total


@gluon.jit
def _multiply(
    scales, zeros, factors, out, x_ring, w_ring, full, empty, tokens, N, first, n, m, begin,
    blocks, scale_stride, out_stride, FORM: gl.constexpr, COUNT: gl.constexpr, SYNC: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """The warps that unpack, multiply and store."""
    ROWS: gl.constexpr = w_ring.shape[1]
    TOKENS: gl.constexpr = x_ring.shape[1]
    own_rows: gl.constexpr = rows_layout(FORM[1], gl.num_warps(), ROWS)
    sums: gl.constexpr = sums_layout(gl.num_warps(), TOKENS, SYNC)
    rows = gl.minimum(n + gl.arange(0, ROWS, own_rows), N - 1).to(gl.int64)
    total = chain(
        rows, scales, zeros, factors, x_ring, w_ring, full, empty, first, begin, blocks,
        scale_stride, FORM, COUNT, SYNC, DTYPE,
    )  # fmt: skip
    own = n + gl.arange(0, ROWS, gl.SliceLayout(1, sums))
    token = m + gl.arange(0, TOKENS, gl.SliceLayout(0, sums))
    out += gl.program_id(2).to(gl.int64) * tokens * N
    place = token.to(gl.int64)[None, :] * out_stride + own[:, None]
    mask = (own < N)[:, None] & (token < tokens)[None, :]
    gl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["tokens", "all_blocks", "length", "first", "scale_stride"])
def ring_kernel(
    x_map, w_map, scales, zeros, factors, out, tokens, N, all_blocks, length, first, scale_stride,
    out_stride,
    FORM: gl.constexpr, SLOTS: gl.constexpr, COUNT: gl.constexpr, SYNC: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """One segment of a tile of outputs and tokens: of out [parts, tokens, N], rows out_stride
    apart. all_blocks: of K; length: blocks of a segment, the last one's may be fewer; multiples of
    COUNT, those of a slot; zeros and scales have one stride; first: Fp8Weight's."""
    ROWS: gl.constexpr = w_map.block_type.shape[0]
    TOKENS: gl.constexpr = x_map.block_type.shape[0]
    WORDS: gl.constexpr = w_map.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(gl.int32, [SLOTS * COUNT, ROWS, WORDS], w_map.layout)
    x_ring = gl.allocate_shared_memory(DTYPE, [2 * SLOTS * COUNT, TOKENS, HALF], x_map.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barriers)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    n = gl.program_id(0) * ROWS
    m = gl.program_id(1) * TOKENS
    begin = gl.program_id(2) * length
    blocks = gl.minimum(length, all_blocks - begin)
    gl.warp_specialize(
        [
            (_multiply, (
                scales, zeros, factors, out, x_ring, w_ring, full, empty, tokens, N, first, n, m,
                begin, blocks, scale_stride, out_stride, FORM, COUNT, SYNC, DTYPE,
            )),
            (_load, (x_map, w_map, x_ring, w_ring, full, empty, n, m, begin, blocks, COUNT)),
        ],
        [1],
        [LOADING],
    )  # fmt: skip
