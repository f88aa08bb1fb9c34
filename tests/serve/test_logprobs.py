"""Log-probabilities as JSON holds them."""

from math import inf, nan

import pytest

from lockstep.outputs import Logprob
from lockstep.serve.logprobs import chat_logprobs


def test_infinity_is_the_least_number_and_no_number_is_refused():
    found = chat_logprobs(None, [5], [{5: Logprob(-inf, 1)}], 1)
    assert found["content"][0]["logprob"] == -9999.0
    with pytest.raises(ValueError, match="not a number"):
        chat_logprobs(None, [5], [{5: Logprob(nan, 1)}], 1)
