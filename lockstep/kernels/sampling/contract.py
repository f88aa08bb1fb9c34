"""sample: the one token that the target emits at each position.

The token is the argmax of processed logits / T + Gumbel(seed, position, token id); ties go to the
smaller id, and temperature 0 is a plain argmax. It is -1 if a logit is NaN or +inf, or if no token
is left. Parameters, masks and noise depend on the row and the absolute position, never on the
batch, nor on the number of ranks that share a row's logits. Penalties count the drafts before a
position. So a draft only changes when a token is known.
"""

import torch
from torch import Tensor

from lockstep.kernels.registry import op
from lockstep.kernels.sampling.reference import (
    _are_allowed,
    _best,
    _best_of_ranks,
    _local_logits,
    _parts,
    _process,
)
from lockstep.kernels.sampling.shard import LogitShard
from lockstep.kernels.sampling.state import ALLOWED, FILTERS, NOISE, SamplingState


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
    shard: LogitShard | None = None,
) -> Tensor:
    """Sample one token per position -> [S, Q] int64, -1 for none, equal on all ranks.

    logits [S, Q, n]: this rank's `shard` of the logits [S, Q, V], taken as fp32. shard None: the
    logits are whole. positions [S, Q] int64: positions of the sampled tokens. drafts
    [S, Q-1] int64 (-1: none). row_ids [S] int64. history [R, L] int64: each row's tokens, with the
    drafts written before the positions. ids [V] int64, ascending: the token of each logit of all
    ranks; None: the whole vocabulary. allowed [S, Q, ceil(tokens / 32)] int32: bitmask of allowed
    tokens, lowest bit first, read for rows with the flag ALLOWED; None: all are allowed. Tensors
    are equal on all ranks, except for the logits.

    Order of processing, as in vLLM: allowed tokens, bias and allowed ids, bad words, min_tokens,
    repetition, frequency and presence penalties, temperature, min_p, top_k, top_p, noise. Ties at
    the top-k threshold are kept. Top-p keeps the likeliest tokens up to the one that reaches top_p.

    A logit row has no token if one of its logits is NaN or +inf, allowed or not, or if its largest
    score, noise included, is not finite: then all tokens are banned or overflow fp32.
    """
    logits = logits.float()
    shard = shard or LogitShard(logits.shape[2:])
    local, local_ids = _local_logits(shard, logits, ids)
    # Greedy rows without flags are done after this one argmax; the loop redoes all other rows.
    best, top = _best(local)
    valid = top < torch.inf
    tokens = best if local_ids is None else local_ids[best]
    flags = state.flags[row_ids]
    for s in torch.nonzero(flags).flatten().tolist():
        row = row_ids[s : s + 1]
        row_flags = int(flags[s])
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
                shard.total,
            )  # fmt: skip
            best, top[s, part] = _best(scores)
            tokens[s, part] = best if token_ids is None else token_ids[best]
    top, tokens, valid = _best_of_ranks(shard, top, tokens, valid)
    return torch.where(valid & top.isfinite(), tokens, -1)
