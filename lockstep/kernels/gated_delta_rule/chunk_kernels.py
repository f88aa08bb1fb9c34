# mypy: ignore-errors
"""gated_delta_chunk in Triton: the chunked form on the absolute 64-token grid.

1. chunk_inputs_kernel: convolution, SiLU and l2 norm, per (chunk, head).
2. intra_chunk_kernel: the WY representation u, w by the UT transform, and causal scores, per
   (chunk, value head). Neither kernel needs a state, so all chunks run in parallel.
3. delta_state_kernel, inter-chunk: carries the state from chunk to chunk, per (row, value head,
   block of V).
4. chunk_output_kernel: outputs from the state before the chunk and the chunk's own tokens, again
   in parallel over chunks.

Operands of products have the model's dtype, accumulators and the state are fp32, and the UT
transform is fp32 with products in tf32. Between kernels 2, 3 and 4 the values and the state are
transposed, [V, tokens] and [V, K]: each is a left operand in the registers in which the product
before left it, or a right operand whose inner dimension is contiguous.

No length is a compile-time constant.
"""

import triton
import triton.language as tl

from lockstep.kernels.architecture import WARP_SIZE
from lockstep.kernels.device.convolution import convolve_chunk
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.gated_delta_rule.gating import gates, load_gate

WARP_SIZE_TL = tl.constexpr(WARP_SIZE)


@triton.jit
def head_channels(head, offs, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Return the channels of a head of [all q | all k | all v] at offs, and the mask of offs.

    head: 0 .. 2 HK + HV - 1, counting the heads of q, then of k, then of v.
    """
    is_value = head >= 2 * HK
    first = tl.where(is_value, 2 * HK * K + (head - 2 * HK) * V, head * K)
    return first + offs, offs < tl.where(is_value, V, K)


@triton.jit
def chunk_inputs_kernel(
    mixed_ptr, conv_weight_ptr, conv_history_ptr, cu_seqlens_ptr, starts_ptr, state_src_ptr,
    chunks_ptr, inputs_ptr, token_stride, conv_len,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, EPS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """Convolve GRID tokens of one (chunk, head of q, k or v); normalize q and k; into inputs."""
    pdl_start()
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    # The host launches the maximum number of chunks, since it does not know the lengths.
    if count == 0:
        return
    row = tl.load(chunks_ptr + chunk * 3)
    offset = tl.load(chunks_ptr + chunk * 3 + 1)
    channel, channel_mask = head_channels(head, tl.arange(0, BLOCK), HK, K, V)
    C: tl.constexpr = 2 * HK * K + HV * V
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    start = tl.load(starts_ptr + row)
    offs_t = tl.arange(0, GRID)
    conv_history_ptr += tl.load(state_src_ptr + row).to(tl.int64) * conv_len * C
    y = convolve_chunk(
        mixed_ptr, conv_history_ptr, conv_weight_ptr, None, channel, channel_mask, begin, offset,
        count, start, conv_len, token_stride, C, R, GRID,
    )  # fmt: skip
    if head < 2 * HK:
        y = y * (1.0 / tl.sqrt_rn(tl.sum(y * y, 1) + EPS))[:, None]
        y = tl.where(head < HK, y * K**-0.5, y)
    offs = (begin + offset + offs_t)[:, None] * C + channel[None, :]
    tl.store(inputs_ptr + offs, y, mask=(offs_t < count)[:, None] & channel_mask[None, :])


@triton.jit
def invert_diagonal_blocks(a, SIDE: tl.constexpr, GRID: tl.constexpr):
    """Compute (I + b)^-1 of each diagonal block b [SIDE, SIDE] of a strictly lower triangular a.

    Forward substitution, all columns at once: the rows below row i subtract their column i of b
    times row i. A warp has one block and a lane one column, so that rows are registers and no step
    waits for another warp. All arithmetic is elementwise, so no layout changes a bit.

    Returns: [GRID, GRID], zeros outside of the blocks.
    """
    BLOCKS: tl.constexpr = GRID // SIDE
    COPIES: tl.constexpr = WARP_SIZE_TL // SIDE
    b = tl.arange(0, BLOCKS)
    r = tl.arange(0, SIDE)[:, None, None]
    on_diagonal = b[:, None, None, None] == b[None, None, :, None]
    blocks = tl.reshape(a, (BLOCKS, SIDE, BLOCKS, SIDE))
    blocks = tl.sum(tl.where(on_diagonal, blocks, 0.0), 2)
    # [row, block, lane]: lanes repeat the SIDE columns, since Triton would spread the rows of a
    # narrower tensor over warps.
    blocks = tl.permute(blocks, (1, 0, 2))[:, :, None, :]
    blocks = tl.broadcast_to(blocks, (SIDE, BLOCKS, COPIES, SIDE))
    blocks = tl.reshape(blocks, (SIDE, BLOCKS, WARP_SIZE_TL))
    lane = tl.arange(0, WARP_SIZE_TL)[None, None, :]
    solved = tl.broadcast_to(tl.where(r == lane % SIDE, 1.0, 0.0), (SIDE, BLOCKS, WARP_SIZE_TL))
    for i in tl.static_range(SIDE - 1):
        column = tl.gather(blocks, tl.full((SIDE, BLOCKS, WARP_SIZE_TL), i, tl.int32), 2)
        # Integers: adding zeros to a selected row then costs no instruction.
        bits = tl.where(r == i, solved.to(tl.int32, bitcast=True), 0)
        row = tl.sum(bits, 0).to(tl.float32, bitcast=True)
        solved = tl.where(r > i, solved - column * row[None, :, :], solved)
    # The copies of a block fill some of its row of blocks; all but one are replaced by zeros.
    spread: tl.constexpr = (SIDE, BLOCKS, BLOCKS // COPIES, COPIES, SIDE)
    copies = tl.reshape(solved, (SIDE, BLOCKS, 1, COPIES, SIDE))
    first = tl.arange(0, BLOCKS // COPIES)[None, None, :, None, None] * COPIES
    column_block = first + tl.arange(0, COPIES)[None, None, None, :, None]
    kept = b[None, :, None, None, None] == column_block
    copies = tl.where(kept, tl.broadcast_to(copies, spread), 0.0)
    return tl.reshape(tl.permute(copies, (1, 0, 2, 3, 4)), (GRID, GRID))


@triton.jit
def ut_transform(a, SIDE: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr):
    """Compute (I + a)^-1 of a strictly lower triangular a [GRID, GRID]: the UT transform.

    Diagonal blocks of SIDE rows are inverted by forward substitution. Let D be the block diagonal
    of these inverses and N = D times the rest of a. N is nilpotent, N^(GRID / SIDE) = 0, so the
    inverse is (I - N + N^2 - N^3) D for four blocks.
    """
    offs_t = tl.arange(0, GRID)
    row = offs_t[:, None]
    col = offs_t[None, :]
    d = invert_diagonal_blocks(a, SIDE, GRID)
    rest = tl.where(row // SIDE > col // SIDE, a, 0.0)
    n = tl.dot(d, rest, input_precision=PRECISION)
    square = tl.dot(n, n, input_precision=PRECISION)
    cube = tl.dot(n, square, input_precision=PRECISION)
    series = tl.where(row == col, 1.0, 0.0) - n + square - cube
    return tl.dot(series, d, input_precision=PRECISION)


@triton.jit(do_not_specialize=["b_partial_stride", "a_partial_stride"])
def intra_chunk_kernel(
    inputs_ptr, b_ptr, a_ptr, a_log_ptr, dt_bias_ptr, cu_seqlens_ptr, chunks_ptr, u_ptr, w_ptr,
    scores_ptr, g_cumsum_ptr, b_stride, a_stride, b_partial_stride, a_partial_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
    SIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the WY representation u, w, causal scores and g_cumsum of one (chunk, value head).

    u [N, HV, V, GRID], w [T, HV, K], scores [N, HV, GRID, GRID], g_cumsum [N, HV, GRID] (log decay,
    cumulated from the chunk's first token). b and a are tree sums of PARTS partials, each
    partial_stride elements apart.
    """
    pdl_start()
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if count == 0:
        return
    row = tl.load(chunks_ptr + chunk * 3)
    offset = tl.load(chunks_ptr + chunk * 3 + 1)
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64) + offset
    k_head = head // (HV // HK)
    block = chunk * HV + head
    offs_t = tl.arange(0, GRID)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.arange(0, BLOCK_V)
    token_mask = offs_t < count
    token = begin + offs_t
    OPERAND: tl.constexpr = inputs_ptr.dtype.element_ty
    offs_a = token * a_stride + head
    offs_b = token * b_stride + head
    raw_a = load_gate(a_ptr, offs_a, a_partial_stride, token_mask, OPERAND, PARTS)
    raw_b = load_gate(b_ptr, offs_b, b_partial_stride, token_mask, OPERAND, PARTS)
    g, beta = gates(raw_a, raw_b, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head))
    # Tokens past the end: no decay, beta 0 and k 0 make them exact no-ops on the state.
    g_cumsum = tl.cumsum(tl.where(token_mask, g, 0.0), 0)
    beta = tl.where(token_mask, beta, 0.0)
    tl.store(g_cumsum_ptr + block * GRID + offs_t, g_cumsum)
    C: tl.constexpr = 2 * HK * K + HV * V
    inputs_rows = inputs_ptr + token[:, None] * C
    mask_k = token_mask[:, None] & (offs_k < K)[None, :]
    mask_v = token_mask[:, None] & (offs_v < V)[None, :]
    t_row = offs_t[:, None]
    t_col = offs_t[None, :]
    # The mask is applied before exp: differences above the diagonal are positive and may overflow.
    log_decay = tl.where(t_row >= t_col, g_cumsum[:, None] - g_cumsum[None, :], float("-inf"))
    decay = tl.exp(log_decay)
    k = tl.load(inputs_rows + (HK + k_head) * K + offs_k[None, :], mask=mask_k, other=0.0)
    q = tl.load(inputs_rows + k_head * K + offs_k[None, :], mask=mask_k, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    tl.store(scores_ptr + (block * GRID + t_row) * GRID + t_col, scores.to(OPERAND))
    a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
    inverse = ut_transform(tl.where(t_row > t_col, a, 0.0), SIDE, GRID, PRECISION)
    # The factors of k's and v's rows scale the columns of the inverse: k and v stay as loaded.
    scaled = inverse * (beta * tl.exp(g_cumsum))[None, :]
    w = tl.dot(scaled.to(OPERAND), k, input_precision=PRECISION)
    w_ptrs = w_ptr + (token[:, None] * HV + head) * K + offs_k[None, :]
    tl.store(w_ptrs, w.to(OPERAND), mask=mask_k)
    v_ptrs = inputs_rows + 2 * HK * K + head * V + offs_v[None, :]
    v = tl.load(v_ptrs, mask=mask_v, other=0.0)
    scaled = (inverse * beta[None, :]).to(OPERAND)
    u = tl.dot(tl.trans(v), tl.trans(scaled), input_precision=PRECISION)
    u_ptrs = u_ptr + (block * V + offs_v[:, None]) * GRID + t_col
    tl.store(u_ptrs, u.to(OPERAND), mask=(offs_v < V)[:, None])


@triton.jit
def delta_state_kernel(
    inputs_ptr, u_ptr, w_ptr, g_cumsum_ptr, state_ptr, chunk_states_ptr, cu_seqlens_ptr,
    starts_ptr, state_src_ptr, state_slots_ptr, snapshot_slots_ptr, first_chunks_ptr, slot_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Carry the state of one (row, value head, block of V) from chunk to chunk.

    u [N, HV, V, GRID] is overwritten by the values v_new = u - w S that the chunk writes.
    chunk_states [N, HV, V, K] receives the state before each chunk. The state is transposed here,
    [BLOCK_V, BLOCK_K], so that it and v_new are left operands straight from registers.
    """
    pdl_start()
    row = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64)
    length = (tl.load(cu_seqlens_ptr + row + 1) - begin).to(tl.int32)
    slot = tl.load(state_slots_ptr + row).to(tl.int64)
    if (length == 0) | (slot == 0):
        return
    snapshot = tl.load(snapshot_slots_ptr + row).to(tl.int64)
    k_head = head // (HV // HK)
    first_chunk = tl.load(first_chunks_ptr + row).to(tl.int64)
    offs_t = tl.arange(0, GRID)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = (offs_v < V)[:, None]
    in_state = mask_v & (offs_k < K)[None, :]
    state_ptr += head * K * V + offs_k[None, :] * V + offs_v[:, None]
    source = tl.load(state_src_ptr + row).to(tl.int64) * slot_stride
    DTYPE: tl.constexpr = state_ptr.dtype.element_ty
    OPERAND: tl.constexpr = inputs_ptr.dtype.element_ty
    resumed = in_state & (tl.load(starts_ptr + row) > 0)
    state = tl.load(state_ptr + source, mask=resumed, other=0.0).to(tl.float32)
    # A row without a whole chunk has its last grid point at its start.
    if (snapshot > 0) & (length < GRID):
        tl.store(state_ptr + snapshot * slot_stride, state.to(DTYPE), mask=in_state)
    for c in range(tl.cdiv(length, GRID)):
        token_mask = (c * GRID + offs_t < length)[:, None]
        token = (begin + c * GRID + offs_t)[:, None]
        mask_k = token_mask & (offs_k < K)[None, :]
        block = (first_chunk + c) * HV + head
        w = tl.load(w_ptr + (token * HV + head) * K + offs_k[None, :], mask=mask_k, other=0.0)
        k_ptrs = inputs_ptr + token * (2 * HK * K + HV * V) + (HK + k_head) * K + offs_k[None, :]
        k = tl.load(k_ptrs, mask=mask_k, other=0.0)
        u_ptrs = u_ptr + (block * V + offs_v[:, None]) * GRID + offs_t[None, :]
        u = tl.load(u_ptrs, mask=mask_v, other=0.0)
        g_cumsum = tl.load(g_cumsum_ptr + block * GRID + offs_t)
        g_last = tl.load(g_cumsum_ptr + block * GRID + GRID - 1)
        operand = state.to(OPERAND)
        states_ptrs = chunk_states_ptr + (block * V + offs_v[:, None]) * K + offs_k[None, :]
        tl.store(states_ptrs, operand, mask=in_state)
        v_new = u.to(tl.float32) - tl.dot(operand, tl.trans(w), input_precision=PRECISION)
        tl.store(u_ptrs, v_new.to(OPERAND), mask=mask_v)
        # Written with its decay to the chunk's end: k stays as loaded.
        decayed = (v_new * tl.exp(g_last - g_cumsum)[None, :]).to(OPERAND)
        state = tl.dot(decayed, k, state * tl.exp(g_last), input_precision=PRECISION)
        # Every chunk ends on the absolute grid or at the row's end, so rounding here does not
        # depend on how a prompt is split into steps.
        state = state.to(DTYPE).to(tl.float32)
        if (snapshot > 0) & (c + 1 == length // GRID):
            tl.store(state_ptr + snapshot * slot_stride, state.to(DTYPE), mask=in_state)
    tl.store(state_ptr + slot * slot_stride, state.to(DTYPE), mask=in_state)


@triton.jit
def chunk_output_kernel(
    inputs_ptr, v_new_ptr, scores_ptr, g_cumsum_ptr, chunk_states_ptr, cu_seqlens_ptr, chunks_ptr,
    out_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, GRID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute outputs [T, HV, V] of one (chunk, value head, block of V).

    The inter-chunk part is exp(g_cumsum) q S, the intra-chunk part scores v_new. v_new
    [N, HV, V, GRID], chunk_states [N, HV, V, K].
    """
    pdl_start()
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    count = tl.load(chunks_ptr + chunk * 3 + 2)
    if count == 0:
        return
    row = tl.load(chunks_ptr + chunk * 3)
    offset = tl.load(chunks_ptr + chunk * 3 + 1)
    begin = tl.load(cu_seqlens_ptr + row).to(tl.int64) + offset
    k_head = head // (HV // HK)
    block = chunk * HV + head
    offs_t = tl.arange(0, GRID)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    token_mask = (offs_t < count)[:, None]
    token = (begin + offs_t)[:, None]
    mask_k = token_mask & (offs_k < K)[None, :]
    q_ptrs = inputs_ptr + token * (2 * HK * K + HV * V) + k_head * K + offs_k[None, :]
    q = tl.load(q_ptrs, mask=mask_k, other=0.0)
    v_rows = (block * V + offs_v)[:, None]
    in_state = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    state = tl.load(chunk_states_ptr + v_rows * K + offs_k[None, :], mask=in_state, other=0.0)
    o = tl.dot(q, tl.trans(state), input_precision=PRECISION)
    g_cumsum = tl.load(g_cumsum_ptr + block * GRID + offs_t)
    scores = tl.load(scores_ptr + (block * GRID + offs_t[:, None]) * GRID + offs_t[None, :])
    v_new_ptrs = v_new_ptr + v_rows * GRID + offs_t[None, :]
    v_new = tl.load(v_new_ptrs, mask=(offs_v < V)[:, None], other=0.0)
    o = tl.dot(scores, tl.trans(v_new), o * tl.exp(g_cumsum)[:, None], input_precision=PRECISION)
    out_offs = (token * HV + head) * V + offs_v[None, :]
    tl.store(out_ptr + out_offs, o, mask=token_mask & (offs_v < V)[None, :])
