"""History, convolution and replay of whole batches on a CPU, in few torch calls.

On a CPU the number of torch calls costs more than their arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lockstep.kernels.activations import silu
from lockstep.kernels.recurrent.history import folded_after, next_folded
from lockstep.kernels.recurrent.state import RecurrentState, expand_heads
from lockstep.step import GRID

Tokens = tuple[Tensor, ...]
"""A tensor for each token of a window."""
WriteStates = Callable[[Tensor, int], None]
"""Window.write_states of a window."""


@lru_cache(maxsize=64)
def flat_indices(
    length: int, slots: tuple[int, ...], starts: tuple[int, ...], offsets: range
) -> Tensor:
    """Return the indices of tokens starts + offsets in history.flatten(0, 1), by offset, then row.

    length: of the history. slots, starts: each row's state slot and first position.
    """
    # Cached: every layer of a step needs the same indices, and computing them takes 20 us.
    rows = list(zip(slots, starts, strict=True))
    return torch.tensor([s * length + (p + i) % length for i in offsets for s, p in rows])


@lru_cache(maxsize=64)
def span_indices(
    length: int,
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    begins: tuple[int, ...],
    ends: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Return the indices of tokens begins .. ends - 1 of each row's window.

    The first indices are those in a window [Q, S, ...].flatten(0, 1), the second those in
    history.flatten(0, 1) of `length` entries. slots, starts: see flat_indices.
    """
    rows = list(enumerate(zip(slots, starts, begins, ends, strict=True)))
    spans = [(row, s, p, t) for row, (s, p, begin, end) in rows for t in range(begin, end)]
    source = [t * len(slots) + row for row, _, _, t in spans]
    target = [s * length + (p + t) % length for _, s, p, t in spans]
    return torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64)


class Window:
    """Window of generated tokens, mixed [Q, S, C], with the history of its rows.

    raw [R + Q, S, C]: raw inputs, R of them before the window. first: position of each row's first
    token. replayed: flat indices, in the histories of u, k and decay, of the tokens to replay. All
    rows have the same number: the most tokens that a state lacks. written [S]: tokens that the
    states in memory include after replay.
    """

    def __init__(
        self,
        mixed: Tensor,
        state: RecurrentState,
        slots: Tensor,
        starts: Tensor,
        folded: Tensor,
        history: int,
        flush: int,
    ) -> None:
        length, rows, channels = mixed.shape
        row_slots = tuple(slots.tolist())
        max_count = max(0, *(starts - folded).tolist())
        self.mixed = mixed
        self.state = state
        self.first: tuple[int, ...] = tuple(starts.tolist())
        self.written = next_folded(starts, folded, flush, state.grid)
        indices = flat_indices(state.k.shape[1], row_slots, self.first, range(-max_count, length))
        self.replayed, self.indices = indices.tensor_split((max_count * rows,))
        raw_indices = flat_indices(
            state.conv.shape[1], row_slots, self.first, range(-history, length)
        )
        before, self.raw_indices = raw_indices.tensor_split((history * rows,))
        conv = state.conv.flatten(0, 1).index_select(0, before)
        self.raw = torch.cat([conv.view(history, rows, channels), mixed])

    def append(self, u: Tensor, k: Tensor, decay: Tensor) -> None:
        """Append the window's raw inputs, u, k and decay [Q, S, ...] to the histories."""
        state = self.state
        raw = self.mixed.reshape(-1, self.mixed.shape[2])
        state.conv.flatten(0, 1).index_copy_(0, self.raw_indices, raw)
        for part, x in ((state.u, u), (state.k, k), (state.decay, decay)):
            part.flatten(0, 1).index_copy_(0, self.indices, x.reshape(-1, *part.shape[2:]))

    def write_states(self, s: Tensor, t: int) -> None:
        """Write the states s [S, HV, K, V] that are due after token t of the window: none here."""

    def clear_padding(self, out: Tensor) -> Tensor:
        """Fill the results [Q, S, ...] of padding tokens with zeros: there are none here."""
        return out


class CommittedWindow(Window):
    """Window whose first `committed` tokens of each row are certain to stay; the rest is padding.

    It may be longer than the histories. Padding tokens are computed like the others: nothing that
    they change is kept.
    """

    def __init__(
        self,
        mixed: Tensor,
        state: RecurrentState,
        slots: Tensor,
        starts: Tensor,
        folded: Tensor,
        history: int,
        committed: Tensor,
    ) -> None:
        super().__init__(mixed, state, slots, starts, folded, history, flush=1)
        target = folded_after(starts, folded, 1, state.grid, committed)
        # Replay writes a state whose last token is before the window, write_states the others.
        self.written = torch.where(target <= starts, target, folded)
        self.slots: tuple[int, ...] = tuple(slots.tolist())
        self.ends: tuple[int, ...] = tuple(committed.tolist())
        self.padding = torch.arange(len(mixed))[:, None] >= committed
        targets = (target - starts).tolist()
        self.due: dict[int, list[int]] = {}
        for row, count in enumerate(targets):
            self.due.setdefault(count - 1, []).append(row)
        self.raw_begins = tuple(max(0, end - history) for end in self.ends)
        self.begins = tuple(max(0, count) for count in targets)

    def append(self, u: Tensor, k: Tensor, decay: Tensor) -> None:
        """Append what later steps read: the last raw inputs, and tokens that states lack."""
        state = self.state
        self._save(state.conv, self.mixed, self.raw_begins)
        for part, x in ((state.u, u), (state.k, k), (state.decay, decay)):
            self._save(part, x, self.begins)

    def _save(self, part: Tensor, x: Tensor, begins: tuple[int, ...]) -> None:
        """Save the committed tokens of x [Q, S, ...] from `begins` on to a history."""
        source, target = span_indices(part.shape[1], self.slots, self.first, begins, self.ends)
        if len(source):
            values = x.reshape(-1, *part.shape[2:]).index_select(0, source)
            part.flatten(0, 1).index_copy_(0, target, values)

    def write_states(self, s: Tensor, t: int) -> None:
        """Write the states s [S, HV, K, V] that are due after token t of the window."""
        for row in self.due.get(t, ()):
            self.state.recurrent[self.slots[row]] = s[row]

    def clear_padding(self, out: Tensor) -> Tensor:
        """Fill the results [Q, S, ...] of padding tokens with zeros, in place."""
        return out.masked_fill_(self.padding.view(*self.padding.shape, *[1] * (out.dim() - 2)), 0.0)


def open_window(
    mixed: Tensor,
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    history: int,
    flush: int,
    committed: Tensor | None,
) -> Window:
    """Return the window of a step's arguments, mixed [Q, S, C]. history: R."""
    arguments = (mixed, state, slots, starts, folded, history)
    return (
        Window(*arguments, flush) if committed is None else CommittedWindow(*arguments, committed)
    )


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Convolve as lockstep.kernels.recurrent.convolution does, multiplying all taps in one call."""
    taps = weight.float().t()
    x = x.float()
    shape = (len(x) - len(taps) + 1, *x.shape[1:])
    windows = x.as_strided((len(taps), *shape), (x.stride(0), *x.stride()))
    total, *products = (windows * taps.view(-1, *[1] * (x.dim() - 1), x.shape[-1])).unbind(0)
    for product in products:
        total.add_(product)
    return silu(total if bias is None else total.add_(bias.float()))


def split_tokens(x: Tensor, heads: int) -> Tokens:
    """Split [T, S, H, X] into T tensors [S * HV, 1, X], key heads repeated for value heads."""
    if x.shape[2] != heads:
        x = expand_heads(x, heads)
    return x.reshape(len(x), -1, 1, x.shape[3]).unbind(0)


def split_chunks(x: Tensor, group: int = 1) -> Tensor:
    """Pad x [T, H, ...] with zeros to whole chunks: [chunks, H * group, GRID, ...].

    group: value heads of a key head, which get equal copies. The result is contiguous: torch copies
    other operands of each product.
    """
    tokens, heads, *rest = x.shape
    chunks = -(-tokens // GRID)
    num_whole = tokens // GRID
    out = x.new_empty(chunks, heads, group, GRID, *rest)
    by_token = out.movedim(3, 1)
    by_token[:num_whole] = x[: num_whole * GRID].view(num_whole, GRID, heads, 1, *rest)
    if num_whole < chunks:
        remaining = tokens - num_whole * GRID
        by_token[num_whole, :remaining] = x[num_whole * GRID :].unsqueeze(2)
        # Keys, values and log decays of 0 make the padding tokens exact no-ops.
        by_token[num_whole, remaining:] = 0.0
    return out.view(chunks, heads * group, GRID, *rest)


def round_rows(state: RecurrentState, s: Tensor, tokens: Sequence[int]) -> None:
    """Round, in place, the rows of s [S, HV, K, V] whose token counts are multiples of the grid."""
    if state.grid == 1:
        return
    for row, count in enumerate(tokens):
        if count % state.grid == 0:
            s[row] = state.rounded(s[row])


def add_rank_one(s: Tensor, k: Tensor, u: Tensor) -> None:
    """Add k u^T to s [N, K, V] in place; k [N, 1, K], u [N, 1, V]."""
    # Replay and step call this one expression, so that both give the same bits.
    s.baddbmm_(k.transpose(1, 2), u)


def replay(
    state: RecurrentState,
    slots: Tensor,
    starts: Tensor,
    folded: Tensor,
    indices: Tensor,
    written: Tensor,
) -> Tensor:
    """Replay tokens folded .. starts - 1 into the rows' states, and write them to memory.

    indices: flat indices of these tokens in the histories (Window.replayed). written [S]: the state
    is written as of this many tokens if that is more than folded. Returns a copy of the states
    [S, HV, K, V] in fp32.
    """
    rows = len(slots)
    heads = state.recurrent.shape[1]
    due = written > folded
    # A single row is replayed in place, in memory: one copy less.
    in_place = rows == 1 and state.grid == 1 and bool(due)
    memory = state.recurrent
    s = memory[int(slots)][None] if in_place else memory.index_select(0, slots).float()
    flat = s.view(-1, *s.shape[-2:])
    max_count = len(indices) // rows
    if max_count:
        tokens = [
            part.flatten(0, 1).index_select(0, indices).view(max_count, rows, -1, part.shape[-1])
            for part in (state.decay.unsqueeze(-1), state.k, state.u)
        ]
        if rows > 1:
            # Rows that lack fewer tokens begin with decay 1, k 0 and u 0: exact no-ops. So is
            # rounding a state that comes from memory.
            live = (torch.arange(max_count, 0, -1)[:, None] <= starts - folded)[..., None, None]
            pairs = zip(tokens, (1.0, 0.0, 0.0), strict=True)
            tokens = [torch.where(live, x, neutral) for x, neutral in pairs]
        by_token = zip(*(split_tokens(x, heads) for x in tokens), strict=True)
        for remaining, (decay_t, k_t, u_t) in zip(
            range(max_count - 1, -1, -1), by_token, strict=True
        ):
            flat.mul_(decay_t)
            add_rank_one(flat, k_t, u_t)
            if state.grid > 1:
                counts = starts - remaining
                round_rows(state, s, counts.tolist())
                _write_rows(state, slots, s, due & (counts == written))
    if in_place:
        return s.clone()
    if state.grid == 1:
        _write_rows(state, slots, s, due)
    return s


def _write_rows(state: RecurrentState, slots: Tensor, s: Tensor, due: Tensor) -> None:
    """Write the rows of s [S, HV, K, V] that are due [S] to their slots."""
    state.recurrent.index_copy_(0, slots[due], s[due].to(state.recurrent.dtype))
