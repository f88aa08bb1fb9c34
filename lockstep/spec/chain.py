"""A chain of drafts: one module, applied K times, each time to the draft that it has just made.

Over the step that was just verified the module fills its own KV from true inputs; then it runs on
from the rows' last committed positions, feeding itself. Positions past a mismatch are overwritten
by the next step. Of a module that recurs the first pass alone writes states, as the target does in
that step; those behind it replay what a state lacks. Where nothing is drafted it only keeps the
keys and values, so that later drafts see no gap.
"""

from dataclasses import replace

from torch import Tensor

from lockstep.kernels.drafting import mtp_inputs, next_draft_step
from lockstep.spec.drafter import DraftContext, no_drafts
from lockstep.step import NEVER, StepContext, StepShape, Verdict


def passes(rows: int, tokens: int, count: int) -> tuple[int, ...]:
    """Tokens of each pass of the module, as lockstep.spec says."""
    return (tokens, *[rows] * (count - 1))


class ChainDrafter:
    """K drafts from one DraftModule, which reads at a position the token after it.

    behind: places between the position at which a token is read, and that of a module which reads
    the token after it.
    """

    behind = 0

    def __init__(self, context: DraftContext) -> None:
        self.context = context
        self.mtp_inputs = context.op(mtp_inputs)
        self.next_draft_step = context.op(next_draft_step)

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Writes as many drafts per row as the step asks for. Sampled rows draft with the noise of
        the position itself."""
        c = self.context
        rows = step.row_ids
        count = step.shape.next_drafts
        where = (step.token_rows, step.positions, step.cu_seqlens)
        window = verdict.tokens.shape[1]
        after, last, at = self.mtp_inputs(c.tokens, rows, *where, verdict.accepted, window)
        state = c.module.begin(hidden, aux_hidden_states)
        if not count:
            self.keep(step, after, state)
            return
        state = self.first(step, after, last, state)
        for k in range(count):
            if k:
                state = c.module(step.token_ids, state, step)
            logits = c.module.logits(state)[:, None]
            tokens = c.sample(logits, at, no_drafts(rows), rows)[:, 0]
            step = self.on(step, tokens, k, self.behind)
            at = step.sample_at

    def keep(self, step: StepContext, after: Tensor, state: Tensor) -> None:
        """The keys and values of the step's tokens; after [T]: the token behind each."""
        self.context.module.keep(after, state, step)

    def first(self, step: StepContext, after: Tensor, last: Tensor, state: Tensor) -> Tensor:
        """keep(), and the states [S, ...] of the first drafts. last [S]: index into T of each row's
        last committed position."""
        found: Tensor = self.context.module(after, state, step)[last]
        return found

    def on(self, step: StepContext, tokens: Tensor, k: int, behind: int) -> StepContext:
        """Keeps the rows' drafts number k, tokens [S]: the step of one token each that they are."""
        c = self.context
        table = step.page_table
        made = self.next_draft_step(
            c.computed, c.folded, c.drafts, step.row_ids, tokens, table, k, behind, c.page_size
        )
        shape = StepShape.uniform(step.shape.rows, 1)
        return replace(step, shape=shape, logit_rows=slice(None), flush=NEVER, **vars(made))
