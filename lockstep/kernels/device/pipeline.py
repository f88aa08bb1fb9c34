# mypy: ignore-errors
"""Multistage TMA pipeline of a quantized GEMM on Hopper, in Gluon: buffers, barriers, stages.

A stage has BLOCKS blocks of K_BLOCK columns: the words of some weight rows, and the x tile in two
halves of HALF columns. The mbarrier `full` of a stage completes when TMA has written all of its
bytes; `empty` completes when the consumer warps have read them. Producers start in phase 1, since
waiting for the previous phase of a fresh barrier returns at once: all stages begin empty.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

K_BLOCK = gl.constexpr(128)
"""Columns of a block: word_order.py interleaves them."""
HALF = gl.constexpr(64)
"""Columns of one x buffer: a row is 128 bytes, which the 128-byte swizzle covers."""


@gluon.jit
def allocate_pipeline(
    x_desc, w_desc, ROWS: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Allocate the shared memory of a pipeline and initialize its barriers.

    ROWS: weight rows of a stage; the descriptor may copy fewer at a time.

    Returns: x_buffers [2 * STAGES * BLOCKS, tokens, HALF], w_buffers [STAGES * BLOCKS, ROWS,
    words],
        full [STAGES], empty [STAGES].
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    WORDS: gl.constexpr = w_desc.block_type.shape[1]
    w_buffers = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS, ROWS, WORDS], w_desc.layout)
    x_buffers = gl.allocate_shared_memory(DTYPE, [2 * STAGES * BLOCKS, TOKENS, HALF], x_desc.layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # The copy engine (async proxy) must see the initialized barriers.
    fence_async_shared()
    return x_buffers, w_buffers, full, empty


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after this one and the phase of its barriers, which flips at the wrap."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def copy_weight_blocks(w_desc, x_buffers, w_buffers, full, stage, n, block, BLOCKS: gl.constexpr):
    """Expect all bytes of an empty stage, and start the TMA copies of its words.

    n: first weight row. block: first of BLOCKS blocks. copy_x_blocks() starts the other copies.
    """
    WORDS: gl.constexpr = w_buffers.shape[2]
    BYTES: gl.constexpr = BLOCKS * (
        w_buffers.shape[1] * WORDS * 4 + x_buffers.shape[1] * K_BLOCK * 2
    )
    ready = full.index(stage)
    mbarrier.expect(ready, BYTES)
    for i in gl.static_range(BLOCKS):
        words = w_buffers.index(stage * BLOCKS + i)
        tma.async_copy_global_to_shared(w_desc, [n, (block + i) * WORDS], ready, words)


@gluon.jit
def copy_x_blocks(x_desc, x_buffers, full, stage, m, block, BLOCKS: gl.constexpr):
    """Start the TMA copies of x into a stage. m: first token. block: first of BLOCKS blocks."""
    ready = full.index(stage)
    for i in gl.static_range(BLOCKS):
        column = (block + i) * K_BLOCK
        low = x_buffers.index(2 * (stage * BLOCKS + i))
        tma.async_copy_global_to_shared(x_desc, [m, column], ready, low)
        high = x_buffers.index(2 * (stage * BLOCKS + i) + 1)
        tma.async_copy_global_to_shared(x_desc, [m, column + HALF], ready, high)


@gluon.jit
def fill_stage(
    x_desc, w_desc, x_buffers, w_buffers, full, empty, stage, phase, n, m, first,
    BLOCKS: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Wait until a stage is empty, then start the TMA copies of BLOCKS blocks into it.

    n, m: first weight row and first token. The first block is first * STEP.
    """
    mbarrier.wait(empty.index(stage), phase)
    block = first * STEP
    copy_weight_blocks(w_desc, x_buffers, w_buffers, full, stage, n, block, BLOCKS)
    copy_x_blocks(x_desc, x_buffers, full, stage, m, block, BLOCKS)
