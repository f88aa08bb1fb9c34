"""Scores of given answers equal the log-probabilities that generation returned, bit for bit."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, AsyncLLM, SamplingParams, ScoreOutput
from lockstep.errors import RequestError
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.outputs import ForcedMismatch, RequestOutput
from tests.bundled_model import DRAFTS, PROMPTS, SEEDED, TEXT, assert_idle, bits, make_engine

ASSETS = Path(__file__).parent / "assets"
MODELS = {
    "bundled": None,
    **{name: str(ASSETS / name) for name in ("qwen3", "nemotron_h", "deepseek_v3", "moe")},
}
LONG = 80
"""Tokens of an answer: more than a window of forced tokens."""
PARAMS = [
    replace(SEEDED, max_tokens=LONG, logprobs=2),
    replace(SEEDED, max_tokens=LONG, logprobs=2, frequency_penalty=1.0, temperature=1.1),
    replace(SEEDED, max_tokens=17, logprobs=2, temperature=0.0),
    replace(SEEDED, max_tokens=1, logprobs=2),
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Return the bundled model with a drafter and two steps in flight."""
    return make_engine("mtp", steps_in_flight=2)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """Return the token ids of answers."""
    return [output.outputs[0].token_ids for output in outputs]


def assert_generated(scores: list[ScoreOutput], outputs: list[RequestOutput]) -> None:
    """Assert that scores have the bits of the answers that were generated."""
    for score, output in zip(scores, outputs, strict=True):
        completion = output.outputs[0]
        assert score.token_ids == completion.token_ids
        assert bits(score.logprobs) == bits(completion.logprobs)
        assert score.cumulative_logprob == completion.cumulative_logprob
        assert score.prompt_token_ids == output.prompt_token_ids


def check_engine(llm: LLM) -> None:
    """Generate answers, and score them alone and together, with cached prefixes."""
    prompts = [prompt * 30 for prompt in PROMPTS]  # long enough for cached pages
    outputs = llm.generate(prompts, PARAMS)
    scores = llm.score(prompts, ids_of(outputs), PARAMS, logprobs=2)
    assert_generated(scores, outputs)
    assert [score.forced_mismatch for score in scores] == [None] * len(PARAMS)
    assert all(score.metrics.num_cached_tokens for score in scores)
    assert scores[0].metrics.num_steps < LONG / 8
    (alone,) = llm.score(prompts[1], ids_of(outputs)[1], logprobs=2)
    assert_generated([alone], outputs[1:2])
    assert_idle(llm)


# Every kind of layer, as in test_scored_from.py, whose other tests have attention only.
@pytest.mark.covering(strength=1)
@pytest.mark.default_cases("bundled", "nemotron_h", "deepseek_v3")
@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("model", MODELS)
def test_score_equals_generation(model: str, drafter: str | None) -> None:
    check_engine(make_engine(drafter, model=MODELS[model], max_model_len=1024))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kv_format"),
    [
        *(("bundled", name) for name in sorted(KV_FORMATS)),
        *(("deepseek_v3", name) for name in ("fp8", "int8_per_token_head", "turboquant_4bit_nc")),
    ],
)
def test_score_equals_generation_with_quantized_kv(model: str, kv_format: str) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": kv_format, "max_model_len": 1024}
    check_engine(make_engine("ngram", model=MODELS[model], **settings))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "kv_format"),
    [
        *(("bundled", name) for name in sorted(KV_FORMATS)),
        ("deepseek_v3", "turboquant_4bit_nc"),
        *((name, "fp8") for name in MODELS if name != "bundled"),
    ],
)
def test_score_equals_generation_on_a_gpu(model: str, kv_format: str) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": kv_format, "max_model_len": 1024}
    settings |= {"device": "cuda", "num_gpu_blocks": 64}
    check_engine(make_engine("ngram", model=MODELS[model], **settings))


def test_mismatch_compares_with_the_sampling_parameters(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, PARAMS[1])
    ids = output.outputs[0].token_ids
    (score,) = llm.score(TEXT, ids, PARAMS[1])
    (greedy,) = llm.score(TEXT, ids)
    assert score.forced_mismatch is None
    assert greedy.forced_mismatch is not None
    assert score.token_logprobs == greedy.token_logprobs
    changed = [*ids[:5], (ids[5] + 1) % llm.engine.vocab_size, *ids[6:]]
    (other,) = llm.score(TEXT, changed, PARAMS[1])
    assert other.forced_mismatch == ForcedMismatch(5, changed[5], ids[5])
    assert other.token_logprobs[:5] == score.token_logprobs[:5]
    assert len(other.logprobs) == len(ids)


def test_stop_tokens_do_not_end_a_score(llm: LLM) -> None:
    (eos, *_) = llm.processor.eos_ids
    answer = [9, eos, 9, 7, eos]
    params = SamplingParams(
        temperature=0, stop=["a"], stop_token_ids=[7], min_tokens=9, max_tokens=9
    )
    (score,) = llm.score(TEXT, answer, params)
    assert score.token_ids == answer and len(score.token_logprobs) == 5
    assert score.cumulative_logprob == sum(score.token_logprobs)


def test_one_prompt_with_several_answers(llm: LLM) -> None:
    texts = [" yes", " no, not at all", " perhaps"]
    scores = llm.score(TEXT, texts)
    encode = llm.get_tokenizer().encode
    assert [score.token_ids for score in scores] == [
        encode(text, add_special_tokens=False) for text in texts
    ]
    alone = [llm.score([TEXT], [text])[0].token_logprobs for text in texts]
    assert [score.token_logprobs for score in scores] == alone


def test_scores_change_no_other_answer(llm: LLM) -> None:
    (expected,) = llm.generate(TEXT, PARAMS[0])
    llm.score([TEXT] * 3, [[5] * 70, [6] * 3, [7] * 20])
    (output,) = llm.generate(TEXT, PARAMS[0])
    assert ids_of([output]) == ids_of([expected])


@pytest.mark.parametrize(
    ("answers", "options", "message"),
    [
        ([], {}, "answers has 0 entries for 0 prompts|answers has 0 entries for 2 prompts"),
        ([[1], [2], [3]], {}, "answers has 3 entries for 2 prompts; send one per prompt, or one"),
        ([[1], []], {}, "answers has an answer of 0 tokens; allowed: 1 token or more"),
        ([[1], [1.5]], {}, r"answers has \[1.5\]; allowed: a text, or a list of token ids"),
        ([[1], 3], {}, "answers has 3; allowed: a text, or a list of token ids"),
        ([[1], [10**7]], {}, "answers has token id 10000000; allowed: 0 to"),
        ([[1], [1] * 600], {}, "answers has 600 tokens; allowed: at most"),
        ([[1], [2]], {"logprobs": 21}, "logprobs=21 is not allowed; allowed: a whole number from"),
        (
            [[1], [2]],
            {"sampling_params": SamplingParams(structured_outputs={"choice": ["a"]})},
            r"sampling_params has structured_outputs; allowed in score\(\): parameters of the",
        ),
        ([[1], [2]], {"text_1": "a"}, "text_1"),
    ],
)
def test_wrong_arguments_are_refused(
    llm: LLM, answers: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.score([TEXT, TEXT], answers, **options)
    assert_idle(llm)


def test_async_scores_equal_generation() -> None:
    async def work(llm: AsyncLLM) -> None:
        async with llm:
            *_, output = [one async for one in llm.generate(TEXT, PARAMS[0])]
            score = await llm.score(TEXT, output.outputs[0].token_ids, PARAMS[0], logprobs=2)
            assert_generated([score], [output])
            assert score.forced_mismatch is None
            with pytest.raises(RequestError, match="answers has 600 tokens"):
                await llm.score(TEXT, [1] * 600)
            with pytest.raises(RequestError, match="sampling_params=3 is not allowed"):
                await llm.score(TEXT, [1], 3)  # type: ignore[arg-type]

    drafting = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4}
    local = {"disable_frontend_multiprocessing": True}
    asyncio.run(work(AsyncLLM(speculative_config=drafting, **settings, **local)))
