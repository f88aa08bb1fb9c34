"""The n-gram drafter equals a plain lookup on random histories."""

import random

import torch

from lockstep.spec.drafter import DraftContext
from lockstep.spec.ngram import Options, create
from lockstep.step import StepShape


def lookup(known: list[int], min_n: int, max_n: int, count: int) -> list[int]:
    """Return the tokens after the latest earlier occurrence of the longest n-gram, padded with
    -1."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(known) - n - 1, -1, -1):
            if len(known) > n and known[start : start + n] == known[-n:]:
                result = known[start + n : start + n + count]
                return result + [-1] * (count - len(result))
    return [-1] * count


def test_ngram_drafts_equal_plain_lookup() -> None:
    rng = random.Random(0)
    seen: set[int] = set()
    for case in range(200):
        min_n = rng.randint(1, 3)
        config = Options(
            "ngram",
            rng.randint(1, 7),
            prompt_lookup_min=min_n,
            prompt_lookup_max=rng.randint(min_n, 5),
        )
        rows = 4
        length = 40
        history = [[rng.randrange(3 + case % 4) for _ in range(length)] for _ in range(rows)]
        computed = [rng.randrange(length - 1) for _ in range(rows)]
        tokens = torch.tensor(history)
        drafts = torch.full((rows, config.num_speculative_tokens), 7)
        requested = rng.choice([config.num_speculative_tokens, rng.randint(0, drafts.shape[1])])
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
            shape = StepShape.uniform(rows, requested + 1)

        create(context).propose(Step(), tokens, (), None)  # type: ignore[arg-type]
        for row in range(rows):
            known = history[row][: computed[row] + 1]
            min_n = config.prompt_lookup_min
            max_n = config.prompt_lookup_max
            expected = lookup(known, min_n, max_n, requested) if requested else []
            assert drafts[row, :requested].tolist() == expected
            assert (drafts[row, requested:] == 7).all(), "not requested by the step"
            seen.add(sum(d >= 0 for d in expected))
    assert {0, 1, 7} <= seen
