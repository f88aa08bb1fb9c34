"""The bundled model as a server on its own socket, with the official client."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from lockstep import LLM, SamplingParams
from lockstep.worker.worker import Worker
from tests.serve.api_calls import anthropic
from tests.serve.live_server import (
    CALL,
    CODE,
    GREEDY,
    MTP,
    SETTINGS,
    TOOLS,
    chat,
    complete,
    serving,
)
from tests.waiting import wait_until

ENDS = ("<|endoftext|>", "<|im_end|>")
"""End tokens, which are not part of a text but count as tokens."""
DIALOGUE: list[Any] = [
    {"role": "user", "content": "My name is Tavoli."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is my name?"},
]


@pytest.fixture(scope="module")
def stack() -> Iterator[SimpleNamespace]:
    """Yield the server, drafting with the model's own module."""
    with serving(LLM(speculative_config=MTP, **SETTINGS)) as result:
        yield result


@pytest.fixture
def server(stack: SimpleNamespace) -> Iterator[SimpleNamespace]:
    """Yield the server; assert afterwards that it is alive and has no request."""
    yield stack
    wait_until(lambda: not stack.llm.engine.scheduler.entries)
    assert stack.engine.is_alive and stack.http.get("/health").text == "ok"


@pytest.fixture(scope="module")
def plain() -> LLM:
    """Return the same model called directly, without drafts."""
    return LLM(**SETTINGS)


def test_tool_call_and_usage(server: SimpleNamespace, plain: LLM) -> None:
    answer = chat(server, CALL, tools=TOOLS, tool_choice="auto")
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.type) == ("tool_calls", "function")
    assert call.function.name == "find_record"
    assert json.loads(call.function.arguments) == {"owner": "Zorin", "limit": 12}
    assert choice.message.content is None and choice.message.role == "assistant"
    assert answer.system_fingerprint == server.llm.engine.fingerprint
    assert answer.system_fingerprint.startswith("ls-") and answer.model == "lockstep"
    direct = plain.chat(CALL, GREEDY, tools=TOOLS)[0]
    usage = answer.usage
    written = len(direct.outputs[0].token_ids)
    assert usage.prompt_tokens == len(direct.prompt_token_ids)
    assert usage.completion_tokens == written
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    assert written / 2 < details.accepted_prediction_tokens <= written
    assert details.rejected_prediction_tokens >= 0


def test_tool_call_is_equal_in_all_apis(server: SimpleNamespace) -> None:
    (call,) = chat(server, CALL, tools=TOOLS).choices[0].message.tool_calls
    function = TOOLS[0]["function"]
    question = CALL[0]["content"]
    response = server.ask.responses.create(
        model="lockstep", input=question, temperature=0, tools=[{"type": "function", **function}]
    )
    (item,) = [item for item in response.output if item.type == "function_call"]
    assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
    tool = {"name": function["name"], "description": function["description"]}
    tool["input_schema"] = function["parameters"]
    url = str(server.http.base_url)
    claude = anthropic().Anthropic(base_url=url, api_key="none", max_retries=0)
    requested: Any = {"model": "lockstep", "max_tokens": 80, "messages": CALL, "tools": [tool]}
    requested["extra_body"] = {"temperature": 0}
    message = claude.messages.create(**requested)
    (block,) = [block for block in message.content if block.type == "tool_use"]
    assert (block.name, block.input) == (call.function.name, json.loads(call.function.arguments))
    with claude.messages.stream(**requested) as stream:
        final = stream.get_final_message()
    assert [b.model_dump(exclude={"id"}) for b in final.content] == [
        b.model_dump(exclude={"id"}) for b in message.content
    ]
    requested["messages"] = [{"role": "user", "content": "Hello."}]
    forced = claude.messages.create(**requested, tool_choice={"type": "any"})
    assert [block.type for block in forced.content] == ["tool_use"]
    assert forced.stop_reason in ("tool_use", "max_tokens")
    claude.close()


def test_streamed_tool_call_is_equal(server: SimpleNamespace) -> None:
    (full,) = chat(server, CALL, tools=TOOLS).choices[0].message.tool_calls
    chunks = chat(server, CALL, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    parts = [d for c in chunks if c.choices for d in c.choices[0].delta.tool_calls or []]
    assert len(parts) > 2 and parts[0].id and parts[0].function.name == full.function.name
    assert {chunk.index for chunk in parts} == {0}
    assert "".join(p.function.arguments or "" for p in parts) == full.function.arguments
    assert not any(c.choices[0].delta.content for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 10
    assert {c.system_fingerprint for c in chunks} == {server.llm.engine.fingerprint}


WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
            },
        },
    }
]


@pytest.mark.parametrize("stream", [False, True])
def test_weather_tool_example(server: SimpleNamespace, stream: bool) -> None:
    """The documented first example, verbatim."""
    requested = [
        {"role": "user", "content": "What is the weather in Paris in Celsius? Use the tool."}
    ]
    result = chat(server, requested, tools=WEATHER, tool_choice="auto", stream=stream)
    if stream:
        chunks = [d for c in result if c.choices for d in c.choices[0].delta.tool_calls or []]
        name = "".join(p.function.name or "" for p in chunks)
        arguments = "".join(p.function.arguments or "" for p in chunks)
        reason = result[-1].choices[0].finish_reason
    else:
        (call,) = result.choices[0].message.tool_calls
        name = call.function.name
        arguments = call.function.arguments
        reason = result.choices[0].finish_reason
    assert (name, reason) == ("get_weather", "tool_calls")
    assert json.loads(arguments) == {"city": "Paris", "unit": "Celsius"}


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls(server: SimpleNamespace, stream: bool) -> None:
    requested = [{"role": "user", "content": "Weather in Paris and in Rome, in Celsius."}]
    result = chat(server, requested, tools=WEATHER, stream=stream)
    calls = {0: "", 1: ""}
    if stream:
        for delta in (d for c in result if c.choices for d in c.choices[0].delta.tool_calls or []):
            calls[delta.index] += delta.function.arguments or ""
    else:
        received = result.choices[0].message.tool_calls
        calls = {i: call.function.arguments for i, call in enumerate(received)}
    assert [json.loads(arguments)["city"] for arguments in calls.values()] == ["Paris", "Rome"]


def test_tool_choice_none(server: SimpleNamespace) -> None:
    message = chat(server, CALL, tools=TOOLS, tool_choice="none").choices[0].message
    assert message.tool_calls is None and message.content


def test_stream_equals_response_and_python(server: SimpleNamespace, plain: LLM) -> None:
    full = chat(server, DIALOGUE)
    chunks = chat(server, DIALOGUE, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    direct = plain.chat(DIALOGUE, GREEDY)[0].outputs[0]
    assert text == full.choices[0].message.content == direct.text
    assert "Tavoli" in text
    assert len([c for c in chunks if c.choices[0].delta.content]) > 1, "as it comes, not at once"
    assert chunks[-1].choices[0].finish_reason == full.choices[0].finish_reason == "stop"
    assert {c.id for c in chunks} == {chunks[0].id} != {full.id}


def test_tool_result_is_part_of_the_prompt(server: SimpleNamespace) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find_record", "arguments": "{}"}}
    turns = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "record 77"},
    ]
    answer = chat(server, CALL + turns, tools=TOOLS, max_tokens=8)
    assert answer.usage.prompt_tokens > chat(server, CALL, tools=TOOLS).usage.prompt_tokens
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")


def test_chat_template_kwargs_reach_the_template(server: SimpleNamespace) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    thinking = chat(server, DIALOGUE, extra_body=extra, max_tokens=4).usage.prompt_tokens
    assert thinking != chat(server, DIALOGUE, max_tokens=4).usage.prompt_tokens


def test_repeated_prompt_hits_the_cache(server: SimpleNamespace) -> None:
    story = [{"role": "user", "content": "The clock on the square is late. " * 30}]
    first, second = (chat(server, story, max_tokens=8) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 64
    assert first.choices[0].message.content == second.choices[0].message.content


def test_cache_salt_separates_prefixes(server: SimpleNamespace) -> None:
    story = [{"role": "user", "content": "A tale that only some may find again. " * 30}]

    def cached(salt: str | None) -> int:
        extra = {"cache_salt": salt} if salt else {}
        answer = chat(server, story, max_tokens=8, extra_body=extra)
        message.add(answer.choices[0].message.content)
        return answer.usage.prompt_tokens_details.cached_tokens

    message: set[str] = set()
    assert [cached(salt) for salt in ("mine", "yours", None)] == [0, 0, 0]
    assert all(cached(salt) >= 64 for salt in ("mine", "yours", None))
    assert len(message) == 1


@pytest.mark.default_cases("sampled0")
@pytest.mark.parametrize("sampled", [{}, {"temperature": 0.8, "seed": 11, "top_p": 0.9}])
def test_completions_with_logprobs(
    server: SimpleNamespace, plain: LLM, sampled: dict[str, Any]
) -> None:
    answer = complete(server, logprobs=3, **sampled)
    changes = {"temperature": 0, "max_tokens": 16, "logprobs": 3, **sampled}
    direct = plain.generate(CODE, SamplingParams(**changes))[0].outputs[0]
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (direct.text, direct.finish_reason)
    received = choice.logprobs
    tokens = direct.token_ids
    entries = list(zip(tokens, direct.logprobs or (), strict=True))
    assert received.token_logprobs == [entry[token].logprob for token, entry in entries]
    assert [len(top) >= 3 for top in received.top_logprobs] == [True] * len(tokens)
    *message, last = received.tokens
    assert "".join(message if last in ENDS else received.tokens) == direct.text
    assert received.text_offset == [len("".join(received.tokens[:i])) for i in range(len(tokens))]
    streamed = [c.choices[0] for c in complete(server, logprobs=3, stream=True, **sampled)]
    assert "".join(c.text for c in streamed) == choice.text
    assert [x for c in streamed for x in c.logprobs.token_logprobs] == received.token_logprobs


@pytest.mark.parametrize("multiple", [False, True])
def test_prompt_logprobs_equal_python(server: SimpleNamespace, plain: LLM, multiple: bool) -> None:
    """Over HTTP, token ids are JSON keys, as in vLLM."""
    prompts = [CODE, "import os"] if multiple else CODE
    sent = {"model": "lockstep", "prompt": prompts, "temperature": 0, "max_tokens": 3, "n": 1}
    result = server.http.post("/v1/completions", json={**sent, "prompt_logprobs": 2}).json()
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    outs = plain.generate(prompts, params)
    assert len(result["choices"]) == len(outs) == (2 if multiple else 1)
    for choice, out in zip(result["choices"], outs, strict=True):
        assert choice["text"] == out.outputs[0].text
        direct = [
            entry and {str(token): asdict(scored) for token, scored in entry.items()}
            for entry in out.prompt_logprobs
        ]
        assert choice["prompt_logprobs"] == direct
        assert direct[0] is None and len(direct) == len(out.prompt_token_ids)


@pytest.mark.slow
def test_completions_of_many_prompts(server: SimpleNamespace, plain: LLM) -> None:
    prompts = [CODE, "import os\n", "3, 6, 9,"]
    answer = complete(server, prompts, n=2, seed=5, temperature=0.9)
    params = SamplingParams(n=2, seed=5, temperature=0.9, max_tokens=16)
    direct = [o for out in plain.generate(prompts, params) for o in out.outputs]
    assert [c.index for c in answer.choices] == list(range(6))
    assert [c.text for c in answer.choices] == [o.text for o in direct]
    assert [c.seed for c in answer.choices] == [5, 6] * 3
    ids = plain.tokenizer.encode(CODE)  # type: ignore[union-attr]
    assert complete(server, ids).choices[0].text == complete(server).choices[0].text
    echoed = complete(server, echo=True, stop=["("])
    assert echoed.choices[0].text.startswith(CODE)


def test_chat_logprobs(server: SimpleNamespace) -> None:
    choice = chat(server, DIALOGUE, logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content
    assert bytes(b for t in content[:-1] for b in t.bytes).decode() == choice.message.content
    for received in content:
        assert received.logprob == received.top_logprobs[0].logprob <= 0
        assert len(received.top_logprobs) == 2


def test_concurrent_callers_get_their_own_answers(server: SimpleNamespace) -> None:
    names = [f"Tavoli{i}" for i in range(6)]

    def ask(name: str) -> str:
        messages = [{"role": "user", "content": f"My name is {name}."}, *DIALOGUE[1:]]
        return chat(server, messages, max_tokens=12).choices[0].message.content

    alone = [ask(name) for name in names]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, names)) == alone
    assert len(set(alone)) > 1


def aborted(server: SimpleNamespace) -> int:
    """Return the number of aborted requests."""
    return server.llm.engine.stats.requests_success_total["abort"]


def test_disconnect_during_stream_aborts(server: SimpleNamespace) -> None:
    before = aborted(server)
    stream = server.ask.completions.create(
        model="lockstep", prompt=CODE, stream=True, max_tokens=900, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    (running,) = (e.request for e in server.llm.engine.scheduler.entries.values())
    stream.close()
    wait_until(lambda: not server.llm.engine.scheduler.entries)
    assert aborted(server) == before + 1
    assert running.finish_reason == "abort" and len(running.output_token_ids) < 900


def test_client_timeout_aborts(server: SimpleNamespace) -> None:
    before = aborted(server)
    impatient = server.ask.with_options(timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(
            model="lockstep", prompt=CODE, n=2, max_tokens=900, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: aborted(server) == before + 2)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_engine_request(server: SimpleNamespace, stream: bool) -> None:
    text = complete(server).choices[0].text
    stop = text[8:12]
    extra = {"ignore_eos": True}
    result = complete(server, stop=stop, max_tokens=900, stream=stream, extra_body=extra)
    choices = [c.choices[0] for c in result] if stream else result.choices
    assert "".join(c.text for c in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop" and choices[-1].stop_reason == stop
    wait_until(lambda: not server.llm.engine.scheduler.entries)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"temperature": 3e9}, "temperature", "from 0.0 to 100.0"),
        ({"prompt": "path " * 2000}, "prompt", "context length is 1024"),
        ({"prompt": [99999]}, "prompt", "0 to 4095"),
        ({"prompt": []}, "prompt", "empty"),
        ({"logit_bias": {"4096": 1}}, "logit_bias", "0 to 4095"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"stop": [""]}, "stop", "would end every answer"),
        ({"max_tokens": "many"}, "max_tokens", "integer"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids", "at least one"),
    ],
    ids=lambda value: str(value)[:24] if isinstance(value, dict) else "",
)
def test_invalid_input_errors(
    server: SimpleNamespace, options: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    with pytest.raises(openai.APIError) as caught:
        complete(server, **{"prompt": CODE, **options}, stream=stream)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert message in caught.value.message
    if not stream:
        assert isinstance(caught.value, openai.BadRequestError)


def test_lone_surrogate_is_refused(server: SimpleNamespace) -> None:
    body = rb'{"messages": [{"role": "user", "content": "x\ud800y"}]}'
    json_type = {"Content-Type": "application/json"}
    result = server.http.post("/v1/chat/completions", content=body, headers=json_type)
    assert result.status_code == 400
    assert "half of a surrogate pair" in result.json()["error"]["message"]


def test_unknown_model_and_route(server: SimpleNamespace) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9.*lockstep"):
        server.ask.completions.create(model="gpt-9", prompt=CODE)
    with pytest.raises(openai.NotFoundError):
        server.ask.post("/nowhere", cast_to=object)
    assert [model.id for model in server.ask.models.list()] == ["lockstep"]


def test_metrics_count_served_requests(server: SimpleNamespace) -> None:
    def counted(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    before = counted("lockstep:generation_tokens_total")
    complete(server, max_tokens=9, extra_body={"ignore_eos": True})
    assert counted("lockstep:generation_tokens_total") == before + 9
    assert counted("lockstep:num_requests_running") == 0
    assert counted("lockstep:time_to_first_token_seconds_count") > 0


def test_dead_engine_fails_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(LLM(**SETTINGS)) as server:
        step = server.llm.engine.step
        monkeypatch.setattr(server.llm.engine, "step", lambda: step() and 1 / 0)
        monkeypatch.setattr(Worker, "probe", lambda worker: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="stopped.*Restart") as received:
            complete(server)
        assert received.value.status_code == 503
        with pytest.raises(openai.InternalServerError, match="Restart"):
            chat(server, DIALOGUE, stream=True)
        health = server.http.get("/health")
        assert (health.status_code, health.text) == (
            503,
            "the engine has stopped. Restart the server.",
        )
