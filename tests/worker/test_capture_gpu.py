"""On a GPU, cuda_graph_mode none, piecewise and full give equal bits, with and without drafts."""

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import count, product
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.engine_builder import build_engine
from lockstep.errors import CaptureError
from lockstep.example_prompts import long_prompt, short_prompts
from lockstep.kernels.activations import silu_mul
from lockstep.kernels.architecture import is_architecture_assumed
from lockstep.kernels.backends import load
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.step import StepShape
from lockstep.worker.capture import CapturedFunction
from lockstep.worker.capture_checks import Fault, OwnMemory
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.row_table import RowTable
from tests.worker.recorded_graphs import num_decode_graphs

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BUCKETS = (1, 2, 4, 8)
DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "mtp": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
    "suffix": {"method": "suffix", "num_speculative_tokens": 15, "adaptive": False},
    "changing": {"method": "mtp", "num_speculative_tokens": 3, "adaptive": True},
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


def build(dtype: str, drafter: str, graph: str, preempt_every: int = 0, **settings: Any) -> LLM:
    """Return the bundled model with few pages, and every bucket that the batches below use."""
    policy = RandomDraftLength if drafter == "changing" else None
    config = EngineConfig.read(
        device=DEVICE,
        dtype=dtype,
        cuda_graph_mode=graph,
        speculative_config=DRAFTERS[drafter],
        row_buckets=BUCKETS,
        prompt_buckets=(),  # joint steps of padded prompts are captured when they are needed
        **{"max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks": 160, **settings},
    )
    hooks = CheckHooks(draft_policy=policy, preempt_every=preempt_every)
    return LLM.from_engine(build_engine(config, hooks=hooks))


def generate_batches(llm: LLM) -> list[Answer]:
    """Return token ids and log-probability bits of single requests, a padded batch, and a long
    prompt."""
    prompts = short_prompts(llm)
    batches = [prompts[:1], prompts[1:4], [*prompts, long_prompt(llm, 500)]]
    received = []
    for batch in batches:
        params = [KINDS[i % len(KINDS)] for i in range(len(batch))]
        outs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        received += [answer(out.outputs[0]) for out in outs]
    return received


def answer(output: Any) -> Answer:
    """Return each token with the bits of its log-probabilities."""
    entries = zip(output.token_ids, output.logprobs, strict=True)
    return [(token, [(i, x.logprob.hex()) for i, x in entry.items()]) for token, entry in entries]


def num_graphs(llm: LLM) -> int:
    """Return the number of recorded graphs of decode steps, whole or in pieces."""
    runner = worker_of(llm.engine)
    faces: list[Any] = [*runner.run_step]
    for module in runner.model.modules():
        faces.append(vars(module).get("tokenwise"))
    return sum(num_decode_graphs(face) for face in faces if isinstance(face, CapturedFunction))


@pytest.fixture(scope="module")
def expected_answers() -> dict[str, list[Answer]]:
    """Return a cache, by dtype, of the eager answers without drafts."""
    return {}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("graph", ["none", "piecewise", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_graphs_change_no_bit(
    expected_answers: dict[str, list[Answer]], dtype: str, graph: str, drafter: str
) -> None:
    if dtype not in expected_answers:
        expected_answers[dtype] = generate_batches(build(dtype, "none", "none"))
    llm = build(dtype, drafter, graph)
    layers = worker_of(llm.engine).model.config.layer_types  # type: ignore[union-attr]
    shapes = list(product(BUCKETS, llm.engine.plan.draft_lengths))
    chunks = 2 * len(layers) * len({rows * (k + 1) for rows, k in shapes})
    graphs = {"none": 0, "piecewise": chunks, "full": 2 * len(shapes)}
    assert num_graphs(llm) == graphs[graph]
    assert generate_batches(llm) == expected_answers[dtype]
    assert num_graphs(llm) == graphs[graph], "every graph is recorded in the warm-up"
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
def test_full_graphs_with_other_settings_change_no_bit(
    expected_answers: dict[str, list[Answer]], drafter: str, settings: dict[str, Any]
) -> None:
    if "bfloat16" not in expected_answers:
        expected_answers["bfloat16"] = generate_batches(build("bfloat16", "none", "none"))
    llm = build("bfloat16", drafter, "full", **settings)
    assert generate_batches(llm) == expected_answers["bfloat16"]
    if "preempt_every" in settings:
        assert llm.engine.refresh_stats().preemptions_total > 5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_replay_of_null_rows_changes_no_row(drafter: str) -> None:
    llm = build("bfloat16", drafter, "full")
    runner = worker_of(llm.engine)
    before = [tensor[1:].clone() for tensor in runner.table.row_tensors()]
    with torch.inference_mode():
        runner.table.inputs.fill()
        for bucket in BUCKETS:
            runner.run_step(StepShape.uniform(bucket, llm.engine.plan.query_len))
    torch.cuda.synchronize()
    for tensor, was in zip(runner.table.row_tensors(), before, strict=True):
        assert torch.equal(tensor[1:], was)
    assert not runner.table.computed.any() and not runner.table.folded.any()


def test_dropped_graphs_are_not_destroyed_during_capture() -> None:
    llm = build("bfloat16", "none", "full")
    cycle: list[Any] = [llm]
    cycle.append(cycle)
    del llm, cycle
    usual = gc.get_threshold()
    gc.set_threshold(1)
    try:
        llm = build("bfloat16", "mtp", "full")
    finally:
        gc.set_threshold(*usual)
    assert gc.isenabled() and num_graphs(llm) == 2 * len(BUCKETS)


def wait(x: Tensor) -> None:
    x.sum().item()


def wait_to_copy(x: Tensor) -> None:
    x.cpu()


def leave_the_stream(x: Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.empty(1000, device=DEVICE)


def allocate_on_the_host(x: Tensor) -> None:
    x.add_(torch.zeros(1000).pin_memory()[:1].to(DEVICE, non_blocking=True))


FAULTS = {
    wait: "waits for the device",
    wait_to_copy: "waits for the device",
    leave_the_stream: "runs on a stream outside of the recorded one",
    allocate_on_the_host: "takes 4,000 bytes on cpu outside of the graph's pool",
}


def patch_silu_mul(monkeypatch: pytest.MonkeyPatch, side_effect: Callable[[Tensor], None]) -> None:
    """Add a side effect to silu_mul's backend."""
    load()
    plain = silu_mul.backends["triton"]

    def faulty(gate_up: Tensor) -> Tensor:
        if not is_architecture_assumed():  # a dry run refuses some of these before any capture
            side_effect(gate_up)
        return plain.run(gate_up)

    monkeypatch.setitem(silu_mul.backends, "triton", plain._replace(run=faulty))


def assert_alive() -> None:
    """Assert that a failed capture left the default stream, a working generator, and an engine that
    can be built."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(3, device=DEVICE).isfinite().all()
    llm = build("bfloat16", "none", "full")
    assert num_graphs(llm) == 2 * len(BUCKETS)
    retained = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    before = torch.cuda.memory_reserved()
    del retained
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before - (1 << 28)


@pytest.mark.parametrize(
    ("fault", "graph"),
    [*product(FAULTS, ["full"]), (wait, "piecewise")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_capture_fault_names_op(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], None], graph: str
) -> None:
    with monkeypatch.context() as patch:
        patch_silu_mul(patch, fault)
        with pytest.raises(CaptureError) as caught:
            build("bfloat16", "none", graph)
    text = str(caught.value)
    chunk, layer = (
        ("blocks.0.tokenwise", "mlp") if graph == "piecewise" else ("forward", "blocks.0.")
    )
    assert f"capture of {chunk} at " in text
    assert re.search(rf"op silu_mul of {layer}.*test_capture_gpu.py:\d+ in {fault.__name__}", text)
    assert re.search(FAULTS[fault], text)
    assert "cuda_graph_mode='none'" in text
    assert_alive()


def test_compilation_during_capture_names_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has another constant at every call, so the eager call does not compile it in
    advance."""
    from tests.worker.constant_kernel import fill

    calls = count()
    with monkeypatch.context() as patch:
        patch_silu_mul(patch, lambda x: fill[(1,)](torch.empty_like(x), next(calls)))
        with pytest.raises(
            CaptureError, match="op silu_mul of blocks.0.*compiles the kernel .*fill"
        ):
            build("bfloat16", "none", "full")
    assert_alive()


def test_allocation_outside_pool_is_a_fault() -> None:
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.current_stream()
    takes = "takes 4,000 bytes on cuda:0 outside of the graph's pool"
    with OwnMemory(pool, stream), pytest.raises(Fault, match=takes):
        torch.empty(1000, device=DEVICE)


def test_capture_fault_outside_ops_names_function(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = RowTable.accept_and_commit

    def peek(self: RowTable, step: Any, tokens: Any) -> Any:
        verdict = commit(self, step, tokens)
        if not step.shape.prompt and not is_architecture_assumed():
            self.computed.sum().item()
        return verdict

    monkeypatch.setattr(RowTable, "accept_and_commit", peek)
    with pytest.raises(CaptureError, match="(?s)decide.*peek.*computed.sum.*waits for the device"):
        build("bfloat16", "none", "full")


def test_capture_recovers_after_cuda_error() -> None:
    """torch.cuda.synchronize() is not a torch op: CUDA refuses it and ends the capture."""
    x = torch.ones(3, device=DEVICE)

    def faulty(times: int) -> Tensor:
        torch.cuda.synchronize()
        return x * times

    def face(fn: Callable[[int], Tensor]) -> CapturedFunction:
        return CapturedFunction(fn, torch.cuda.graph_pool_handle(), lambda key: True, fn.__name__)

    for _ in range(2):
        with pytest.raises(CaptureError, match="capture of faulty.*torch.cuda.synchronize"):
            face(faulty)(2)
        assert torch.randn(3, device=DEVICE).isfinite().all()
        assert face(x.mul)(3).tolist() == [3, 3, 3]
    assert_alive()
