"""prompt_logprobs with scored_from: the end of a prompt is scored as an answer, bit for bit."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import LLM, AsyncLLM, RequestOutput, RequestOutputKind
from lockstep.errors import RequestError
from lockstep.worker.executor import worker_of
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, assert_idle, bits, make_engine
from tests.serve.live_server import MTP, SETTINGS, serving
from tests.test_score import MODELS

LONG = 90
"""Tokens of an answer: more than a window of forced tokens."""
PARAMS = replace(SEEDED, max_tokens=LONG, logprobs=3, prompt_logprobs=2)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Return an engine with a drafter and two steps in flight."""
    return make_engine("ngram", model=MODELS["qwen3"], steps_in_flight=2)


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[RequestOutput]:
    """Return the generated answers to PROMPTS, which tests score."""
    return llm.generate(PROMPTS, PARAMS)


def scored_requests(
    outputs: list[RequestOutput], cut: int = LONG, **changes: Any
) -> tuple[list[list[int]], list[Any]]:
    """Return prompts that end with the first tokens of answers, and parameters that score them."""
    prompts = [output.prompt_token_ids + output.outputs[0].token_ids[:cut] for output in outputs]
    params = [
        replace(PARAMS, **{"scored_from": len(output.prompt_token_ids), "logprobs": None} | changes)
        for output in outputs
    ]
    return prompts, params


def expected_logprobs(output: RequestOutput, count: int, cut: int = LONG) -> list[Any]:
    """Return the bits of a generated answer after those of its prompt, with `count` likeliest
    tokens."""
    completion = output.outputs[0]
    entries = completion.logprobs[:cut]
    kept = [
        {t: x for t, x in entry.items() if t == token or x.rank <= count}
        for token, entry in zip(completion.token_ids, entries, strict=False)
    ]
    return bits(output.prompt_logprobs) + bits(kept)


# Every kind of layer: the engine of the other tests has attention only, and experts keep no state.
@pytest.mark.covering(strength=1)
@pytest.mark.default_cases("bundled", "nemotron_h", "deepseek_v3")
@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("model", MODELS)
def test_scored_tokens_have_the_bits_of_generation(model: str, drafter: str | None) -> None:
    llm = make_engine(drafter, model=MODELS[model])
    outputs = llm.generate(PROMPTS, PARAMS)
    scored = llm.generate(*scored_requests(outputs, max_tokens=1))
    for output, before in zip(scored, outputs, strict=True):
        assert bits(output.prompt_logprobs) == expected_logprobs(before, 2)
        assert output.prompt_token_ids == before.prompt_token_ids + before.outputs[0].token_ids
        assert len(output.prompt_logprobs or ()) == len(output.prompt_token_ids)
        assert output.prompt_logprobs[0] is None
        assert all(entry is not None for entry in output.prompt_logprobs[1:])
        assert output.outputs[0].logprobs is None and len(output.outputs[0].token_ids) == 1
        assert output.metrics.forced_mismatch is None
    assert_idle(llm)


@pytest.mark.parametrize("cut", [1, 65])
def test_answer_goes_on_after_scored_tokens(
    llm: LLM, answers: list[RequestOutput], cut: int
) -> None:
    prompts, params = scored_requests(answers, cut, max_tokens=LONG - cut, logprobs=3)
    for output, before in zip(llm.generate(prompts, params), answers, strict=True):
        assert bits(output.prompt_logprobs) == expected_logprobs(before, 2, cut)
        rest = output.outputs[0]
        assert rest.token_ids == before.outputs[0].token_ids[cut:]
        assert bits(rest.logprobs) == bits(before.outputs[0].logprobs)[cut:]
        assert rest.finish_reason == "length"
        assert before.outputs[0].text.endswith(rest.text)
        (total,) = {sum(e[t].logprob for t, e in zip(rest.token_ids, rest.logprobs, strict=True))}
        assert rest.cumulative_logprob == total
    assert_idle(llm)


def test_scores_do_not_change_while_steps_raise(
    llm: LLM, answers: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps fail between the windows of scored tokens, and after them."""
    prompts, params = scored_requests(answers, 80, max_tokens=9, logprobs=1)
    expected = list(map(answer, llm.generate(prompts, params)))
    worker = worker_of(llm.engine)
    launch = worker.launch
    num_steps = 0

    def fail(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps % 7 == 0:
            raise RuntimeError("a step failed")
        return launch(*arguments)

    before = llm.engine.drain_stats().resumed_total
    monkeypatch.setattr(worker, "launch", fail)
    scored = llm.generate(prompts, params)
    assert list(map(answer, scored)) == expected
    for output, plain in zip(scored, answers, strict=True):
        assert bits(output.prompt_logprobs) == expected_logprobs(plain, 2, 80)
    assert llm.engine.drain_stats().resumed_total > before
    assert_idle(llm)


def test_stop_tokens_and_stop_strings_in_scored_tokens_end_nothing(llm: LLM) -> None:
    (eos, *_) = llm.processor.eos_ids
    ids = llm.get_tokenizer().encode("a b c", add_special_tokens=False)
    prompt = [*ids, eos, *ids, 7, *ids, eos]
    params = replace(
        GREEDY, ignore_eos=False, stop=["b"], stop_token_ids=[7], prompt_logprobs=0, scored_from=2
    )
    (output,) = llm.generate([prompt], replace(params, max_tokens=5, min_tokens=5, stop=None))
    assert len(output.outputs[0].token_ids) == 5
    assert [list(entry)[0] for entry in output.prompt_logprobs[1:]] == prompt[1:]
    (output,) = llm.generate([prompt], replace(params, max_tokens=5))
    assert output.outputs[0].token_ids and len(output.prompt_logprobs) == len(prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scored_from": 0}, "scored_from=0 is not allowed; allowed: a whole number from 1"),
        ({"scored_from": 1.0}, "scored_from=1.0 is not allowed; allowed: a whole number from 1"),
        ({"scored_from": True}, "scored_from=True is not allowed"),
        ({"scored_from": 4}, "scored_from=4 is not allowed; allowed: 1 to 3, since the prompt has"),
        ({"prompt_logprobs": None}, "scored_from=2 needs prompt_logprobs"),
        ({"truncate_prompt_tokens": 3}, "scored_from=2 is not allowed with truncate_prompt_token"),
        ({"forced_token_ids": [1]}, "scored_from=2 is not allowed with forced_token_ids"),
        (
            {"structured_outputs": {"choice": ["a"]}, "ignore_eos": False},
            "scored_from=2 is not allowed with structured_outputs",
        ),
    ],
)
def test_wrong_values_are_refused(llm: LLM, changes: dict[str, Any], message: str) -> None:
    fields = {"prompt_logprobs": 1, "scored_from": 2} | changes
    with pytest.raises(RequestError, match=message):
        llm.generate([[5, 6, 7, 8]], replace(GREEDY, **fields))
    with pytest.raises(RequestError, match="prompt has token id 10000000"):
        llm.generate([[5, 6, 7, 10**7]], replace(GREEDY, prompt_logprobs=1, scored_from=2))
    assert_idle(llm)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_async_outputs_hide_scored_tokens(
    answers: list[RequestOutput], kind: RequestOutputKind
) -> None:
    prompts, params = scored_requests(answers[:1], 70, max_tokens=20, n=2, output_kind=kind)

    async def read() -> list[RequestOutput]:
        local = {"disable_frontend_multiprocessing": True}
        async with AsyncLLM(MODELS["qwen3"], max_model_len=512, max_num_seqs=4, **local) as engine:
            return [output async for output in engine.generate(prompts[0], params[0])]

    received = asyncio.run(read())
    assert all(output.outputs for output in received)
    last = received[-1]
    assert last.finished and last.prompt_token_ids == prompts[0]
    assert bits(last.prompt_logprobs) == expected_logprobs(answers[0], 2, 70)
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for output in received:
        for one in output.outputs:
            new = one.token_ids
            tokens[one.index] = (tokens[one.index] if kind.name == "DELTA" else []) + new
    assert tokens[0] == answers[0].outputs[0].token_ids[70:]
    assert len(tokens[1]) == 20


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    """Yield a server."""
    settings = SETTINGS | {"speculative_config": MTP | {"method": "ngram"}}
    with serving(LLM(MODELS["qwen3"], **settings)) as result:
        yield result


def test_server_scores_the_end_of_a_prompt(server: SimpleNamespace) -> None:
    fields = {"temperature": 0.8, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": PROMPTS[0], "max_tokens": 70, "logprobs": 1, "prompt_logprobs": 1, **fields}
    before = server.http.post("/v1/completions", json=body).json()["choices"][0]
    prompt = before["prompt_token_ids"] + before["token_ids"]
    count = len(before["prompt_token_ids"])
    body |= {"prompt": prompt, "scored_from": count, "max_tokens": 2, "return_token_sources": True}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    scored = choice["prompt_logprobs"]
    assert scored[:count] == before["prompt_logprobs"] and len(scored) == len(prompt)
    values = [
        entry[str(token)]["logprob"] for token, entry in zip(prompt, scored, strict=True) if entry
    ]
    assert values[count - 1 :] == before["logprobs"]["token_logprobs"]
    assert len(choice["token_ids"]) == len(choice["token_sources"]) == 2
    assert choice["prompt_token_ids"] == prompt and "forced_mismatch" not in choice
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 2)
    # As evaluation harnesses ask: the prompt is echoed, and nothing is generated.
    echoed = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1, "scored_from": count}
    (choice,) = server.http.post("/v1/completions", json=echoed).json()["choices"]
    assert choice["logprobs"]["token_logprobs"][count:] == before["logprobs"]["token_logprobs"]


def test_server_refuses_wrong_values_by_name(server: SimpleNamespace) -> None:
    for fields in (
        {"scored_from": 2},
        {"scored_from": 9, "prompt_logprobs": 0},
        {"scored_from": 0, "prompt_logprobs": 0},
        {"scored_from": 2, "prompt_logprobs": 0, "truncate_prompt_tokens": 3},
    ):
        body = {"prompt": [5, 6, 7], "max_tokens": 2, **fields}
        response = server.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "scored_from"
