"""The n-gram drafter against a plain lookup on random histories."""

import random

import torch

from lockstep.spec.drafter import DraftContext
from lockstep.spec.ngram import Options, create
from lockstep.step import StepShape


def lookup(known: list[int], least: int, most: int, count: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest n-gram, padded with -1."""
    for n in range(most, least - 1, -1):
        for start in range(len(known) - n - 1, -1, -1):
            if len(known) > n and known[start : start + n] == known[-n:]:
                found = known[start + n : start + n + count]
                return found + [-1] * (count - len(found))
    return [-1] * count


def test_equals_a_plain_lookup() -> None:
    rng = random.Random(0)
    seen: set[int] = set()
    for case in range(200):
        least = rng.randint(1, 3)
        config = Options(
            "ngram",
            rng.randint(1, 7),
            prompt_lookup_min=least,
            prompt_lookup_max=rng.randint(least, 5),
        )
        rows = 4
        length = 40
        history = [[rng.randrange(3 + case % 4) for _ in range(length)] for _ in range(rows)]
        computed = [rng.randrange(length - 1) for _ in range(rows)]
        tokens = torch.tensor(history)
        drafts = torch.full((rows, config.num_speculative_tokens), 7)
        asked = rng.choice([config.num_speculative_tokens, rng.randint(0, drafts.shape[1])])
        context = DraftContext(
            config,
            drafts,
            tokens,
            torch.tensor(computed),
            folded=torch.tensor(computed),
            page_size=64,
            module=None,
            sample=torch.cat,
            op=lambda op: op,
        )

        class Step:
            row_ids = torch.arange(rows)
            shape = StepShape.uniform(rows, asked + 1)

        create(context).propose(Step(), tokens, (), None)  # type: ignore[arg-type]
        for row in range(rows):
            known = history[row][: computed[row] + 1]
            least = config.prompt_lookup_min
            most = config.prompt_lookup_max
            expected = lookup(known, least, most, asked) if asked else []
            assert drafts[row, :asked].tolist() == expected
            assert (drafts[row, asked:] == 7).all(), "the step did not ask for these"
            seen.add(sum(d >= 0 for d in expected))
    assert {0, 1, 7} <= seen
