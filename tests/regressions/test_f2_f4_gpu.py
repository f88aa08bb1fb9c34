"""F2 and F4 with the GPU kernels of latent attention and Mamba-2, in captured graphs.

Drafts accepted in every number, pools of one page and the null page, padded rows, and later
keys.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.worker.capture import CapturedFunction
from lockstep.worker.executor import worker_of
from tests.regressions.conftest import (
    PARAMS,
    PROMPTS,
    answers,
    engine_over,
    poison_latents_behind,
    run_null_rows,
)
from tests.tiny_model import DEEPSEEK, NEMOTRON_H, make_model

pytestmark = pytest.mark.gpu

PUBLISHED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
"""A latent of DeepSeek-V3's size, for which Hopper has a kernel."""
TARGETS: dict[str, dict[str, Any]] = {
    "latent": DEEPSEEK,
    "published latent": {**DEEPSEEK, **PUBLISHED},
    "mamba2": {**NEMOTRON_H, "hybrid_override_pattern": "MM*EM"},
}
METHODS = {"latent": "mtp", "published latent": "mtp", "mamba2": "suffix"}
"""Drafters; in the second run suffix finds the first answers."""
LATENT = [kind for kind, method in METHODS.items() if method == "mtp"]
GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
MANY: dict[str, Any] = {**GPU, "num_gpu_blocks": 64}
BUCKETS = (1, 2, 3, 4, 5, 6, 7, 8)
WINDOW = 4
SHORT = [[3, 1, 4, 1, 5, i] for i in range(4)]
"""Prompts for a pool of one page and the null page, one at a time."""
FEW = replace(PARAMS, max_tokens=6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of each target."""
    return {
        kind: make_model(tmp_path_factory.mktemp("target") / "model", base)
        for kind, base in TARGETS.items()
    }


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> dict[str, list[Any]]:
    """Return the eager answers to PROMPTS without drafts."""
    return {
        kind: answers(engine_over(folder, cuda_graph_mode="none", **MANY))
        for kind, folder in folders.items()
    }


@pytest.mark.parametrize("kind", TARGETS)
def test_every_bucket_is_captured_with_two_pages(folders: dict[str, Path], kind: str) -> None:
    """Null rows of every bucket change no row, and every request runs afterwards."""
    alone = engine_over(folders[kind], cuda_graph_mode="none", **MANY)
    want = [answers(alone, [prompt], FEW) for prompt in SHORT]
    small: dict[str, Any] = {"num_gpu_blocks": 2, "num_snapshots": 0, "row_buckets": BUCKETS}
    llm = engine_over(folders[kind], METHODS[kind], WINDOW - 1, **small, **GPU)
    for half in worker_of(llm.engine).run_step:
        assert isinstance(half, CapturedFunction)
    for bucket in BUCKETS:
        run_null_rows(llm, bucket, WINDOW)
    assert [answers(llm, [prompt], FEW) for prompt in SHORT] == want


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("bucket", [3, 5, 8])
def test_padded_rows_do_not_change_real_rows(
    folders: dict[str, Path], plain: dict[str, list[Any]], kind: str, bucket: int
) -> None:
    settings: dict[str, Any] = {"row_buckets": (bucket, 8), "max_num_batched_tokens": 64}
    llm = engine_over(folders[kind], METHODS[kind], WINDOW - 1, **settings, **MANY)
    assert answers(llm) == plain[kind]


@pytest.mark.parametrize("kind", TARGETS)
def test_any_number_of_accepted_drafts_keeps_the_answer(
    folders: dict[str, Path], plain: dict[str, list[Any]], kind: str
) -> None:
    """A different number of drafts in every step; rows swapped to the host; then from the cache."""
    settings: dict[str, Any] = {"row_buckets": (1, 4, 8), "preempt_every": 4}
    llm = engine_over(folders[kind], METHODS[kind], 7, changing=True, **settings, **MANY)
    assert answers(llm) == plain[kind]
    assert answers(llm) == plain[kind]
    stats = llm.engine.refresh_stats()
    assert stats.draft_tokens_total > 0
    assert stats.preemptions_total > 0
    if METHODS[kind] == "suffix":
        assert stats.accepted_tokens_total > 4 * len(PROMPTS)


@pytest.mark.parametrize("kind", LATENT)
def test_later_keys_are_never_read(
    folders: dict[str, Path],
    plain: dict[str, list[Any]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before every step, each of its rows' slots from the first that it writes on is poisoned, in
    every layer and the draft module's."""
    poisoned = poison_latents_behind(monkeypatch)
    settings: dict[str, Any] = {"cuda_graph_mode": "none", "enable_prefix_caching": False}
    llm = engine_over(folders[kind], METHODS[kind], WINDOW - 1, **settings, **MANY)
    assert answers(llm) == plain[kind]
    assert poisoned
