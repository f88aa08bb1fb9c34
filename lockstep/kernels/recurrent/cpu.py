"""Rings and convolution of whole batches in few torch calls, whose number costs on a CPU."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.kernels.activations import silu
from lockstep.kernels.recurrent.history import next_folded
from lockstep.kernels.recurrent.state import RecurrentState, expand

Tokens = tuple[Tensor, ...]


@lru_cache(maxsize=64)
def ring_places(
    length: int, slots: tuple[int, ...], starts: tuple[int, ...], offsets: range
) -> Tensor:
    """Where the tokens at starts + offsets are in ring.flatten(0, 1), by offset, then by row.

    length: of a ring; slots, starts: each row's state slot and first position. Cached, since every
    layer of a step asks for the same places and making them takes 20 us.
    """
    rows = list(zip(slots, starts, strict=True))
    return torch.tensor([s * length + (p + i) % length for i in offsets for s, p in rows])


class Window:
    """The tokens of a generated step's rows, mixed [Q, S, C], among what their rings hold.

    raw [R + Q, S, C]: the R raw inputs before them, then theirs. first: position of each row's
    first. replayed: places in the rings of u, k and decay of the tokens that the longest lacking
    state lacks.
    """

    def __init__(
        self,
        mixed: Tensor,
        state: RecurrentState,
        slots: Tensor,
        starts: Tensor,
        folded: Tensor,
        history: int,
    ) -> None:
        length, rows, channels = mixed.shape
        own = tuple(slots.tolist())
        most = max(0, *(starts - folded).tolist())
        self.mixed = mixed
        self.state = state
        self.first: tuple[int, ...] = tuple(starts.tolist())
        places = ring_places(state.k.shape[1], own, self.first, range(-most, length))
        self.replayed, self.places = places.tensor_split((most * rows,))
        raw_places = ring_places(state.conv.shape[1], own, self.first, range(-history, length))
        before, self.raw_places = raw_places.tensor_split((history * rows,))
        conv = state.conv.flatten(0, 1).index_select(0, before)
        self.raw = torch.cat([conv.view(history, rows, channels), mixed])

    def keep(self, u: Tensor, k: Tensor, decay: Tensor) -> None:
        """Writes what replaying these tokens takes, [Q, S, ...] each, to the rings."""
        state = self.state
        raw = self.mixed.reshape(-1, self.mixed.shape[2])
        state.conv.flatten(0, 1).index_copy_(0, self.raw_places, raw)
        for ring, x in ((state.u, u), (state.k, k), (state.decay, decay)):
            ring.flatten(0, 1).index_copy_(0, self.places, x.reshape(-1, *ring.shape[2:]))


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See lockstep.kernels.recurrent.convolution. All taps are multiplied in one call."""
    taps = weight.float().t()
    x = x.float()
    shape = (len(x) - len(taps) + 1, *x.shape[1:])
    windows = x.as_strided((len(taps), *shape), (x.stride(0), *x.stride()))
    total, *others = (windows * taps.view(-1, *[1] * (x.dim() - 1), x.shape[-1])).unbind(0)
    for product in others:
        total.add_(product)
    return silu(total if bias is None else total.add_(bias.float()))


def by_token(x: Tensor, heads: int) -> Tokens:
    """[T, S, H, X] -> T tensors [S * HV, 1, X], a value head reading as `expand` says."""
    if x.shape[2] != heads:
        x = expand(x, heads)
    return x.reshape(len(x), -1, 1, x.shape[3]).unbind(0)


def round_rows(state: RecurrentState, s: Tensor, tokens: Sequence[int]) -> None:
    """Rounds in place the rows of s [S, HV, K, V] that stand on the state's grid, each behind so
    many tokens."""
    if state.grid == 1:
        return
    for row, count in enumerate(tokens):
        if count % state.grid == 0:
            s[row] = state.rounded(s[row])


def write(s: Tensor, k: Tensor, u: Tensor) -> None:
    """s [N, K, V] += k [N, 1, K] (x) u [N, 1, V]: the one expression of stepping and replay."""
    s.baddbmm_(k.transpose(1, 2), u)


def replay(
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    places: Tensor,
    flush: int,
) -> Tensor:
    """The state with the tokens folded .. starts - 1, at these ring places, folded in:
    [S, HV, K, V] fp32, a copy.

    It is written as `next_folded` says. Where a row lacks fewer tokens than its batch mates, the
    first are decay 1, k 0 and u 0: an exact no-op, and so is rounding a state that memory has.
    """
    rows = len(slots)
    heads = state.recurrent.shape[1]
    written = next_folded(starts, folded, flush, state.grid)
    due = written > folded
    alone = rows == 1 and state.grid == 1 and bool(due)
    here = state.recurrent
    s = here[int(slots)][None] if alone else here.index_select(0, slots).float()
    flat = s.view(-1, *s.shape[-2:])
    most = len(places) // rows
    if most:
        tokens = [
            ring.flatten(0, 1).index_select(0, places).view(most, rows, -1, ring.shape[-1])
            for ring in (state.decay.unsqueeze(-1), state.k, state.u)
        ]
        if rows > 1:
            live = (torch.arange(most, 0, -1)[:, None] <= starts - folded)[..., None, None]
            pairs = zip(tokens, (1.0, 0.0, 0.0), strict=True)
            tokens = [torch.where(live, x, nothing) for x, nothing in pairs]
        each = zip(*(by_token(x, heads) for x in tokens), strict=True)
        for before, (decay_t, k_t, u_t) in zip(range(most - 1, -1, -1), each, strict=True):
            flat.mul_(decay_t)
            write(flat, k_t, u_t)
            if state.grid > 1:
                behind = starts - before
                round_rows(state, s, behind.tolist())
                _keep(state, slots, s, due & (behind == written))
    if alone:
        return s.clone()
    if state.grid == 1:
        _keep(state, slots, s, due)
    return s


def _keep(state: RecurrentState, slots: Tensor, s: Tensor, due: Tensor) -> None:
    """Writes the rows of s [S, HV, K, V] where that is due [S] to their slots."""
    state.recurrent.index_copy_(0, slots[due], s[due].to(state.recurrent.dtype))
