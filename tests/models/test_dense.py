"""Decoders without recurrent layers: no way of serving changes a bit."""

from pathlib import Path

import pytest

from tests.models.dense import NGRAM, answer, bits, generate_greedy, greedy, make_llm
from tests.tiny_model import DEEPSEEK, KIMI, LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, make_model

BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES = {
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "llama": LLAMA,
    "llama, biases": {**LLAMA, **BIASES},
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": KIMI,
}


SLOW_FAMILIES = ("qwen3", "qwen2", "llama", "mixtral", "kimi_k2")
"""Families whose features are covered by another one: norms of heads, biases, the same experts, or
latent queries."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(n, marks=pytest.mark.slow if n in SLOW_FAMILIES else ()) for n in FAMILIES
    ],
)
def dummy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model's folder without weights."""
    return make_model(tmp_path_factory.mktemp("dummy") / "model", FAMILIES[request.param])


@pytest.mark.default_cases("llama, biases")
def test_drafts_and_unaligned_chunks_change_no_bit(dummy: Path) -> None:
    prompt = [*range(5, 155), *range(5, 155)]
    plain = answer(dummy, prompt, 44)
    drafted = answer(dummy, prompt, 44, speculative_config=NGRAM)
    chunked = answer(dummy, prompt, 44, max_num_batched_tokens=70, enable_prefix_caching=False)
    assert bits(plain) == bits(drafted) == bits(chunked)
    metrics = drafted.metrics
    assert metrics is not None and metrics.num_accepted_tokens > 0


@pytest.mark.default_cases("qwen3_moe")
def test_batch_mates_change_no_bit(dummy: Path) -> None:
    """Each of several concurrent requests, two with a common prefix, equals its run alone."""
    prompts = [list(range(5, 100)), list(range(5, 80)), list(range(40, 43)), [7]]
    llm = make_llm(dummy, load_format="dummy", dtype="bfloat16", speculative_config=NGRAM)
    alone = make_llm(dummy, load_format="dummy", dtype="bfloat16", enable_prefix_caching=False)
    expected = [bits(generate_greedy(alone, prompt, 12)) for prompt in prompts]
    actual = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(12))
    assert [bits(output) for output in actual] == expected


@pytest.mark.default_cases("llama, biases")
@pytest.mark.parametrize("drafting", [None, NGRAM], ids=["plain", "ngram"])
def test_second_turn_hits_generated_prefix(dummy: Path, drafting: object) -> None:
    llm = make_llm(dummy, load_format="dummy", speculative_config=drafting)
    first = list(range(5, 35))
    message = generate_greedy(llm, first, 36).outputs[0].token_ids
    second = [*first, *message, *range(40, 60)]
    warm = generate_greedy(llm, second, 12)
    cold = answer(dummy, second, 12, speculative_config=drafting)
    assert warm.metrics is not None and cold.metrics is not None
    assert warm.metrics.num_cached_tokens == (len(first) + len(message) - 1) // 64 * 64 > len(first)
    assert cold.metrics.num_cached_tokens == 0
    assert bits(warm) == bits(cold)
