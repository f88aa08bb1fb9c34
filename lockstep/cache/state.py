"""What a recurrent mixer keeps: its state, and rings of its recent tokens."""

import torch

from lockstep.cache.specs import Law, Part, Spec
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
    """The parts of lockstep.kernels.recurrent.state.RecurrentState, per slot.

    sizes: HK, HV, K, V; channels: of the convolution, of `kernel` taps; window: most tokens of a
    step; dtype: of the model; state_dtype: of the state in memory.
    """
    key_heads, value_heads, key_dim, value_dim = sizes
    raw = history_length(window, kernel - 1)
    slots = history_length(window, max_replayed(window, flush, state_grid(state_dtype)))
    f32 = torch.float32
    return Spec(
        Law.STATE,
        (
            Part("recurrent", (value_heads, key_dim, value_dim), state_dtype),
            Part("conv", (raw, channels), dtype, ring=True),
            Part("u", (slots, value_heads, value_dim), f32, ring=True),
            Part("k", (slots, key_heads, key_dim), f32, ring=True),
            Part("decay", (slots, value_heads), f32, ring=True),
        ),
    )
