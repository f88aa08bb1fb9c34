"""Shapes of the steps of an engine: of those that it runs, and of the largest ones."""

from collections.abc import Sequence
from dataclasses import replace

from lockstep.config import PADDED_PROMPTS, StepLimits
from lockstep.scheduling.chunks import FORCED_WINDOWS
from lockstep.step import PAGE_SIZE, StepShape


def uniform_shapes(limits: StepLimits) -> list[StepShape]:
    """Return the shapes of steps without prompt tokens, largest first: one graph each."""
    return [
        StepShape.uniform(rows, drafts + 1)
        for rows in reversed(limits.row_buckets)
        for drafts in reversed(limits.draft_lengths)
    ]


def forced_shape(limits: StepLimits, rows: int, window: int) -> StepShape:
    """Return the shape of a step in which rows bring up to `window` forced tokens each."""
    shape = StepShape.uniform(rows, window)
    return replace(shape, next_drafts=limits.query_len - 1, forced=True)


def largest_forced_step(limits: StepLimits) -> StepShape:
    """Return the shape of the largest step of forced tokens."""
    window = FORCED_WINDOWS[-1]
    return forced_shape(limits, min(limits.max_decided // window, limits.max_num_seqs), window)


def shortest_prompt_step(limits: StepLimits) -> StepShape:
    """Return the shape of a step with one prompt of a page."""
    size = min(PAGE_SIZE, limits.max_model_len)
    return StepShape(1, size, size, prompt=True, next_drafts=limits.query_len - 1)


def padded_prompt_step(limits: StepLimits, tokens: int) -> StepShape:
    """Return the shape of a step of few prompts, and a null row, that is padded to `tokens`."""
    rows = min(PADDED_PROMPTS, limits.max_num_seqs) + 1
    return StepShape(rows, tokens, tokens, prompt=True, next_drafts=limits.query_len - 1)


def prompt_step(limits: StepLimits, lengths: Sequence[int], buckets: Sequence[int]) -> StepShape:
    """Return the shape of a step of prompt chunks of these lengths.

    buckets: token counts of padded steps, ascending; the first one that fits is used.
    """
    tokens = sum(lengths)
    bucket = next((bucket for bucket in buckets if bucket >= tokens), None)
    if bucket is not None and len(lengths) <= PADDED_PROMPTS:
        return padded_prompt_step(limits, bucket)
    sizes = (len(lengths), tokens, max(lengths))
    return StepShape(*sizes, prompt=True, next_drafts=limits.query_len - 1)
