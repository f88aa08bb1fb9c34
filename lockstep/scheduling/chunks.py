"""Division of a step's prompt tokens among the waiting prompts."""


def split_budget(remaining: list[int], budget: int, grain: int) -> list[int]:
    """Return equal shares of `budget` tokens in whole grains; short prompts leave theirs to longer
    ones.

    Requires budget >= len(remaining) * grain. Every share is a multiple of the grain, or all that
    remains of its prompt; it is at least a grain or all that remains.
    """
    shares = [0] * len(remaining)
    order = sorted(range(len(remaining)), key=lambda i: remaining[i])
    for num_served, index in enumerate(order):
        share = budget // (len(order) - num_served)
        rest = remaining[index]
        shares[index] = rest if rest <= share else share // grain * grain
        budget -= shares[index]
    return shares
