"""Data of one step that every layer receives: its static shape and its device tensors.

A step is one ragged batch of rows. T tokens, S rows, Q query length, P pages of a row.
"""

from dataclasses import dataclass

from torch import Tensor

GRID = 64
"""Token grid on which prompt chunks, snapshots and pages end, counted from position 0."""
PAGE_SIZE = GRID
"""Tokens of a page: a prefix hit ends where both a page and a snapshot of state end."""


def flush_after(device: str) -> int:
    """Return how many tokens a recurrent state may lack before a decode step writes it.

    Replaying tokens costs a GPU less than writing the state each time; a CPU, more. H200, 64 rows,
    us per layer at 4, 5, 6 and 8: 89.0, 87.4, 87.8 and 89.9 for one token per row, 146.0, 141.3,
    141.2 and 142.3 for four.
    """
    return 5 if device.startswith("cuda") else 1


NEVER = 2**31 - 1
"""Value of `flush` for a step that writes no state, since its tokens may be rejected."""


@dataclass(frozen=True)
class StepShape:
    """Static shape of a step: the key of a captured program.

    rows: S, null rows included. tokens: T over all rows. query_len: maximum tokens of a row; a step
    that is no prompt step is uniform: tokens == rows * query_len. next_drafts: drafts per row that
    the step proposes for the next one.
    """

    rows: int
    tokens: int
    query_len: int
    prompt: bool = False
    next_drafts: int = 0

    @classmethod
    def uniform(cls, rows: int, query_len: int) -> "StepShape":
        """Return the shape of a step in which every row brings its last token and query_len - 1
        drafts.

        The step proposes as many drafts for the next one.
        """
        return cls(rows, rows * query_len, query_len, next_drafts=query_len - 1)


@dataclass
class Step:
    """The device tensors of one step; integers are int32 unless noted.

    row_ids [S] lines of the table (int64); token_ids [T] (int64); positions [T] (int64);
    token_rows [T] index into the S rows (int64); cu_seqlens [S+1]; starts [S] tokens committed
    before this step; seq_lens [S] = starts + query lengths; page_table [S, P];
    slot_mapping [T] (int64) page * page_size + offset.
    State: state_slots [S] (int64) where a row's state is kept; state_src [S] (int64) where a prompt
    chunk reads its first state (a snapshot, or the row's own); snapshot_slots [S] where a prompt
    chunk leaves the state of its last grid point (0: nowhere); folded [S] the first tokens of the
    row, of those before starts, that its state holds; flush: a generated step writes a state that
    lacks so many tokens or more.
    drafts [S, Q-1]: the draft tokens among token_ids, -1 where there is none (uniform steps).
    logit_rows: an index into T of the N tokens whose logits are wanted: a slice of all, or [S]
    (int64), the rows' last; sample_at [S, N / S] (int64): where the tokens that they give stand.
    """

    shape: StepShape
    row_ids: Tensor
    token_ids: Tensor
    positions: Tensor
    token_rows: Tensor
    cu_seqlens: Tensor
    starts: Tensor
    seq_lens: Tensor
    page_table: Tensor
    slot_mapping: Tensor
    state_slots: Tensor
    state_src: Tensor
    snapshot_slots: Tensor
    folded: Tensor
    flush: int
    drafts: Tensor
    logit_rows: Tensor | slice
    sample_at: Tensor


@dataclass
class Verdict:
    """Decision of the target.

    tokens [S, Q] (int64): the token that it emits after each position, -1 for none
    (kernels.sampling). accepted [S] (int32): number of leading drafts that equal it; a row emits
    tokens[s, : accepted[s] + 1]. results [S, Q + 2] (int64): tokens, accepted and drafted in one
    tensor for the host.
    """

    tokens: Tensor
    accepted: Tensor
    results: Tensor
