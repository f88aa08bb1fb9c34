"""A prompt that does not fit is refused with the texts and fields that agents use to compact their
context."""

import re
from typing import Any

import pytest

from tests.serve.api_calls import CHAT_PATH, TEXT_PATH, post
from tests.serve.openai.responses.test_endpoint import create

LONG = "the fox " * 600
"""More tokens than the context, with fewer characters than the limit that is checked before
tokenizing."""
ENDLESS = "x" * 1_000_000
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
ANTHROPICS = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
OPENAIS = "maximum context length is 512 tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [LONG, ENDLESS], ids=["tokens", "characters"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT_PATH, lambda text: {"messages": [{"role": "user", "content": text}]}, "messages"),
        (TEXT_PATH, lambda text: {"prompt": text}, "prompt"),
        (TEXT_PATH, lambda text: {"prompt": [7] * min(len(text), 100_000)}, "prompt"),
        (RESPONSES, lambda text: {"input": text}, "input"),
    ],
)
def test_openai_error_code(
    server: Any, path: str, body: Any, param: str, text: str, stream: bool
) -> None:
    result = post(server, path, stream=stream, **body(text))
    if path == RESPONSES and stream:
        return  # see the next test
    error = result.json()["error"]
    assert (result.status_code, error["code"]) == (400, "context_length_exceeded"), result.text
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert OPENAIS in error["message"]
    assert not server.client.requests


@pytest.mark.parametrize("text", [LONG, ENDLESS], ids=["tokens", "characters"])
def test_responses_stream_fails_with_the_code(server: Any, text: str) -> None:
    """Codex compacts a conversation if response.failed has this code, and not at a 400."""
    created, failed = create(server, input=text, stream=True)
    assert (created.type, failed.type) == ("response.created", "response.failed")
    assert [created.sequence_number, failed.sequence_number] == [0, 1]
    response = failed.response
    assert (response.status, response.error.code) == ("failed", "context_length_exceeded")
    assert OPENAIS in response.error.message and created.response.id == response.id
    assert not server.client.requests


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_echoed_token_ids_have_the_same_error(server: Any, echo: bool, logprobs: Any) -> None:
    result = post(server, TEXT_PATH, prompt=[7] * 4000, echo=echo, logprobs=logprobs, max_tokens=1)
    error = result.json()["error"]
    assert (result.status_code, error["code"]) == (400, "context_length_exceeded"), result.text
    assert error["message"].startswith("prompt is too long: 4000 tokens > 511 maximum")


@pytest.mark.parametrize("text", [LONG, ENDLESS], ids=["tokens", "characters"])
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_anthropic_error_phrase(server: Any, path: str, text: str) -> None:
    counting = path.endswith("count_tokens")
    extra = {} if counting else {"max_tokens": 9, "stream": True}
    result = post(server, path, messages=[{"role": "user", "content": text}], **extra)
    if counting and text is LONG:
        assert result.json()["input_tokens"] > 512, "a prompt that is too long can be counted"
        return
    error = result.json()["error"]
    assert (result.status_code, error["type"]) == (400, "invalid_request_error")
    phrase = ANTHROPICS.match(error["message"])
    assert phrase is not None, error["message"]
    assert int(phrase[1]) > int(phrase[2]) == 511


def test_max_tokens_is_reduced_to_the_context(server: Any) -> None:
    """A max_tokens above the rest of the context is reduced to it."""
    server.text = "fox " * 700
    full = post(server, CHAT_PATH, messages=[{"role": "user", "content": "x"}], max_tokens=5000)
    assert full.json()["choices"][0]["finish_reason"] == "length"
    usage = full.json()["usage"]
    assert usage["total_tokens"] == 512


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(5000, "model_context_window_exceeded"), (9, "max_tokens")]
)
def test_message_stop_reason_names_the_limit(server: Any, max_tokens: int, reason: str) -> None:
    server.text = "fox " * 700
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens}
    assert post(server, MESSAGES, **body).json()["stop_reason"] == reason
    assert f'"stop_reason":"{reason}"' in post(server, MESSAGES, stream=True, **body).text
