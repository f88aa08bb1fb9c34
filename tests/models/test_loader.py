"""Loading a folder: every tensor is used, every parameter filled, and anything else is named."""

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


def build(raw: dict[str, Any], drafting: bool = False) -> tuple[Any, Any, BuildContext]:
    context = BuildContext("cpu", torch.float32, 1, 64)
    model: Any = build_model(raw, context)
    draft = architecture(raw["model_type"]).Draft(model, context) if drafting else None
    return model, draft, context


def checkpoint(raw: dict[str, Any], drafting: bool = False) -> Tensors:
    """Return names and values as in a file."""
    model, draft, context = build(raw, drafting)
    fill_dummy(model, draft, 3, context)
    table = {n if n == "lm_head.weight" else f"model.{n}": t for n, t in model.weights().items()}
    table |= {f"mtp.{n}": t for n, t in draft.weights().items()} if draft else {}
    return {name: tensor.detach().contiguous().clone() for name, tensor in table.items()}


def load(folder: Path, raw: dict[str, Any], *files: Tensors, drafting: bool = False) -> Any:
    """Write the files and load them into a fresh model whose weights are NaN before."""
    for index, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{index}.safetensors")
    model, draft, _ = build(raw, drafting)
    for module in (model, draft):
        for parameter in module.parameters() if module else ():
            parameter.data.fill_(torch.nan)
    load_weights(Checkpoint(folder, raw), model, draft, lambda done, of: None)
    return model, draft


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_parameter_is_filled_from_several_files(tmp_path: Path, kind: str) -> None:
    raw = CONFIGS[kind]
    tensors = checkpoint(CONFIGS[kind])
    names = sorted(tensors)
    sublayers = [{n: tensors[n] for n in names[i::2]} for i in range(2)]
    model, _ = load(tmp_path, raw, *sublayers)
    assert not any(p.isnan().any() for p in model.parameters())
    for name, target in model.weights().items():
        assert torch.equal(target, tensors[name if name in tensors else f"model.{name}"])


def test_draft_module_is_filled_only_when_drafting(tmp_path: Path) -> None:
    raw = CONFIGS["hybrid"]
    tensors = checkpoint(raw, drafting=True)
    _, draft = load(tmp_path, raw, tensors, drafting=True)
    assert not any(p.isnan().any() for p in draft.parameters())
    assert torch.equal(draft.fc.part(0), tensors["mtp.fc.weight"])
    model, draft = load(tmp_path, raw, tensors)
    assert draft is None and not any(p.isnan().any() for p in model.parameters())


def test_prefix_and_vision_tower_are_accepted(tmp_path: Path) -> None:
    raw = CONFIGS["hybrid"]
    tensors = {n.replace("model.", "model.language_model."): t for n, t in checkpoint(raw).items()}
    load(tmp_path, raw, tensors | {"model.visual.patch_embed.weight": torch.zeros(2)})


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
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
def test_unfit_tensor_is_named(
    tmp_path: Path, fault: Callable[[Tensors], None], message: str
) -> None:
    tensors = checkpoint(CONFIGS["qwen3"])
    fault(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, CONFIGS["qwen3"], tensors)


def test_all_loading_faults_are_named(tmp_path: Path) -> None:
    tensors = checkpoint(CONFIGS["qwen3"])
    missing(tensors)
    spare(tensors)
    with pytest.raises(CheckpointError, match="missing.*q_norm.*; spare.*bias"):
        load(tmp_path, CONFIGS["qwen3"], tensors)


def test_duplicate_tensor_is_refused(tmp_path: Path) -> None:
    tensors = checkpoint(CONFIGS["qwen3"])
    with pytest.raises(CheckpointError, match=r"doubled tensors \(1\): model.norm.weight"):
        load(tmp_path, CONFIGS["qwen3"], tensors, {"model.norm.weight": torch.ones(48)})


def test_tied_head_must_equal_embedding(tmp_path: Path) -> None:
    raw = {**CONFIGS["qwen3"], "tie_word_embeddings": True}
    tensors = checkpoint(raw)
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    load(tmp_path, raw, tensors | {"lm_head.weight": head})
    head[5, 7] += 1
    with pytest.raises(CheckpointError, match="lm_head.weight .*tie_word_embeddings"):
        load(tmp_path, raw, tensors | {"lm_head.weight": head})


def test_missing_and_broken_weight_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        load(tmp_path, CONFIGS["qwen3"])
    (tmp_path / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path, CONFIGS["qwen3"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_dummy_norms_are_near_identity(kind: str) -> None:
    model, _, context = build(CONFIGS[kind])
    fill_dummy(model, None, 0, context)
    norms = [m for m in model.modules() if hasattr(m, "offset")]
    heads = {"Norm"} if kind in ("qwen3", "qwen3_moe", "hybrid", "hybrid moe") else set()
    assert {type(m).__name__ for m in norms} >= {"AddRMSNorm"} | heads
    for norm in norms:
        assert (norm.weight + norm.offset - 1).abs().max() <= 0.2


def test_dummy_experts_scale_with_their_inputs() -> None:
    model, _, context = build(CONFIGS["hybrid moe"])
    fill_dummy(model, None, 0, context)
    moe = model.blocks[0].mlp
    for weight, inputs in ((moe.up, 48), (moe.down, 22)):
        assert weight.stored.shape[-1] == inputs
        assert float(weight.stored.std()) == pytest.approx(0.7 * inputs**-0.5, rel=0.05)
