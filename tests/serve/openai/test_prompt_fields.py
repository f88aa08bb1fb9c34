"""Request fields that truncate a prompt, and that name tokens by id and the answer by
request_id."""

from typing import Any

import pytest

from tests.serve.api_calls import CHAT_PATH, TEXT_PATH, post


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_truncate_prompt_tokens_keeps_the_last_tokens(server: Any, path: str) -> None:
    assert post(server, path).status_code == 200
    full = server.client.requests[-1].prompt_token_ids
    response = post(server, path, truncate_prompt_tokens=1)
    assert response.status_code == 200, response.text
    assert server.client.requests[-1].prompt_token_ids == full[-1:]
    assert response.json()["usage"]["prompt_tokens"] == 1


def test_truncate_minus_one_leaves_room_for_the_answer(server: Any) -> None:
    ids = [1 + i % 9 for i in range(600)]
    assert post(server, TEXT_PATH, prompt=ids).status_code == 400
    response = post(server, TEXT_PATH, prompt=ids, truncate_prompt_tokens=-1, max_tokens=12)
    assert response.status_code == 200, response.text
    assert server.client.requests[-1].prompt_token_ids == ids[-500:]


@pytest.mark.parametrize("special", [True, False])
def test_long_text_is_truncated_before_the_length_check(
    server: Any, processor: Any, special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "the quick brown fox " * 3000
    assert len(text) > processor.max_characters
    fields = {"prompt": text, "add_special_tokens": special}
    refused = post(server, TEXT_PATH, **fields)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    ids = processor.tokenizer.encode(text, add_special_tokens=special)
    for requested, remaining in ((7, 7), (-1, 512 - 12)):
        response = post(
            server, TEXT_PATH, **fields, truncate_prompt_tokens=requested, max_tokens=12
        )
        assert response.status_code == 200, response.text
        assert server.client.requests[-1].prompt_token_ids == ids[-remaining:]
    response = post(server, TEXT_PATH, **fields, truncate_prompt_tokens=600)
    assert response.json()["error"]["code"] == "context_length_exceeded", "it is still too long"
    monkeypatch.setattr("lockstep.text.processor.MAX_CUT_CHARACTERS", 50_000)
    response = post(server, TEXT_PATH, **fields, truncate_prompt_tokens=7)
    assert response.status_code == 400
    assert "60000 characters; allowed with truncate_prompt_tokens" in response.text


def test_echo_shows_the_truncated_prompt(server: Any, processor: Any) -> None:
    ids = processor.tokenizer.encode("the fox")
    response = post(server, TEXT_PATH, prompt="the fox", truncate_prompt_tokens=1, echo=True)
    kept = processor.tokenizer.decode(ids[-1:], skip_special_tokens=False)
    assert response.json()["choices"][0]["text"] == kept + "hello fox"


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
@pytest.mark.parametrize("wrong", [0, -2, 2**31])
def test_invalid_truncation_length_is_refused(server: Any, path: str, wrong: int) -> None:
    response = post(server, path, truncate_prompt_tokens=wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("field", ["truncate_prompt_tokens", "return_tokens_as_token_ids"])
def test_responses_refuse_the_fields_by_name(server: Any, field: str) -> None:
    response = post(server, "/v1/responses", input="x", **{field: 3})
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


def test_chat_logprobs_name_tokens_by_their_ids(server: Any) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    choice = post(server, CHAT_PATH, **fields, return_tokens_as_token_ids=True).json()["choices"][0]
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named and named == [f"token_id:{i}" for i in choice["token_ids"]]
    tops = [
        top["token"] for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"]
    ]
    assert all(token.startswith("token_id:") for token in tops)


def test_completion_logprobs_name_tokens_by_their_ids(server: Any) -> None:
    fields = {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = post(server, TEXT_PATH, **fields).json()["choices"][0]
    named = choice["logprobs"]["tokens"]
    assert named and named == [f"token_id:{i}" for i in choice["token_ids"]]
    for token, top in zip(named, choice["logprobs"]["top_logprobs"], strict=True):
        assert token in top


@pytest.mark.parametrize(("path", "kind"), [(CHAT_PATH, "chatcmpl-"), (TEXT_PATH, "cmpl-")])
def test_response_id_contains_the_request_id(server: Any, path: str, kind: str) -> None:
    for _ in range(2):
        assert post(server, path, request_id="job-7:a").json()["id"] == f"{kind}job-7:a"
    first, second = server.client.requests[-2:]
    assert first.id != second.id
    for wrong in ("", "a b", "é", "x" * 129):
        response = post(server, path, request_id=wrong)
        assert response.status_code == 400 and response.json()["error"]["param"] == "request_id"
