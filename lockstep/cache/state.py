"""Storage of recurrent mixers: the state, and circular history buffers of recent tokens."""

import torch

from lockstep.cache.specs import Part, Spec, StorageKind
from lockstep.kernels.recurrent.history import history_length, max_replayed, state_grid


def state_spec(
    sizes: tuple[int, int, int, int],
    channels: int,
    kernel: int,
    window: int,
    flush: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> Spec:
    """Return the parts of lockstep.kernels.recurrent.state.RecurrentState, per slot.

    sizes: HK, HV, K, V. channels: of the convolution, which has `kernel` taps. window: maximum
    tokens of a step. flush: tokens that a state may lack before a step writes it. dtype: of the
    model. state_dtype: of the state in memory.
    """
    key_heads, value_heads, key_dim, value_dim = sizes
    # The convolution needs the inputs of its kernel - 1 previous tokens.
    conv_len = history_length(window, kernel - 1)
    replay_len = history_length(window, max_replayed(window, flush, state_grid(state_dtype)))
    f32 = torch.float32
    return Spec(
        StorageKind.STATE,
        (
            Part("recurrent", (value_heads, key_dim, value_dim), state_dtype),
            Part("conv", (conv_len, channels), dtype, is_history=True),
            Part("u", (replay_len, value_heads, value_dim), f32, is_history=True),
            Part("k", (replay_len, key_heads, key_dim), f32, is_history=True),
            Part("decay", (replay_len, value_heads), f32, is_history=True),
        ),
    )
