"""Tensor parallelism: every number of ranks gives the answers of one, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.errors import LockstepError
from lockstep.layers import sharding
from lockstep.sampling_params import StructuredOutputsParams
from lockstep.worker import executor
from lockstep.worker.worker import Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer
from tests.thread_ranks import ThreadRanks

ASSETS = Path(__file__).parents[1] / "assets"
MTP = {"method": "mtp", "num_speculative_tokens": 2}
EAGLE3 = {**MTP, "method": "eagle3", "model": str(ASSETS / "qwen3" / "eagle3")}
NGRAM = {**MTP, "method": "ngram"}
CASES: dict[str, tuple[str | None, int, dict[str, Any]]] = {
    "bundled, MTP": (None, 2, {"speculative_config": MTP}),
    "bundled, reduced draft vocabulary": (
        None,
        2,
        {"speculative_config": {**MTP, "draft_vocab_size": 512}},
    ),
    "bundled, three ranks, TurboQuant": (
        None,
        3,
        {"speculative_config": NGRAM, "kv_cache_dtype": "turboquant_4bit_nc"},
    ),
    "bundled, FP8 activations": (
        None,
        3,
        {"speculative_config": MTP, "quantization": "fp8", "activation_dtype": "fp8"},
    ),
    "moe, four ranks, int4": ("moe", 4, {"speculative_config": MTP, "quantization": "int4"}),
    "nemotron_h, FP8 weights and cache": (
        "nemotron_h",
        2,
        {"speculative_config": MTP, "quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
    "deepseek_v3, four ranks": ("deepseek_v3", 4, {"speculative_config": MTP}),
    "qwen3, EAGLE-3, four ranks, FP8 cache": (
        "qwen3",
        4,
        {"speculative_config": EAGLE3, "kv_cache_dtype": "fp8"},
    ),
}
"""Name -> checkpoint, number of ranks, engine settings."""
SHORT = replace(GREEDY, max_tokens=8)
PARAMS = [
    replace(SHORT, logprobs=2, prompt_logprobs=1),
    replace(SEEDED, max_tokens=8, logprobs=2, top_k=40, presence_penalty=0.5),
    replace(SEEDED, max_tokens=8, seed=3, min_p=0.05, logit_bias={7: 2.0}),
    replace(
        SHORT,
        ignore_eos=False,
        structured_outputs=StructuredOutputsParams(regex=r"[a-z ]{4,40}\."),
    ),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small vocabularies of these models, unevenly among three ranks."""
    monkeypatch.setattr(sharding, "VOCABULARY_TILE", 256)


def generate(model: str | None, size: int, settings: dict[str, Any]) -> tuple[list[Any], str]:
    """Return the answers of an engine of `size` ranks, and its fingerprint."""
    folder = {} if model is None else {"model": str(ASSETS / model)}
    sizes = dict(tensor_parallel_size=size, max_model_len=256, max_num_seqs=4)
    llm = LLM(**folder, **sizes, audit=0.001, **settings)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [answer(output) for output in outputs], llm.engine.fingerprint


@pytest.mark.default_cases(
    "bundled, three ranks, TurboQuant", "qwen3, EAGLE-3, four ranks, FP8 cache"
)
@pytest.mark.parametrize("name", CASES)
def test_answers_do_not_depend_on_the_number_of_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, size, settings = CASES[name]
    expected = generate(model, 1, settings)
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    assert generate(model, size, settings) == expected


@torch.inference_mode()
def change_drafts(worker: Worker) -> None:
    """Change the table of the second rank, as a step with other bits would."""
    if worker.group.index == 1:
        worker.table.drafts[1:] += 1


def test_audit_names_a_rank_with_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    monkeypatch.setattr(executor, "AUDIT_EVERY", 1)
    llm = LLM(
        tensor_parallel_size=2,
        max_model_len=256,
        max_num_seqs=4,
        audit=0.001,
        speculative_config=NGRAM,
    )
    llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=2))
    executor.executor_of(llm.engine).collective_rpc(change_drafts)
    with pytest.raises(LockstepError, match=r"rank 1 has another row table than rank 0 \(drafts\)"):
        llm.generate(PROMPTS[0], GREEDY)


@pytest.mark.default_cases("moe")
@pytest.mark.parametrize("name", ["moe", "nemotron_h", "deepseek_v3"])
def test_dummy_weights_do_not_depend_on_the_number_of_ranks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"load_format": "dummy", "speculative_config": NGRAM}
    expected = generate(name, 1, settings)
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    assert generate(name, 2, settings) == expected
