"""F2 on a 16-bit recurrent state: it is rounded at absolute positions, so batching and drafts keep
the answer.

An engine that rounds wherever a step writes the state gives another answer for every window; each
such injected fault must be detected.
"""

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
def half_answers(make: Callable[..., LLM]) -> list[Any]:
    """Return the plain answers with a 16-bit state."""
    return answers(make(mamba_ssm_cache_dtype=HALF))


@pytest.fixture(scope="module")
def known_half(half_answers: list[Any]) -> list[list[int]]:
    """Return each prompt followed by its plain answer, for a scripted drafter."""
    return [p + tokens for p, (tokens, _) in zip(PROMPTS, half_answers, strict=True)]


def test_float32_is_the_default(make: Callable[..., LLM], plain: list[Any]) -> None:
    llm = make(mamba_ssm_cache_dtype="float32")
    assert answers(llm) == plain
    assert llm.engine.numerics == make().engine.numerics


@pytest.mark.parametrize("flush", some_slow([1, 5, 20], (20,)))
def test_chunks_drafts_and_preemption_keep_the_answer(
    make: Callable[..., LLM],
    plain: list[Any],
    half_answers: list[Any],
    known_half: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    flush: int,
) -> None:
    """Also where the stored state may lack more tokens than to the next rounding position."""
    assert half_answers != plain, "rounding changes no bit"
    for user in (gated_delta_net, row_table):
        monkeypatch.setattr(user, "flush_after", lambda device: flush)
    for settings in (
        dict(max_num_batched_tokens=64),
        dict(method="ngram", k=7, changing=True, known=known_half),
        dict(method="ngram", k=3, known=known_half),
    ):
        llm = make(mamba_ssm_cache_dtype=HALF, **settings)
        assert answers(llm) == half_answers, settings
    assert llm.engine.stats.accepted_tokens_total > 20
    llm = make("mtp", 3, preempt_every=4, mamba_ssm_cache_dtype=HALF, max_num_batched_tokens=128)
    assert answers(llm) == half_answers
    assert answers(llm) == half_answers, "with cached prefixes"
    assert llm.engine.refresh_stats().preemptions_total > 0
    assert llm.engine.scheduler.cache.hit_tokens > 0


@pytest.mark.default_cases("True")
@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("k", some_slow([1, 3, 15], (15,)))
def test_answers_longer_than_the_token_ring_are_equal(
    make: Callable[..., LLM], k: int, changing: bool
) -> None:
    """Only in long answers does a state lack the maximum, 15 tokens and a window, so that the
    circular history buffer wraps."""
    prompts = PROMPTS[1:3]
    long_params = replace(PARAMS, max_tokens=100)
    expected = answers(make(mamba_ssm_cache_dtype=HALF), prompts, long_params)
    known = [p + tokens for p, (tokens, _) in zip(prompts, expected, strict=True)]
    llm = make("ngram", k, changing, known=known, mamba_ssm_cache_dtype=HALF)
    assert answers(llm, prompts, long_params) == expected


def test_numerics_slots_and_snapshots_of_the_state(make: Callable[..., LLM]) -> None:
    """States have half the bytes. History buffers reach to the next rounding position."""
    full = make()
    half = make(mamba_ssm_cache_dtype=HALF)
    assert "/state-bfloat16/" in half.engine.numerics
    assert "/state-float32/" in full.engine.numerics
    pairs = zip(*(_mixers(llm) for llm in (full, half)), strict=True)
    layers = [(wide.state, narrow.state) for wide, narrow in pairs]
    for wide, narrow in layers:
        assert 2 * narrow.recurrent.nbytes == wide.recurrent.nbytes
        assert narrow.conv.shape == wide.conv.shape
        assert narrow.k.shape[1] == history.ROUNDING_INTERVAL + 1
        assert wide.k.shape[1] == 2
    states = 4 * sum(s.recurrent[0].numel() for s, _ in layers)
    histories = [buffer for state, _ in layers for buffer in state.tensors()[2:]]
    token_bytes = sum(buffer[0, 0].nbytes for buffer in histories)
    saved = full.engine.plan.slot_bytes - half.engine.plan.slot_bytes
    assert saved == states // 2 - (history.ROUNDING_INTERVAL - 1) * token_bytes


def _mixers(llm: LLM) -> list[Any]:
    blocks = worker_of(llm.engine).model.blocks
    return [block.linear_attn for block in blocks if hasattr(block, "linear_attn")]


def round_at_step_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round each written state after the tokens of its step."""

    def by_step(starts: Tensor, folded: Tensor, flush: int, grid: int) -> Tensor:
        return torch.where(starts - folded >= flush, starts, folded)

    for user in (recurrent_cpu, step_metadata.contract):
        monkeypatch.setattr(user, "next_folded", by_step)


def round_by_window_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by the token's position in the window, not in the row."""
    run = cpu._step_tokens

    def by_window(state: RecurrentState, s: Tensor, starts: Any, *rest: Any) -> Any:
        return run(state, s, [0 for _ in starts], *rest)

    monkeypatch.setattr(cpu, "_step_tokens", by_window)


@pytest.mark.parametrize("fault", [round_at_step_end, round_by_window_position])
def test_rounding_by_step_is_detected(
    torch_step: None,
    make: Callable[..., LLM],
    known_half: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    fault(monkeypatch)
    drafted = make("ngram", 7, known=known_half, mamba_ssm_cache_dtype=HALF)
    assert answers(drafted) != answers(make(mamba_ssm_cache_dtype=HALF))
