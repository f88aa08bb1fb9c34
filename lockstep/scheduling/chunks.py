"""How the prompt tokens of one step are divided between the prompts that wait."""


def split_budget(remaining: list[int], budget: int, grain: int) -> list[int]:
    """Equal shares of `budget` tokens in whole grains; what short prompts leave goes to longer.

    Needs budget >= len(remaining) * grain. Every share is at least a grain or all that remains, and
    is a multiple of the grain unless it is all that remains.
    """
    shares = [0] * len(remaining)
    order = sorted(range(len(remaining)), key=lambda i: remaining[i])
    for place, index in enumerate(order):
        share = budget // (len(order) - place)
        rest = remaining[index]
        shares[index] = rest if rest <= share else share // grain * grain
        budget -= shares[index]
    return shares
