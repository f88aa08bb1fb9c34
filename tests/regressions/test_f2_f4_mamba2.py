"""F2 and F4 on Mamba-2: its state after any number of accepted drafts, and padded rows.

A scripted drafter has drafts accepted in every number, and sometimes drafts nothing. Each injected
fault of the reported engines must change the answer; without it the answer is the plain one.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM
from lockstep.kernels.mamba2 import cpu
from lockstep.layers import mamba2
from lockstep.worker import row_table
from tests.regressions.conftest import PROMPTS, answers, engine_over, replay_faults, run_null_rows
from tests.tiny_model import NEMOTRON_H, make_model

SLOW = pytest.mark.slow
STATES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """Return a function that makes an engine of a tiny Nemotron-H: three recurrent blocks, one
    attention, one mixture."""
    folder: Path = tmp_path_factory.mktemp("nemotron")
    make_model(folder, NEMOTRON_H, hybrid_override_pattern="MM*EM")
    return partial(engine_over, folder)


@pytest.fixture(scope="module", params=STATES)
def state(request: pytest.FixtureRequest) -> str:
    """Return the dtype of the recurrent state."""
    return str(request.param)


@pytest.fixture(scope="module")
def plain(make: Callable[..., LLM], state: str) -> list[Any]:
    """Return the answers without drafts."""
    return answers(make(mamba_ssm_cache_dtype=state))


@pytest.fixture(scope="module")
def known(plain: list[Any]) -> list[list[int]]:
    """Return the prompts with these answers, for a scripted drafter."""
    return [p + tokens for p, (tokens, _) in zip(PROMPTS, plain, strict=True)]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("k", "flush"),
    [(3, 1), (7, 5), *(pytest.param(*both, marks=SLOW) for both in ((1, 1), (1, 5), (2, 5)))],
)
def test_accepted_drafts_keep_the_answer(
    make: Callable[..., LLM],
    plain: list[Any],
    known: list[list[int]],
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    k: int,
    flush: int,
) -> None:
    """Run windows of one length and of all, next to prompts in chunks, with rare state writes."""
    for user in (mamba2, row_table):
        monkeypatch.setattr(user, "flush_after", lambda device: flush)
    for changing in (False, True):
        settings: Any = dict(max_num_batched_tokens=64, mamba_ssm_cache_dtype=state)
        llm = make("ngram", k, changing=changing, known=known, **settings)
        assert answers(llm) == plain
        assert llm.engine.stats.accepted_tokens_total > 10


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("every", [1, 2, None])
def test_preemption_and_prefix_hits_keep_the_answer(
    make: Callable[..., LLM], plain: list[Any], state: str, every: int | None
) -> None:
    """With snapshots at every page, every other page, and only at a prompt's last page."""
    settings: Any = dict(max_num_batched_tokens=128, mamba_ssm_cache_dtype=state)
    llm = make("ngram", 3, preempt_every=4, snapshot_every=every, **settings)
    assert answers(llm) == plain
    assert answers(llm) == plain, "with what is cached"
    assert llm.engine.refresh_stats().preemptions_total > 0
    assert llm.engine.scheduler.cache.hit_tokens > 0


def test_16_bit_state_has_its_own_numerics(make: Callable[..., LLM]) -> None:
    full, half = (answers(make(mamba_ssm_cache_dtype=state)) for state in STATES)
    assert full != half


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("fault", replay_faults(cpu.replay))
def test_state_read_at_a_wrong_position_is_detected(
    make: Callable[..., LLM],
    plain: list[Any],
    known: list[list[int]],
    state: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Any],
) -> None:
    monkeypatch.setattr(cpu, "replay", fault)
    llm = make("ngram", 3, known=known, mamba_ssm_cache_dtype=state)
    assert answers(llm) != plain


@pytest.mark.parametrize("bucket", range(1, 9))
def test_every_bucket_runs_null_rows_with_two_pages(make: Callable[..., LLM], bucket: int) -> None:
    llm = make("ngram", 3, num_gpu_blocks=2, row_buckets=(bucket, 8), num_snapshots=0)
    run_null_rows(llm, bucket, 4)


def test_padded_rows_do_not_change_real_rows(
    make: Callable[..., LLM], plain: list[Any], state: str
) -> None:
    assert answers(make("ngram", 3, row_buckets=(8,), mamba_ssm_cache_dtype=state)) == plain
