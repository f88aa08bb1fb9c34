"""gated_delta_step and gated_delta_chunk: the two laws of a Gated DeltaNet mixer.

Both take the raw projections and do convolution, SiLU, l2 norm and recurrence (Yang et al., Gated
Delta Networks, 2024; layout of Qwen3.5 checkpoints). Generated tokens go through the
token-by-token update; prompt tokens through the chunked (WY) form on the absolute 64-token grid.
C = 2 HK K + HV V channels, ordered [all q | all k | all v]. W window tokens, R conv kernel - 1.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.activations import silu
from lockstep.kernels.registry import op
from lockstep.step import GRID

L2_EPS = 1e-6


@dataclass
class GatedDeltaState:
    """One layer's recurrent state, by slot (slot 0 is the null slot). fp32 but for conv.

    recurrent [slots, HV, K, V]: the state before the last window. conv [slots, R + W, C]: the R
    raw inputs before the last window, then the window's own. u [slots, W, HV, V],
    k [slots, W, HK, K], decay [slots, W, HV]: what replays the window's tokens into the state.
    """

    recurrent: Tensor
    conv: Tensor
    u: Tensor
    k: Tensor
    decay: Tensor

    def tensors(self) -> list[Tensor]:
        """All parts, each indexed by slot first."""
        return [getattr(self, f.name) for f in fields(self)]


def _heads(mixed: Tensor, state: GatedDeltaState) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved mixed [..., C] fp32 -> q, k [..., HK, K] normalised (q scaled), v [..., HV, V]."""
    hv, dk, dv = state.recurrent.shape[1:]
    hk = state.k.shape[2]
    qk, v = mixed.split([2 * hk * dk, hv * dv], dim=-1)
    qk = qk.unflatten(-1, (2 * hk, dk))
    qk = qk * torch.rsqrt((qk * qk).sum(-1, keepdim=True).add_(L2_EPS))
    return qk[..., :hk, :] * dk**-0.5, qk[..., hk:, :], v.unflatten(-1, (hv, dv))


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., R + Q, C] raw inputs, weight [C, R + 1] -> SiLU of the causal conv [..., Q, C]."""
    taps = weight.float().t()
    x = x.float()
    length = x.shape[-2] - taps.shape[0] + 1
    total = x[..., :length, :] * taps[0]
    for j in range(1, taps.shape[0]):
        total += x[..., j : j + length, :] * taps[j]
    return silu(total)


def _expand(x: Tensor, heads: int) -> Tensor:
    """[..., HK, K] -> [..., HV, K]: value head i reads key head i // (HV / HK)."""
    group = heads // x.shape[-2]
    return x.unsqueeze(-2).expand(*x.shape[:-1], group, x.shape[-1]).flatten(-3, -2)


@op
def gated_delta_step(
    mixed: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    state: GatedDeltaState,
    slots: Tensor,
    pending: Tensor,
) -> Tensor:
    """Generated tokens: replay the accepted ones of the last window, run the new window.

    mixed [S, Q, C] raw; g [S, Q, HV] fp32 log decay; beta [S, Q, HV] fp32; conv_weight [C, R + 1];
    slots [S] int64; pending [S] int64 (0..W) -> o [S, Q, HV, V] fp32. The state is read once and
    written once: after the replay, before the new window, whose inputs are kept. Q <= W.
    Slots may repeat only if null; a null row's results are undefined.
    """
    hv, history = state.recurrent.shape[1], state.conv.shape[1] - state.u.shape[1]
    taken = pending.tolist()
    past = [state.conv[s, n : n + history] for s, n in zip(slots.tolist(), taken, strict=True)]
    raw = torch.cat([torch.stack(past), mixed], dim=1)
    q, k, v = _heads(_convolve(raw, conv_weight), state)
    s = _replay(state, slots, pending, max(taken))
    state.recurrent.index_copy_(0, slots, s)
    decay = torch.exp(g)
    out, u = _run(s, _expand(q, hv), _expand(k, hv), v, decay, beta)
    for kept, new in ((state.conv, raw), (state.u, u), (state.k, k), (state.decay, decay)):
        kept[:, : new.shape[1]].index_copy_(0, slots, new.to(kept.dtype))
    return out


def _run(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token: s [S, HV, K, V], changed in place; q, k [S, Q, HV, K];
    v [S, Q, HV, V]; decay, beta [S, Q, HV] -> o, u [S, Q, HV, V]."""
    s = s.flatten(0, 1)
    out, u = [], []
    tokens = (_by_token(x) for x in (q, k, v, decay[..., None], beta[..., None]))
    for qt, kt, vt, fade, rate in zip(*tokens, strict=True):
        s.mul_(fade)
        u.append((vt - torch.bmm(kt, s)).mul_(rate))
        _write(s, kt, u[-1])
        out.append(torch.bmm(qt, s))
    return _by_row(out, v), _by_row(u, v)


def _by_token(x: Tensor) -> tuple[Tensor, ...]:
    """[S, Q, HV, X] -> Q tensors [S * HV, 1, X]."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(2).unbind(0)


def _by_row(tokens: list[Tensor], like: Tensor) -> Tensor:
    """Q tensors [S * HV, 1, V] -> [S, Q, HV, V], as `like`."""
    rows, length, heads, width = like.shape
    return torch.cat(tokens, 1).view(rows, heads, length, width).transpose(1, 2)


def _write(s: Tensor, k: Tensor, u: Tensor) -> None:
    """s [N, K, V] += k [N, 1, K] (x) u [N, 1, V]: the one expression of stepping and replay."""
    s.baddbmm_(k.transpose(1, 2), u)


def _replay(state: GatedDeltaState, slots: Tensor, pending: Tensor, most: int) -> Tensor:
    """The committed state [S, HV, K, V]: the last window's first `pending` tokens folded in.

    Where a row has fewer than its batch mates, the rest is decay 1 and u 0: an exact no-op.
    """
    s = state.recurrent.index_select(0, slots)
    if most:
        decay, u, k = (x[:, :most].index_select(0, slots) for x in (state.decay, state.u, state.k))
        if pending.shape[0] > 1:
            live = (torch.arange(most) < pending[:, None])[..., None]
            decay, u = torch.where(live, decay, 1.0), torch.where(live[..., None], u, 0.0)
        flat = s.flatten(0, 1)
        tokens = (_by_token(x) for x in (decay[..., None], _expand(k, s.shape[1]), u))
        for fade, kt, ut in zip(*tokens, strict=True):
            flat.mul_(fade)
            _write(flat, kt, ut)
    return s


@op
def gated_delta_chunk(
    mixed: Tensor,
    g: Tensor,
    beta: Tensor,
    conv_weight: Tensor,
    state: GatedDeltaState,
    cu_seqlens: Tensor,
    starts: Tensor,
    state_src: Tensor,
    state_slots: Tensor,
    snapshot_slots: Tensor,
) -> Tensor:
    """Prompt tokens: the chunked form on the absolute grid, fp32 state between chunks.

    mixed [T, C] raw; g, beta [T, HV] fp32; cu_seqlens [S+1], the rest [S], all int32
    -> o [T, HV, V] fp32. Row s begins at position starts[s], a multiple of the grid, from the
    state in slot state_src[s] (zeros where starts[s] == 0), and leaves its state in
    state_slots[s]; the state at its last grid point goes to snapshot_slots[s] where that is not 0.
    """
    out = torch.zeros(mixed.shape[0], *state.u.shape[2:])
    history = state.conv.shape[1] - state.u.shape[1]
    bounds = cu_seqlens.tolist()
    rows = zip(
        starts.tolist(),
        state_src.tolist(),
        state_slots.tolist(),
        snapshot_slots.tolist(),
        strict=True,
    )
    for i, (start, src, dst, snapshot) in enumerate(rows):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end or dst == 0:
            continue
        past = state.conv[src, :history] if start else torch.zeros_like(state.conv[0, :history])
        s = state.recurrent[src].clone() if start else torch.zeros_like(state.recurrent[0])
        raw = torch.cat([past, mixed[begin:end]])
        heads = _heads(_convolve(raw, conv_weight), state)
        out[begin:end], at_grid, s = _chunks(*heads, g[begin:end], beta[begin:end], s)
        state.recurrent[dst], state.conv[dst, :history] = s, raw[end - begin :]
        if snapshot:
            whole = (end - begin) // GRID * GRID
            state.recurrent[snapshot] = at_grid
            state.conv[snapshot, :history] = raw[whole : whole + history]
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
