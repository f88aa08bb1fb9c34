"""Every family with odd head groups, real head dims, biases, tied and untied, equals transformers:
logits and greedy tokens, with whole and chunked prompts, with and without drafts."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.dense import NGRAM, bits, generate_greedy, make_llm, prompts, random_oracle
from tests.models.oracle import RELATIVE, compare_tokens, logits_error
from tests.models.test_deepseek_v3 import oracle_of as latent_oracle
from tests.models.test_nemotron_h import oracle_of as nemotron_oracle
from tests.tiny_model import CONFIG, DEEPSEEK, KIMI, LLAMA, QWEN2, QWEN3, QWEN3_MOE, THREE_LAYERS

Base = dict[str, Any]
TOKENS = 64
"""Tokens per answer."""
LONGEST = 140
"""Tokens of the longest prompt: three chunks."""
UNKNOWN_SETTINGS = ("model_type", "torch_dtype", "dtype", "mtp_num_hidden_layers")
HYBRID = {**{n: v for n, v in CONFIG.items() if n not in UNKNOWN_SETTINGS}, **THREE_LAYERS}


def heads(queries: int, keys: int, dim: int, **more: Any) -> Base:
    """Return settings of attention: `queries` heads over `keys` KV heads of dim `dim`."""
    sizes = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": dim}
    return {**sizes, "hidden_size": 48, **more}


def latents(queries: int, nope: int, rope: int, value: int, **more: Any) -> Base:
    """Return settings of latent attention."""
    sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    number = {"num_attention_heads": queries, "num_key_value_heads": queries}
    return {**sizes, **number, **more}


BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[str, Base]] = {
    "Llama, 1 query head to a key head, of 64, tied": (
        "Llama",
        {**LLAMA, **heads(3, 3, 64), "tie_word_embeddings": True},
    ),
    "Llama, 3 of 80, biases": ("Llama", {**LLAMA, **heads(3, 1, 80), **BIASES}),
    "Qwen2, 7 of 128, biases of q, k and v": (
        "Qwen2",
        {**QWEN2, **heads(7, 1, 128), "hidden_size": 7 * 128},
    ),
    "Qwen3, 5 of 80, tied": ("Qwen3", {**QWEN3, **heads(5, 1, 80), "tie_word_embeddings": True}),
    "Qwen3, 6 of 192": ("Qwen3", {**QWEN3, **heads(6, 1, 192)}),
    "Qwen3 with experts, 7 of 64": ("Qwen3Moe", {**QWEN3_MOE, **heads(7, 1, 64)}),
    "Qwen3.5, 6 of 256, 64 of which turn": ("Qwen3_5", {**HYBRID, **heads(6, 1, 256)}),
    "DeepSeek-V3, 5 of 192 + 64": ("latents", {**DEEPSEEK, **latents(5, 192, 64, 128)}),
    "Kimi-K2, 3 of 80 + 64, tied": ("latents", {**KIMI, **latents(3, 80, 64, 80)}),
    "Nemotron-H, 7 of 128": (
        "NemotronH",
        heads(7, 1, 128, hybrid_override_pattern="M*EM-", mamba_head_dim=80, mamba_num_heads=6),
    ),
    "Nemotron-H, 6 of 192, tied": (
        "NemotronH",
        heads(6, 1, 192, hybrid_override_pattern="M*M", tie_word_embeddings=True, mlp_bias=True),
    ),
}
QUICK_CASES = ("Llama, 3 of 80, biases", "DeepSeek-V3, 5 of 192 + 64", "Nemotron-H, 7 of 128")
"""Cases of the default run: one of each kind; the others are slow."""


def make_oracle(folder: Path, family: str, base: Base) -> Any:
    """Return transformers' random model of these settings, saved in the folder."""
    if family == "latents":
        return latent_oracle(folder, base)
    if family == "NemotronH":
        return nemotron_oracle(folder, **base)
    mine = {name: value for name, value in base.items() if name not in UNKNOWN_SETTINGS}
    return random_oracle(folder, family, mine, 0.0 if family == "Qwen3_5" else 1.0)


@pytest.mark.default_cases("Llama, 3 of 80, biases")
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n in QUICK_CASES else pytest.mark.slow) for n in CASES]
)
def test_odd_dimensions_equal_transformers(case: str, tmp_path: Path) -> None:
    family, base = CASES[case]
    oracle = make_oracle(tmp_path, family, base)
    plain = make_llm(tmp_path, speculative_config=None)
    chunked = make_llm(tmp_path, speculative_config=None, max_num_batched_tokens=64)
    drafted = make_llm(tmp_path, speculative_config=NGRAM)
    for ids in prompts(2, LONGEST):
        for llm in (plain, chunked):
            assert logits_error(llm, oracle, ids) < RELATIVE
        expected = generate_greedy(plain, ids, TOKENS)
        compare_tokens(oracle, ids, expected.outputs[0].token_ids)
        assert bits(generate_greedy(drafted, ids, TOKENS)) == bits(expected)
