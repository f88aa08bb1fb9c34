"""State of a recurrent layer, and replay of tokens into it: the reference.

A value head's state S [K, V] takes tokens one after another, S = S decay + k u^T, in fp32. HK key
heads of K, HV value heads of V; value head h reads key head h // (HV / HK). In Gated DeltaNet u
depends on v and on S. In Mamba-2 k is B, u is dt x, and C is the query.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.recurrent.history import state_grid
from lockstep.step import GRID


@dataclass
class RecurrentState:
    """Recurrent state of one layer, by slot (slot 0 is the null slot).

    recurrent [slots, HV, K, V]: the state after the row's first `folded` tokens, in fp32 or, where
    the user chose so, bf16. The other parts are circular histories, see
    lockstep.kernels.recurrent.history:

    conv [slots, W + R, C]: raw inputs of the convolution, in the model's dtype.
    u [slots, L, HV, V], k [slots, L, HK, K], decay [slots, L, HV]: what replays a token into the
    state, in fp32; L = W + max_replayed.
    """

    recurrent: Tensor
    conv: Tensor
    u: Tensor
    k: Tensor
    decay: Tensor

    def tensors(self) -> list[Tensor]:
        """Return all parts, each indexed by slot first."""
        return [getattr(self, f.name) for f in fields(self)]

    def sizes(self) -> tuple[int, int, int, int]:
        """Return HK, HV, K and V."""
        hv, k, v = self.recurrent.shape[1:]
        return self.k.shape[2], hv, k, v

    @property
    def grid(self) -> int:
        """Multiples of tokens at which the state is rounded and may be written."""
        return state_grid(self.recurrent.dtype)

    def rounded(self, s: Tensor) -> Tensor:
        """Round s to the state's dtype in memory and widen it to fp32; a no-op for fp32."""
        return s.to(self.recurrent.dtype).float()


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key heads [..., HK, K] -> [..., HV, K]: value head h reads key head h // (HV / HK)."""
    group = heads // x.shape[-2]
    return x.unsqueeze(-2).expand(*x.shape[:-1], group, x.shape[-1]).flatten(-3, -2)


def pad_chunk(x: Tensor) -> Tensor:
    """Pad x [T, H, ...] of up to GRID tokens with zeros and transpose it to [H, GRID, ...]."""
    # Keys, values and log decays of 0 make the padding tokens exact no-ops.
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, GRID - len(x))).transpose(0, 1)


def rank_one_update(s: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """Compute s + k u^T of s [HV, K, V], k [HV, 1, K], u [HV, 1, V]."""
    # Replay and step call this one expression, so that both give the same bits.
    return torch.baddbmm(s, k.transpose(1, 2), u)


def replay(state: RecurrentState, slot: int, s: Tensor, first: int, end: int) -> Tensor:
    """Replay the row's tokens first .. end - 1 into its state s [HV, K, V]."""
    for position in range(first, end):
        index = position % state.k.shape[1]
        k = expand_heads(state.k[slot, index], len(s))[:, None]
        s = s * state.decay[slot, index][:, None, None]
        s = rank_one_update(s, k, state.u[slot, index][:, None])
        s = round_on_grid(state, s, position + 1)
    return s


def replay_and_write(
    state: RecurrentState, slot: int, folded: int, start: int, target: int
) -> Tensor:
    """Replay the row's tokens folded .. start - 1, and write the state as of `target` tokens.

    Nothing is written if target is `folded`, or if it is a token of the window (target > start).
    Returns the state after token start - 1 in fp32.
    """
    point = min(target, start)
    s = replay(state, slot, state.recurrent[slot].float(), folded, point)
    if folded < target <= start:
        state.recurrent[slot] = s
    return replay(state, slot, s, point, start)


def round_on_grid(state: RecurrentState, s: Tensor, tokens: int) -> Tensor:
    """Round a row's state s after `tokens` tokens if that is a multiple of the state's grid."""
    return state.rounded(s) if tokens % state.grid == 0 else s
