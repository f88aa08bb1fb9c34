"""gated_delta_step and gated_delta_chunk: the two laws of a Gated DeltaNet mixer.

Both take the raw projections and do gates, convolution, SiLU, l2 norm and recurrence (Yang et al.,
Gated Delta Networks, 2024; layout of Qwen3.5 checkpoints). Generated tokens go through the
token-by-token update; prompt tokens through the chunked (WY) form on the absolute 64-token grid.
C = 2 HK K + HV V channels, ordered [all q | all k | all v]. W window tokens, R conv kernel - 1.
"""

from dataclasses import dataclass, fields
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.activations import sigmoid, silu, softplus
from lockstep.kernels.norm import gated_rms_norm
from lockstep.kernels.registry import op
from lockstep.step import GRID

L2_EPS = 1e-6
EPS = torch.tensor(L2_EPS)
"""As a tensor, which is added sooner than a number (lockstep.kernels.activations.ONE)."""


@dataclass(frozen=True)
class GatedDeltaWeights:
    """A layer's own weights: conv [C, R + 1]; a_log, dt_bias [HV] fp32; norm [V], with its eps."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float


@dataclass
class GatedDeltaState:
    """One layer's recurrent state, by slot (slot 0 is the null slot). fp32 but for conv.

    recurrent [slots, HV, K, V]: the state before what is pending. The rest are rings of L lines, a
    token's line being its position modulo L: conv [slots, L, C] raw inputs, and what replays a
    window into the state: u [slots, L, HV, V], k [slots, L, HK, K], decay [slots, L, HV].
    L = ring_lines(W, R, flush): a window is written beside all that is read with it.
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


def ring_lines(window: int, history: int, flush: int = 1) -> int:
    """L for windows of up to `window` tokens behind `history` raw inputs of the convolution, where
    up to flush - 1 + window tokens may be pending."""
    return window + max(flush - 1 + window, history)


def _gates(b: Tensor, a: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
    """Raw b, a [..., HV] -> g, the log decay, and beta [..., HV], both fp32."""
    rise = softplus(a.float() + weights.dt_bias)
    return -torch.exp(weights.a_log) * rise, sigmoid(b.float())


def _heads(mixed: Tensor, state: GatedDeltaState) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved mixed [..., C] fp32 -> q, k [..., HK, K] normalised (q scaled), v [..., HV, V]:
    views of mixed, which is written over."""
    hk, hv, dk, dv = state.sizes()
    qk, v = mixed.split([2 * hk * dk, hv * dv], dim=-1)
    qk = qk.unflatten(-1, (2 * hk, dk))
    qk.mul_((qk * qk).sum(-1, keepdim=True).add_(EPS).rsqrt_())
    q, k = qk.split([hk, hk], dim=-2)
    return q.mul_(dk**-0.5), k, v.unflatten(-1, (hv, dv))


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """x [R + T, ..., C] raw inputs, weight [C, R + 1] -> SiLU of the causal conv [T, ..., C]."""
    taps, x = weight.float().t(), x.float()
    shape = (len(x) - len(taps) + 1, *x.shape[1:])
    windows = x.as_strided((len(taps), *shape), (x.stride(0), *x.stride()))
    first, *others = (windows * taps.view(-1, *[1] * (x.dim() - 1), x.shape[-1])).unbind(0)
    for tap in others:
        first.add_(tap)
    return silu(first)


def _expand(x: Tensor, heads: int) -> Tensor:
    """[..., HK, K] -> [..., HV, K]: value head i reads key head i // (HV / HK)."""
    group = heads // x.shape[-2]
    return x.unsqueeze(-2).expand(*x.shape[:-1], group, x.shape[-1]).flatten(-3, -2)


@lru_cache(maxsize=64)
def _lines(
    length: int, slots: tuple[int, ...], starts: tuple[int, ...], positions: range
) -> Tensor:
    """Where starts + positions are in ring.flatten(0, 1), of `length` lines a slot: by position,
    then by slot. Layers share it: made anew it costs 20 us."""
    rows = list(zip(slots, starts, strict=True))
    return torch.tensor([s * length + (p + i) % length for i in positions for s, p in rows])


@op(writes=("state",))
def gated_delta_step(
    mixed: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    slots: Tensor,
    starts: Tensor,
    pending: Tensor,
    flush: int = 1,
) -> Tensor:
    """Generated tokens: replay the pending ones, run the new window, and norm.

    mixed [S, Q, C], z [S, Q, HV, V], b, a [S, Q, HV] raw; slots [S] int64; starts [S] the window's
    first positions; pending [S] int64: tokens before it that the state lacks, up to flush - 1 + W
    -> [S, Q, HV, V] of z's dtype, after the gated norm. The state is read once, and written once
    where at least `flush` were pending: after the replay, before the new window, which is kept.
    So what is pending next is what was accepted, and besides, where it was not written, what was
    pending. No bit depends on flush. Q <= W. Slots may repeat only if null; a null row's results
    are undefined.
    """
    mixed, z, b, a = (x.transpose(0, 1) for x in (mixed, z, b, a))
    (length, rows, channels), hv = mixed.shape, b.shape[2]
    history, most = weights.conv.shape[1] - 1, max(pending.tolist())
    reach = max(history, most)
    place = tuple(slots.tolist()), tuple(starts.tolist())
    lines = _lines(state.conv.shape[1], *place, range(-reach, length))
    past, new = lines[: reach * rows], lines[reach * rows :]
    conv = state.conv.flatten(0, 1).index_select(0, past[(reach - history) * rows :])
    raw = torch.cat([conv.view(history, rows, channels), mixed])
    q, k, v = _heads(_convolve(raw, weights.conv), state)
    g, beta = _gates(b, a, weights)
    s, decay = _replay(state, slots, past[(reach - most) * rows :], pending, flush), torch.exp(g)
    gates = (_by_token(x.unsqueeze(-1), hv) for x in (decay, beta))
    o, u = _run(s, *(_by_token(x, hv) for x in (q, k, v)), *gates)
    for ring, x in ((state.conv, mixed), (state.u, u), (state.k, k), (state.decay, decay)):
        ring.flatten(0, 1).index_copy_(0, new, x.reshape(-1, *ring.shape[2:]))
    return gated_rms_norm(o.view(z.shape), z, weights.norm, weights.eps).transpose(0, 1)


Tokens = tuple[Tensor, ...]


def _by_token(x: Tensor, heads: int) -> Tokens:
    """[T, S, H, X] -> T tensors [S * HV, 1, X], a value head reading as _expand says."""
    if x.shape[2] != heads:
        x = _expand(x, heads)
    return x.reshape(len(x), -1, 1, x.shape[3]).unbind(0)


def _run(
    s: Tensor, q: Tokens, k: Tokens, v: Tokens, decay: Tokens, beta: Tokens
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token, in place on s [N, K, V]: q, k [N, 1, K], v [N, 1, V],
    decay, beta [N, 1, 1] -> o, u [Q * N, 1, V]."""
    out: list[Tensor] = []
    u: list[Tensor] = []
    for qt, kt, vt, fade, rate in zip(q, k, v, decay, beta, strict=True):
        s.mul_(fade)
        u.append((vt - torch.bmm(kt, s)).mul_(rate))
        _write(s, kt, u[-1])
        out.append(torch.bmm(qt, s))
    return torch.cat(out), torch.cat(u)


def _write(s: Tensor, k: Tensor, u: Tensor) -> None:
    """s [N, K, V] += k [N, 1, K] (x) u [N, 1, V]: the one expression of stepping and replay."""
    s.baddbmm_(k.transpose(1, 2), u)


def _replay(
    state: GatedDeltaState, slots: Tensor, lines: Tensor, pending: Tensor, flush: int
) -> Tensor:
    """The state with the pending tokens, in these lines, folded in: [S * HV, K, V], a copy.

    It is written where at least `flush` were pending. Where a row has fewer than its batch mates,
    the first are decay 1, k 0 and u 0: an exact no-op.
    """
    (rows,), heads, due = slots.shape, state.recurrent.shape[1], pending >= flush
    alone = rows == 1 and bool(due)
    s = state.recurrent[int(slots)] if alone else state.recurrent.index_select(0, slots)
    flat, most = s.view(-1, *s.shape[-2:]), len(lines) // rows
    if most:
        tokens = [
            ring.flatten(0, 1).index_select(0, lines).view(most, rows, -1, ring.shape[-1])
            for ring in (state.decay.unsqueeze(-1), state.k, state.u)
        ]
        if rows > 1:
            live = (torch.arange(most, 0, -1)[:, None] <= pending)[..., None, None]
            pairs = zip(tokens, (1.0, 0.0, 0.0), strict=True)
            tokens = [torch.where(live, x, nothing) for x, nothing in pairs]
        for fade, kt, ut in zip(*(_by_token(x, heads) for x in tokens), strict=True):
            flat.mul_(fade)
            _write(flat, kt, ut)
    if alone:
        return flat.clone()
    state.recurrent.index_copy_(0, slots[due], s[due])
    return flat


@op(writes=("state",))
def gated_delta_chunk(
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Tensor:
    """Prompt tokens: the chunked form on the absolute grid, fp32 state between chunks.

    mixed [T, C], b, a [T, HV] raw; cu_seqlens [S+1], the rest [S], all int32
    -> o [T, HV, V] fp32, before the gated norm. Row s begins at position starts[s], a multiple of
    the grid, from the state in slot state_src[s] (zeros where starts[s] == 0), and leaves its state
    in state_slots[s]; the state at its last grid point goes to snapshot_slots[s] where that is not
    0.
    """
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history, conv = weights.conv.shape[1] - 1, state.conv.flatten(0, 1)
    g, beta = _gates(b, a, weights)
    bounds = cu_seqlens.tolist()

    def last(slot: int, position: int) -> Tensor:
        return _lines(state.conv.shape[1], (slot,), (position,), range(-history, 0))

    rows = (x.tolist() for x in (starts, state_src, state_slots, snapshot_slots))
    for i, (start, src, dst, snapshot) in enumerate(zip(*rows, strict=True)):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end or dst == 0:
            continue
        past = conv[last(src, start)] if start else conv.new_zeros(history, conv.shape[1])
        s = state.recurrent[src].clone() if start else torch.zeros_like(state.recurrent[0])
        raw = torch.cat([past, mixed[begin:end]])
        heads = _heads(_convolve(raw, weights.conv), state)
        out[begin:end], at_grid, s = _chunks(*heads, g[begin:end], beta[begin:end], s)
        state.recurrent[dst], conv[last(dst, start + end - begin)] = s, raw[end - begin :]
        if snapshot:
            whole = (end - begin) // GRID * GRID
            state.recurrent[snapshot] = at_grid
            conv[last(snapshot, start + whole)] = raw[whole : whole + history]
    return out


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One row's chunks: q, k [T, HK, K], v [T, HV, V], g, beta [T, HV], s [HV, K, V]
    -> o [T, HV, V], the state at the last grid point, the state after the last token.

    Rows past the end have k = 0, beta = 0 and no decay: exact no-ops on the state.
    """
    length, hv = v.shape[:2]
    whole, chunks = length // GRID, -(-length // GRID)
    short = chunks * GRID - length

    def tiles(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, short))
        return x.view(chunks, GRID, *x.shape[1:]).transpose(1, 2)

    q, k, v = tiles(_expand(q, hv)), tiles(_expand(k, hv)), tiles(v)
    g, beta = tiles(g).cumsum(-1), tiles(beta)[..., None]
    causal = torch.ones(GRID, GRID, dtype=torch.bool).tril()
    decay = torch.exp((g[..., :, None] - g[..., None, :]).masked_fill(~causal, -torch.inf))
    inner = ((k * beta) @ k.transpose(-1, -2) * decay).tril(-1) + torch.eye(GRID)
    grown = torch.exp(g)[..., None]
    solved = torch.linalg.solve_triangular(
        inner, torch.cat([v * beta, k * beta * grown], -1), upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, q = (q @ k.transpose(-1, -2)) * decay, q * grown
    left = k * torch.exp(g[..., -1:] - g)[..., None]
    out, at_grid = torch.empty_like(v), s
    for c in range(chunks):
        new = u[c] - w[c] @ s
        out[c] = q[c] @ s + scores[c] @ new
        s = s * torch.exp(g[c, :, -1])[:, None, None] + left[c].transpose(-1, -2) @ new
        if c + 1 == whole:
            at_grid = s
    return out.transpose(1, 2).reshape(chunks * GRID, hv, -1)[:length], at_grid, s
