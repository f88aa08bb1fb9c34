"""Log-probabilities as JSON values."""

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.outputs import Logprob
from lockstep.serve.openai.logprobs import chat_logprobs, prompt_offsets, text_logprobs


def test_infinite_logprob_is_finite_in_json_and_nan_raises():
    result = chat_logprobs(None, [5], [{5: Logprob(-inf, 1)}], 1)
    assert result["content"][0]["logprob"] == -9999.0
    with pytest.raises(ValueError, match="not a number"):
        chat_logprobs(None, [5], [{5: Logprob(nan, 1)}], 1)


def test_added_first_token_has_offset_zero(processor):
    tokenizer = processor.tokenizer
    ids = tokenizer.encode("the fox")
    begin = tokenizer.fast.token_to_id("<|im_start|>")
    indices = prompt_offsets(tokenizer, ids, "the fox")
    assert indices[0] == 0 and len(set(indices)) == len(ids)
    assert prompt_offsets(tokenizer, [begin, *ids], "the fox") == [0, *indices]
    shown = len("<|im_start|>")
    result = prompt_offsets(tokenizer, [begin, *ids], "<|im_start|>the fox")
    assert result == [0, *(shown + index for index in indices)]


def test_parts_of_characters_have_names_of_their_own(processor):
    """Parts of different characters were one key, with the log-probability of the last.

    https://github.com/sgl-project/sglang/issues/32290
    https://github.com/vllm-project/vllm/issues/44319
    """
    tokenizer = processor.tokenizer
    first, second = (tokenizer.encode(char)[0] for char in "\U0001f60a\u65e5")
    entry = {second: Logprob(-9.5, 3), first: Logprob(-0.5, 1)}
    result = text_logprobs(tokenizer, [second], [entry], 2, [0])
    names = [
        "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token))
        for token in (second, first)
    ]
    assert result["tokens"] == names[:1] and names[1].startswith("bytes:\\xf0")
    assert result["top_logprobs"] == [dict(zip(names, (-9.5, -0.5), strict=True))]
    as_ids = text_logprobs(tokenizer, [second], [entry], 2, [0], as_ids=True)
    assert as_ids["tokens"] == [f"token_id:{second}"]


def test_likeliest_tokens_come_first():
    """The chosen token was the last entry, although it was the likeliest.

    https://github.com/timtoole02/Camelid/pull/334
    """
    entry = {9: Logprob(-4.0, 4), 5: Logprob(-0.5, 1), 7: Logprob(-2.0, 2), 8: Logprob(-3.0, 3)}
    for chosen, names in ((5, [5, 7]), (7, [5, 7]), (9, [5, 7, 9])):
        (top,) = text_logprobs(None, [chosen], [entry], 2, [0])["top_logprobs"]
        assert list(top) == [f"token_id:{name}" for name in names]


def test_chosen_token_keeps_its_logprob_among_equal_texts():
    """Byte tokens and ordinary tokens may have one text."""
    tokenizer: Any = SimpleNamespace(token_bytes=lambda token: b"\n")
    entry = {5: Logprob(-9.5, 3), 6: Logprob(-0.5, 1)}
    assert text_logprobs(tokenizer, [5], [entry], 2, [0])["top_logprobs"] == [{"\n": -9.5}]
