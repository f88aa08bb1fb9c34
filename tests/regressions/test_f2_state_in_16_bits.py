"""F2 on a recurrent state of 16 bits: it is rounded at absolute positions, so that nothing that
exists for speed changes an answer. An engine that rounds wherever a step wrote the state gives
another answer with every window; each such fault, put in here, must show."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import LLM
from lockstep.kernels import step_metadata
from lockstep.kernels.gated_delta_rule import cpu
from lockstep.kernels.recurrent import cpu as recurrent_cpu
from lockstep.kernels.recurrent import history
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.layers import gated_delta_net
from lockstep.worker import row_table
from lockstep.worker.executor import worker_of
from tests.regressions.conftest import PARAMS, PROMPTS, answers
from tests.selection import some_slow

HALF = "bfloat16"


@pytest.fixture(scope="module")
def wanted(make: Callable[..., LLM]) -> list[Any]:
    """The plain answers of an engine with such a state."""
    return answers(make(mamba_ssm_cache_dtype=HALF))


@pytest.fixture(scope="module")
def texts(wanted: list[Any]) -> list[list[int]]:
    """The prompts with these answers, for a drafter that knows them."""
    return [p + tokens for p, (tokens, _) in zip(PROMPTS, wanted, strict=True)]


def test_float32_is_the_default(make: Callable[..., LLM], plain: list[Any]) -> None:
    llm = make(mamba_ssm_cache_dtype="float32")
    assert answers(llm) == plain
    assert llm.engine.numerics == make().engine.numerics


@pytest.mark.parametrize("flush", some_slow([1, 5, 20], (20,)))
def test_chunks_drafts_and_preemption_leave_the_answer_alone(
    make: Callable[..., LLM],
    plain: list[Any],
    wanted: list[Any],
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    flush: int,
) -> None:
    """Also where the state may lack tokens for longer than to the next point of its grid."""
    assert wanted != plain, "rounding changes no bit"
    for user in (gated_delta_net, row_table):
        monkeypatch.setattr(user, "flush_after", lambda device: flush)
    for settings in (
        dict(max_num_batched_tokens=64),
        dict(method="ngram", k=7, changing=True, known=texts),
        dict(method="ngram", k=3, known=texts),
    ):
        llm = make(mamba_ssm_cache_dtype=HALF, **settings)
        assert answers(llm) == wanted, settings
    assert llm.engine.stats.accepted_tokens_total > 20
    llm = make("mtp", 3, preempt_every=4, mamba_ssm_cache_dtype=HALF, max_num_batched_tokens=128)
    assert answers(llm) == wanted
    assert answers(llm) == wanted, "with what is cached"
    assert llm.engine.refresh_stats().preemptions_total > 0
    assert llm.engine.scheduler.cache.hit_tokens > 0


@pytest.mark.parametrize("k", some_slow([1, 3, 15], (15,)))
def test_answers_longer_than_the_rings_are_left_alone(make: Callable[..., LLM], k: int) -> None:
    """A state lacks the most tokens, 15 and a window, only where an answer goes on for longer than
    that; then rings have gone round, and none of their tokens may be missing."""
    prompts = PROMPTS[1:3]
    lasting = replace(PARAMS, max_tokens=100)
    due = answers(make(mamba_ssm_cache_dtype=HALF), prompts, lasting)
    known = [p + tokens for p, (tokens, _) in zip(prompts, due, strict=True)]
    for changing in (False, True):
        llm = make("ngram", k, changing, known=known, mamba_ssm_cache_dtype=HALF)
        assert answers(llm, prompts, lasting) == due


def test_numerics_slots_and_snapshots_say_so(make: Callable[..., LLM]) -> None:
    """Half of the bytes of the states themselves; rings hold the tokens up to the next point."""
    whole = make()
    half = make(mamba_ssm_cache_dtype=HALF)
    assert "/state-bfloat16/" in half.engine.numerics
    assert "/state-float32/" in whole.engine.numerics
    pairs = zip(*(_mixers(llm) for llm in (whole, half)), strict=True)
    layers = [(wide.state, narrow.state) for wide, narrow in pairs]
    for wide, narrow in layers:
        assert 2 * narrow.recurrent.nbytes == wide.recurrent.nbytes
        assert narrow.conv.shape == wide.conv.shape
        assert narrow.k.shape[1] == history.ROUNDING_INTERVAL + 1
        assert wide.k.shape[1] == 2
    states = 4 * sum(s.recurrent[0].numel() for s, _ in layers)
    lines = sum(ring[0, 0].nbytes for state, _ in layers for ring in state.tensors()[2:])
    saved = whole.engine.plan.slot_bytes - half.engine.plan.slot_bytes
    assert saved == states // 2 - (history.ROUNDING_INTERVAL - 1) * lines


def _mixers(llm: LLM) -> list[Any]:
    blocks = worker_of(llm.engine).model.blocks
    return [block.linear_attn for block in blocks if hasattr(block, "linear_attn")]


def as_each_step_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds what a step writes, where it writes it: behind the tokens that it found."""

    def by_step(starts: Tensor, folded: Tensor, flush: int, grid: int) -> Tensor:
        return torch.where(starts - folded >= flush, starts, folded)

    for user in (recurrent_cpu, step_metadata.contract):
        monkeypatch.setattr(user, "next_folded", by_step)


def as_the_window_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds by the token's place in the window, not in the row."""
    run = cpu._step_tokens

    def by_window(state: RecurrentState, s: Tensor, starts: Any, *rest: Any) -> Any:
        return run(state, s, [0 for _ in starts], *rest)

    monkeypatch.setattr(cpu, "_step_tokens", by_window)


@pytest.mark.parametrize("fault", [as_each_step_leaves_it, as_the_window_counts])
def test_rounding_that_follows_the_step_is_caught(
    make: Callable[..., LLM],
    texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    drafted = make("ngram", 7, known=texts, mamba_ssm_cache_dtype=HALF)
    assert answers(drafted) != answers(make(mamba_ssm_cache_dtype=HALF))
