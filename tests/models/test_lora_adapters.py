"""Folders of LoRA adapters: read strictly, placed in the model, and added as PEFT adds them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.check.random_adapters import write_random_adapter
from lockstep.errors import CheckpointError
from lockstep.kernels.exchange import ALONE, RankGroup
from lockstep.layers.adapters import NO_ADAPTERS
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import GatheredLinear, Linear
from lockstep.layers.lora import LoRA
from lockstep.layers.sharding import Columns
from lockstep.models.lora_adapters import LoRAAdapter, adapter_table, place_adapters
from lockstep.step import StepContext
from tests.thread_ranks import run_ranks

RANK = 3
WIDTHS = {"q_proj": Columns.of(12), "k_proj": Columns.of(8)}
Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]


def build(**options: Any) -> BuildContext:
    context = BuildContext("cpu", torch.float32, 1, 1, **options)
    context.prefixes = ("model.",)
    return context


def model(context: BuildContext) -> torch.nn.ModuleList:
    """Return two fused projections, the second in another row order, and an output projection."""
    order = {"q_proj": lambda: torch.arange(12).flip(0)} if context.group.size == 1 else None
    layers = [
        Linear(context.for_layer("layers.0").for_submodule("self_attn"), 16, WIDTHS),
        Linear(context.for_layer("layers.1").for_submodule("self_attn"), 16, WIDTHS, orders=order),
        GatheredLinear(
            context.for_layer("layers.1").for_submodule("self_attn"), 16, {"o_proj": Columns.of(24)}
        ),
    ]
    for layer in layers:
        for gemm in layer.gemms:
            gemm.weight.data.copy_(torch.arange(gemm.weight.numel()).view_as(gemm.weight) % 7 - 3.0)
    return torch.nn.ModuleList(layers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_adapter(model(build()), tmp_path / "adapter", seed=3, rank=RANK)


def edit(folder: Path, change: Edit) -> None:
    """Change the settings and tensors of an adapter."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(settings, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")


def loaded(adapter: LoRAAdapter, **options: Any) -> torch.nn.ModuleList:
    """Return the model with one adapter."""
    adapted = model(build(adapters=adapter_table([adapter]), **options))
    (placed,) = place_adapters(adapted, [adapter])
    placed.load()
    return adapted


def step(ids: list[int]) -> StepContext:
    """Return the part of a step that linear layers read."""
    context = object.__new__(StepContext)
    context.adapter_ids = torch.tensor(ids, dtype=torch.int32)
    return context


def test_layers_add_what_peft_adds(folder: Path) -> None:
    """lora_B(lora_A(x)) * scaling, to the tokens of the adapter alone."""
    adapter = LoRAAdapter.read("a", folder)
    assert adapter.rank == RANK and adapter.scale == 2.0 and len(adapter.modules) == 5
    tensors = load_file(folder / "adapter_model.safetensors")
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    ids = [1, 0, 1, 1]
    for base, adapted in zip(model(build()), loaded(adapter), strict=True):
        expected = base(x, None)
        parts = []
        for read in base.sources:
            a, b = (tensors[f"base_model.model.{read.path}.lora_{n}.weight"] for n in "AB")
            delta = F.linear(F.linear(x, a), b) * adapter.scale
            parts.append(delta.flip(1) if base.orders and len(b) == 12 else delta)
        expected = torch.where(
            torch.tensor(ids)[:, None] > 0, expected + torch.cat(parts, 1), expected
        )
        actual = adapted(x, step(ids))
        torch.testing.assert_close(actual, expected)
        assert torch.equal(actual[1], base(x, None)[1])
        split = adapted.parts(x, step(ids))
        assert torch.equal(torch.cat(split, 1), actual)


def test_layers_of_ranks_have_the_columns_of_one(folder: Path) -> None:
    """The weights are zeros, so that only the adapter counts."""
    adapter = LoRAAdapter.read("a", folder)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))

    def outputs(group: RankGroup) -> tuple[Tensor, ...]:
        layers = loaded(adapter, group=group)
        for gemm in (gemm for layer in layers for gemm in layer.gemms):
            gemm.weight.data.zero_()
        ids = step([1, 1, 0])
        return (*layers[0].parts(x, ids), layers[2](x, ids))

    full = outputs(ALONE)
    first, second = run_ranks(2, outputs)
    for part in (0, 1):
        assert torch.equal(torch.cat([first[part], second[part]], 1), full[part])
    assert torch.equal(first[2], full[2]) and torch.equal(second[2], full[2])


def test_only_changed_layers_have_adapters(folder: Path) -> None:
    def drop(settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "o_proj" in name or "layers.0" in name]:
            del tensors[name]
        settings["target_modules"] = ["q_proj", "k_proj"]

    edit(folder, drop)
    layers = loaded(LoRAAdapter.read("a", folder))
    assert [isinstance(layer.add_adapters, LoRA) for layer in layers] == [False, True, False]
    assert not any(isinstance(module, LoRA) for module in model(build()).modules())
    assert build().adapters is NO_ADAPTERS


def test_scale_and_digest(folder: Path) -> None:
    plain = LoRAAdapter.read("a", folder)
    assert plain.digest == LoRAAdapter.read("b", folder).digest
    edit(folder, lambda settings, _: settings.update(use_rslora=True))
    rooted = LoRAAdapter.read("a", folder)
    assert rooted.scale == pytest.approx(2.0 * RANK**0.5)
    assert rooted.digest != plain.digest
    edit(folder, lambda _, tensors: next(iter(tensors.values())).add_(1))
    assert LoRAAdapter.read("a", folder).digest != rooted.digest


SETTINGS = {
    "peft_type": "LOHA",
    "task_type": "SEQ_CLS",
    "bias": "all",
    "use_dora": True,
    "use_qalora": True,
    "lora_bias": True,
    "fan_in_fan_out": True,
    "init_lora_weights": "pissa",
    "r": 513,
    "lora_alpha": 0,
    "target_modules": [],
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "layer_replication": [[0, 2]],
    "trainable_token_indices": [1],
    "target_parameters": ["experts.up"],
    "alora_invocation_tokens": [5],
    "a_new_method": True,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_that_would_change_answers_is_refused(folder: Path, name: str) -> None:
    edit(folder, lambda settings, _: settings.update({name: SETTINGS[name]}))
    with pytest.raises(CheckpointError, match=rf"adapter_config.json {name}=.*allowed: "):
        LoRAAdapter.read("a", folder)


def test_settings_without_effect_are_accepted(folder: Path) -> None:
    more = {
        "base_model_name_or_path": "x/y", "lora_dropout": 0.1, "inference_mode": True,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "peft_version": "0.21.2",
        "init_lora_weights": "gaussian", "target_modules": ".*_proj", "loftq_config": {},
        "layers_to_transform": [0, 1], "megatron_core": "megatron.core", "use_dora": False,
    }  # fmt: skip
    edit(folder, lambda settings, _: settings.update(more))
    assert LoRAAdapter.read("a", folder).rank == RANK


FIRST = "base_model.model.layers.0.self_attn.q_proj"
TENSORS: dict[str, tuple[Edit, str]] = {
    "an embedding": (
        lambda _, t: t.update({"base_model.model.embed_tokens.lora_embedding_A": torch.ones(1)}),
        "tensors that are not applied .1.: base_model.model.embed_tokens.lora_embedding_A",
    ),
    "a half": (lambda _, t: t.pop(f"{FIRST}.lora_B.weight"), r"not applied .1.: .*q_proj.lora_A"),
    "nothing": (lambda _, t: t.clear(), "not applied .0.: none"),
    "another target": (
        lambda settings, _: settings.update(target_modules=["k_proj", "o_proj"]),
        "that target_modules of adapter_config.json does not name: .*q_proj",
    ),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_that_are_not_applied_are_refused(folder: Path, what: str) -> None:
    change, message = TENSORS[what]
    edit(folder, change)
    with pytest.raises(CheckpointError, match=message):
        LoRAAdapter.read("a", folder)


def test_adapter_of_another_model_is_refused(folder: Path) -> None:
    def rename(settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("layers.1", "layers.7")] = tensors.pop(name)

    edit(folder, rename)
    with pytest.raises(CheckpointError, match=r"modules .3. that take no adapter: layers.7"):
        loaded(LoRAAdapter.read("a", folder))


@pytest.mark.parametrize("changed", [torch.ones(RANK, 17), torch.ones(RANK, 16, dtype=torch.int32)])
def test_tensor_of_another_shape_or_dtype_is_refused(folder: Path, changed: Tensor) -> None:
    edit(folder, lambda _, tensors: tensors.update({f"{FIRST}.lora_A.weight": changed}))
    with pytest.raises(CheckpointError, match="does not fit the base model and r=3"):
        loaded(LoRAAdapter.read("a", folder))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="adapter_config.json cannot be read .No such file"):
        LoRAAdapter.read("a", tmp_path)
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}'
    )
    with pytest.raises(CheckpointError, match="adapter_model.safetensors cannot be read"):
        LoRAAdapter.read("a", tmp_path)
