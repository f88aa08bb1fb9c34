"""Predicted outputs over HTTP: OpenAI's `prediction`, and its counts in `usage`."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import LLM
from tests.serve.live_server import MTP, SETTINGS, chat, serving

MESSAGES: list[Any] = [{"role": "user", "content": "Count to ten."}]
LENGTH = 48
"""Tokens of an answer."""


@pytest.fixture(scope="module", params=["prediction", "mtp"])
def server(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """Yield a server whose drafter reads predictions, and one whose drafter does not."""
    with serving(LLM(speculative_config=MTP | {"method": request.param}, **SETTINGS)) as result:
        yield result


def test_prediction_changes_counts_and_no_answer(server: SimpleNamespace) -> None:
    options: Any = {"max_tokens": LENGTH, "extra_body": {"ignore_eos": True}}
    unspeculated = {"ignore_eos": True, "speculate": False}
    plain = chat(server, MESSAGES, max_tokens=LENGTH, extra_body=unspeculated)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens == LENGTH
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]
    for content in (text, parts):
        done = chat(
            server,
            MESSAGES,
            prediction={"type": "content", "content": content},
            **options,
        )
        assert done.choices[0].message.content == text
        details = done.usage.completion_tokens_details
        if server.service.drafts_predictions:
            assert details.accepted_prediction_tokens > LENGTH // 2
            assert details.rejected_prediction_tokens < details.accepted_prediction_tokens
        else:
            assert details.accepted_prediction_tokens == 0
            assert details.rejected_prediction_tokens == 0
    other = chat(
        server,
        MESSAGES,
        prediction={"type": "content", "content": "Nothing of this is in the answer."},
        **options,
        stream=True,
        stream_options={"include_usage": True},
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in other if c.choices)
    assert streamed == text
    assert other[-1].usage.completion_tokens_details.accepted_prediction_tokens < 10


@pytest.mark.parametrize(
    ("prediction", "place"),
    [
        ("text", "prediction"),
        ({}, "prediction.type"),
        ({"type": "other", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content: Field required"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "image"}]}, "prediction.content[0]"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0]"),
        (
            {"type": "content", "content": [{"type": "text", "text": "a", "txt": 1}]},
            "prediction.content[0].txt",
        ),
        ({"type": "content", "content": "a", "more": 1}, "prediction.more"),
    ],
)
def test_wrong_predictions_are_refused(
    server: SimpleNamespace, prediction: Any, place: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "prediction": prediction}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"].startswith(place) and error["param"].startswith("prediction")
