"""Forced continuation: an answer that begins with forced tokens equals the one that generated
them."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.errors import RequestError
from lockstep.outputs import ForcedMismatch, RequestOutput
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, TEXT, answer, assert_idle, make_engine

LONG = 90
"""Tokens of an answer: more than a window of forced tokens."""
PARAMS: dict[str, SamplingParams] = {
    "greedy": replace(GREEDY, logprobs=1),
    "seeded": replace(SEEDED, logprobs=0),
    "penalties": replace(GREEDY, frequency_penalty=1.0, repetition_penalty=1.2),
    "filters": replace(SEEDED, top_k=40, min_p=0.02),
    "bad words": replace(GREEDY, bad_words=["path", "return", "def"]),
    "prompt log-probabilities": replace(GREEDY, prompt_logprobs=1),
    "stop": replace(GREEDY, stop=["e", "in"], min_tokens=9),
    "choice": replace(GREEDY, ignore_eos=False, structured_outputs={"choice": [TEXT, "the end"]}),
    "long": replace(SEEDED, max_tokens=LONG),
}


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    """Return the bundled model without drafts, and with two drafters and two steps in flight."""
    engines = {name: make_engine(name, steps_in_flight=2) for name in ("mtp", "ngram")}
    return {"none": make_engine(None), **engines}


@pytest.fixture(scope="module")
def expected(engines: dict[str, LLM]) -> dict[str, RequestOutput]:
    """Return the answers that generate all of their tokens."""
    return generate(engines["none"], {name: {} for name in PARAMS})


def generate(llm: LLM, changes: dict[str, dict[str, Any]]) -> dict[str, RequestOutput]:
    """Run one request of each kind together, over alternating prompts."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(PARAMS))]
    params = [replace(params, **changes[name]) for name, params in PARAMS.items()]
    return dict(zip(PARAMS, llm.generate(prompts, params), strict=True))


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("drafter", ["none", "mtp", "ngram"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_forced_prefix_changes_no_answer(
    engines: dict[str, LLM], expected: dict[str, RequestOutput], drafter: str, share: float
) -> None:
    """share 0: one token is forced; 1: all tokens."""
    forced = {}
    for name, output in expected.items():
        tokens = output.outputs[0].token_ids
        forced[name] = tokens[: max(1, int(share * len(tokens)))]
    llm = engines[drafter]
    outputs = generate(llm, {name: {"forced_token_ids": ids} for name, ids in forced.items()})
    for name, output in outputs.items():
        assert answer(output) == answer(expected[name]), name
        assert output.metrics.forced_mismatch is None
    assert_idle(llm)


def test_forced_tokens_take_few_steps(
    engines: dict[str, LLM], expected: dict[str, RequestOutput]
) -> None:
    tokens = expected["long"].outputs[0].token_ids
    params = replace(PARAMS["long"], forced_token_ids=tokens)
    prompt = PROMPTS[list(PARAMS).index("long") % len(PROMPTS)]
    (output,) = engines["none"].generate(prompt, params)
    assert output.outputs[0].token_ids == tokens
    assert output.metrics.num_steps == 2, "windows of 64 and of 26 tokens"
    assert output.metrics.num_draft_tokens == 0


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("drafter", ["none", "mtp"])
@pytest.mark.parametrize("at", [0, 1, 5, 70])
def test_other_token_is_an_error_or_reported(
    engines: dict[str, LLM], expected: dict[str, RequestOutput], drafter: str, at: int
) -> None:
    llm = engines[drafter]
    prompt = PROMPTS[list(PARAMS).index("long") % len(PROMPTS)]
    tokens = expected["long"].outputs[0].token_ids
    wrong = (tokens[at] + 1) % llm.engine.vocab_size
    mismatch = ForcedMismatch(at, wrong, tokens[at])
    changed = [*tokens[:at], wrong, *tokens[at + 1 : at + 9]]
    params = replace(PARAMS["long"], forced_token_ids=changed)
    (output,) = llm.generate(prompt, params)
    completion = output.outputs[0]
    assert completion.finish_reason == "error"
    assert completion.token_ids == tokens[:at]
    assert f"forced_token_ids[{at}] is {wrong}, but the model chooses {tokens[at]}" in str(
        completion.error
    )
    assert output.metrics.forced_mismatch == mismatch
    (output,) = llm.generate(prompt, replace(params, forced_mismatch="report"))
    assert output.outputs[0].token_ids[: len(changed)] == changed
    assert output.outputs[0].finish_reason == "length"
    assert output.metrics.forced_mismatch == mismatch
    assert_idle(llm)


def test_preempted_rows_keep_their_forced_tokens() -> None:
    """More forced rows than pages: rows move to host memory between windows."""
    llm = make_engine(None, num_gpu_blocks=9, max_model_len=400, enable_prefix_caching=False)
    params = [replace(SEEDED, seed=seed, max_tokens=150) for seed in range(4)]
    expected = llm.generate(PROMPTS, params)
    forced = [
        replace(one, forced_token_ids=output.outputs[0].token_ids[:140])
        for one, output in zip(params, expected, strict=True)
    ]
    outputs = llm.generate(PROMPTS, forced)
    assert [answer(output) for output in outputs] == [answer(output) for output in expected]
    assert sum(output.metrics.num_preemptions for output in outputs)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"forced_token_ids": [1] * 17},
            "forced_token_ids has 17 tokens; allowed: at most max_tok",
        ),
        ({"forced_token_ids": [10**7]}, "forced_token_ids has token id 10000000; allowed: 0 to"),
        ({"forced_token_ids": "abc"}, "forced_token_ids='abc' is not allowed; allowed: a list of"),
        ({"forced_token_ids": [1], "forced_mismatch": "skip"}, "forced_mismatch='skip' is not"),
        (
            {"forced_token_ids": [1] * 600, "max_tokens": 600},
            "forced_token_ids has 600 tokens; allowed: at most",
        ),
        (
            {"forced_token_ids": [9, 7, 9], "stop_token_ids": [7]},
            r"forced_token_ids\[1\] is 7, a stop token that ends the answer",
        ),
        (
            {
                "forced_token_ids": [1],
                "forced_mismatch": "report",
                "structured_outputs": {"choice": ["a"]},
                "ignore_eos": False,
            },
            'forced_mismatch="report" is not allowed with a grammar',
        ),
    ],
)
def test_wrong_forced_tokens_are_refused(
    engines: dict[str, LLM], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engines["none"].generate(TEXT, replace(GREEDY, **changes))
    assert_idle(engines["none"])
