"""The invented vocabulary of benchmarks/grammar.py."""

from benchmarks.grammar import LONGEST, MadeUp


def test_invented_vocabulary_extends_the_bundled_one():
    tokenizer = MadeUp(6000)
    result = [tokenizer.token_bytes(token) for token in range(len(tokenizer))]
    expected = 4096
    assert len(result) == 6000
    assert len(set(result[expected:])) == 6000 - expected
    assert all(0 < len(spelled) <= LONGEST for spelled in result[expected:])
    assert set(result[expected:]).isdisjoint(result[:expected])
