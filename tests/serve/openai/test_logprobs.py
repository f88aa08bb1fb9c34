"""Log-probabilities as JSON values."""

from math import inf, nan

import pytest

from lockstep.outputs import Logprob
from lockstep.serve.openai.logprobs import chat_logprobs, prompt_offsets


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
