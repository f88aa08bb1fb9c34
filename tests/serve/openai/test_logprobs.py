"""Log-probabilities as JSON values."""

from math import inf, nan

import pytest

from lockstep.outputs import Logprob
from lockstep.serve.openai.logprobs import chat_logprobs, prompt_offsets


def test_infinity_is_the_least_number_and_no_number_is_refused():
    result = chat_logprobs(None, [5], [{5: Logprob(-inf, 1)}], 1)
    assert result["content"][0]["logprob"] == -9999.0
    with pytest.raises(ValueError, match="not a number"):
        chat_logprobs(None, [5], [{5: Logprob(nan, 1)}], 1)


def test_a_token_that_the_tokenizer_put_in_front_has_no_place_of_its_own(processor):
    tokenizer = processor.tokenizer
    ids = tokenizer.encode("the fox")
    begin = tokenizer.fast.token_to_id("<|im_start|>")
    places = prompt_offsets(tokenizer, ids, "the fox")
    assert places[0] == 0 and len(set(places)) == len(ids)
    assert prompt_offsets(tokenizer, [begin, *ids], "the fox") == [0, *places]
    shown = len("<|im_start|>")
    result = prompt_offsets(tokenizer, [begin, *ids], "<|im_start|>the fox")
    assert result == [0, *(shown + place for place in places)]
