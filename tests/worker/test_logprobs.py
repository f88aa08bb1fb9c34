"""Log-probabilities of the likeliest tokens: their order, also where logits are equal."""

import pytest
import torch

from lockstep.worker.sampler import logprobs

VOCAB = 4096
COUNTS = (1, 2, 5, 20)


@pytest.mark.parametrize("count", COUNTS)
def test_equal_logits_are_listed_by_id(count: int) -> None:
    """Logits of 16 bits, of which many are equal; the greedy token is the first of the largest."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(50, VOCAB, generator=generator) * 2).bfloat16()
    chosen = logits.argmax(-1).tolist()
    for row, token, entry in zip(logits, chosen, logprobs(logits, chosen, count), strict=True):
        expected = sorted(range(VOCAB), key=lambda i: (-float(row[i]), i))[:count]
        assert list(entry) == expected and expected[0] == token
        assert [one.rank for one in entry.values()] == list(range(1, count + 1))


def test_chosen_token_is_added_and_shares_its_rank() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    (entry,) = logprobs(logits, [5], 2)
    assert {token: one.rank for token, one in entry.items()} == {5: 3, 1: 1, 3: 2}
    assert list(logprobs(logits, [5], 0)[0]) == [5]
