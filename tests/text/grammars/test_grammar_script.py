"""benchmarks/grammar.py: its synthetic vocabulary."""

from benchmarks.grammar import MAX_TOKEN_BYTES, SyntheticTokenizer


def test_synthetic_vocabulary_extends_the_bundled_one():
    tokenizer = SyntheticTokenizer(6000)
    result = [tokenizer.token_bytes(token) for token in range(len(tokenizer))]
    expected = 4096
    assert len(result) == 6000
    assert len(set(result[expected:])) == 6000 - expected
    assert all(0 < len(spelled) <= MAX_TOKEN_BYTES for spelled in result[expected:])
    assert set(result[expected:]).isdisjoint(result[:expected])
