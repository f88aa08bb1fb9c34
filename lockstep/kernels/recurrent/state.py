"""What a recurrent layer keeps of its rows, and how its tokens are replayed into it: the reference.

A state S [K, V] of a value head takes in one token after another: S decay + k u^T, all in fp32.
HK key heads of K, HV value heads of V; value head h reads key head h // (HV / HK). Gated DeltaNet
makes u out of v and of what S holds already; in Mamba-2 k is B, u is dt x, and C asks.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lockstep.kernels.recurrent.history import state_grid


@dataclass
class RecurrentState:
    """One layer's recurrent state, by slot (slot 0 is the null slot). fp32 but for conv and, where
    the user chose so, recurrent, which may be bf16.

    recurrent [slots, HV, K, V]: the state behind the row's first `folded` tokens. The rest are
    rings, a token's ring slot being its position modulo the ring's length (ring_slots of
    lockstep.kernels.recurrent.history): conv [slots, W + R, C] raw inputs, and of L = W +
    max_replayed ring slots what replays tokens into the state: u [slots, L, HV, V],
    k [slots, L, HK, K], decay [slots, L, HV].
    """

    recurrent: Tensor
    conv: Tensor
    u: Tensor
    k: Tensor
    decay: Tensor

    def tensors(self) -> list[Tensor]:
        """All parts, each indexed by slot first."""
        return [getattr(self, f.name) for f in fields(self)]

    def sizes(self) -> tuple[int, int, int, int]:
        """HK, HV, K, V."""
        hv, k, v = self.recurrent.shape[1:]
        return self.k.shape[2], hv, k, v

    @property
    def grid(self) -> int:
        """The multiples of tokens behind which the state is rounded and may be written."""
        return state_grid(self.recurrent.dtype)

    def rounded(self, s: Tensor) -> Tensor:
        """fp32 numbers as a state in memory has them, in fp32. s itself where that is fp32."""
        return s.to(self.recurrent.dtype).float()


def expand(x: Tensor, heads: int) -> Tensor:
    """[..., HK, K] -> [..., HV, K]: value head i reads key head i // (HV / HK)."""
    group = heads // x.shape[-2]
    return x.unsqueeze(-2).expand(*x.shape[:-1], group, x.shape[-1]).flatten(-3, -2)


def write(s: Tensor, k: Tensor, u: Tensor) -> Tensor:
    """s [HV, K, V] + k [HV, 1, K] (x) u [HV, 1, V]: the one expression of stepping and replay."""
    return torch.baddbmm(s, k.transpose(1, 2), u)


def replay(state: RecurrentState, slot: int, s: Tensor, first: int, end: int) -> Tensor:
    """A row's state s [HV, K, V] with its tokens first .. end - 1 folded in."""
    for position in range(first, end):
        ring_slot = position % state.k.shape[1]
        k = expand(state.k[slot, ring_slot], len(s))[:, None]
        s = s * state.decay[slot, ring_slot][:, None, None]
        s = write(s, k, state.u[slot, ring_slot][:, None])
        s = on_grid(state, s, position + 1)
    return s


def on_grid(state: RecurrentState, s: Tensor, tokens: int) -> Tensor:
    """A row's state behind so many tokens, rounded where they are a multiple of its grid."""
    return state.rounded(s) if tokens % state.grid == 0 else s
