"""Loading a folder: every tensor used, every parameter filled, and whatever else is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models import architecture
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model, fill_dummy, load_weights
from tests.tiny_model import CONFIG, HYBRID_MOE, LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE

CONFIGS = {
    "qwen3": {**QWEN3, "vocab_size": 96},
    "hybrid": {**CONFIG, "vocab_size": 96},
    "qwen2": {**QWEN2, "vocab_size": 96},
    "llama": {**LLAMA, "vocab_size": 96, "attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {**QWEN3_MOE, "vocab_size": 96},
    "mixtral": {**MIXTRAL, "vocab_size": 96},
    "hybrid moe": {**HYBRID_MOE, "vocab_size": 96},
}
Tensors = dict[str, Tensor]


def build(raw: dict[str, Any], drafting: bool = False) -> tuple[Any, Any]:
    made = BuildContext("cpu", torch.float32, 1, 64)
    model: Any = build_model(raw, made)
    return model, architecture(raw["model_type"]).Draft(model, made) if drafting else None


def checkpoint(raw: dict[str, Any], drafting: bool = False) -> Tensors:
    """Names and values as a file would hold them."""
    model, draft = build(raw, drafting)
    fill_dummy(model, draft, seed=3)
    table = {n if n == "lm_head.weight" else f"model.{n}": t for n, t in model.weights().items()}
    table |= {f"mtp.{n}": t for n, t in draft.weights().items()} if draft else {}
    return {name: tensor.detach().contiguous().clone() for name, tensor in table.items()}


def load(folder: Path, raw: dict[str, Any], *files: Tensors, drafting: bool = False) -> Any:
    """Writes the files and loads them into a fresh model, whose weights are all NaN before."""
    for index, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{index}.safetensors")
    model, draft = build(raw, drafting)
    for module in (model, draft):
        for parameter in module.parameters() if module else ():
            parameter.data.fill_(torch.nan)
    load_weights(Checkpoint(folder, raw), model, draft, lambda done, of: None)
    return model, draft


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_is_filled_from_any_number_of_files(tmp_path: Path, kind: str) -> None:
    raw = CONFIGS[kind]
    tensors = checkpoint(CONFIGS[kind])
    names = sorted(tensors)
    sublayers = [{n: tensors[n] for n in names[i::2]} for i in range(2)]
    model, _ = load(tmp_path, raw, *sublayers)
    assert not any(p.isnan().any() for p in model.parameters())
    for name, target in model.weights().items():
        assert torch.equal(target, tensors[name if name in tensors else f"model.{name}"])


def test_the_draft_module_is_filled_or_left_alone(tmp_path: Path) -> None:
    raw = CONFIGS["hybrid"]
    tensors = checkpoint(raw, drafting=True)
    _, draft = load(tmp_path, raw, tensors, drafting=True)
    assert not any(p.isnan().any() for p in draft.parameters())
    assert torch.equal(draft.fc.part(0), tensors["mtp.fc.weight"])
    model, draft = load(tmp_path, raw, tensors)
    assert draft is None and not any(p.isnan().any() for p in model.parameters())


def test_a_prefix_and_a_vision_tower_are_no_obstacle(tmp_path: Path) -> None:
    raw = CONFIGS["hybrid"]
    tensors = {n.replace("model.", "model.language_model."): t for n, t in checkpoint(raw).items()}
    load(tmp_path, raw, tensors | {"model.visual.patch_embed.weight": torch.zeros(2)})


def test_positions_that_older_files_have_are_those_of_config_json(tmp_path: Path) -> None:
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    load(tmp_path, CONFIGS["mixtral"], checkpoint(CONFIGS["mixtral"]) | inverse)


def missing(t: Tensors) -> None:
    del t["model.layers.1.self_attn.q_norm.weight"]


def spare(t: Tensors) -> None:
    t["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)


def draft(t: Tensors) -> None:
    t["mtp.fc.weight"] = torch.zeros(2)


def deeper(t: Tensors) -> None:
    t["model.layers.3.input_layernorm.weight"] = torch.zeros(48)


def misshapen(t: Tensors) -> None:
    t["model.layers.0.mlp.up_proj.weight"] = torch.zeros(64, 47)


def quantised(t: Tensors) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"
    t[name] = t[name].to(torch.float8_e4m3fn)


def integers(t: Tensors) -> None:
    t["model.norm.weight"] = torch.ones(48, dtype=torch.int8)


def doubled(t: Tensors) -> None:
    t["norm.weight"] = torch.ones(48)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (missing, r"missing tensors \(1\): layers.1.self_attn.q_norm.weight"),
        (spare, r"spare tensors \(1\): model.layers.0.self_attn.q_proj.bias"),
        (draft, r"spare tensors \(1\): mtp.fc.weight"),
        (deeper, r"spare tensors \(1\): model.layers.3.input_layernorm.weight"),
        (misshapen, r"mlp.up_proj.weight \(shape \(64, 47\), config.json asks for \(64, 48\)\)"),
        (quantised, r"unfit tensors \(1\): .*o_proj.weight \(torch.float8_e4m3fn"),
        (integers, r"unfit tensors \(1\): model.norm.weight \(torch.int8"),
        (doubled, r"doubled tensors \(1\): norm.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, fault: Callable[[Tensors], None], message: str
) -> None:
    tensors = checkpoint(CONFIGS["qwen3"])
    fault(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, CONFIGS["qwen3"], tensors)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    tensors = checkpoint(CONFIGS["qwen3"])
    missing(tensors)
    spare(tensors)
    with pytest.raises(CheckpointError, match="missing.*q_norm.*; spare.*bias"):
        load(tmp_path, CONFIGS["qwen3"], tensors)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = checkpoint(CONFIGS["qwen3"])
    with pytest.raises(CheckpointError, match=r"doubled tensors \(1\): model.norm.weight"):
        load(tmp_path, CONFIGS["qwen3"], tensors, {"model.norm.weight": torch.ones(48)})


def test_a_tied_head_may_stand_in_the_file_only_as_the_embedding(tmp_path: Path) -> None:
    raw = {**CONFIGS["qwen3"], "tie_word_embeddings": True}
    tensors = checkpoint(raw)
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    load(tmp_path, raw, tensors | {"lm_head.weight": head})
    head[5, 7] += 1
    with pytest.raises(CheckpointError, match="lm_head.weight .*tie_word_embeddings"):
        load(tmp_path, raw, tensors | {"lm_head.weight": head})


def test_a_folder_without_weights_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        load(tmp_path, CONFIGS["qwen3"])
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path, CONFIGS["qwen3"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_dummy_norms_stand_around_what_leaves_their_input_alone(kind: str) -> None:
    model, _ = build(CONFIGS[kind])
    fill_dummy(model, None, seed=0)
    norms = [m for m in model.modules() if hasattr(m, "offset")]
    heads = {"Norm"} if kind in ("qwen3", "qwen3_moe", "hybrid", "hybrid moe") else set()
    assert {type(m).__name__ for m in norms} >= {"AddRMSNorm"} | heads
    for norm in norms:
        assert (norm.weight + norm.offset - 1).abs().max() <= 0.2


def test_dummy_experts_have_the_scale_of_their_inputs() -> None:
    model, _ = build(CONFIGS["hybrid moe"])
    fill_dummy(model, None, seed=0)
    moe = model.blocks[0].mlp
    for weight, inputs in ((moe.up, 48), (moe.down, 22)):
        assert weight.stored.shape[-1] == inputs
        assert float(weight.stored.std()) == pytest.approx(0.7 * inputs**-0.5, rel=0.05)
