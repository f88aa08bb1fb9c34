"""F2 (vLLM #39273, #40738, #40880, #52942): recurrent state after N accepted drafts.

A scripted drafter has drafts accepted in every number and drafts nothing at times. Each fault of
the old engines, put in here, must change the answer; without a fault the answer is the plain one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.kernels import gated_delta_rule as rule
from tests.regressions.conftest import PROMPTS, answers, script


def plain_and_known(make: Callable[..., LLM]) -> tuple[list[Any], list[list[int]]]:
    plain = answers(make())
    return plain, [p + tokens for p, (tokens, _) in zip(PROMPTS, plain, strict=True)]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("chunk", [64, 2048])
def test_accepted_drafts_leave_the_answer_alone(
    make: Callable[..., LLM], k: int, chunk: int
) -> None:
    plain, known = plain_and_known(make)
    llm = make("ngram", k, max_num_batched_tokens=chunk)
    script(llm, known)
    assert answers(llm) == plain
    assert llm.engine.stats.accepted_tokens_total > 20


@pytest.mark.parametrize("method", ["ngram", "mtp"])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
def test_real_drafters_leave_the_answer_alone(
    make: Callable[..., LLM], method: str, k: int
) -> None:
    assert answers(make(method, k)) == answers(make())


def no_replay(state: Any, slots: Any, pending: Any, most: int) -> Any:
    """The state as it was before the last window: accepted tokens are forgotten."""
    return state.recurrent.index_select(0, slots)


def replay_all_but_one(state: Any, slots: Any, pending: Any, most: int) -> Any:
    """Reads the state one token too early."""
    earlier = (pending - 1).clamp_min(0)
    return replay(state, slots, earlier, int(earlier.max()))


replay = rule._replay


@pytest.mark.parametrize("fault", [no_replay, replay_all_but_one])
def test_state_read_at_the_wrong_place_is_caught(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]
) -> None:
    plain, known = plain_and_known(make)
    monkeypatch.setattr(rule, "_replay", fault)
    llm = make("ngram", 3)
    script(llm, known)
    assert answers(llm) != plain


def test_conv_window_that_does_not_move_is_caught(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, known = plain_and_known(make)
    step = rule.gated_delta_step.reference

    def stuck(mixed: Any, g: Any, beta: Any, w: Any, state: Any, slots: Any, pending: Any) -> Any:
        at = pending.clamp_max(1)
        history = state.conv.shape[1] - state.u.shape[1]
        for slot, n, m in zip(slots.tolist(), pending.tolist(), at.tolist(), strict=True):
            state.conv[slot, n : n + history] = state.conv[slot, m : m + history].clone()
        return step(mixed, g, beta, w, state, slots, pending)

    llm = make("ngram", 3)
    for block in llm.engine.runner.model.blocks:
        if hasattr(block.mixer, "step_op"):
            block.mixer.step_op = stuck
    script(llm, known)
    assert answers(llm) != plain


def test_replay_is_stepping_bit_for_bit() -> None:
    """Random acceptance over 60 steps against one token a step."""
    generator = torch.Generator().manual_seed(3)
    hk, hv, dk, dv, window, total = 2, 4, 16, 16, 5, 150
    channels = 2 * hk * dk + hv * dv
    mixed = torch.randn(total + window, channels, generator=generator)
    g = -torch.rand(total + window, hv, generator=generator)
    beta = torch.rand(total + window, hv, generator=generator)
    weight = torch.randn(channels, 4, generator=generator)

    def fresh() -> rule.GatedDeltaState:
        return rule.GatedDeltaState(
            torch.zeros(2, hv, dk, dv),
            torch.zeros(2, 3 + window, channels),
            torch.zeros(2, window, hv, dv),
            torch.zeros(2, window, hk, dk),
            torch.zeros(2, window, hv),
        )

    def run(state: rule.GatedDeltaState, at: int, n: int, pending: int) -> torch.Tensor:
        x = (t[None, at : at + n] for t in (mixed, g, beta))
        where = torch.tensor([1]), torch.tensor([pending])
        return rule.gated_delta_step(*x, weight, state, *where)[0]

    one, many = fresh(), fresh()
    stepped = torch.stack([run(one, t, 1, min(t, 1))[0] for t in range(total)])
    at = pending = 0
    while at < total:
        out = run(many, at, window, pending)
        pending = int(torch.randint(1, window + 1, (1,), generator=generator))
        taken = min(pending, total - at)
        assert torch.equal(out[:taken], stepped[at : at + taken])
        at += pending
