"""F2 (vLLM #39273, #40738, #40880, #52942): recurrent state after N accepted drafts.

A scripted drafter has drafts accepted in every number, and sometimes drafts nothing. Each injected
fault of the reported engines must change the answer; without it the answer is the plain one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.kernels import gated_delta_rule as rule
from lockstep.kernels.gated_delta_rule import cpu
from lockstep.kernels.recurrent.history import history_length, max_replayed
from lockstep.kernels.recurrent.state import RecurrentState
from lockstep.layers import gated_delta_net
from lockstep.worker import row_table
from lockstep.worker.executor import worker_of
from tests.regressions.conftest import answers, replay_faults

SLOW = pytest.mark.slow
K = (1, pytest.param(2, marks=SLOW), 3, pytest.param(5, marks=SLOW), 7)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("chunk", [64, 2048])
def test_accepted_drafts_keep_the_answer(
    make: Callable[..., LLM], plain: list[Any], known: list[list[int]], k: int, chunk: int
) -> None:
    llm = make("ngram", k, known=known, max_num_batched_tokens=chunk)
    assert answers(llm) == plain
    assert llm.engine.stats.accepted_tokens_total > 20


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("method", ["ngram", "mtp"])
@pytest.mark.parametrize("k", K)
def test_real_drafters_keep_the_answer(
    make: Callable[..., LLM], plain: list[Any], method: str, k: int
) -> None:
    assert answers(make(method, k)) == plain


@pytest.mark.parametrize("flush", [2, 5])
def test_rare_state_writes_keep_the_answer(
    make: Callable[..., LLM],
    plain: list[Any],
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    flush: int,
) -> None:
    """The stored state may lack up to `flush` tokens, as on a GPU."""
    for user in (gated_delta_net, row_table):
        monkeypatch.setattr(user, "flush_after", lambda device: flush)
    llm = make("ngram", 3, known=known)
    assert answers(llm) == plain
    assert answers(make()) == plain


@pytest.mark.parametrize("flush", [1, 8])
@pytest.mark.parametrize("k", [3, 7])
def test_changing_numbers_of_drafts_keep_the_answer(
    make: Callable[..., LLM],
    plain: list[Any],
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    k: int,
    flush: int,
) -> None:
    """Windows of one length replay tokens of windows of another."""
    for user in (gated_delta_net, row_table):
        monkeypatch.setattr(user, "flush_after", lambda device: flush)
    llm = make("ngram", k, changing=True, known=known)
    assert answers(llm) == plain
    assert llm.engine.stats.accepted_tokens_total > 12


@pytest.mark.parametrize("fault", replay_faults(cpu.replay))
def test_state_read_at_a_wrong_position_is_detected(
    torch_step: None,
    make: Callable[..., LLM],
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[..., Any],
) -> None:
    plain = answers(make())
    monkeypatch.setattr(cpu, "replay", fault)
    llm = make("ngram", 3, known=known)
    assert answers(llm) != plain


def test_stuck_conv_window_is_detected(
    torch_step: None, make: Callable[..., LLM], known: list[list[int]]
) -> None:
    plain = answers(make())
    step = cpu.gated_delta_step_cpu

    def stuck(
        mixed: Any, z: Any, b: Any, a: Any, w: Any, state: Any, *where: Any, **rest: Any
    ) -> Any:
        """The inputs before the window are those after the first accepted token of the last one."""
        for slot, start, folded in zip(*(x.tolist() for x in where), strict=True):
            length = state.conv.shape[1]
            for i in range(start - w.conv.shape[1] + 1, start):
                past = state.conv[slot, (i - max(start - folded - 1, 0)) % length].clone()
                state.conv[slot, i % length] = past
        return step(mixed, z, b, a, w, state, *where, **rest)

    llm = make("ngram", 3, known=known)
    for block in worker_of(llm.engine).model.blocks:
        if hasattr(block, "linear_attn"):
            block.linear_attn.step_op = stuck
    assert answers(llm) != plain


def test_replay_equals_single_steps() -> None:
    """Random acceptance over 60 steps equals one token per step, bit for bit."""
    generator = torch.Generator().manual_seed(3)
    hk = 2
    hv = 4
    dk = 16
    dv = 16
    window = 5
    total = 150
    channels = 2 * hk * dk + hv * dv

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    raw = [normal(total + window, *n) for n in ((channels,), (hv, dv), (hv,), (hv,))]
    weights = rule.GatedDeltaWeights(
        normal(channels, 4), normal(hv), normal(hv) - 2.0, normal(dv), 1e-6
    )
    length = history_length(window, max_replayed(window))

    def fresh() -> RecurrentState:
        return RecurrentState(
            torch.zeros(2, hv, dk, dv),
            torch.zeros(2, history_length(window, 3), channels),
            torch.zeros(2, length, hv, dv),
            torch.zeros(2, length, hk, dk),
            torch.zeros(2, length, hv),
        )

    def run(state: RecurrentState, at: int, n: int, lacking: int) -> torch.Tensor:
        x = (t[None, at : at + n] for t in raw)
        where = torch.tensor([1]), torch.tensor([at]), torch.tensor([at - lacking])
        return cpu.gated_delta_step_cpu(*x, weights, state, *where)[0]

    one = fresh()
    many = fresh()
    stepped = torch.stack([run(one, t, 1, min(t, 1))[0] for t in range(total)])
    at = 0
    accepted = 0
    while at < total:
        out = run(many, at, window, accepted)
        accepted = int(torch.randint(1, window + 1, (1,), generator=generator))
        taken = min(accepted, total - at)
        assert torch.equal(out[:taken], stepped[at : at + taken])
        at += accepted
