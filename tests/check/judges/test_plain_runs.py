"""The judge of prompt log-probabilities accepts ties, and names wrong ranks."""

from lockstep.answer import Answer
from lockstep.check.judges.plain_runs import _wrong_prompt
from lockstep.outputs import RequestMetrics
from lockstep.scheduling.request import Request


def wrong_prompt(*entry: tuple[int, float, int]) -> str | None:
    """Judge one prompt token, 20, by entries of token, log-probability and rank."""
    scores = tuple((token, value.hex(), rank) for token, value, rank in entry)
    answer = Answer((), (), RequestMetrics(), prompt_logprobs=(scores,))
    return _wrong_prompt(answer, Request("a", [1, 20]), 3)


def test_equal_logits_have_one_rank_or_several() -> None:
    # The prompt token shares the rank of its equals; the likeliest tokens are numbered.
    assert wrong_prompt((5, -1.0, 1), (7, -2.0, 2), (9, -2.0, 3), (20, -2.0, 2)) is None


def test_wrong_ranks_are_named() -> None:
    assert "ranks" in str(wrong_prompt((5, -1.0, 2), (7, -2.0, 1), (20, -3.0, 3)))
    assert "above 1" in str(wrong_prompt((5, -0.1, 1), (7, -0.1, 2), (20, -3.0, 3)))
