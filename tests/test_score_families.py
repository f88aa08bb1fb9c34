"""Scores equal generation, bit for bit, for every architecture and every KV cache format.

Weights are random. tests/test_score.py has trained models.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.kernels.formats.kv.table import KV_FORMATS
from tests.bundled_model import assert_idle
from tests.pairwise import covering
from tests.regressions.conftest import engine_over
from tests.test_score import assert_generated, ids_of
from tests.tiny_model import make_model
from tests.worker.test_tensor_parallel_coverage import FAMILIES, LATENT

SIZES: dict[str, Any] = {
    "head_dim": 32,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
}
"""Sizes that every KV cache format can store; a family takes those that it has."""
LONG = 80
"""Tokens of an answer: more than a window of forced tokens."""
GREEDY = SamplingParams(
    temperature=0, max_tokens=LONG, ignore_eos=True, logprobs=1, detokenize=False
)
SEEDED = replace(GREEDY, temperature=0.9, seed=7)
PARAMS = [SEEDED, replace(SEEDED, frequency_penalty=1.0), replace(GREEDY, max_tokens=17)]
PROMPTS = [{"prompt_token_ids": [(7 * i + i * i) % 250 for i in range(n)]} for n in (130, 64, 5)]
CASES = [
    (family, kv_format)
    for family in FAMILIES
    for kv_format in sorted(KV_FORMATS)
    if kv_format in LATENT or not family.startswith(("deepseek", "kimi"))
]


def widen(base: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a family with the sizes of SIZES."""
    if "text_config" in base:
        return {**base, "text_config": widen(base["text_config"])}
    sizes = {name: value for name, value in SIZES.items() if name in base}
    # Others divide the hidden size by their 6 heads.
    return {**base, **(sizes or {"hidden_size": 192})}


def check(folder: Path, family: str, kv_format: str, **settings: Any) -> None:
    """Generate answers with drafts, and score them together and alone, with cached prefixes."""
    base, drafter = FAMILIES[family]
    llm: LLM = engine_over(
        make_model(folder / "model", widen(base)),
        drafter["method"],
        kv_cache_dtype=kv_format,
        num_gpu_blocks=64,
        max_num_seqs=4,
        **settings,
    )
    outputs = llm.generate(PROMPTS, PARAMS)
    ids = ids_of(outputs)
    assert len(set(ids[0])) > 8, "an answer of few different tokens shows little"
    scores = llm.score(PROMPTS, ids, PARAMS, logprobs=1)
    assert_generated(scores, outputs)
    assert [score.forced_mismatch for score in scores] == [None] * len(PARAMS)
    assert scores[0].metrics.num_cached_tokens
    (alone,) = llm.score(PROMPTS[1], ids[1], logprobs=1)
    assert_generated([alone], outputs[1:2])
    assert_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kv_format"), CASES)
def test_every_family_and_kv_format(tmp_path: Path, family: str, kv_format: str) -> None:
    check(tmp_path, family, kv_format)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "kv_format"), [CASES[i] for i in covering(CASES, 1)])
def test_every_family_and_kv_format_on_a_gpu(tmp_path: Path, family: str, kv_format: str) -> None:
    check(tmp_path, family, kv_format, device="cuda", dtype="bfloat16")
