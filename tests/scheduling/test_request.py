"""Tests of a request: appended tokens and finish reasons."""

import pytest

from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request

EOS = frozenset({7})


def make(max_len: int = 100, **params: object) -> Request:
    params.setdefault("max_tokens", 10)
    return Request(
        "r",
        [1, 2, 3],
        SamplingParams(**params),
        eos_token_ids=EOS,
        max_len=max_len,  # type: ignore
    )


@pytest.mark.parametrize(
    ("params", "tokens", "taken", "finish", "stop"),
    [
        ({}, [4, 5], 2, None, None),
        ({}, [4, 7, 5], 2, "stop", None),
        ({"ignore_eos": True}, [4, 7, 5], 3, None, None),
        ({"stop_token_ids": [5]}, [4, 5, 6], 2, "stop", 5),
        ({"stop_token_ids": [5], "ignore_eos": True}, [7, 5, 6], 2, "stop", 5),
        ({"max_tokens": 2}, [4, 5, 6], 2, "length", None),
        ({"max_tokens": 2}, [4, 7, 6], 2, "stop", None),
        ({"min_tokens": 2}, [7, 7, 7, 4], 3, "stop", None),
        ({"min_tokens": 2, "stop_token_ids": [5]}, [5, 5, 4, 5, 6], 4, "stop", 5),
        ({"max_tokens": None, "max_len": 5}, [4, 5, 6], 2, "length", None),
        ({"max_len": 5}, [4, 5, 6], 2, "length", None),
    ],
)
def test_append(params: dict, tokens: list, taken: int, finish: str | None, stop: int) -> None:
    request = make(**params)
    assert request.append(tokens, [{} for _ in tokens]) == taken
    assert request.output_token_ids == tokens[:taken] and len(request.logprobs) == taken
    assert (request.finish_reason, request.stop_reason) == (finish, stop)


def test_no_token_is_appended_after_the_end() -> None:
    request = make(max_tokens=1)
    assert request.append([4]) == 1
    assert request.append([5]) == 0
    assert request.output_token_ids == [4]
