# mypy: ignore-errors
"""gated_delta_step in Triton: kernels before and after the recurrence.

step_inputs_kernel computes the inputs of a window's tokens once for all CTAs that read them, and
appends raw inputs, k and decay to the history. The recurrence is recurrent/step_kernel.py.
gated_norm_kernel norms its outputs.

inputs [S * Q, C + 2 HV] fp32: q, k and v of a token as the recurrence reads them, then (decay,
beta) of each value head.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import silu_approx
from lockstep.kernels.device.convolution import convolve_window
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.history import window_index
from lockstep.kernels.device.reductions import pairwise_sum
from lockstep.kernels.gated_delta_rule.gating import gates, load_gate


@triton.jit
def _l2_normalize(x, EPS: tl.constexpr):
    """Divide each row of x by its l2 norm."""
    return x * tl.rsqrt(pairwise_sum(x * x) + EPS)[:, None]


@triton.jit
def _key_inputs(
    mixed_ptr, conv_weight_ptr, conv_history_ptr, k_history_ptr, inputs_ptr, head, begin,
    conv_index, history_index, length, conv_len, history_len, stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, EPS: tl.constexpr, COMMITTED: tl.constexpr,
):  # fmt: skip
    """Compute TOKENS tokens of head `head` of [all q | all k], into inputs and history.

    COMMITTED: save raw inputs of the last R tokens, and no k.
    """
    C: tl.constexpr = 2 * HK * K + HV * V
    first = head * K
    offs = tl.arange(0, BLOCK)[None, :]
    x, raw = convolve_window(
        mixed_ptr, conv_history_ptr, conv_weight_ptr, first, K, begin, conv_index, length, conv_len,
        stride, C, R, BLOCK, TOKENS, None,
    )  # fmt: skip
    for n in tl.static_range(TOKENS):
        t = begin + n
        index = window_index(history_index, t, history_len, COMMITTED)
        conv_ptr = conv_history_ptr + window_index(conv_index, t, conv_len, COMMITTED) * C
        mask = (offs < K) & (t < length)
        values = _l2_normalize(x[n], EPS)
        if head < HK:
            values *= K**-0.5
        elif not COMMITTED:
            k_ptrs = k_history_ptr + index * (HK * K) + (first - HK * K) + offs
            tl.store(k_ptrs, values, mask=mask)
        tl.store(inputs_ptr + t * (C + 2 * HV) + first + offs, values, mask=mask)
        if COMMITTED:
            mask = mask & (t >= length - R)
        tl.store(conv_ptr + first + offs, raw[R + n], mask=mask)


@triton.jit
def _value_inputs(
    mixed_ptr, conv_weight_ptr, conv_history_ptr, inputs_ptr, head, begin, conv_index, length,
    conv_len, stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, COMMITTED: tl.constexpr,
):  # fmt: skip
    """Compute TOKENS tokens of value head `head`, into inputs; save their raw inputs.

    COMMITTED: save raw inputs of the last R tokens.
    """
    C: tl.constexpr = 2 * HK * K + HV * V
    first = 2 * HK * K + head * V
    offs = tl.arange(0, BLOCK)[None, :]
    x, raw = convolve_window(
        mixed_ptr, conv_history_ptr, conv_weight_ptr, first, V, begin, conv_index, length, conv_len,
        stride, C, R, BLOCK, TOKENS, None,
    )  # fmt: skip
    for n in tl.static_range(TOKENS):
        t = begin + n
        conv_ptr = conv_history_ptr + window_index(conv_index, t, conv_len, COMMITTED) * C
        mask = (offs < V) & (t < length)
        tl.store(inputs_ptr + t * (C + 2 * HV) + first + offs, x[n], mask=mask)
        if COMMITTED:
            mask = mask & (t >= length - R)
        tl.store(conv_ptr + first + offs, raw[R + n], mask=mask)


@triton.jit(
    do_not_specialize=[
        "length",
        "conv_len",
        "history_len",
        "b_stride",
        "a_stride",
        "b_partial_stride",
        "a_partial_stride",
    ],
    do_not_specialize_on_alignment=["b_ptr", "a_ptr", "slots_ptr", "starts_ptr", "committed_ptr"],
)
def step_inputs_kernel(
    mixed_ptr, b_ptr, a_ptr, conv_weight_ptr, a_log_ptr, dt_bias_ptr, conv_history_ptr,
    k_history_ptr, decay_history_ptr, slots_ptr, starts_ptr, committed_ptr, inputs_ptr,
    length, conv_len, history_len, stride, b_stride, a_stride, b_partial_stride, a_partial_stride,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr, L2_EPS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the window's inputs of one (row, head of q, k or v); for a value head also gates.

    b and a are tree sums of PARTS partials, each partial_stride elements apart.

    committed [S]: tokens of each window that are certain to stay. Only these are computed, and k
    and decay are left to save_tokens_kernel. None: all are.
    """
    pdl_start()
    COMMITTED: tl.constexpr = committed_ptr is not None
    C: tl.constexpr = 2 * HK * K + HV * V
    WIDTH: tl.constexpr = C + 2 * HV
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start = tl.load(starts_ptr + row).to(tl.int32)
    conv_index = start % conv_len
    history_index = start % history_len
    token = row * length
    mixed_ptr += token * stride
    conv_history_ptr += slot * conv_len * C
    k_history_ptr += slot * history_len * (HK * K)
    inputs_ptr += token * WIDTH
    if COMMITTED:
        length = tl.load(committed_ptr + row).to(tl.int32)
    # Writing the history while other tokens read it is safe: conv_len is window + R, so the new
    # tokens of a window never replace the R raw inputs before it. A committed window may be longer:
    # it replaces an input only after the last iteration that reads it. Token t takes the entry of
    # the j-th input before the window if t + j = conv_len > R, and j <= R - begin is read from
    # there, so t > begin.
    for begin in range(0, length, TOKENS):
        if head < 2 * HK:
            _key_inputs(
                mixed_ptr, conv_weight_ptr, conv_history_ptr, k_history_ptr, inputs_ptr, head,
                begin, conv_index, history_index, length, conv_len, history_len, stride,
                HK, HV, K, V, R, BLOCK_K, TOKENS, L2_EPS, COMMITTED,
            )  # fmt: skip
        else:
            v_head = head - 2 * HK
            t = begin + tl.arange(0, TOKENS)
            token_mask = t < length
            DTYPE: tl.constexpr = mixed_ptr.dtype.element_ty
            offs_a = (token + t) * a_stride + v_head
            offs_b = (token + t) * b_stride + v_head
            raw_a = load_gate(a_ptr, offs_a, a_partial_stride, token_mask, DTYPE, PARTS)
            raw_b = load_gate(b_ptr, offs_b, b_partial_stride, token_mask, DTYPE, PARTS)
            _value_inputs(
                mixed_ptr, conv_weight_ptr, conv_history_ptr, inputs_ptr, v_head, begin, conv_index,
                length, conv_len, stride, HK, HV, K, V, R, BLOCK_V, TOKENS, COMMITTED,
            )  # fmt: skip
            g, beta = gates(
                raw_a, raw_b, tl.load(a_log_ptr + v_head), tl.load(dt_bias_ptr + v_head)
            )
            decay = tl.exp(g)
            index = window_index(history_index, t, history_len, COMMITTED)
            gate_ptrs = inputs_ptr + C + 2 * v_head + t * WIDTH
            tl.store(gate_ptrs, decay, mask=token_mask)
            tl.store(gate_ptrs + 1, beta, mask=token_mask)
            if not COMMITTED:
                decay_ptrs = decay_history_ptr + slot * history_len * HV + v_head + index * HV
                tl.store(decay_ptrs, decay, mask=token_mask)


@triton.jit(
    do_not_specialize=["heads", "eps", "length"],
    do_not_specialize_on_alignment=["committed_ptr"],
)
def gated_norm_kernel(
    o_ptr, z_ptr, norm_ptr, out_ptr, committed_ptr, heads, z_stride, eps, length,
    HV: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Norm HEADS of `heads` outputs: o / rms(o) * norm * silu(z). See gated_rms_norm.

    committed [S]: tokens of each window of `length` that are certain to stay; the outputs of the
    others are zeros. None, as length is then: all tokens have an output.
    """
    pdl_start()
    n = (tl.program_id(0) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
    offs_v = tl.arange(0, BLOCK_V)[None, None, :]
    mask = (n < heads) & (offs_v < V)
    weight = tl.load(norm_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
    gate = tl.load(z_ptr + n // HV * z_stride + n % HV * V + offs_v, mask=mask, other=0.0)
    x = tl.load(o_ptr + n * V + offs_v, mask=mask, other=0.0)
    squares = pairwise_sum(tl.reshape(x * x, (HEADS, BLOCK_V)))[:, None, None]
    x = x * tl.rsqrt(squares / V + eps) * weight * silu_approx(gate.to(tl.float32))
    if committed_ptr is not None:
        token = n // HV
        count = tl.load(committed_ptr + token // length, mask=n < heads, other=0)
        # A select: o was not written and z may hold anything, NaN too.
        x = tl.where(token % length < count, x, 0.0)
    tl.store(out_ptr + n * V + offs_v, x.to(out_ptr.dtype.element_ty), mask=mask)
