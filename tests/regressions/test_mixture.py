"""Mixture-of-experts answers are independent of the batch: of other tokens and padding.

Other engines change an expert's kernel, order of sums or capacity with its number of tokens, so
that a request's answer depends on the others.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.kernels.experts import cpu as experts_cpu
from lockstep.worker.hooks import CheckHooks
from tests.models.dense import make_llm
from tests.regressions.conftest import PROMPTS, ScriptedDrafter, answers
from tests.tiny_model import HYBRID_MOE, NEXT, THREE_LAYERS, make_model

MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
NGRAM = {**MTP, "method": "ngram"}
FAMILIES = {
    "qwen3_5_moe": {**HYBRID_MOE, **THREE_LAYERS},
    "qwen3_next": {**NEXT, **THREE_LAYERS, "mtp_num_hidden_layers": 1},
}
SERVING_SETTINGS: dict[str, dict[str, Any]] = {
    "in company": {},
    "ngram": {"speculative_config": NGRAM},
    "mtp": {"speculative_config": MTP},
    "chunks of a page": {"max_num_batched_tokens": 64},
    "padded": {"row_buckets": (8,), "prompt_buckets": (48, 384), "speculative_config": MTP},
}


def make_dummy_llm(folder: Path, **settings: Any) -> LLM:
    chosen = {"max_num_seqs": 8, "dtype": "bfloat16", **settings}
    return make_llm(folder, load_format="dummy", **chosen)


@pytest.fixture(scope="module", params=FAMILIES)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (folder, answers to PROMPTS as single requests)."""
    folder = make_model(tmp_path_factory.mktemp("mixture") / "model", FAMILIES[request.param])
    llm = make_dummy_llm(folder, max_num_seqs=1, enable_prefix_caching=False)
    return folder, [answers(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("way", SERVING_SETTINGS)
def test_serving_settings_keep_every_bit(alone, way: str) -> None:
    (folder, expected) = alone
    assert answers(make_dummy_llm(folder, **SERVING_SETTINGS[way])) == expected


def test_accepted_drafts_keep_the_answer(alone) -> None:
    (folder, expected) = alone
    known = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)]
    config = EngineConfig.read(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=8,
        speculative_config=NGRAM,
    )
    llm = LLM.from_engine(
        build_engine(config, hooks=CheckHooks(drafter=partial(ScriptedDrafter, known)))
    )
    assert answers(llm) == expected
    assert llm.engine.stats.accepted_tokens_total > 20


def test_batch_dependent_expert_is_detected(alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: an expert with several tokens multiplies in two halves of K."""
    (folder, expected) = alone
    right = experts_cpu.tiled_linear

    def split(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return right(x, weight)
        half = x.shape[1] // 2
        return right(x[:, :half], weight[:, :half]) + right(x[:, half:], weight[:, half:])

    monkeypatch.setattr(experts_cpu, "tiled_linear", split)
    assert answers(make_dummy_llm(folder)) != expected
