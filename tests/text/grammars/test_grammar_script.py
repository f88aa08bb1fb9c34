"""benchmarks/grammar.py: the vocabulary that it makes up."""

from benchmarks.grammar import LONGEST, MadeUp


def test_a_made_up_vocabulary_goes_on_behind_the_bundled_one():
    tokenizer = MadeUp(6000)
    found = [tokenizer.token_bytes(token) for token in range(len(tokenizer))]
    own = 4096
    assert len(found) == 6000
    assert len(set(found[own:])) == 6000 - own
    assert all(0 < len(spelled) <= LONGEST for spelled in found[own:])
    assert set(found[own:]).isdisjoint(found[:own])
