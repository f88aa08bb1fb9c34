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
    tokens of a step. dtype: of the model. state_dtype: of the state in memory.
    """
    key_heads, value_heads, key_dim, value_dim = sizes
    # The convolution needs the inputs of its kernel - 1 previous tokens.
    raw = history_length(window, kernel - 1)
    slots = history_length(window, max_replayed(window, flush, state_grid(state_dtype)))
    f32 = torch.float32
    return Spec(
        StorageKind.STATE,
        (
            Part("recurrent", (value_heads, key_dim, value_dim), state_dtype),
            Part("conv", (raw, channels), dtype, ring=True),
            Part("u", (slots, value_heads, value_dim), f32, ring=True),
            Part("k", (slots, key_heads, key_dim), f32, ring=True),
            Part("decay", (slots, value_heads), f32, ring=True),
        ),
    )
