"""On a GPU, joint steps give the bits of separate steps."""

from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.worker import joint_steps
from lockstep.worker.executor import worker_of
from tests.bundled_model import GREEDY, SEEDED, answer

pytestmark = pytest.mark.gpu

MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
LENGTHS = (20, 300, 90, 170, 64, 500, 33, 129)


def build(graph: str, drafter: dict[str, Any] | None, **settings: Any) -> LLM:
    """Return the bundled model on the GPU."""
    return LLM(
        device="cuda",
        dtype="bfloat16",
        cuda_graph_mode=graph,
        speculative_config=drafter,
        max_model_len=1024,
        max_num_seqs=4,
        enable_prefix_caching=False,
        **settings,
    )


def generate(llm: LLM) -> list[Any]:
    """Return the answers to prompts that arrive while others decode."""
    prompts = [
        {"prompt_token_ids": [(11 * index + 3 * at) % 2000 for at in range(length)]}
        for index, length in enumerate(LENGTHS * 2)
    ]
    kinds = (GREEDY, SEEDED)
    params: list[SamplingParams] = [
        replace(kinds[index % 2], max_tokens=5 + 3 * index, logprobs=2)
        for index in range(len(prompts))
    ]
    return [answer(output) for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("drafter", [None, MTP], ids=["none", "mtp"])
def test_joint_graphs_change_no_bit(
    drafter: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint_steps, "USES_BEFORE_CAPTURE", 0)
    expected = generate(build("none", None))
    llm = build("full", drafter)
    steps = worker_of(llm.engine).joint_steps
    assert generate(llm) == expected
    graphs = set(steps.graphs)
    assert graphs and steps.may_capture
    # The same load needs no further graph.
    assert generate(llm) == expected
    assert steps.graphs == graphs
