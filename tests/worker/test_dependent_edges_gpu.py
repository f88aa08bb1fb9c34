"""Kernels of captured steps start early where that is faster, and answers stay."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lockstep import LLM, SamplingParams
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.engines import build
from lockstep.check.report.coverage import Coverage
from lockstep.kernels.activations import silu_mul
from lockstep.kernels.backends import load
from lockstep.worker import dependent_edges
from lockstep.worker.capture import CapturedFunction, captured_halves
from lockstep.worker.dependent_edges import has_programmatic_edges, num_programmatic
from lockstep.worker.executor import worker_of

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, detokenize=False)
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 40, 130, 70)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the ms that replays with programmatic edges take, where those with full ones take 1."""
    replay = dependent_edges.replay_ms

    def set_ms(programmatic: float) -> None:
        def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
            replay(graph)
            return programmatic if num_programmatic(graph) else 1.0

        monkeypatch.setattr(dependent_edges, "replay_ms", replay_ms)

    return set_ms


def run_silu_mul(gate_up: Tensor) -> Tensor:
    return silu_mul.backends["triton"].run(gate_up)


def graphs_of(llm: LLM) -> Iterator[torch.cuda.CUDAGraph]:
    """Yield the graphs of short steps."""
    for half in captured_halves(worker_of(llm.engine).run_step):
        for key, recording in half.recordings.items():
            if half.starts_early(key):
                yield recording.graph


def answers(mode: str) -> tuple[LLM, list[tuple[object, ...]]]:
    llm = LLM(device="cuda", cuda_graph_mode=mode, max_num_seqs=4, max_model_len=512)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    kept = [(tuple(out.outputs[0].token_ids), repr(out.outputs[0].logprobs)) for out in outputs]
    return llm, kept


def compared_graph(
    chain: Callable[[Tensor], Tensor], tokens: int, width: int
) -> torch.cuda.CUDAGraph:
    """Compare 200 replays of a chain of kernels with eager calls -> its graph."""
    load()
    pool = torch.cuda.graph_pool_handle()
    captured = CapturedFunction(chain, pool, lambda key: True, "chain", lambda key: True)
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(200):
        x = torch.randn(tokens, width, device="cuda", generator=generator).bfloat16()
        assert torch.equal(captured(x), chain(x))
    (recording,) = captured.recordings.values()
    return recording.graph


def test_answers_are_those_of_full_edges_and_of_eager_steps(
    measured: Callable[[float], None],
) -> None:
    _, expected = answers("none")
    measured(0.5)
    early, actual = answers("full")
    assert actual == expected
    for graph in graphs_of(early):
        assert (num_programmatic(graph) > 0) == has_programmatic_edges()
    measured(2.0)
    late, actual = answers("full")
    assert actual == expected
    for graph in graphs_of(late):
        assert num_programmatic(graph) == 0


def test_engines_of_a_check_start_kernels_early_whatever_is_faster(
    measured: Callable[[float], None],
) -> None:
    measured(2.0)
    engine = build(None, {"device": "cuda", "max_num_seqs": 2, "max_model_len": 512})
    coverage = Coverage()
    coverage.record_engine(engine.engine, NO_DRAFTER)
    assert coverage.has_early_starts == has_programmatic_edges()


def test_kernel_that_does_not_wait_keeps_its_edge(measured: Callable[[float], None]) -> None:
    measured(0.5)

    def chain(x: Tensor) -> Tensor:
        for _ in range(3):
            x = run_silu_mul(torch.cat([run_silu_mul(torch.cat([x, x.neg()], 1)), x], 1))
        return x

    assert num_programmatic(compared_graph(chain, 64, 2048)) == 0


def test_chain_of_waiting_kernels_has_the_results_of_separate_launches(
    measured: Callable[[float], None],
) -> None:
    """Each kernel overwrites what the one before the previous kernel read."""
    measured(0.5)

    def chain(x: Tensor) -> Tensor:
        width = x.shape[1]
        while width > 64:
            x = run_silu_mul(x)
            width //= 2
        return x

    graph = compared_graph(chain, 512, 16384)
    assert num_programmatic(graph) == 7 * has_programmatic_edges()
