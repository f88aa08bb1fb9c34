"""The same settings and request give the same answer over HTTP and in Python."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM
from lockstep.outputs import CompletionOutput
from lockstep.worker.build import find_model
from tests.selection import some_slow
from tests.serve.live_server import CALL, CODE, TOOLS, serving

SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 2,
    "default_chat_template_kwargs": {"enable_thinking": True},
}
GENERATION = (
    '{"temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_new_tokens": 40, '
    '"repetition_penalty": 1.05, "eos_token_id": [1, 2]}'
)
HI = [{"role": "user", "content": "What is the sum of 3 and 4?"}]
WORDS = {"type": "object", "properties": {"word": {"enum": ["a", "b"]}}, "required": ["word"]}
FORM: dict[str, Any] = {"structured_outputs": {"json": WORDS}}
NAMED = {"type": "function", "function": {"name": "find_record"}}


@dataclass(frozen=True)
class ParityCase:
    """A request: sampling fields with the same names, fields of the call, and fields with two
    names."""

    sampling: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    messages: list[Any] = field(default_factory=lambda: HI)


CHATS = {
    "defaults": ParityCase({"seed": 1}),
    "greedy": ParityCase({"seed": 1, "temperature": 0}),
    "max_tokens": ParityCase({"seed": 2, "max_tokens": 5}),
    "max_tokens over max_new_tokens": ParityCase({"seed": 2, "max_tokens": 300}),
    "stop": ParityCase({"seed": 3, "stop": ["the", "a"]}),
    "stop kept": ParityCase({"seed": 3, "stop": ["a"], "include_stop_str_in_output": True}),
    "penalties": ParityCase({"seed": 4, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
    "n": ParityCase({"seed": 5, "n": 2}),
    "form": ParityCase({"seed": 6, **FORM}),
    "calls": ParityCase({"seed": 7}, {"tools": TOOLS}, CALL),
    "calls that must come": ParityCase(
        {"seed": 7}, {"tools": TOOLS, "tool_choice": "required"}, CALL
    ),
    "a named call": ParityCase(
        {"seed": 7}, {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False}, CALL
    ),
    "no calls": ParityCase({"seed": 7}, {"tools": TOOLS, "tool_choice": "none"}, CALL),
    "no thought": ParityCase({"seed": 8}, {"chat_template_kwargs": {"enable_thinking": False}}),
    "continued": ParityCase(
        {"seed": 9},
        {"continue_final_message": True, "add_generation_prompt": False},
        [*HI, {"role": "assistant", "content": "It is"}],
    ),
}
DEFAULT_CHATS = ("defaults", "max_tokens over max_new_tokens", "stop", "n", "calls", "continued")
"""Cases of the default run, one per group: sampling fields, stops, choices, tools, templates."""
TEXTS: dict[str, dict[str, Any]] = {
    "defaults": {"seed": 1},
    "greedy": {"seed": 1, "temperature": 0, "max_tokens": 20},
    "truncated": {"seed": 2, "min_tokens": 3, "ignore_eos": True},
    "form": {"seed": 3, "max_tokens": 30, **FORM},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield the bundled model with a custom generation_config, as a server and as an LLM."""
    folder: Path = tmp_path_factory.mktemp("parity") / "model"
    shutil.copytree(find_model(None), folder)
    (folder / "generation_config.json").write_text(GENERATION)
    with serving(LLM(str(folder), **SETTINGS)) as result, LLM(str(folder), **SETTINGS) as llm:
        result.llm = llm  # an engine belongs to one thread, and the server's has another one
        yield result


def in_python(one: CompletionOutput) -> dict[str, Any]:
    """Return a completion of LLM.chat in the form of the HTTP answer."""
    calls = [(call.id is not None, call.name, call.arguments) for call in one.tool_calls]
    reason = "tool_calls" if calls and one.finish_reason == "stop" else one.finish_reason
    return {
        "content": one.content or None,
        "reasoning": one.reasoning,
        "calls": calls,
        "finish_reason": reason,
        "seed": one.seed,
        "token_ids": one.token_ids,
    }


def over_http(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice of /v1/chat/completions in the same form."""
    message = choice["message"]
    calls = message.get("tool_calls") or ()
    results = [(True, one["function"]["name"], one["function"]["arguments"]) for one in calls]
    return {
        "content": message["content"] or None,
        "reasoning": message.get("reasoning_content"),
        "calls": results,
        "finish_reason": choice["finish_reason"],
        "seed": choice["seed"],
        "token_ids": choice["token_ids"],
    }


@pytest.mark.default_cases("max_tokens over max_new_tokens", "stop", "continued")
@pytest.mark.parametrize("name", some_slow(CHATS, DEFAULT_CHATS))
def test_chat_equals_python(server: Any, name: str) -> None:
    requested = CHATS[name]
    sampling = {"max_tokens": None, **requested.sampling}
    params = server.llm.get_default_sampling_params(**sampling)
    (out,) = server.llm.chat(requested.messages, params, **requested.call)
    body = {
        "messages": requested.messages,
        **requested.sampling,
        **requested.call,
        "return_token_ids": True,
    }
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert out.prompt_token_ids == answer["prompt_token_ids"]
    assert [in_python(one) for one in out.outputs] == [over_http(c) for c in answer["choices"]]


@pytest.mark.default_cases("truncated")
@pytest.mark.parametrize("name", TEXTS)
def test_completion_equals_python(server: Any, name: str) -> None:
    (out,) = server.llm.generate(CODE, server.llm.get_default_sampling_params(**TEXTS[name]))
    body = {"prompt": CODE, **TEXTS[name], "return_token_ids": True}
    (choice,) = server.http.post("/v1/completions", json=body).json()["choices"]
    done = out.outputs[0]
    assert (done.text, done.token_ids) == (choice["text"], choice["token_ids"])
    assert (done.finish_reason, done.seed) == (choice["finish_reason"], choice["seed"])


@pytest.mark.slow
def test_default_parameters_equal_the_servers(server: Any) -> None:
    """generate() without parameters equals /v1/completions without, chat() equals
    /v1/chat/completions."""
    served = server.http.get("/v1/models").json()["data"][0]["default_sampling_params"]
    params = server.llm.get_default_sampling_params()
    assert {name: getattr(params, name) for name in served} == served | {"max_tokens": 16}
    (text,) = server.llm.generate(CODE)
    again = params.clone(seed=text.outputs[0].seed)
    assert server.llm.generate(CODE, again)[0].outputs == text.outputs
    (chat,) = server.llm.chat(HI)
    again = params.clone(seed=chat.outputs[0].seed, max_tokens=40)
    assert server.llm.chat(HI, again)[0].outputs[0].token_ids == chat.outputs[0].token_ids
