"""A recurrent draft model drafts in each step what it generates alone after the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.layers import gated_delta_net, mamba2
from lockstep.models import nemotron_h
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.spec.draft_model import create
from lockstep.worker import row_table
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from tests.models.dense import make_llm
from tests.models.weights import read_weights, write_weights
from tests.regressions.conftest import engine_over
from tests.spec.watching import RecordedDrafts
from tests.tiny_model import CONFIG, LLAMA, NEMOTRON_H, THREE_LAYERS, make_model

MODELS: dict[str, dict[str, Any]] = {
    "gated delta net": {**CONFIG, **THREE_LAYERS, "mtp_num_hidden_layers": 0},
    "mamba-2": {**NEMOTRON_H, "hybrid_override_pattern": "M-M*E"},
}
PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (130, 5, 58)]
REQUESTS = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
NOISE = 0.02
"""Noise of the draft model's weights, relative to the target's, so that some drafts are wrong."""


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recurrent model."""
    return make_model(tmp_path_factory.mktemp("recurs"), MODELS[request.param])


def make_engine(target: Path, draft: Path, k: int, seen: RecordedDrafts, **settings: Any) -> LLM:
    """Return an engine with a varying number of drafts, rows that move to the host, and short
    chunks."""
    spec = {"model": str(draft), "num_speculative_tokens": k}
    short = {"max_model_len": 256, "max_num_batched_tokens": 64}
    hooks = CheckHooks(drafter=seen.create, draft_policy=RandomDraftLength, preempt_every=3)
    return make_llm(
        target, hooks, load_format="dummy", speculative_config=spec, **short, **settings
    )


def resemble(draft: Any, target: Any) -> None:
    """Give a draft model the target's weights, with noise."""
    generator = torch.Generator().manual_seed(1)
    noisy = {
        name: weight * (1 + torch.randn(weight.shape, generator=generator) * NOISE)
        for name, weight in read_weights(target).items()
    }
    write_weights(draft, noisy)


def answers_alone(
    folder: Path, draft: Any, result: list[tuple[list[int], list[int]]]
) -> list[list[int]]:
    """Return the draft model's answers after each of the known tokens, in its own engine."""
    llm = engine_over(folder, max_num_seqs=32, enable_prefix_caching=False)
    write_weights(worker_of(llm.engine).model, read_weights(draft))
    params = [
        SamplingParams(temperature=0, max_tokens=len(drafts), ignore_eos=True, detokenize=False)
        for _, drafts in result
    ]
    outs = llm.generate([{"prompt_token_ids": known} for known, _ in result], params)
    return [out.outputs[0].token_ids for out in outs]


def assert_drafts_equal_answers_alone(folder: Path, seen: RecordedDrafts) -> None:
    """Assert that every recorded draft equals the draft model's answer alone."""
    actual = {(tuple(known), tuple(drafts)) for known, drafts in seen.drafts}
    checked = [(list(known), list(drafts)) for known, drafts in sorted(actual)]
    assert len(checked) > 15
    answers = answers_alone(folder, seen.context.module.model, checked)
    for (known, drafts), expected in zip(checked, answers, strict=True):
        assert drafts == expected, len(known)


@pytest.mark.default_cases("gated delta net-3", "mamba-2-3")
@pytest.mark.parametrize(("k", "flush"), [(1, 1), (3, 1), (15, 5)])
def test_recurrent_drafts_equal_its_own_answers(
    folder: Path, k: int, flush: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After accepted and rejected drafts, chunks, preemption and prefix hits, across pages."""
    for user in (row_table, gated_delta_net, mamba2):
        monkeypatch.setattr(user, "flush_after", lambda device: flush)
    monkeypatch.setattr(nemotron_h.Model, "snapshot_every", 1)
    seen = RecordedDrafts(create)
    llm = make_engine(folder, folder, k, seen)
    resemble(seen.context.module.model, worker_of(llm.engine).model)
    first = llm.generate(REQUESTS, GREEDY)
    again = llm.generate(REQUESTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
    assert again[0].metrics.num_cached_tokens == 128
    stats = llm.engine.refresh_stats()
    assert stats.preemptions_total
    assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total
    assert_drafts_equal_answers_alone(folder, seen)


@pytest.mark.slow
def test_flush_interval_changes_no_draft_with_16_bit_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is rounded at the same positions, whether it is replayed or read."""
    actual = []
    for flush in (1, 5):
        for user in (row_table, gated_delta_net, mamba2):
            monkeypatch.setattr(user, "flush_after", lambda device, flush=flush: flush)
        seen = RecordedDrafts(create)
        llm = make_engine(folder, folder, 7, seen, mamba_ssm_cache_dtype="bfloat16")
        resemble(seen.context.module.model, worker_of(llm.engine).model)
        llm.generate(REQUESTS, GREEDY)
        assert llm.engine.refresh_stats().accepted_tokens_total
        actual.append(seen.drafts)
    assert actual[0] == actual[1]


@pytest.mark.default_cases("mamba-2")
def test_recurrent_draft_of_dense_target(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's rows have slots and snapshots; a prefix hit requires both models to resume."""
    monkeypatch.setattr(nemotron_h.Model, "snapshot_every", 1)
    target = make_model(tmp_path, LLAMA)
    seen = RecordedDrafts(create)
    llm = make_engine(target, folder, 7, seen)
    first = llm.generate(REQUESTS, GREEDY)
    again = llm.generate(REQUESTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
    assert again[0].metrics.num_cached_tokens == 128
    assert_drafts_equal_answers_alone(folder, seen)
    plain = engine_over(target, max_model_len=256).generate(REQUESTS, GREEDY)
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in first]


def test_snapshot_interval_follows_draft_model(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", LLAMA)
    draft = make_model(tmp_path / "draft", MODELS["mamba-2"])
    llm = make_engine(target, draft, 1, RecordedDrafts(create))
    assert llm.engine.plan.snapshot_every == nemotron_h.SNAPSHOT_EVERY
