# mypy: ignore-errors
"""mamba2_step in Triton: the kernel before the recurrence.

step_inputs_kernel computes the inputs of a window's tokens once for all CTAs that read them, and
appends raw inputs, B and decay to the history. The recurrence is recurrent/step_kernel.py.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.convolution import convolve_window
from lockstep.kernels.device.dependent_launch import pdl_start
from lockstep.kernels.device.history import window_index
from lockstep.kernels.mamba2.discretization import discretize


@triton.jit
def _channel_inputs(
    mixed_ptr, conv_weight_ptr, bias_ptr, conv_history_ptr, inputs_ptr, history_ptr, channel, width,
    begin, conv_index, history_index, length, conv_len, history_len, stride, history_stride,
    C: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, COMMITTED: tl.constexpr,
):  # fmt: skip
    """Compute TOKENS tokens of `width` channels from `channel` on, into inputs.

    Saves their raw inputs, and the results too if history_ptr is not None. COMMITTED: saves raw
    inputs of the last R tokens, and no results.
    """
    offs = tl.arange(0, BLOCK)[None, :]
    x, raw = convolve_window(
        mixed_ptr, conv_history_ptr, conv_weight_ptr, channel, width, begin, conv_index, length,
        conv_len, stride, C, R, BLOCK, TOKENS, bias_ptr,
    )  # fmt: skip
    for n in tl.static_range(TOKENS):
        t = begin + n
        index = window_index(history_index, t, history_len, COMMITTED)
        conv_ptr = conv_history_ptr + window_index(conv_index, t, conv_len, COMMITTED) * C
        mask = (offs < width) & (t < length)
        if history_ptr is not None and not COMMITTED:
            tl.store(history_ptr + index * history_stride + offs, x[n], mask=mask)
        tl.store(inputs_ptr + t * WIDTH + offs, x[n], mask=mask)
        if COMMITTED:
            mask = mask & (t >= length - R)
        tl.store(conv_ptr + channel + offs, raw[R + n], mask=mask)


@triton.jit(
    do_not_specialize=["length", "conv_len", "history_len", "dt_stride", "dt_min", "dt_max"],
    do_not_specialize_on_alignment=["dt_ptr", "slots_ptr", "starts_ptr", "committed_ptr"],
)
def step_inputs_kernel(
    mixed_ptr, dt_ptr, conv_weight_ptr, bias_ptr, a_log_ptr, dt_bias_ptr, conv_history_ptr,
    k_history_ptr, decay_history_ptr, slots_ptr, starts_ptr, committed_ptr, inputs_ptr,
    length, conv_len, history_len, stride, dt_stride, dt_min, dt_max,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute the window's inputs of one (row, group of C, group of B or head of x).

    inputs [S * Q, C + 2 HV] fp32: all C, all B, all x, then (decay, time step) of each head, in the
    order that recurrent_step_kernel reads: C is its q, B its k, x its v, the time step its beta.
    committed [S]: tokens of each window that are certain to stay. Only these are computed, and B
    and decay are left to save_tokens_kernel. None: all are.
    """
    pdl_start()
    COMMITTED: tl.constexpr = committed_ptr is not None
    C: tl.constexpr = 2 * HK * K + HV * V
    WIDTH: tl.constexpr = C + 2 * HV
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1)
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
        # A window longer than the history of raw inputs: see step_inputs_kernel of the delta rule.
        length = tl.load(committed_ptr + row).to(tl.int32)
    # Channels of mixed are ordered [x | B | C]; those of inputs [C | B | x].
    for begin in range(0, length, TOKENS):
        if unit < HK:
            _channel_inputs(
                mixed_ptr, conv_weight_ptr, bias_ptr, conv_history_ptr, inputs_ptr + unit * K, None,
                HV * V + (HK + unit) * K, K, begin, conv_index, history_index, length, conv_len,
                history_len, stride, 0, C, WIDTH, R, BLOCK_K, TOKENS, COMMITTED,
            )  # fmt: skip
        elif unit < 2 * HK:
            g = unit - HK
            _channel_inputs(
                mixed_ptr, conv_weight_ptr, bias_ptr, conv_history_ptr, inputs_ptr + unit * K,
                k_history_ptr + g * K, HV * V + g * K, K, begin, conv_index, history_index, length,
                conv_len, history_len, stride, HK * K, C, WIDTH, R, BLOCK_K, TOKENS, COMMITTED,
            )  # fmt: skip
        else:
            head = unit - 2 * HK
            t = begin + tl.arange(0, TOKENS)
            token_mask = t < length
            raw = tl.load(dt_ptr + (token + t) * dt_stride + head, mask=token_mask, other=0.0)
            _channel_inputs(
                mixed_ptr, conv_weight_ptr, bias_ptr, conv_history_ptr,
                inputs_ptr + 2 * HK * K + head * V, None, head * V, V, begin, conv_index,
                history_index, length, conv_len, history_len, stride, 0, C, WIDTH, R, BLOCK_V,
                TOKENS, COMMITTED,
            )  # fmt: skip
            dt, log_decay = discretize(
                raw, tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head), dt_min, dt_max
            )
            decay = tl.exp(log_decay)
            index = window_index(history_index, t, history_len, COMMITTED)
            gate_ptrs = inputs_ptr + C + 2 * head + t * WIDTH
            tl.store(gate_ptrs, decay, mask=token_mask)
            tl.store(gate_ptrs + 1, dt, mask=token_mask)
            if not COMMITTED:
                decay_ptrs = decay_history_ptr + slot * history_len * HV + head + index * HV
                tl.store(decay_ptrs, decay, mask=token_mask)
