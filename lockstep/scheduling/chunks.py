"""Tokens of a row in a step of prompts, and in a step of forced tokens."""

FORCED_WINDOWS = (16, 64)
"""Windows of forced tokens to which a row's window is padded, ascending: tokens of a row per
step."""
FORCED_TOKENS = 256
"""Maximum tokens of all windows of a step, where decode steps have no more: H200s compute as many
while they read the weights of a dense 27B model."""


def split_budget(remaining: list[int], budget: int, grain: int) -> list[int]:
    """Return the tokens that each prompt computes in this step.

    The shares are equal, except that a prompt with less than its share leaves the rest to longer
    prompts. Every share is a positive multiple of the grain, or all that remains of its prompt.

    remaining: tokens that each prompt has not computed yet. budget: tokens of the step; at least
    len(remaining) * grain. grain: tokens between two positions where a chunk may end.
    """
    shares = [0] * len(remaining)
    order = sorted(range(len(remaining)), key=lambda i: remaining[i])
    for num_served, index in enumerate(order):
        share = budget // (len(order) - num_served)
        rest = remaining[index]
        shares[index] = rest if rest <= share else share // grain * grain
        budget -= shares[index]
    return shares
