"""Launcher of sample in Triton."""

from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.sampling import SamplingState, sample
from lockstep.kernels.sampling.device_filter import (
    GROUP,
    TILE,
)
from lockstep.kernels.sampling.device_score import (
    Batch,
    Parameters,
)
from lockstep.kernels.sampling.kernels import choose_kernel, score_kernel, whole_kernel

SPAN = 8192
"""Logits per CTA in a batch of MANY logit rows or more."""
BLOCK = 2048
"""Logits per CTA in a smaller batch, and logits that a CTA reads at once."""
MANY = 16
"""Logit rows from which on a batch is large enough to fill the GPU with CTAs of SPAN logits."""
LOGIT_ROW_BLOCK = 16384
"""Scores of a whole logit row that a CTA reads at once."""
GRAIN = 8
"""Adjacent logits per lane."""
WHOLE = 64
"""Maximum CTAs, and score buffers, that process UNDECIDED logit rows."""
MAX_VOCAB = 1 << 20
"""Maximum vocabulary size."""


def _supports(**traits: Any) -> str | None:
    """Return None if the kernels serve this vocabulary, else the reason why not."""
    vocab = traits.get("vocab", 1)
    return (
        f"vocab {vocab} is above {MAX_VOCAB}"
        if vocab > MAX_VOCAB
        else gpu_trait(device=traits["device"])
    )


@sample.backend("triton", supports=_supports)
def sample_triton(
    logits: Tensor,
    positions: Tensor,
    drafts: Tensor,
    row_ids: Tensor,
    history: Tensor,
    state: SamplingState,
    ids: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Launch the three kernels: see sampling.sample. All but row_ids and ids are contiguous."""
    rows, queries, vocab = logits.shape
    logit_rows = rows * queries
    groups = triton.cdiv(vocab, GROUP)
    blocks = triton.cdiv(vocab, BLOCK)
    span = SPAN if logit_rows >= MANY else BLOCK
    parts = triton.cdiv(vocab, span)
    power = triton.next_power_of_2
    out = row_ids.new_empty(rows, queries)
    if not logit_rows:
        return out

    def floats(size: int, count: int = logit_rows) -> Tensor:
        return logits.new_empty(count, size, dtype=torch.float32)

    def ints(size: int) -> Tensor:
        return logits.new_empty(logit_rows, size, dtype=torch.int32)

    batch = Batch(logits, positions, drafts, row_ids, history, ids, allowed)
    parameters = Parameters(**state.parts() | {"in_prompt": state.in_prompt.view(torch.uint8)})
    words, longest = state.bad_words.shape[1:]
    numbers = (queries, history.shape[1], state.bias.shape[1])
    common = dict(VOCAB=vocab, STOPS=state.stop_ids.shape[1], W=words, L=longest)
    common |= dict(WORD_LANES=power(longest), enable_fp_fusion=False)
    sizes = dict(BLOCKS=blocks, GROUPS=groups, GROUP=GROUP, GRAIN=GRAIN, **common)
    partials = (floats(groups), floats(blocks), floats(parts), ints(parts))
    score_kernel[(logit_rows, parts)](
        batch, parameters, *partials, *numbers, FIRST=0, SPAN=span, BLOCK=BLOCK, num_warps=8, **sizes
    )
    tile = (ints(TILE), floats(TILE * GROUP), ints(TILE * GROUP))
    block_lanes = power(blocks)
    choose_kernel[(logit_rows,)](
        batch, parameters, *partials, *tile, out, *numbers, PARTS=parts, PART_LANES=power(parts),
        LANES=block_lanes * BLOCK // GROUP, BLOCK_LANES=block_lanes, TILE=TILE, num_warps=16,
        **sizes,
    )  # fmt: skip
    num_ctas = min(logit_rows, WHOLE)
    whole_kernel[(num_ctas,)](
        batch, parameters, floats(vocab, num_ctas), out, logit_rows, *numbers,
        BLOCK=max(2, min(LOGIT_ROW_BLOCK, power(vocab))), num_warps=16, **common,
    )  # fmt: skip
    return out
