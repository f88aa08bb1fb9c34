"""Effect of every sampling parameter on the bundled model, and refused values."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.errors import RequestError
from lockstep.outputs import CompletionOutput, Logprob
from tests.bundled_model import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    QUESTION,
    SEEDED,
    TEXT,
    answer,
    assert_idle,
    make_engine,
    one,
)


@pytest.fixture(scope="module")
def greedy(engine: LLM) -> CompletionOutput:
    """Return the model's answer to TEXT by GREEDY, of which most tests change one parameter."""
    return one(engine)


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_text(llm: LLM, greedy: CompletionOutput, include: bool) -> None:
    complete = greedy.text
    stop = complete[9:13]
    cut = one(llm, stop=["never there", stop], include_stop_str_in_output=include)
    index = complete.index(stop) + (len(stop) if include else 0)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (complete[:index], "stop", stop)
    assert len(cut.token_ids) < NUM_TOKENS
    assert stop in llm.tokenizer.decode(cut.token_ids)  # type: ignore[union-attr]
    assert stop not in llm.tokenizer.decode(cut.token_ids[:-1])  # type: ignore[union-attr]
    assert one(llm, stop="never there").text == complete
    assert one(llm, stop=complete[-3:] + "never there").text == complete, "nothing is held back"


def test_stop_string_ends_only_its_request(llm: LLM) -> None:
    complete = [o.outputs[0] for o in llm.generate(PROMPTS[:3], GREEDY)]
    stop = complete[1].text[5:8]
    params = [GREEDY, replace(GREEDY, stop=stop), GREEDY]
    before = llm.engine.stats.requests_success_total["abort"]
    outs = [o.outputs[0] for o in llm.generate(PROMPTS[:3], params)]
    assert llm.engine.stats.requests_success_total["abort"] == before + 1, (
        "it is not run to its end"
    )
    assert [o.text for o in outs[::2]] == [o.text for o in complete[::2]]
    assert [o.token_ids for o in outs[::2]] == [o.token_ids for o in complete[::2]]
    assert outs[1].text == complete[1].text[: complete[1].text.index(stop)]


def test_stop_token_ends_the_answer_without_text(llm: LLM, greedy: CompletionOutput) -> None:
    ids = greedy.token_ids
    index = 6
    stop = ids[index]
    cut = one(llm, stop_token_ids=[4000, stop])
    first = ids.index(stop)
    assert cut.token_ids == ids[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == llm.tokenizer.decode(ids[:first])  # type: ignore[union-attr]
    shown = one(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == llm.tokenizer.decode(ids[: first + 1])  # type: ignore[union-attr]


def test_end_token_with_ignore_eos_and_min_tokens(llm: LLM) -> None:
    ends = replace(GREEDY, max_tokens=40, ignore_eos=False)
    ended = llm.chat(QUESTION, ends)[0].outputs[0]
    assert ended.finish_reason == "stop" and ended.stop_reason is None
    assert ended.token_ids[-1] in llm.processor.eos_ids and "<|im_end|>" not in ended.text
    on = llm.chat(QUESTION, replace(ends, ignore_eos=True))[0].outputs[0]
    assert on.finish_reason == "length" and len(on.token_ids) == 40
    assert on.token_ids[: len(ended.token_ids)] == ended.token_ids
    minimum = len(ended.token_ids) + 7
    late = llm.chat(QUESTION, replace(ends, min_tokens=minimum))[0].outputs[0]
    assert not set(late.token_ids[:minimum]) & llm.processor.eos_ids
    assert late.token_ids[: len(ended.token_ids) - 1] == ended.token_ids[:-1]
    assert len(late.token_ids) > minimum or late.finish_reason == "length"


def test_min_tokens_delays_stop_tokens(llm: LLM, greedy: CompletionOutput) -> None:
    tokens = greedy.token_ids
    stop = tokens[0]
    kept = one(llm, stop_token_ids=[stop], min_tokens=6)
    assert stop not in kept.token_ids[:6] and len(kept.token_ids) > 6
    assert one(llm, stop_token_ids=[stop]).token_ids == [stop]
    index = next(i for i in range(3, NUM_TOKENS) if tokens[i] not in tokens[:i])
    just = one(llm, stop_token_ids=[tokens[index]], min_tokens=index)
    assert just.token_ids == tokens[: index + 1], "as soon as that many tokens came before it"


def test_logprobs_have_the_token_and_the_most_likely(llm: LLM, greedy: CompletionOutput) -> None:
    for params in (GREEDY, SEEDED):
        out = one(llm, params=params, logprobs=4)
        assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
        for token, entry in zip(out.token_ids, out.logprobs, strict=True):
            chosen: Logprob = entry[token]
            ranks = sorted(x.rank for x in entry.values())
            assert ranks == sorted({*range(1, 5), chosen.rank}), "the four likeliest and its own"
            assert chosen.decoded_token == llm.tokenizer.decode([token], False)  # type: ignore
            assert sum(math.exp(x.logprob) for x in entry.values()) < 1 + 1e-5
            assert params is not GREEDY or chosen.rank == 1
    assert all(len(entry) == 1 for entry in one(llm, logprobs=0).logprobs)
    assert greedy.logprobs is None


def test_prompt_logprobs_equal_generated_logprobs(llm: LLM) -> None:
    out = one(llm, logprobs=2)
    ids = llm.tokenizer.encode(TEXT) + out.token_ids  # type: ignore[union-attr]
    scored = llm.generate(ids, replace(GREEDY, max_tokens=1, prompt_logprobs=2))[0]
    scores = scored.prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(ids)
    for token, entry in zip(ids[1:], scores[1:], strict=True):
        assert entry is not None and token in entry
        assert {1, 2} <= {x.rank for x in entry.values()}
    for token, entry, reported in zip(
        out.token_ids, scores[-NUM_TOKENS:], out.logprobs, strict=True
    ):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(reported[token].logprob, abs=2e-3)
    assert one(llm, ids).logprobs is None
    assert llm.generate(ids, GREEDY)[0].prompt_logprobs is None


def test_prompt_logprobs_are_independent_of_chunks_and_cache(plain: LLM) -> None:
    ids = (plain.tokenizer.encode(TEXT) * 80)[:300]  # type: ignore[union-attr]
    ask = replace(GREEDY, max_tokens=3, prompt_logprobs=1, logprobs=1)
    chunked = make_engine(None, max_num_batched_tokens=64)
    complete = answer(plain.generate(ids, ask)[0])
    assert len(complete[1]) == 300
    assert answer(chunked.generate(ids, ask)[0]) == complete
    again = chunked.generate(ids, GREEDY)[0], chunked.generate(ids, GREEDY)[0]
    assert again[1].metrics.num_cached_tokens >= 64
    assert answer(again[0]) == answer(again[1])
    assert answer(chunked.generate(ids, ask)[0]) == complete


def test_allowed_token_ids(llm: LLM) -> None:
    allowed = [11, 200, 1000, 3000]
    for params in (GREEDY, SEEDED):
        out = one(llm, params=params, allowed_token_ids=allowed)
        assert set(out.token_ids) <= set(allowed) and len(out.token_ids) == NUM_TOKENS
    assert one(llm, allowed_token_ids=[3000]).token_ids == [3000] * NUM_TOKENS


def test_bad_words_are_never_generated(llm: LLM, greedy: CompletionOutput) -> None:
    tokens = greedy.token_ids
    pair = tokens[2:4]
    clean = one(llm, bad_words_ids=[pair]).token_ids
    pairs = list(zip(clean, clean[1:], strict=False))
    first = next(i for i in range(NUM_TOKENS) if tokens[i : i + 2] == pair)
    assert tuple(pair) not in pairs
    assert clean[: first + 1] == tokens[: first + 1], "its first token alone is no bad word"
    assert clean[first + 1] != pair[1]
    complete = one(llm, PROMPTS[1])
    word = next(w for w in complete.text.split() if w.isidentifier())
    assert word not in one(llm, PROMPTS[1], bad_words=[word]).text.split()


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_temperature_near_0_is_greedy(
    llm: LLM, greedy: CompletionOutput, temperature: float
) -> None:
    assert one(llm, temperature=temperature).token_ids == greedy.token_ids


def test_logit_bias(llm: LLM, greedy: CompletionOutput) -> None:
    tokens = greedy.token_ids
    assert one(llm, logit_bias={77: 100.0}).token_ids == [77] * NUM_TOKENS
    assert tokens[0] not in one(llm, logit_bias={tokens[0]: -100.0}).token_ids
    assert one(llm, logit_bias={tokens[0]: 0.0}).token_ids == tokens
    assert one(llm, logit_bias={77: 2**70}).token_ids == [77] * NUM_TOKENS, "wider than an int64"
    reported = one(llm, logprobs=0, logit_bias={77: 100.0}).logprobs
    assert reported[0][77].logprob < -1, "log-probabilities are of the raw logits"


INVALID_PARAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "from 1 to 128"),
    ({"n": True}, "n", "from 1 to 128"),
    ({"temperature": -0.1}, "temperature", "from 0.0 to 100.0"),
    ({"temperature": math.nan}, "temperature", "from 0.0 to 100.0"),
    ({"temperature": None}, "temperature", "from 0.0 to 100.0"),
    ({"top_p": 0.0}, "top_p", "to 1.0"),
    ({"top_k": -2}, "top_k", "from -1"),
    ({"top_k": 1.5}, "top_k", "whole number"),
    ({"min_p": 1.1}, "min_p", "from 0.0 to 1.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.001 to 100.0"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2.0 to 2.0"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "from -2.0 to 2.0"),
    ({"seed": 2**63}, "seed", "whole number"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"min_tokens": -1}, "min_tokens", "from 0"),
    ({"min_tokens": 17, "max_tokens": 16}, "min_tokens", "max_tokens=16"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
    ({"logit_bias": {5: "x"}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {5: True}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {5: math.nan}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {5: math.inf}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {5: 10**400}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {5: 1e31}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": [5]}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {4096: 1.0}}, "logit_bias", "0 to 4095"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [7], "bad_words_ids": [[7]]}, "allowed_token_ids", "no token to emit"),
    ({"allowed_token_ids": [7, 4089], "stop_token_ids": [7], "min_tokens": 1},)
    + ("allowed_token_ids", "no token to emit"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "0 to 4095"),
    ({"allowed_token_ids": torch.tensor([1, 2])}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": torch.tensor(3)}, "allowed_token_ids", "a list of token ids"),
    ({"stop_token_ids": 5}, "stop_token_ids", "a list of token ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids", "a list of token ids"),
    ({"forced_token_ids": [5, False]}, "forced_token_ids", "a list of token ids"),
    ({"prediction": [True]}, "prediction", "a list of token ids"),
    ({"logit_bias": {True: 1.0}}, "logit_bias", "token ids to finite numbers"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "0 to 4095"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids", "at most 16"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": [5]}, "stop", "a string or a list of strings"),
    ({"stop": {"a"}}, "stop", "a string or a list of strings"),
    ({"stop": [""]}, "stop", "would end every answer"),
    ({"stop": ""}, "stop", "would end every answer"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": "x" * 257}, "stop", "1 to 256 characters"),
    ({"stop": ["x", "x" * 257]}, "stop", "1 to 256 characters"),
    ({"stop": "x", "detokenize": False}, "stop", "detokenize"),
    ({"bad_words": "fox"}, "bad_words", "a list of strings"),
    ({"bad_words": [5]}, "bad_words", "a list of strings"),
    ({"bad_words": [""]}, "bad_words", "has no tokens"),
    ({"bad_words": ["\ud800"]}, "bad_words", "half of a surrogate pair"),
    ({"bad_words": ["fox"] * 33}, "bad_words", "at most 32"),
    ({"bad_words": [TEXT * 3]}, "bad_words", "1 to 8 tokens"),
    ({"bad_words": ["x" * 1025]}, "bad_words", "1 to 1024 characters"),
    ({"bad_words_ids": [[]]}, "bad_words", "1 to 8 tokens"),
    ({"bad_words_ids": [5]}, "bad_words_ids", "a list of lists of token ids"),
    ({"bad_words_ids": [[True]]}, "bad_words_ids", "a list of lists of token ids"),
    ({"bad_words_ids": [["a"]]}, "bad_words_ids", "a list of lists of token ids"),
    ({"bad_words_ids": [frozenset({1})]}, "bad_words_ids", "a list of lists of token ids"),
    ({"bad_words_ids": [[4096]]}, "bad_words", "0 to 4095"),
    ({"ignore_eos": "no"}, "ignore_eos", "True or False"),
    ({"detokenize": None}, "detokenize", "True or False"),
]


@pytest.mark.parametrize(("wrong", "field", "allowed"), INVALID_PARAMS, ids=lambda v: str(v)[:40])
def test_invalid_parameters_leave_the_engine_running(
    llm: LLM, wrong: dict[str, Any], field: str, allowed: str
) -> None:
    with pytest.raises(RequestError) as caught:
        params = replace(GREEDY, **wrong)
        llm.generate([TEXT, TEXT, TEXT], [GREEDY, params, GREEDY])
    message = str(caught.value)
    assert caught.value.field == field and field in message
    assert allowed in message, message
    assert message.endswith(".") and message.count(". ") + message.count("; ") >= 1, message
    assert_idle(llm)


MANY = 1_000_000
HUGE: list[tuple[str, Callable[[], Any]]] = [
    ("stop", lambda: ["x"] * MANY),
    ("stop", lambda: "x" * MANY),
    ("stop", lambda: ["x" * MANY]),
    ("stop", lambda: dict.fromkeys(range(MANY))),
    ("stop_token_ids", lambda: ["x"] * MANY),
    ("bad_words", lambda: ["x"] * MANY),
    ("bad_words", lambda: ["x" * MANY]),
    ("bad_words_ids", lambda: [["x"] * MANY] * 32),
    ("allowed_token_ids", lambda: ["x"] * MANY),
    ("logit_bias", lambda: dict.fromkeys(range(MANY), "x")),
    ("logit_bias", lambda: dict.fromkeys(range(MANY // 2), "x")),
    ("n", lambda: "x" * MANY),
    ("seed", lambda: 10**5000),
    ("temperature", lambda: ["x" * MANY] * MANY),
]
"""Made by their test: every worker collects them, and would hold them to its end."""


@pytest.mark.parametrize(("name", "make"), HUGE, ids=[name for name, _ in HUGE])
def test_huge_parameters_are_refused_at_once(name: str, make: Callable[[], Any]) -> None:
    wrong = {name: make()}
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert time.process_time() - began < 0.2
    assert name.startswith(str(caught.value.field))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("arguments", "field", "message"),
    [
        ({"best_of": 3}, "best_of", "ask for n and choose"),
        ({"logits_processors": [print]}, "logits_processors", "use logit_bias"),
        ({"guided_decoding": {"regex": "a"}}, "guided_decoding", "StructuredOutputsParams"),
        ({"max_new_tokens": 3}, "max_new_tokens", "it is max_tokens here"),
        ({"use_beam_search": True}, "use_beam_search", "beam search is not supported"),
        ({"temprature": 1}, "temprature", "Did you mean temperature"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1, or a whole number from 1"),
        ({"output_kind": "delta"}, "output_kind", "RequestOutputKind"),
    ],
    ids=str,
)
def test_keywords_of_other_engines_are_explained(
    arguments: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**arguments)
    assert caught.value.field == field


def test_keywords_of_default_behaviour_are_accepted() -> None:
    harmless = {"best_of": 1, "early_stopping": False, "logits_processors": None, "extra_args": {}}
    assert SamplingParams(**harmless) == SamplingParams()


def test_clone_is_a_checked_copy() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert params.clone() == params and params.clone() is not params
    assert params.clone(n=2) == SamplingParams(temperature=0.5, stop=["a"], n=2)
    with pytest.raises(RequestError, match="top_p=2"):
        params.clone(top_p=2)
