"""Tests of every family: trainer and engine compute the same, target and drafter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep import SamplingParams
from lockstep.worker.executor import worker_of
from tests.models.dense import make_llm
from tests.models.oracle import RELATIVE, compare_greedy, logits_error
from training.models.base import LanguageModel
from training.tests.saved_models import MAX_BYTES, VOCAB, random_prompts, row_of, save_model

FAMILIES = ("moe", "nemotron_h", "deepseek_v3", "qwen3", "qwen3_draft")
DRAFTERS = {"moe": "mtp", "nemotron_h": "mtp", "deepseek_v3": "mtp", "qwen3": "eagle3"}
ALIKE = {"mtp": 1, "eagle3": 3}
"""Number of drafts of a chain that equal the engine's.

From the second draft on, MTP is trained on other keys and values than the engine has
(training/README.md).
"""
STEPS = 3


@pytest.fixture(scope="module", params=FAMILIES)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, LanguageModel]:
    """Return a family's name, folder and model."""
    return request.param, *save_model(request.param, tmp_path_factory.mktemp("family"))


def test_the_folder_is_small(saved: tuple[str, Path, LanguageModel]) -> None:
    files = [path for path in saved[1].rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES


@pytest.mark.default_cases("qwen3_draft")
@torch.no_grad()
def test_engine_computes_the_trained_model(saved: tuple[str, Path, LanguageModel]) -> None:
    (_, folder, model) = saved

    def oracle(ids: Tensor) -> SimpleNamespace:
        hidden, *_ = model.hidden(row_of(ids[0].tolist()))
        return SimpleNamespace(logits=model.head(hidden)[None, : ids.shape[1]])

    llm = make_llm(folder)
    for ids in random_prompts():
        assert logits_error(llm, oracle, ids) < RELATIVE
        compare_greedy(llm, oracle, ids, 16)


@pytest.mark.default_cases("nemotron_h", "qwen3_draft")
@torch.no_grad()
def test_engine_drafts_with_the_trained_module(saved: tuple[str, Path, LanguageModel]) -> None:
    """Compare the chain after a prompt, teacher-forced with the drafts themselves."""
    (name, folder, model) = saved
    if name not in DRAFTERS:
        assert model.drafter is None
        return
    config: dict[str, Any] = {
        "method": DRAFTERS[name],
        "num_speculative_tokens": STEPS,
        "adaptive": False,
    }
    if name == "qwen3":
        config["model"] = str(folder / "eagle3")
    llm = make_llm(folder, speculative_config=config, max_num_seqs=1)
    module = worker_of(llm.engine).program.drafter.context.module
    compute = module.logits
    known = torch.arange(VOCAB) if module.ids is None else module.ids
    seen: list[Tensor] = []

    def watch(state: Tensor) -> Tensor:
        seen.append(compute(state)[0])
        return compute(state)

    module.logits = watch
    for ids in random_prompts():
        seen.clear()
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        first = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids[:1]
        drafted = [int(known[logits.argmax()]) for logits in seen[:STEPS]]
        rows = row_of(ids + first + drafted)
        _, read, _ = model.hidden(rows)
        drafts, _ = model.drafts(rows, read, STEPS)
        for step, hidden in enumerate(drafts[: ALIKE[DRAFTERS[name]]]):
            wanted = F.linear(hidden[len(ids) - 1 + step], model.draft_head)[known]
            assert float((seen[step] - wanted).norm() / wanted.norm()) < RELATIVE
