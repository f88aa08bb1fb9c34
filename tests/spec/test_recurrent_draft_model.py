"""A draft model that recurs: its drafts are what it says alone behind the tokens of that step."""

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
from tests.spec.watching import Seen
from tests.tiny_model import CONFIG, LLAMA, NEMOTRON_H, THREE_LAYERS, make_model

MODELS: dict[str, dict[str, Any]] = {
    "gated delta net": {**CONFIG, **THREE_LAYERS, "mtp_num_hidden_layers": 0},
    "mamba-2": {**NEMOTRON_H, "hybrid_override_pattern": "M-M*E"},
}
PROMPTS = [[(7 * i + i * i) % 250 for i in range(n)] for n in (130, 5, 58)]
ASKED = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
NOISE = 0.02
"""Of the draft model's weights, relative to the target's: some of its drafts are wrong."""


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that recurs."""
    return make_model(tmp_path_factory.mktemp("recurs"), MODELS[request.param])


def make_engine(target: Path, draft: Path, k: int, seen: Seen, **settings: Any) -> LLM:
    """Another number of drafts in every step; rows that are moved to the host; short chunks."""
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


def alone(folder: Path, draft: Any, found: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """What the draft model says behind each of the known tokens, in an engine of its own."""
    llm = engine_over(folder, max_num_seqs=32, enable_prefix_caching=False)
    write_weights(worker_of(llm.engine).model, read_weights(draft))
    params = [
        SamplingParams(temperature=0, max_tokens=len(drafts), ignore_eos=True, detokenize=False)
        for _, drafts in found
    ]
    outs = llm.generate([{"prompt_token_ids": known} for known, _ in found], params)
    return [out.outputs[0].token_ids for out in outs]


def assert_alone(folder: Path, seen: Seen) -> None:
    """Every draft that was seen is what the draft model says alone."""
    found = {(tuple(known), tuple(drafts)) for known, drafts in seen.found}
    checked = [(list(known), list(drafts)) for known, drafts in sorted(found)]
    assert len(checked) > 15
    due = alone(folder, seen.context.module.model, checked)
    for (known, drafts), expected in zip(checked, due, strict=True):
        assert drafts == expected, len(known)


@pytest.mark.parametrize(("k", "flush"), [(1, 1), (3, 1), (15, 5)])
def test_drafts_are_what_it_says_alone(
    folder: Path, k: int, flush: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind accepted and rejected drafts, chunks, preemption and prefix hits, across pages."""
    for user in (row_table, gated_delta_net, mamba2):
        monkeypatch.setattr(user, "flush_after", lambda device: flush)
    monkeypatch.setattr(nemotron_h.Model, "snapshot_every", 1)
    seen = Seen(create)
    llm = make_engine(folder, folder, k, seen)
    resemble(seen.context.module.model, worker_of(llm.engine).model)
    first = llm.generate(ASKED, GREEDY)
    again = llm.generate(ASKED, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
    assert again[0].metrics.num_cached_tokens == 128
    stats = llm.engine.refresh_stats()
    assert stats.preemptions_total
    assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total
    assert_alone(folder, seen)


def test_no_draft_depends_on_when_a_state_of_16_bits_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed or read, it is rounded at the same places."""
    found = []
    for flush in (1, 5):
        for user in (row_table, gated_delta_net, mamba2):
            monkeypatch.setattr(user, "flush_after", lambda device, flush=flush: flush)
        seen = Seen(create)
        llm = make_engine(folder, folder, 7, seen, mamba_ssm_cache_dtype="bfloat16")
        resemble(seen.context.module.model, worker_of(llm.engine).model)
        llm.generate(ASKED, GREEDY)
        assert llm.engine.refresh_stats().accepted_tokens_total
        found.append(seen.found)
    assert found[0] == found[1]


def test_behind_a_target_that_does_not_recur(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows have slots and snapshots all the same; a prefix is found where both can go on."""
    monkeypatch.setattr(nemotron_h.Model, "snapshot_every", 1)
    target = make_model(tmp_path, LLAMA)
    seen = Seen(create)
    llm = make_engine(target, folder, 7, seen)
    first = llm.generate(ASKED, GREEDY)
    again = llm.generate(ASKED, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
    assert again[0].metrics.num_cached_tokens == 128
    assert_alone(folder, seen)
    plain = engine_over(target, max_model_len=256).generate(ASKED, GREEDY)
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in first]


def test_snapshots_are_as_rare_as_the_draft_model_asks(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", LLAMA)
    draft = make_model(tmp_path / "draft", MODELS["mamba-2"])
    llm = make_engine(target, draft, 1, Seen(create))
    assert llm.engine.plan.snapshot_every == nemotron_h.SNAPSHOT_EVERY
