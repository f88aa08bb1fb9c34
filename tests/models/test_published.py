"""Published checkpoints: their settings are read, every tensor is used, and small dummies of them
answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep import LLM, SamplingParams
from lockstep.config import EngineConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.kernels.backends import load as load_backends
from lockstep.layers.build_context import BuildContext
from lockstep.models import ARCHITECTURES
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import TIED_HEAD, Source, build_model, target_source
from lockstep.quantization import TensorInfo, read_weight_format
from lockstep.spec import own_drafter
from lockstep.worker.build import build_draft
from lockstep.worker.explain import explain_architecture
from tests.models.published_checkpoints import (
    CHECKPOINTS,
    LOADS,
    Published,
    names_known,
    names_of,
    read_checkpoint_settings,
)

SERVED = [name for name, one in CHECKPOINTS.items() if one.result == LOADS and not one.drafter]
LISTED = [name for name in SERVED if CHECKPOINTS[name].written_shapes]
MAX_TENSORS = 3000
"""Tensors of a checkpoint above which only its first layers are checked."""
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_published_settings_are_read_or_refused_by_name(name: str) -> None:
    published = CHECKPOINTS[name]
    if published.result == LOADS:
        read_checkpoint_settings(published)
        return
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint_settings(published)
    message = str(caught.value)
    assert published.result in message and "allowed: " in message
    if "model_type" in published.result:
        assert all(known in message for known in ARCHITECTURES)


def test_brace_names_are_expanded() -> None:
    assert names_of("a.{0-2,7}.{q,k}") == [
        "a.0.q",
        "a.0.k",
        *(f"a.{i}.{x}" for i in (1, 2, 7) for x in "qk"),
    ]
    assert names_of("{a.{0-1},b}.c") == ["a.0.c", "b.c", "a.1.c", "b.c"]


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "Qwen/Qwen3.6-27B"])
def test_first_layers_include_every_kind_of_tensor(name: str) -> None:
    """A kind of tensor that only later layers have would not be checked."""
    published = CHECKPOINTS[name]
    first = published.first_layers()
    assert len(first.shapes) < len(published.shapes)

    def kinds(one: Published) -> set[str]:
        return {"".join(c for c in tensor if not c.isdigit()) for tensor in one.shapes}

    assert kinds(first) == kinds(published)


class ListedTensors(Checkpoint):
    """Checkpoint whose tensors are known without their files."""

    def tensors(self) -> dict[str, dict[str, TensorInfo]]:
        """Map each module to its tensors."""
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, (dtype, shape) in self.listed.items():
            module, _, suffix = self.key(name).rpartition(".")
            modules.setdefault(module, {})[suffix] = TensorInfo(name, shape, dtype)
        return modules

    def names(self) -> Any:
        """Yield the names of all tensors."""
        yield from self.listed

    @property
    def listed(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor; one element if its shape is not known."""
        described = json.loads((self.folder / "tensors.json").read_text())
        parts = {name: (shape or "BF16 [1]").split(" ", 1) for name, shape in described.items()}
        return {name: (dtype, tuple(json.loads(shape))) for name, (dtype, shape) in parts.items()}


def source_of(checkpoint: Checkpoint) -> Source:
    """Return the mapping of a checkpoint's tensors to a model that is built without memory."""
    load_backends()
    method = own_drafter(checkpoint)
    drafting = {"method": method, "num_speculative_tokens": 3} if method else None
    config = EngineConfig.read(model=str(checkpoint.folder), speculative_config=drafting)
    weight_format = read_weight_format(checkpoint.quantization())
    with FakeTensorMode(allow_non_fake_inputs=True):
        build = BuildContext(
            device="cpu",
            dtype=torch.bfloat16,
            window=4,
            max_positions=4096,
            tensors=checkpoint.tensors(),
            prefixes=checkpoint.prefixes,
            weight_format=weight_format,
        )
        build.memory_budget.bounded = False
        model = build_model(checkpoint.raw, build)
        draft = build_draft(config, checkpoint, model, build)
        return target_source(checkpoint, model, draft, weight_format)


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_every_tensor_and_parameter_is_matched(name: str, tmp_path: Path) -> None:
    published = CHECKPOINTS[name]
    if len(published.shapes) > MAX_TENSORS:
        published = published.first_layers()
    (published.write(tmp_path) / "tensors.json").write_text(json.dumps(published.shapes))
    (tmp_path / "model.safetensors").touch()  # with files there, tensors decide what drafts
    checkpoint = ListedTensors(tmp_path, Checkpoint.read(tmp_path).raw)
    source = source_of(checkpoint)
    filled, spare, unfit = set(), [], []
    for tensor, (dtype, shape) in checkpoint.listed.items():
        key = checkpoint.key(tensor)
        if key in source.wanted:
            filled.add(key)
            fault = source.wanted[key].mismatch(
                torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            )
            unfit += [(tensor, fault)] if fault and names_known(published) else []
        elif not (key == TIED_HEAD and source.embedding is not None) and not source.ignored(tensor):
            spare.append(tensor)
    assert not spare and not unfit
    assert filled == set(source.wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_memory_plan_of_published_size(name: str, tmp_path: Path) -> None:
    """The model is built at its size, and its largest steps run, with fake tensors."""
    pytest.importorskip("triton")
    folder = CHECKPOINTS[name].write(tmp_path)
    method = own_drafter(Checkpoint.read(folder))
    drafting = {"method": method, "num_speculative_tokens": 3} if method else None
    config = EngineConfig.read(model=str(folder), speculative_config=drafting)
    if CHECKPOINTS[name].refused_on_gpu is not None:
        with pytest.raises(ConfigError, match=CHECKPOINTS[name].refused_on_gpu):
            explain_architecture(config, "sm_90", None)
        return
    plan = explain_architecture(config, "sm_90", None)["plan"]
    assert plan["weights_bytes"] > 2**29 and plan["needed_bytes"] > plan["weights_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_small_dummy_answers(name: str, tmp_path: Path) -> None:
    """Run one layer of every kind, with the published heads and weight format."""
    llm = LLM(
        str(CHECKPOINTS[name].small().write(tmp_path)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=2,
        num_gpu_blocks=16,
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": list(range(3, 73))}, params)
    assert len(output.outputs[0].token_ids) == 4
