"""Predicted outputs: drafts are tokens of a text that the client expects as the answer.

The text belongs to the request (SamplingParams.prediction). Drafts begin at its beginning. Where
the answer leaves it, they go on after the answer's longest last n-gram that occurs in the text. A
row without such a text drafts nothing.
"""

from torch import Tensor

from lockstep.kernels.drafting import prediction_lookup
from lockstep.spec.config import SpeculativeConfig as Options
from lockstep.spec.drafter import DraftContext
from lockstep.step import StepContext, Verdict

__all__ = ["METHOD", "NEEDS_MODULE", "Options", "PredictionDrafter", "create"]

NEEDS_MODULE = False
METHOD = "prediction"
"""Name of this drafter."""
MIN_MATCH = 2
"""Tokens of the shortest n-gram at which a row meets its text again."""
MAX_MATCH = 32
"""Maximum tokens of an n-gram, which bounds the work of a lookup."""


class PredictionDrafter:
    """Drafter that looks up the answer's last tokens in the row's predicted text."""

    def __init__(self, context: DraftContext) -> None:
        assert context.predictions is not None
        self.context = context
        self.predictions = context.predictions
        self.prediction_lookup = context.op(prediction_lookup)

    def propose(
        self,
        step: StepContext,
        hidden: Tensor,
        aux_hidden_states: tuple[Tensor, ...],
        verdict: Verdict,
    ) -> None:
        """Write the drafts of the next step: the text's tokens after the match, else -1."""
        context = self.context
        predictions = self.predictions
        self.prediction_lookup(
            context.tokens,
            context.computed,
            predictions.prompt_len,
            predictions.texts,
            predictions.text_lens,
            context.drafts[:, : step.shape.next_drafts],
            step.row_ids,
            MIN_MATCH,
            MAX_MATCH,
        )


def create(context: DraftContext) -> PredictionDrafter:
    """Return the drafter."""
    return PredictionDrafter(context)
