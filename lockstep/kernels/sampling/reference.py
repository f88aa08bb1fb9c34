"""The steps of the reference of sample: masks, penalties, filters and noise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.sampling.shard import LogitShard
from lockstep.kernels.sampling.state import (
    ALLOWED,
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
"""Minimum number of scores whose argmax is computed by blocks."""
Word = TypeVar("Word", int, Tensor)
BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8)
OCTETS = BITS.view(torch.int64).flatten()
"""[256] int64: the bits of each byte value, lowest first, one byte per bit."""


@dataclass(frozen=True)
class ScoreFunctions:
    """Functions over the scores of a vocabulary, with the bits of _best, uniform and sort_scores.

    Only these differ between the reference and the CPU backend.
    """

    find_best: Callable[[Tensor], tuple[Tensor, Tensor]]
    uniform: Callable[[Tensor, Tensor, Tensor], Tensor]
    sort: Callable[[Tensor], tuple[Tensor, Tensor]]


def sample_by(
    functions: ScoreFunctions,
    logits: Tensor,
    positions: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    history: Tensor,
    state: SamplingState,
    ids: Tensor | None = None,
    allowed: Tensor | None = None,
    shard: LogitShard | None = None,
) -> Tensor:
    """Sample as lockstep.kernels.sampling.sample says."""
    logits = logits.float()
    shard = shard or LogitShard(logits.shape[2:])
    local, local_ids = _local_logits(shard, logits, ids)
    # Greedy rows without flags are done after this one argmax; the loop redoes all other rows.
    best, top = functions.find_best(local)
    valid = top < torch.inf
    tokens = best if local_ids is None else local_ids[best]
    for s, row_flags in enumerate(state.flags[row_ids].tolist()):
        if not row_flags:
            continue
        row = row_ids[s : s + 1]
        words = allowed[s] if row_flags & ALLOWED and allowed is not None else None
        if words is not None and row_flags == ALLOWED and _are_allowed(tokens[s], words):
            continue
        top[s] = -torch.inf
        logit_row = local[s]
        logit_ids = local_ids
        if row_flags & FILTERS and row_flags & NOISE:  # filters compare tokens of all ranks
            logit_row = shard.gather(logits[s])
            logit_ids = ids
        for part, x, token_ids in _parts(logit_row, words, logit_ids):
            scores = _process(
                x, part, positions[s], drafts[s], row, history, state, row_flags, token_ids,
                shard.total, functions,
            )  # fmt: skip
            best, top[s, part] = functions.find_best(scores)
            tokens[s, part] = best if token_ids is None else token_ids[best]
    top, tokens, valid = _best_of_ranks(shard, top, tokens, valid)
    return torch.where(valid & (top.abs() < torch.inf), tokens, -1)


def _are_allowed(tokens: Tensor, words: Tensor) -> bool:
    """Return whether the bit of each of tokens [Q] is set in words [Q, N] int32."""
    word = words.gather(1, (tokens >> 5)[:, None])[:, 0]
    return bool((word >> (tokens & 31).int() & 1).all())


def _best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return index and value of the largest of scores [..., V]; NaN counts as largest."""
    if scores.shape[-1] >= MANY:
        return _best_of_many(scores)
    best = scores.argmax(-1, keepdim=True)
    return best[..., 0], scores.gather(-1, best)[..., 0]


def _best_of_many(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Compute _best by blocks."""
    # On a CPU amax takes a tenth of the time of argmax. So find the best block by amax first.
    rest = -scores.shape[-1] % BLOCK
    padded = pad(scores, (0, rest), value=-torch.inf) if rest else scores
    blocks = padded.unflatten(-1, (-1, BLOCK))
    first = blocks.amax(-1).argmax(-1, keepdim=True)
    best, top = _best(blocks.take_along_dim(first[..., None], -2)[..., 0, :])
    return first[..., 0] * BLOCK + best, top


def _local_logits(
    shard: LogitShard, logits: Tensor, ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's logits [S, Q, n] and their tokens [n] (None: the whole vocabulary).

    A rank without logits has one that never wins. ids [V]: the tokens of all ranks' logits, None
    for the whole vocabulary.
    """
    if shard.ranks == 1:
        return logits, ids
    if not shard.width:
        index = torch.zeros(1, dtype=torch.int64, device=logits.device)
        return logits.new_full((*logits.shape[:2], 1), -torch.inf), index
    index = torch.arange(shard.begin, shard.begin + shard.width, device=logits.device)
    return logits, index if ids is None else ids[index]


def _best_of_ranks(
    shard: LogitShard, top: Tensor, tokens: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best of all ranks' scores [S, Q], its token, and whether all logits are valid.

    top [S, Q] fp32: this rank's best score. tokens [S, Q] int64: its token. valid [S, Q] bool.
    """
    if shard.ranks == 1:
        return top, tokens, valid
    parts = (top.view(torch.int32), tokens.int(), valid.int())
    records = shard.gather_records(torch.stack(parts, -1).flatten(0, 1))
    values = records[:, :, 0].contiguous().view(torch.float32)
    # Ranks have ascending tokens, so the first of equal scores has the smallest token.
    best, top_of_all = _best(values)
    token = records[:, :, 1].gather(1, best[:, None]).long()
    shape = top.shape
    return top_of_all.view(shape), token.view(shape), records[:, :, 2].bool().all(1).view(shape)


def _parts(
    logits: Tensor, words: Tensor | None, ids: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield groups of a row's positions that choose from the same tokens.

    logits [Q, V] of the tokens ids. words [Q, N] int32: bitmask of allowed tokens, None: all.
    Yields the positions, a copy of their logits [P, n], and the tokens [n] or None for all. A
    position without an allowed token is skipped.
    """
    if words is None:
        yield slice(0, len(logits)), logits.clone(), ids
        return
    for q, bits in enumerate(_bits(words, ids, logits.shape[1])):
        indices = torch.from_numpy(bits.nonzero()[0]).to(logits.device)
        if len(indices):
            part = slice(q, q + 1)
            yield (
                part,
                logits[part].index_select(1, indices),
                indices if ids is None else ids[indices],
            )


def _bits(words: Tensor, ids: Tensor | None, vocab: int) -> Any:
    """Unpack words [Q, N] int32 to booleans [Q, V] of the tokens ids or of all tokens."""
    # Returns a numpy array, whose nonzero takes a tenth of the time of torch's on a CPU.
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
    functions: ScoreFunctions,
) -> Tensor:
    """Compute the scores [P, n], whose argmax is the sampled token, from logits x [P, n].

    part: positions of the row. ids [n]: tokens of the logits. vocab: size of the vocabulary.
    """
    positions = positions[part]
    token_index = slice(None) if ids is None else ids
    if flags & BIAS:
        x = x + state.bias[row][:, token_index]
    if flags & BAD_WORDS:
        _ban_words(x, positions, history[row[0]], state.bad_words[row[0]], ids)
    if flags & MIN_TOKENS:
        early = positions < state.min_position[row]
        x[early.nonzero(), _logit_indices(state.stop_ids[row[0]], ids)] = -torch.inf
    if flags & PENALTIES:
        x = _penalise(x, part.start, drafts, row, state, token_index)
    if not flags & NOISE:
        return x
    x = x / state.temperature[row]
    if flags & FILTERS:
        min_p = float(state.min_p[row])
        top_k, top_p = int(state.top_k[row]), float(state.top_p[row])
        x = _filter(x, min_p, top_k, top_p, vocab, functions)
    noise = torch.arange(x.shape[-1], device=x.device) if ids is None else ids
    return x + _to_gumbel(functions.uniform(state.seed[row], positions, noise))


def _logit_indices(tokens: Tensor, ids: Tensor | None) -> Tensor:
    """Return the indices of tokens (-1: none) in a logit row; others are skipped."""
    tokens = tokens[tokens >= 0]
    if ids is None:
        return tokens
    indices = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
    return indices[ids[indices] == tokens]


def _ban_words(
    x: Tensor, positions: Tensor, history: Tensor, words: Tensor, ids: Tensor | None
) -> None:
    """Ban, in place, the last token of each word whose other tokens precede the position."""
    length = words.shape[1]
    for word in words[words[:, -1] >= 0]:
        prefix = word[:-1]
        used = prefix >= 0
        back = torch.arange(1 - length, 0)
        for q, position in enumerate(positions.tolist()):
            seen = history[(position + back).clamp_min(0)]
            if bool(((seen == prefix) | ~used).all()) and position >= int(used.sum()):
                x[q, _logit_indices(word[-1:], ids)] = -torch.inf


def _penalise(
    x: Tensor,
    first: int,
    drafts: Tensor,
    row: Tensor,
    state: SamplingState,
    token_index: slice | Tensor,
) -> Tensor:
    """Apply repetition, frequency and presence penalties to x [P, n], positions `first` and later.

    Counts at a position are the row's counts and the drafts before the position.
    """
    counts = state.counts[row].repeat(x.shape[0], 1)
    for q, draft in enumerate(drafts.tolist()):
        if draft >= 0:
            counts[max(q + 1 - first, 0) :, draft] += 1
    counts = counts[:, token_index]
    seen = (counts > 0) | state.in_prompt[row][:, token_index]
    repetition = state.repetition[row]
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - state.frequency[row] * counts
    return x - state.presence[row] * (counts > 0)


def _filter(
    x: Tensor, min_p: float, top_k: int, top_p: float, vocab: int, functions: ScoreFunctions
) -> Tensor:
    """Ban the tokens that min_p, top_k and top_p exclude."""
    if min_p > 0:
        floor = x.amax(-1, keepdim=True) + torch.log(torch.tensor(min_p))
        x = x.masked_fill(x < floor, -torch.inf)
    if 0 < top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ordered, ids = functions.sort(x)
        # Sums run over `vocab` scores, padded with -inf: the tree must not depend on len(x).
        padded = pad(ordered, (0, vocab - ordered.shape[-1]), value=-torch.inf)
        mass = torch.softmax(padded, -1).cumsum(-1)[:, : ordered.shape[-1]]
        out = torch.zeros_like(mass, dtype=torch.bool)
        out[:, 1:] = mass[:, :-1] >= top_p
        x = x.masked_fill(torch.zeros_like(out).scatter_(-1, ids, out), -torch.inf)
    return x


def sort_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row of scores [Q, V] -> (scores, indices): largest first, equal ones by index."""
    ordered, indices = scores.sort(dim=-1, descending=True, stable=True)
    return ordered, indices


def gumbel(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return standard Gumbel noise [Q, V] fp32 of seed [1], positions [Q], ids [V], all int64."""
    return _to_gumbel(uniform(seed, positions, ids))


def _to_gumbel(numbers: Tensor) -> Tensor:
    """Turn uniform numbers into standard Gumbel noise, in place."""
    return numbers.log_().neg_().log_().neg_()


def uniform(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return uniform numbers in (0, 1) [Q, V] fp32 of seed [1], positions [Q], ids [V], all int64.

    A counter-based hash: murmur3's 32-bit finalizer over seed, position and token id. It has no
    state, so (seed, position, token) gives the same number in any batch, step or drafter.
    """
    key = torch.tensor(position_keys(seed, positions), device=ids.device)[:, None]
    bits = _mix(_mix(key ^ ids) ^ key) >> 9
    # 23 bits: (bits + 0.5) / 2^23 is exact in fp32, above 0 and below 1.
    return bits.float().add_(0.5).mul_(2.0**-23)


REFERENCE_FUNCTIONS = ScoreFunctions(_best, uniform, sort_scores)


def position_keys(seed: Tensor, positions: Tensor) -> list[int]:
    """Return the hash of seed [1] and each position [Q]."""
    of_row = _mix((int(seed) & MASK32) ^ 0x9E3779B9)
    of_row = _mix(of_row ^ ((int(seed) >> 32) & MASK32))
    return [_mix(of_row ^ (position & MASK32)) for position in positions.tolist()]


def _mix(x: Word) -> Word:
    """Apply murmur3's fmix32 to an int, or in place to the elements of an int64 tensor."""
    # In place: allocating a tensor of the vocabulary's size costs more than the arithmetic.
    x ^= x >> 16
    x *= 0x85EBCA6B
    x &= MASK32
    x ^= x >> 13
    x *= 0xC2B2AE35
    x &= MASK32
    x ^= x >> 16
    return x
