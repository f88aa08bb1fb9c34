"""Completions, errors, disconnects, metrics and the other routes of the server."""

import asyncio
import json
import shlex

import openai
import pytest
from tokenizers.processors import TemplateProcessing

from lockstep.engine.stats import Stats
from lockstep.errors import RequestError
from lockstep.serve.server import startup_message
from lockstep.serve.telemetry.metrics import Metrics
from tests.serve.api_calls import create_completion
from tests.serve.fake_client import post_and_disconnect


def fetch(server, method, path, **options):
    async def run():
        async with server.http() as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def test_completion_and_stream(server):
    full = create_completion(server, prompt="the", n=2, max_tokens=50)
    assert [c.text for c in full.choices] == ["hello fox"] * 2
    chunks = create_completion(server, prompt=["the", "a"], stream=True, max_tokens=50)
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in mine) == "hello fox" and mine[-1].finish_reason == "stop"
    assert create_completion(server, prompt=[1, 2, 3]).usage.prompt_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server, processor, stream):
    server.text = "hello lazy fox"
    response = create_completion(
        server, prompt="the dog", echo=True, logprobs=1, max_tokens=50, stream=stream
    )
    choices = [c.choices[0] for c in response] if stream else response.choices
    assert "".join(c.text for c in choices) == "the doghello lazy fox"
    tokens = [t for c in choices for t in c.logprobs.tokens]
    assert "".join(tokens) == "the doghello lazy fox<|im_end|>"
    assert choices[0].logprobs.token_logprobs[0] is None
    offsets = [o for c in choices for o in c.logprobs.text_offset]
    for offset, token in zip(offsets, tokens, strict=True):
        assert "".join(tokens)[offset:].startswith(token)


def test_add_special_tokens_false(server, processor):
    """Clients that render the chat template themselves send this option."""
    begin = processor.tokenizer.fast.token_to_id("<|im_start|>")
    added = TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", begin)])
    processor.tokenizer.fast.post_processor = added
    try:
        for options in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            response = create_completion(server, prompt=["the", "a"], echo=True, extra_body=options)
            assert [choice.text for choice in response.choices] == ["thehello fox", "ahello fox"]
        first = [request.prompt_token_ids[0] == begin for request in server.client.requests]
        assert first == [True, True, True, True, False, False]
    finally:
        processor.tokenizer.fast.post_processor = None


@pytest.mark.parametrize("step", [1, 3, 80])
def test_logprobs_text_offsets(server, step):
    """Characters of several tokens and tokens whose text is delayed, with and without streaming."""
    server.client.step = step
    server.text = "a 🦊 is é, stopp the fox"
    requested = {
        "prompt": "naïve 🦊 dog",
        "echo": True,
        "logprobs": 0,
        "max_tokens": 90,
        "stop": "op q",
    }
    (full,) = create_completion(server, **requested).choices
    text = full.text
    logprobs = full.logprobs
    assert text == "naïve 🦊 doga 🦊 is é, stopp the fox"
    for index, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        if not token.startswith("bytes:") and token != "<|im_end|>":
            assert text[index:].startswith(token), (index, token)
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[-1] == len(text), "of the token that ends it"
    streamed = [chunk.choices[0] for chunk in create_completion(server, stream=True, **requested)]
    assert "".join(choice.text for choice in streamed) == text
    offsets = [index for choice in streamed for index in choice.logprobs.text_offset]
    assert offsets == logprobs.text_offset


@pytest.mark.parametrize("stream", [False, True])
def test_invalid_echo_ids_are_refused_before_generation(server, stream):
    body = {"prompt": [[1, 2], [-1]], "echo": True, "stream": stream, "logprobs": 1}
    response = fetch(server, "POST", "/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert server.client.requests == []


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"prompt": []}, "prompt", 400),
        ({"prompt": [1] * 600}, "prompt", 400),
        ({}, "prompt", 400),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens", 400),
        ({"prompt": "x", "model": "other"}, "model", 404),
    ],
)
def test_errors_are_objects(server, body, param, status):
    answer = fetch(server, "POST", "/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert error["type"] == "invalid_request_error" and error["message"]
    assert fetch(server, "GET", "/health").status_code == 200


def test_too_long_prompt_names_the_limit(server):
    answer = fetch(server, "POST", "/v1/completions", json={"prompt": [1] * 600})
    assert "600 tokens" in answer.text and "context length is 512" in answer.text


def test_invalid_json_and_unknown_route(server):
    assert fetch(server, "POST", "/v1/completions", content=b"{").status_code == 400
    missing = fetch(server, "GET", "/v2")
    assert missing.status_code == 404 and missing.json()["error"]["message"]
    wrong = fetch(server, "GET", "/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["message"]
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "methods"), [("/ping", "GET, POST"), ("/v1/responses/x", "DELETE, GET")]
)
def test_allow_header_lists_all_methods(server, path, methods):
    wrong = fetch(server, "PUT", path)
    assert wrong.status_code == 405 and wrong.headers["allow"] == methods
    assert (
        wrong.json()["error"]["message"] == f"PUT {path}: Method Not Allowed; allowed: {methods}."
    )


def test_slash_at_the_end_is_a_relative_redirect(server):
    """Behind a proxy with TLS an absolute one would lead to http, where clients send no key."""
    answer = fetch(server, "POST", "/v1/completions/?a=b", json={"prompt": "the"})
    assert (answer.status_code, answer.headers["location"]) == (307, "../completions?a=b")
    answer = fetch(
        server, "POST", "/v1/completions/", json={"prompt": "the"}, follow_redirects=True
    )
    assert answer.status_code == 200 and answer.json()["choices"]
    for path in ("/v2/", "/v1/completions//", "//evil.example/", "/"):
        assert fetch(server, "POST", path).status_code in (404, 405)


@pytest.mark.parametrize(("error", "status"), [(RequestError("no", "x"), 400), (KeyError(1), 500)])
def test_engine_errors(server, error, status):
    server.client.error = error
    answer = fetch(server, "POST", "/v1/completions", json={"prompt": "x"})
    assert answer.status_code == status
    # After a 500 the connection is closed, and a client must not send its next request on it.
    assert (answer.headers.get("connection") == "close") == (status == 500)
    with pytest.raises(openai.APIError):
        create_completion(server, prompt="x", stream=True)
    server.client.error = None
    assert create_completion(server, prompt="x", max_tokens=40).choices[0].text == "hello fox"


def test_dead_engine(server):
    server.client.alive = False
    assert fetch(server, "POST", "/v1/completions", json={"prompt": "x"}).status_code == 503
    assert fetch(server, "GET", "/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(server, stream):
    server.client.hang = True
    server.eos = None
    server.client.answer = lambda request: request.prompt_token_ids[:1]

    body = {"prompt": "x", "max_tokens": 50, "stream": stream, "n": 2}
    asyncio.run(post_and_disconnect(server, "/v1/completions", body, requests=2))
    assert sorted(server.client.aborted) == sorted(r.id for r in server.client.requests)


def test_models_tokens_docs(server):
    models = fetch(server, "GET", "/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("tiny", 512)]
    assert fetch(server, "GET", "/v1/models/tiny").status_code == 200
    assert fetch(server, "GET", "/v1/models/none").json()["error"]["code"] == "model_not_found"
    result = fetch(server, "POST", "/tokenize", json={"prompt": "the fox"}).json()
    back = fetch(server, "POST", "/detokenize", json={"tokens": result["tokens"]}).json()
    assert back == {"prompt": "the fox"} and result["count"] == len(result["tokens"])
    messages = [{"role": "user", "content": "x"}]
    assert fetch(server, "POST", "/tokenize", json={"messages": messages}).json()["count"] > 3
    assert fetch(server, "POST", "/tokenize", json={}).status_code == 400
    assert fetch(server, "GET", "/docs").status_code == 200
    assert "/v1/chat/completions" in fetch(server, "GET", "/openapi.json").json()["paths"]


def test_metrics(server):
    stats = Stats(num_running=2, pages_used=5, pages=10)
    server.client.counts = stats
    stats.generation_tokens_total = 7
    stats.ttft_seconds = [0.2]
    stats.requests_success_total["stop"] = 3
    text = fetch(server, "GET", "/metrics").text
    assert 'lockstep:num_requests_running{model_name="tiny"} 2.0' in text
    assert 'lockstep:kv_cache_usage_perc{model_name="tiny"} 0.5' in text
    assert 'lockstep:generation_tokens_total{model_name="tiny"} 7.0' in text
    assert 'lockstep:request_success_total{finished_reason="stop",model_name="tiny"} 3.0' in text
    assert 'lockstep:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text


def test_metrics_counters_are_set_to_totals():
    metrics = Metrics("m")
    for total in (3, 5):
        text = metrics.render(Stats(steps_total=total)).decode()
    assert 'lockstep:decode_steps_total{model_name="m"} 5.0' in text


def test_startup_message_commands_work(processor):
    url = "http://127.0.0.1:1"
    ready, curl = startup_message(url, "tiny").splitlines()
    assert ready == f"Ready: the model 'tiny' at {url}/v1 (base_url of OpenAI clients)"
    words = shlex.split(curl)
    assert words[2] == f"{url}/v1/chat/completions" and json.loads(words[-1])["model"] == "tiny"
    assert json.loads(words[-1])["messages"][0]["content"] == "List the first 12 primes."
    assert f"{url}/v1/completions" in startup_message(url, "tiny", has_template=False)
    _, curl = startup_message(url, "tiny", has_keys=True).splitlines()
    assert "Authorization: Bearer KEY" in shlex.split(curl)
