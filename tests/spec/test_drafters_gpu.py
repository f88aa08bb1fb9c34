"""On a GPU, every drafter in every graph mode, with up to 15 drafts, leaves answers unchanged."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.step import StepShape
from lockstep.worker.capture import CapturedFunction
from lockstep.worker.executor import worker_of
from tests.regressions.conftest import PROMPTS, answers, engine_over
from tests.spec.blocks import make_block_model
from tests.spec.heads import make_head
from tests.tiny_model import CONFIG, LLAMA, THREE_LAYERS, make_model
from tests.worker.recorded_graphs import num_decode_graphs

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 4}
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {**LLAMA, **WIDE},
    "hybrid": {**CONFIG, **THREE_LAYERS, **WIDE, "num_key_value_heads": 2},
}
METHODS = {
    "eagle3": "eagle3",
    "draft_model": "draft_model",
    "recurrent": "draft_model",
    "dflash": "dflash",
    "suffix": "suffix",
    "ngram": "ngram",
}
"""Drafter -> its method."""
RECURRENT: dict[str, Any] = {**CONFIG, **THREE_LAYERS, **WIDE, "mtp_num_hidden_layers": 0}
BUCKETS = (1, 2, 4, 8)
GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_gpu_blocks": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path | None]]:
    """Return each target's folder, and those of its drafters."""
    result = {}
    for kind, base in TARGETS.items():
        root = tmp_path_factory.mktemp(kind)
        target = make_model(root / "target", base)
        vocab = json.loads((target / "config.json").read_text())["vocab_size"]
        aux_layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        make_head(
            root / "head", vocab, 64, eagle_config=aux_layers, num_hidden_layers=2, head_dim=32
        )
        make_block_model(root / "blocks", vocab, 64, [0, 1], head_dim=32)
        draft = make_model(root / "draft", LLAMA, num_hidden_layers=1, **WIDE)
        result[kind] = {
            "target": target,
            "eagle3": root / "head",
            "draft_model": draft,
            "recurrent": make_model(root / "recurrent", RECURRENT),
            "dflash": root / "blocks",
            "suffix": None,
            "ngram": None,
        }
    return result


@pytest.fixture(scope="module")
def expected(folders: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the eager answers without drafts."""
    return {
        kind: answers(engine_over(result["target"], cuda_graph_mode="none", **GPU))
        for kind, result in folders.items()
    }


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("graph", "k"), [("full", 3), ("full", 15), ("piecewise", 15), ("none", 7)]
)
def test_drafters_change_no_answer_on_gpu(
    folders: dict[str, Any], expected: dict[str, Any], kind: str, method: str, graph: str, k: int
) -> None:
    """The second run uses the prefix cache and the buffer of past answers."""
    mine = folders[kind]
    llm = engine_over(
        mine["target"],
        METHODS[method],
        k,
        drafts_with=mine[method],
        cuda_graph_mode=graph,
        row_buckets=BUCKETS,
        max_num_batched_tokens=64,
        **GPU,
    )
    assert answers(llm) == expected[kind]
    assert answers(llm) == expected[kind]
    stats = llm.engine.refresh_stats()
    assert stats.draft_tokens_total
    if method == "suffix":
        assert stats.accepted_tokens_total > 4 * len(PROMPTS)


@pytest.mark.parametrize("method", METHODS)
def test_varying_draft_counts_change_no_answer_on_gpu(
    folders: dict[str, Any], expected: dict[str, Any], method: str
) -> None:
    """Graphs of 0, 1, 3, 7 and 15 drafts for each bucket; rows move to the host."""
    mine = folders["hybrid"]
    llm = engine_over(
        mine["target"],
        METHODS[method],
        15,
        changing=True,
        drafts_with=mine[method],
        row_buckets=BUCKETS,
        preempt_every=5,
        **GPU,
    )
    for half in worker_of(llm.engine).run_step:
        assert isinstance(half, CapturedFunction)
        assert num_decode_graphs(half) == len(list(product(BUCKETS, (0, 1, 3, 7, 15))))
    assert answers(llm) == expected["hybrid"]


@pytest.mark.parametrize("method", METHODS)
def test_replay_of_null_rows_changes_no_row(folders: dict[str, Any], method: str) -> None:
    mine = folders["dense"]
    where = {"drafts_with": mine[method], "row_buckets": BUCKETS}
    llm = engine_over(mine["target"], METHODS[method], 15, **where, **GPU)
    runner = worker_of(llm.engine)
    before = [tensor[1:].clone() for tensor in runner.table.row_tensors()]
    with torch.inference_mode():
        runner.table.inputs.fill()
        for bucket in BUCKETS:
            runner.run_step(StepShape.uniform(bucket, 16))
    torch.cuda.synchronize()
    for tensor, was in zip(runner.table.row_tensors(), before, strict=True):
        assert torch.equal(tensor[1:], was)
    assert not runner.table.computed.any()
