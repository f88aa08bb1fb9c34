"""sample: the one token that the target emits at each position.

argmax over processed logits / T + Gumbel(seed, position, token id), ties by the smaller id;
temperature 0 is plain argmax. -1 where there is no such token: a logit is NaN or +inf, or nothing
is left to choose from. Every row is its own: parameters, masks and noise come from the row's
row of the table and the absolute position, never from the batch. Penalties count the drafts in
front of a position, so a draft changes nothing but the time at which a token is known.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lockstep.kernels.registry import op

MASK32 = 0xFFFFFFFF
BLOCK = 512
MANY = 32 * BLOCK
"""Scores of which the largest is looked for in blocks."""
Word = TypeVar("Word", int, Tensor)

BIAS = 1
PENALTIES = 2
MIN_TOKENS = 4
BAD_WORDS = 8
FILTERS = 16
NOISE = 32
ALLOWED = 64
"""Bits of `flags`: what a row uses. A row that uses nothing is a plain argmax."""
BITS = (torch.arange(256)[:, None] >> torch.arange(8) & 1).to(torch.uint8)
OCTETS = BITS.view(torch.int64).flatten()
"""[256] int64: the bits of an octet, lowest first, a byte for each."""


@dataclass(frozen=True)
class RowParameters:
    """The numbers that a row samples by. Each is declared here alone: its name, a default that asks
    for nothing and, by its type, the words that it takes in SamplingState.scalars.

    flags: bits of BIAS .. ALLOWED; top_k: 0 is off; min_position: in front of it the row's stop ids
    are not allowed.
    """

    seed: int = field(default=0, metadata={"format": "q"})
    flags: int = 0
    top_k: int = 0
    min_position: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def words(self) -> Tensor:
        """[WORDS] int32: a row of SamplingState.scalars.

        Raises struct.error or OverflowError where a value does not fit.
        """
        packed = struct.pack(_FORMAT, *(getattr(self, name) for name in _FORMATS))
        return torch.frombuffer(bytearray(packed), dtype=torch.int32)


_DTYPES = {"q": torch.int64, "i": torch.int32, "f": torch.float32}
_FORMATS = {
    f.name: f.metadata.get("format", "i" if f.type is int else "f") for f in fields(RowParameters)
}
"""Name -> its letter in the language of the struct module."""
_PLAIN = "=" + "".join(_FORMATS.values())
_FORMAT = _PLAIN + "4x" * (struct.calcsize(_PLAIN) // 4 % 2)
WORDS = struct.calcsize(_FORMAT) // 4
"""32-bit words of a row: an even number, so that a seed is a whole 64-bit number in every row."""
COLUMNS = {name: struct.calcsize(_PLAIN[: i + 1]) // 4 for i, name in enumerate(_FORMATS)}
"""Name -> the first of its words."""


@dataclass
class SamplingState:
    """What the rows of the table sample by: R rows, V tokens; row 0 is the null row's.

    scalars [R, WORDS] int32: RowParameters, one upload a row; each of its names is an attribute, a
    view [R] of its column. bias [R, V] fp32 (-inf: not allowed); counts [R, V] int32 of generated
    tokens; in_prompt [R, V] bool; stop_ids [R, N] int64 (-1: none); bad_words [R, W, L] int64, W
    words of up to L tokens, right-aligned, -1 in front: the last token of each is not allowed after
    the others.
    """

    scalars: Tensor
    bias: Tensor
    counts: Tensor
    in_prompt: Tensor
    stop_ids: Tensor
    bad_words: Tensor

    def __getattr__(self, name: str) -> Tensor:
        """A column of the scalars, made at its first use. Raises AttributeError."""
        if name not in COLUMNS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        dtype = _DTYPES[_FORMATS[name]]
        column = self.scalars.view(dtype)[:, COLUMNS[name] * 4 // dtype.itemsize]
        setattr(self, name, column)
        return column

    @classmethod
    def empty(
        cls, rows: int, vocab: int, stop_ids: int, bad_words: tuple[int, int], device: str
    ) -> "SamplingState":
        """Rows that ask for nothing: greedy, no penalties, no masks."""

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full((rows, *shape), value, dtype=dtype, device=device)

        return cls(
            scalars=RowParameters().words().repeat(rows, 1).to(device),
            bias=full(0.0, torch.float32, vocab),
            counts=full(0, torch.int32, vocab),
            in_prompt=full(0, torch.bool, vocab),
            stop_ids=full(-1, torch.int64, stop_ids),
            bad_words=full(-1, torch.int64, *bad_words),
        )

    def parts(self) -> dict[str, Tensor]:
        """Name -> each tensor, indexed by row first."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def tensors(self) -> list[Tensor]:
        """All parts."""
        return list(self.parts().values())


@op
def sample(
    logits: Tensor,
    positions: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    history: Tensor,
    state: SamplingState,
    ids: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """logits [S, Q, V], taken as fp32; positions [S, Q] int64: where the sampled token will stand;
    drafts [S, Q-1] int64 (-1: none); row_ids [S] int64; history [R, L] int64: each row's tokens,
    drafts written in front of the positions; ids [V] int64, ascending: the tokens whose logits
    these are, where they are not the whole vocabulary; allowed [S, Q, ceil(tokens / 32)] int32:
    bits, lowest first, of the tokens that may come there, read of rows with the flag ALLOWED, all
    of them where it is None -> [S, Q] int64, -1 for none.

    Order of processing, as in vLLM: allowed, bias and allowed ids, bad words, min_tokens,
    repetition, frequency and presence penalties, temperature, min_p, top_k, top_p, noise. Ties at
    the top-k threshold are kept; top-p keeps the likeliest tokens up to the one that reaches top_p.

    A logit row has no token where one of its logits is NaN or +inf, allowed or not, and where its
    largest score, noise included, is not finite: all are banned, or leave fp32's range.
    """
    logits = logits.float()
    best, top = _best(logits)
    sound = top < torch.inf
    tokens = best if ids is None else ids[best]
    flags = state.flags[row_ids]
    for s in torch.nonzero(flags).flatten().tolist():
        row = row_ids[s : s + 1]
        use = int(flags[s])
        words = allowed[s] if use & ALLOWED and allowed is not None else None
        if words is not None and use == ALLOWED and _are_allowed(tokens[s], words):
            continue
        top[s] = -torch.inf
        for part, x, kept in _parts(logits[s], words, ids):
            given = (part, positions[s], drafts[s], row, history, state, use, kept, logits.shape[2])
            best, top[s, part] = _best(_process(x, *given))
            tokens[s, part] = best if kept is None else kept[best]
    return torch.where(sound & top.isfinite(), tokens, -1)


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
