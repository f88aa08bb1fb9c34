"""Launcher of sample in Triton."""

from math import gcd
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.backends import gpu_trait
from lockstep.kernels.integers import ceil_div, next_power_of_2
from lockstep.kernels.sampling import VOCABULARY_TILE, LogitShard, SamplingState, sample
from lockstep.kernels.sampling.device_score import Batch, Parameters
from lockstep.kernels.sampling.exchange_kernels import choose_proposed_kernel, propose_kernel
from lockstep.kernels.sampling.kernels import choose_kernel, score_kernel, whole_kernel
from lockstep.kernels.sampling.shard import GROUP, TILE, RecordLayout

SPAN = 8192
"""Logits per CTA in a batch of MANY logit rows or more."""
BLOCK = VOCABULARY_TILE
"""Logits per CTA in a smaller batch, and logits that a CTA reads at once."""
MANY = 16
"""Minimum logit rows of a batch that fills the GPU with CTAs of SPAN logits."""
LOGIT_ROW_BLOCK = 16384
"""Scores of a whole logit row that a CTA reads at once."""
GRAIN = 8
"""Adjacent logits per lane."""
WHOLE = 64
"""Maximum CTAs, each with a score buffer, that process the logit rows which choose_kernel left
UNDECIDED."""
MAX_ALIGNMENT = 8
"""Logits of the widest load: 16 bytes of a 16-bit dtype."""
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
    shard: LogitShard | None = None,
) -> Tensor:
    """Launch the kernels: see sampling.sample. All but row_ids and ids are contiguous."""
    shard = shard or LogitShard(logits.shape[2:])
    out = row_ids.new_empty(logits.shape[:2])
    if not out.numel():
        return out
    batch = Batch(logits, positions, drafts, row_ids, history, ids, allowed)
    launch = _Launch(batch, state, shard, out)
    partials = launch.score()
    if shard.ranks == 1:
        launch.choose(partials)
        launch.choose_from_whole(logits)
    else:
        needed = launch.choose_proposed(launch.propose(partials))
        launch.choose_from_whole(shard.gather(logits.flatten(0, 1), needed))
    return out


class _Launch:
    """Launches of one call. out [S, Q]: the sampled tokens.

    lengths: queries of a row, tokens of a row's history, tokens of the vocabulary.
    """

    def __init__(self, batch: Batch, state: SamplingState, shard: LogitShard, out: Tensor) -> None:
        self.batch = batch
        self.parameters = Parameters(
            **state.parts() | {"in_prompt": state.in_prompt.view(torch.uint8)}
        )
        self.shard = shard
        self.out = out
        self.logit_rows = out.numel()
        words, longest = state.bad_words.shape[1:]
        self.lengths = (out.shape[1], batch.history.shape[1], state.bias.shape[1])
        self.common = dict(STOPS=state.stop_ids.shape[1], W=words, L=longest)
        self.common |= dict(WORD_LANES=next_power_of_2(longest), enable_fp_fusion=False)
        self.span = SPAN if self.logit_rows >= MANY else BLOCK
        self.parts = max(ceil_div(shard.width, self.span), 1)

    def floats(self, *sizes: int) -> Tensor:
        """Return an unfilled tensor [logit rows, ...] of fp32."""
        return self.out.new_empty(self.logit_rows, *sizes, dtype=torch.float32)

    def ints(self, *sizes: int) -> Tensor:
        """Return an unfilled tensor [logit rows, ...] of int32."""
        return self.out.new_empty(self.logit_rows, *sizes, dtype=torch.int32)

    def score(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Launch score_kernel -> peaks, masses, best scores and their indices, of this rank."""
        sizes = _sizes(self.shard.width)
        peaks = self.floats(sizes["GROUPS"])
        masses = self.floats(sizes["BLOCKS"])
        partials = (peaks, masses, self.floats(self.parts), self.ints(self.parts))
        alignment = gcd(self.shard.total, MAX_ALIGNMENT)
        pitch = self.shard.width // alignment if self.shard.ranks > 1 else None
        score_kernel[(self.logit_rows, self.parts)](
            self.batch, self.parameters, *partials, *self.lengths, pitch, VOCAB=self.shard.width,
            FIRST=self.shard.begin, SPAN=self.span, GRAIN=GRAIN, BLOCK=BLOCK, ALIGNMENT=alignment,
            num_warps=8, **sizes, **self.common,
        )  # fmt: skip
        return partials

    def choose(self, partials: tuple[Tensor, ...]) -> None:
        """Launch choose_kernel, which leaves some logit rows UNDECIDED."""
        tile = (self.ints(TILE), self.floats(TILE * GROUP), self.ints(TILE * GROUP))
        choose_kernel[(self.logit_rows,)](
            self.batch, self.parameters, *partials, *tile, self.out, *self.lengths,
            VOCAB=self.shard.total, PARTS=self.parts, PART_LANES=next_power_of_2(self.parts),
            GRAIN=GRAIN, TILE=TILE, num_warps=16, **_sizes(self.shard.total),
            **_lanes(self.shard.total), **self.common,
        )  # fmt: skip

    def _record(self) -> dict[str, int]:
        """Return the layout of a record, as constants of the kernels."""
        itemsize = self.batch.logits.dtype.itemsize
        layout = RecordLayout.of(_sizes(self.shard.max_width)["BLOCKS"], TILE, GROUP, itemsize)
        sizes = dict(WORDS=layout.size, GROUPS_AT=layout.groups, LOGITS_AT=layout.logits)
        return sizes | dict(LOGIT_WORDS=4 // itemsize)

    def propose(self, partials: tuple[Tensor, ...]) -> Tensor:
        """Launch propose_kernel and exchange the records -> [N, ranks, words] int32."""
        layout = self._record()
        begin = self.shard.begin
        width = self.shard.width
        if begin % BLOCK and width:
            raise ValueError(
                f"logits from {begin} on are no shard; allowed: multiples of {BLOCK}, the logits "
                "whose sums belong to one rank. Cut the vocabulary by Columns.vocabulary()."
            )
        records = self.ints(layout["WORDS"])
        needed = self.ints()
        views = (records.view(torch.float32), records.view(self.batch.logits.dtype))
        propose_kernel[(self.logit_rows,)](
            self.batch, self.parameters, *partials, records, *views, needed, self.lengths[0],
            VOCAB=width, FIRST=begin, PARTS=self.parts, PART_LANES=next_power_of_2(self.parts),
            GRAIN=GRAIN, BLOCK=BLOCK, TILE=TILE, num_warps=16, enable_fp_fusion=False,
            **_sizes(width), **_lanes(width), **layout,
        )  # fmt: skip
        return self.shard.gather_records(records, needed)

    def choose_proposed(self, records: Tensor) -> Tensor:
        """Launch choose_proposed_kernel -> whether each logit row is needed whole, [N] int32."""
        total = self.shard.total
        ranks = self.shard.ranks
        sizes = _sizes(total)
        needed = self.ints()
        views = (records.view(torch.float32), records.view(self.batch.logits.dtype))
        scratch = (self.floats(sizes["GROUPS"]), self.floats(sizes["BLOCKS"]), self.ints(TILE))
        tile = (self.floats(TILE * GROUP), self.ints(TILE * GROUP))
        choose_proposed_kernel[(self.logit_rows,)](
            self.batch, self.parameters, records, *views, *scratch, *tile, self.out, needed,
            *self.lengths, VOCAB=total, MAX_WIDTH=self.shard.max_width, RANKS=ranks,
            RANK_LANES=next_power_of_2(ranks), TILE=TILE, num_warps=16, **sizes, **_lanes(total),
            **self._record(), **self.common,
        )  # fmt: skip
        return needed

    def choose_from_whole(self, logits: Tensor) -> None:
        """Launch whole_kernel, which reads the whole logits [N, V] of UNDECIDED logit rows."""
        vocab = self.shard.total
        num_ctas = min(self.logit_rows, WHOLE)
        scores = self.out.new_empty(num_ctas, vocab, dtype=torch.float32)
        whole_kernel[(num_ctas,)](
            self.batch._replace(logits=logits), self.parameters, scores, self.out,
            self.logit_rows, *self.lengths, VOCAB=vocab,
            BLOCK=max(2, min(LOGIT_ROW_BLOCK, next_power_of_2(vocab))), num_warps=16, **self.common,
        )  # fmt: skip


def _sizes(width: int) -> dict[str, int]:
    """Return the numbers of groups and blocks of `width` logits, at least one of each."""
    blocks = max(ceil_div(width, BLOCK), 1)
    return dict(BLOCKS=blocks, GROUPS=max(ceil_div(width, GROUP), 1), GROUP=GROUP)


def _lanes(width: int) -> dict[str, int]:
    """Return the lanes of a CTA that reads all groups, and all blocks, of `width` logits."""
    block_lanes = next_power_of_2(_sizes(width)["BLOCKS"])
    return dict(LANES=block_lanes * BLOCK // GROUP, BLOCK_LANES=block_lanes)
