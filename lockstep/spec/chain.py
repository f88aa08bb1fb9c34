"""Chain drafting: one module, applied K times, each time to the draft that it has just proposed.

Over the verified step the module fills its own KV from true inputs; then it continues from the
rows' last committed positions on its own drafts. The next step overwrites positions after a
mismatch. In a recurrent module only the first pass writes states, as the target does in that step;
later passes replay what a state lacks. Where nothing is drafted, the module only writes keys and
values, so that later drafts see no gap.
"""

from dataclasses import replace

from torch import Tensor

from lockstep.kernels.drafting import mtp_inputs, next_draft_step
from lockstep.spec.drafter import DraftContext, no_drafts
from lockstep.step import NEVER_FLUSH, StepContext, StepShape, Verdict


def passes(rows: int, tokens: int, num_drafts: int) -> tuple[int, ...]:
    """Return the tokens of each pass of the module, see lockstep.spec."""
    return (tokens, *[rows] * (num_drafts - 1))


class ChainDrafter:
    """Drafter of K drafts from one DraftModule, which reads the next token at each position.

    shift: offset of the position at which a draft is read, against a module that reads the next
    token.
    """

    shift = 0

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
        """Write the drafts of the next step. Sampled rows use the noise of the position itself."""
        c = self.context
        rows = step.row_ids
        num_drafts = step.shape.next_drafts
        next_tokens, last, sample_at = self.mtp_inputs(
            c.tokens,
            rows,
            step.token_rows,
            step.positions,
            step.cu_seqlens,
            verdict.accepted,
            verdict.tokens.shape[1],
        )
        state = c.module.begin(hidden, aux_hidden_states)
        # The module must still write KV: later drafts attend to these positions.
        if not num_drafts:
            self.write_cache(step, next_tokens, state)
            return
        state = self.first_states(step, next_tokens, last, state)
        for k in range(num_drafts):
            if k:  # the first states come from the pass over the verified step
                state = c.module(step.token_ids, state, step)
            logits = c.module.logits(state)[:, None]
            tokens = c.sample(logits, sample_at, no_drafts(rows), rows)[:, 0]
            step = self.next_step(step, tokens, k, self.shift)
            sample_at = step.sample_at

    def write_cache(self, step: StepContext, next_tokens: Tensor, state: Tensor) -> None:
        """Write the keys and values of the step's tokens. next_tokens [T]: one after each token."""
        self.context.module.write_cache(next_tokens, state, step)

    def first_states(
        self, step: StepContext, next_tokens: Tensor, last: Tensor, state: Tensor
    ) -> Tensor:
        """Do what write_cache() does, and return the states [S, ...] of the first drafts.

        last [S]: index into T of each row's last committed position.
        """
        states: Tensor = self.context.module(next_tokens, state, step)[last]
        return states

    def next_step(self, step: StepContext, tokens: Tensor, k: int, shift: int) -> StepContext:
        """Store draft number k of each row, tokens [S]; return the step of one token each."""
        c = self.context
        table = step.page_table
        tensors = self.next_draft_step(
            c.computed, c.folded, c.drafts, step.row_ids, tokens, table, k, shift, c.page_size
        )
        shape = StepShape.uniform(step.shape.rows, 1)
        # Drafts may be rejected, so their pass must not write recurrent state.
        return replace(
            step, shape=shape, logit_rows=slice(None), flush=NEVER_FLUSH, **vars(tensors)
        )
