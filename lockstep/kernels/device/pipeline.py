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
def fill_stage(
    x_desc, w_desc, x_buffers, w_buffers, full, empty, stage, phase, n, m, first,
    BLOCKS: gl.constexpr, STEP: gl.constexpr,
):  # fmt: skip
    """Wait until a stage is empty, then start the TMA copies of BLOCKS blocks into it.

    n, m: first weight row and first token. The first block is first * STEP.
    """
    WORDS: gl.constexpr = w_buffers.shape[2]
    BYTES: gl.constexpr = BLOCKS * (
        w_buffers.shape[1] * WORDS * 4 + x_buffers.shape[1] * K_BLOCK * 2
    )
    mbarrier.wait(empty.index(stage), phase)
    ready = full.index(stage)
    mbarrier.expect(ready, BYTES)
    for i in gl.static_range(BLOCKS):
        block = first * STEP + i
        buffer = stage * BLOCKS + i
        tma.async_copy_global_to_shared(w_desc, [n, block * WORDS], ready, w_buffers.index(buffer))
        low = x_buffers.index(2 * buffer)
        tma.async_copy_global_to_shared(x_desc, [m, block * K_BLOCK], ready, low)
        high = x_buffers.index(2 * buffer + 1)
        tma.async_copy_global_to_shared(x_desc, [m, block * K_BLOCK + HALF], ready, high)
