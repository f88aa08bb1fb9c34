"""sample: the one token that the target emits at each position.

The token is the argmax of processed logits / T + Gumbel(seed, position, token id); ties go to the
smaller id, and temperature 0 is a plain argmax. It is -1 if a logit is NaN or +inf, or if no token
is left. Parameters, masks and noise depend on the row and the absolute position, never on the
batch, nor on the number of ranks that share a row's logits. Penalties count the drafts before a
position. So a draft only changes when a token is known.
"""

from torch import Tensor

from lockstep.kernels.registry import op
from lockstep.kernels.sampling.reference import REFERENCE_FUNCTIONS, sample_by
from lockstep.kernels.sampling.shard import LogitShard
from lockstep.kernels.sampling.state import SamplingState


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
    return sample_by(
        REFERENCE_FUNCTIONS, logits, positions, drafts, row_ids, history, state, ids, allowed, shard
    )
