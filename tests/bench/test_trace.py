"""A trace names every layer, counts time once, and removes its hooks afterwards."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench.trace import CAPTURED, PREFIX, layer_times, trace_steps
from lockstep.errors import ConfigError
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.worker.executor import worker_of
from tests.tiny_model import make_model

PROMPTS = [{"prompt_token_ids": list(range(3, 40))}, {"prompt_token_ids": list(range(50, 150))}]
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_model(tmp_path_factory.mktemp("model"))
    spec = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    return LLM(str(folder), load_format="dummy", speculative_config=spec, max_num_seqs=2)


def make_event(name: str, ts: float, dur: float, cat: str, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": 1} | {
        "args": args
    }


def annotation(name: str, ts: float, dur: float) -> dict[str, Any]:
    return make_event(PREFIX + name, ts, dur, "user_annotation")


def test_time_by_hand() -> None:
    """Two blocks in one step; kernels run later, and belong to the range that launched them."""
    events = [
        annotation("step", 0, 100),
        annotation("blocks.0", 10, 40),
        annotation("blocks.0.mlp", 20, 20),
        annotation("blocks.0.mlp", 22, 10),
        annotation("blocks.1", 50, 30),
        make_event("launch", 25, 1, "cuda_runtime", correlation=7),
        make_event("launch", 55, 1, "cuda_driver", correlation=8),
        make_event("launch", 90, 1, "cuda_runtime", correlation=9),
        make_event("gemm", 300, 11, "kernel", correlation=7),
        make_event("norm", 305, 11, "kernel", correlation=8),  # waits for gemm until 311
        make_event("copy", 316, 2, "gpu_memcpy", correlation=9),
        make_event("stray", 400, 9, "kernel", correlation=99),
        {"ph": "M", "name": "process_name"},
    ]
    lines = {line.name: line for line in layer_times(events, steps=1)}
    assert set(lines) == {"step", "blocks.*", "blocks.*.mlp"}
    assert lines["step"].host_us == 30 and lines["step"].device_us == 2
    assert lines["blocks.*"].host_us == 50 and lines["blocks.*"].calls == 2
    assert lines["blocks.*"].device_us == 5 and lines["blocks.*"].kernels == 1
    assert lines["blocks.*.mlp"].calls == 1
    assert lines["blocks.*.mlp"].host_us == 20 and lines["blocks.*.mlp"].device_us == 11
    assert layer_times(events, steps=2)[0].device_us == 5.5


def test_every_layer_is_named_and_time_counts_once(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    lines = {line.name: line for line in trace_steps(llm, PROMPTS, 0.0, path, steps=2)}
    expected = {
        "step": 1, "table.prepare": 1, "sampler.sample_target": 1, "table.accept_and_commit": 1,
        "head": 1, "drafter.propose": 1, "blocks.*": 4, "blocks.*.mlp.down": 4,
        "draft.fc": 2, "embed": 3,
        "blocks.*.linear_attn:GatedDeltaNet.step_op": 3, "blocks.*.self_attn:Attention.attend": 1,
    }  # fmt: skip
    assert {name: lines[name].calls for name in expected} == expected
    assert CAPTURED not in lines
    events = json.loads(path.read_text())["traceEvents"]
    steps = [e["dur"] for e in events if e.get("name") == PREFIX + "step"]
    assert len(steps) == 2
    assert sum(line.host_us for line in lines.values()) == pytest.approx(sum(steps) / 2, rel=1e-6)
    assert all(line.host_us > 0 for line in lines.values())


def test_hooks_are_removed(llm: LLM, tmp_path: Path) -> None:
    expected = [o.outputs[0].token_ids for o in llm.generate(list(PROMPTS), PARAMS)]
    worker = worker_of(llm.engine)
    attributes = [set(vars(m)) for m in (worker.program.table, worker.program.sampler, worker)]
    trace_steps(llm, PROMPTS, 0.0, tmp_path / "trace.json", steps=1)
    assert not llm.engine.has_work()
    assert [set(vars(m)) for m in (worker.program.table, worker.program.sampler, worker)] == (
        attributes
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in worker.model.modules())
    assert [o.outputs[0].token_ids for o in llm.generate(list(PROMPTS), PARAMS)] == expected


def test_unwritable_path_is_refused(llm: LLM, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "trace.json"):
        with pytest.raises(ConfigError, match="a file that can be written"):
            trace_steps(llm, PROMPTS, 0.0, path)
