"""Decoders in which nothing recurs: one law for all tokens, so no way of serving changes a bit."""

from pathlib import Path

import pytest

from tests.models.dense import NGRAM, answer, ask, bits, greedy, make_llm
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


SLOW = ("llama", "mixtral", "kimi_k2")
"""Another family has all that they have: biases beside, the same experts with more of them, or
latents of queries too."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in FAMILIES],
)
def dummy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose weights are made up."""
    return make_model(tmp_path_factory.mktemp("dummy") / "model", FAMILIES[request.param])


def test_drafting_and_chunks_off_the_grid_change_no_bit(dummy: Path) -> None:
    prompt = [*range(5, 155), *range(5, 155)]
    plain = answer(dummy, prompt, 44)
    drafted = answer(dummy, prompt, 44, speculative_config=NGRAM)
    chunked = answer(dummy, prompt, 44, max_num_batched_tokens=70, enable_prefix_caching=False)
    assert bits(plain) == bits(drafted) == bits(chunked)
    metrics = drafted.metrics
    assert metrics is not None and metrics.num_accepted_tokens > 0


def test_company_changes_no_bit(dummy: Path) -> None:
    """Each of several requests at once, one of them beginning like another, as it is alone."""
    prompts = [list(range(5, 100)), list(range(5, 80)), list(range(40, 43)), [7]]
    llm = make_llm(dummy, load_format="dummy", dtype="bfloat16", speculative_config=NGRAM)
    alone = make_llm(dummy, load_format="dummy", dtype="bfloat16", enable_prefix_caching=False)
    wanted = [bits(ask(alone, prompt, 12)) for prompt in prompts]
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(12))
    assert [bits(output) for output in found] == wanted


@pytest.mark.parametrize("drafting", [None, NGRAM], ids=["plain", "ngram"])
def test_a_second_turn_finds_what_was_generated(dummy: Path, drafting: object) -> None:
    llm = make_llm(dummy, load_format="dummy", speculative_config=drafting)
    first = list(range(5, 35))
    said = ask(llm, first, 36).outputs[0].token_ids
    second = [*first, *said, *range(40, 60)]
    warm = ask(llm, second, 12)
    cold = answer(dummy, second, 12, speculative_config=drafting)
    assert warm.metrics is not None and cold.metrics is not None
    assert warm.metrics.num_cached_tokens == (len(first) + len(said) - 1) // 64 * 64 > len(first)
    assert cold.metrics.num_cached_tokens == 0
    assert bits(warm) == bits(cold)
