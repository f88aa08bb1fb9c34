"""The steps of the reference of sample: masks, penalties, filters and noise."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.sampling.state import (
    BAD_WORDS,
    BIAS,
    FILTERS,
    MIN_TOKENS,
    NOISE,
    PENALTIES,
    SamplingState,
)

MASK32 = 0xFFFFFFFF
BLOCK = 512
MANY = 32 * BLOCK
"""Scores of which the largest is looked for in blocks."""
Word = TypeVar("Word", int, Tensor)
BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8)
OCTETS = BITS.view(torch.int64).flatten()
"""[256] int64: the bits of an octet, lowest first, a byte for each."""


def _are_allowed(tokens: Tensor, words: Tensor) -> bool:
    """Whether each of tokens [Q] has its bit in words [Q, N] int32."""
    found = words.gather(1, (tokens >> 5)[:, None])[:, 0]
    return bool((found >> (tokens & 31).int() & 1).all())


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """[..., V] -> the place of the largest, and its value: NaN where there is one."""
    if scores.shape[-1] >= MANY:
        return _best_of_many(scores)
    best = scores.argmax(-1, keepdim=True)
    return best[..., 0], scores.gather(-1, best)[..., 0]


def _best_of_many(scores: Tensor) -> tuple[Tensor, Tensor]:
    """See _best: by blocks, as on a CPU amax takes a tenth of the time of argmax."""
    rest = -scores.shape[-1] % BLOCK
    whole = pad(scores, (0, rest), value=-torch.inf) if rest else scores
    blocks = whole.unflatten(-1, (-1, BLOCK))
    first = blocks.amax(-1).argmax(-1, keepdim=True)
    best, top = _best(blocks.take_along_dim(first[..., None], -2)[..., 0, :])
    return first[..., 0] * BLOCK + best, top


def _parts(
    logits: Tensor, words: Tensor | None, ids: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """A row's positions, those together that choose from the same tokens: which they are, a copy of
    their logits [P, n], and the tokens [n], None for all. logits [Q, V] of `ids`; words [Q, N]
    int32, bits of what is allowed, None: everything. A position where nothing is allowed is left
    out."""
    if words is None:
        yield slice(0, len(logits)), logits.clone(), ids
        return
    for q, bits in enumerate(_bits(words, ids, logits.shape[1])):
        places = torch.from_numpy(bits.nonzero()[0]).to(logits.device)
        if len(places):
            part = slice(q, q + 1)
            yield part, logits[part].index_select(1, places), places if ids is None else ids[places]


def _bits(words: Tensor, ids: Tensor | None, vocab: int) -> Any:
    """words [Q, N] int32 -> whether the bit of each of `ids`, or of each token, is set: [Q, V] bool
    of numpy, which finds those that are in a tenth of the time that torch takes on a CPU."""
    octets = words.contiguous().view(torch.uint8).flatten().int()
    spread = OCTETS.to(octets.device).index_select(0, octets).view(torch.bool)
    bits = spread.view(len(words), -1)
    return (bits[:, :vocab] if ids is None else bits[:, ids]).cpu().numpy()


def _process(
    x: Tensor,
    part: slice,
    positions: Tensor,
    drafts: Tensor,
    row: Tensor,
    history: Tensor,
    state: SamplingState,
    flags: int,
    ids: Tensor | None,
    vocab: int,
) -> Tensor:
    """Logits [P, n] of tokens `ids`, out of `vocab`, at the part's positions of one row -> scores
    [P, n] whose argmax is the token's place."""
    positions = positions[part]
    kept = slice(None) if ids is None else ids
    if flags & BIAS:
        x = x + state.bias[row][:, kept]
    if flags & BAD_WORDS:
        _ban_words(x, positions, history[row[0]], state.bad_words[row[0]], ids)
    if flags & MIN_TOKENS:
        early = positions < state.min_position[row]
        x[early.nonzero(), _places(state.stop_ids[row[0]], ids)] = -torch.inf
    if flags & PENALTIES:
        x = _penalise(x, part.start, drafts, row, state, kept)
    if not flags & NOISE:
        return x
    x = x / state.temperature[row]
    if flags & FILTERS:
        min_p = float(state.min_p[row])
        x = _filter(x, min_p, int(state.top_k[row]), float(state.top_p[row]), vocab)
    noise = torch.arange(x.shape[-1], device=x.device) if ids is None else ids
    return x + gumbel(state.seed[row], positions, noise)


def _places(tokens: Tensor, ids: Tensor | None) -> Tensor:
    """Where tokens (-1: none) stand in a logit row; those that do not are left out."""
    tokens = tokens[tokens >= 0]
    if ids is None:
        return tokens
    places = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
    return places[ids[places] == tokens]


def _ban_words(
    x: Tensor, positions: Tensor, history: Tensor, words: Tensor, ids: Tensor | None
) -> None:
    length = words.shape[1]
    for word in words[words[:, -1] >= 0]:
        prefix = word[:-1]
        used = prefix >= 0
        back = torch.arange(1 - length, 0)
        for q, position in enumerate(positions.tolist()):
            seen = history[(position + back).clamp_min(0)]
            if bool(((seen == prefix) | ~used).all()) and position >= int(used.sum()):
                x[q, _places(word[-1:], ids)] = -torch.inf


def _penalise(
    x: Tensor,
    first: int,
    drafts: Tensor,
    row: Tensor,
    state: SamplingState,
    kept: slice | Tensor,
) -> Tensor:
    """Counts at position q: the row's own and the drafts in front of q. x: from `first` on."""
    counts = state.counts[row].repeat(x.shape[0], 1)
    for q, draft in enumerate(drafts.tolist()):
        if draft >= 0:
            counts[max(q + 1 - first, 0) :, draft] += 1
    counts = counts[:, kept]
    seen = (counts > 0) | state.in_prompt[row][:, kept]
    repetition = state.repetition[row]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - state.frequency[row] * counts
    return x - state.presence[row] * (counts > 0)


def _filter(x: Tensor, min_p: float, top_k: int, top_p: float, vocab: int) -> Tensor:
    """What is not in x counts as banned: sums are over `vocab` scores, however few there are."""
    if min_p > 0:
        floor = x.amax(-1, keepdim=True) + torch.log(torch.tensor(min_p))
        x = x.masked_fill(x < floor, -torch.inf)
    if 0 < top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = x.sort(dim=-1, descending=True, stable=True)
        whole = pad(ordered, (0, vocab - ordered.shape[-1]), value=-torch.inf)
        mass = torch.softmax(whole, -1).cumsum(-1)[:, : ordered.shape[-1]]
        out = torch.zeros_like(mass, dtype=torch.bool)
        out[:, 1:] = mass[:, :-1] >= top_p
        x = x.masked_fill(torch.zeros_like(out).scatter_(-1, ids, out), -torch.inf)
    return x


def gumbel(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """seed [1] int64, positions [Q] int64, ids [V] int64 -> standard Gumbel noise [Q, V] fp32."""
    return uniform(seed, positions, ids).log_().neg_().log_().neg_()


def uniform(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """seed [1] int64, positions [Q] int64, ids [V] int64 -> numbers in (0, 1) [Q, V] fp32.

    A counter-based hash (murmur3's 32-bit finaliser over seed, position and token id) gives 23
    bits, so that (bits + 0.5) / 2^23 is exact and below 1. No state: the same (seed, position,
    token) gives the same number in any batch, step or drafter.
    """
    of_row = _mix((int(seed) & MASK32) ^ 0x9E3779B9)
    of_row = _mix(of_row ^ ((int(seed) >> 32) & MASK32))
    keys = [_mix(of_row ^ (position & MASK32)) for position in positions.tolist()]
    key = torch.tensor(keys, device=ids.device)[:, None]
    bits = _mix(_mix(key ^ ids) ^ key) >> 9
    return bits.float().add_(0.5).mul_(2.0**-23)


def _mix(x: Word) -> Word:
    """murmur3's fmix32 on 32 bits: those of an int, or of each number of an int64 tensor, in its
    place: to take new memory for a vocabulary of numbers costs more than the arithmetic."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x &= MASK32
    x ^= x >> 13
    x *= 0xC2B2AE35
    x &= MASK32
    x ^= x >> 16
    return x
