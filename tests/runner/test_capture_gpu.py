"""On a GPU: graph none = piecewise = full, bit for bit, with and without drafts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.errors import CaptureError
from lockstep.runner.capture import Captured
from lockstep.runner.table import RowTable
from lockstep.samples import long_prompt, short_prompts
from lockstep.step import StepShape

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BUCKETS = (1, 2, 4, 8)
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
}
GREEDY = SamplingParams(
    temperature=0, max_tokens=48, ignore_eos=True, logprobs=2, seed=1, detokenize=False
)
SAMPLED = replace(GREEDY, temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=5)
PENALISED = replace(
    GREEDY,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    min_tokens=20,
    ignore_eos=False,
)
KINDS = (GREEDY, SAMPLED, PENALISED)

Answer = list[Any]


def build(dtype: str, drafter: str, graph: str, **settings: Any) -> LLM:
    """The bundled model with few pages, and every bucket that the batches below fall into."""
    return LLM(
        device=DEVICE,
        dtype=dtype,
        cuda_graph_mode=graph,
        speculative_config=DRAFTERS[drafter],
        row_buckets=BUCKETS,
        **{"max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks": 160, **settings},
    )


def ask(llm: LLM) -> list[Answer]:
    """Token ids and log-probability bits: alone, in a padded batch, and with a long prompt."""
    prompts = short_prompts(llm)
    batches = [prompts[:1], prompts[1:4], [*prompts, long_prompt(llm, 500)]]
    told = []
    for batch in batches:
        params = [KINDS[i % len(KINDS)] for i in range(len(batch))]
        outs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        told += [answer(out.outputs[0]) for out in outs]
    return told


def answer(output: Any) -> Answer:
    """Each token with the bits of its log-probabilities."""
    entries = zip(output.token_ids, output.logprobs, strict=True)
    return [(token, [(i, x.logprob.hex()) for i, x in entry.items()]) for token, entry in entries]


def recorded(llm: LLM) -> int:
    """How many graphs the engine holds."""
    runner = llm.engine.runner
    faces: list[Any] = [runner.run_step]
    for module in runner.model.modules():
        faces += [vars(module).get("before"), vars(module).get("after")]
    return sum(len(face.recordings) for face in faces if isinstance(face, Captured))


@pytest.fixture(scope="module")
def known() -> dict[str, list[Answer]]:
    """Per dtype: what the model says eagerly and without drafts."""
    return {}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("graph", ["none", "piecewise", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_change_no_bit(
    known: dict[str, list[Answer]], dtype: str, graph: str, drafter: str
) -> None:
    if dtype not in known:
        known[dtype] = ask(build(dtype, "none", "none"))
    llm = build(dtype, drafter, graph)
    layers = llm.engine.runner.model.config.layer_types  # type: ignore[union-attr]
    graphs = {"none": 0, "piecewise": 2 * len(layers) * len(BUCKETS), "full": len(BUCKETS)}
    assert recorded(llm) == graphs[graph]
    assert ask(llm) == known[dtype]
    assert recorded(llm) == graphs[graph], "every graph is recorded in the warm-up"
    stats = llm.engine.refresh_stats()
    assert bool(stats.accepted_tokens_total) == (drafter != "none")


@pytest.mark.parametrize(
    "settings",
    [
        {"preempt_every": 5},
        {"steps_in_flight": 1},
        {"max_num_batched_tokens": 64},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_full_graphs_under_other_settings_change_no_bit(
    known: dict[str, list[Answer]], drafter: str, settings: dict[str, Any]
) -> None:
    if "bfloat16" not in known:
        known["bfloat16"] = ask(build("bfloat16", "none", "none"))
    llm = build("bfloat16", drafter, "full", **settings)
    assert ask(llm) == known["bfloat16"]
    if "preempt_every" in settings:
        assert llm.engine.refresh_stats().preemptions_total > 5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_replayed_step_of_null_rows_changes_no_row(drafter: str) -> None:
    llm = build("bfloat16", drafter, "full")
    runner = llm.engine.runner
    before = [tensor[1:].clone() for tensor in runner.table.row_tensors()]
    with torch.inference_mode():
        runner.table.inputs.fill()
        for bucket in BUCKETS:
            runner.run_step(StepShape.uniform(bucket, llm.engine.plan.query_len))
    torch.cuda.synchronize()
    for tensor, was in zip(runner.table.row_tensors(), before, strict=True):
        assert torch.equal(tensor[1:], was)
    assert not runner.table.computed.any() and not runner.table.pending.any()


def test_a_host_sync_inside_the_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = RowTable.advance

    def peek(self: RowTable, step: Any, tokens: Any) -> Any:
        verdict = advance(self, step, tokens)
        if not step.shape.prompt:
            self.computed.sum().item()
        return verdict

    monkeypatch.setattr(RowTable, "advance", peek)
    with pytest.raises(CaptureError, match="(?s)run_step.*cuda_graph_mode='none'"):
        build("bfloat16", "none", "full")
