"""sample: the one token that the target emits at each position.

argmax over processed logits / T + Gumbel(seed, position, token id), ties by the smaller id;
temperature 0 is plain argmax. -1 where there is no such token: a logit is NaN or +inf, or nothing
is left to choose from. Every row is its own: parameters, masks and noise come from the row's
row of the table and the absolute position, never from the batch. Penalties count the drafts in
front of a position, so a draft changes nothing but the time at which a token is known.
"""

import torch
from torch import Tensor

from lockstep.kernels.registry import op
from lockstep.kernels.sampling.reference import _are_allowed, _best, _parts, _process
from lockstep.kernels.sampling.state import ALLOWED, SamplingState


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
