"""Families with mixtures of experts equal transformers, for all forms of a checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep import LLM
from lockstep.errors import CapacityError, CheckpointError
from lockstep.layers.build_context import BuildContext
from lockstep.models import architecture
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model
from lockstep.spec import own_drafter
from tests.models.dense import NGRAM, VOCAB, bits, generate_greedy, make_llm, prompts, random_oracle
from tests.models.oracle import RELATIVE, compare_tokens, logits_error
from tests.tiny_model import HYBRID_MOE, MIXTRAL, NEXT, QWEN3_MOE, THREE_LAYERS

MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
Base = dict[str, Any]


def without_unknown_settings(base: Base) -> Base:
    """Return the settings that transformers' config classes know."""
    unknown = ("mtp_num_hidden_layers", "model_type", "torch_dtype", "dtype")
    return {name: value for name, value in base.items() if name not in unknown}


FAMILIES: dict[str, tuple[str, Base, float]] = {
    "qwen3_moe": ("Qwen3Moe", {**QWEN3_MOE, "rope_theta": 5e4}, 1.0),
    "qwen3_moe, not renormalized": (
        "Qwen3Moe",
        {**QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
        1.0,
    ),
    "mixtral": ("Mixtral", MIXTRAL, 1.0),
    "qwen3_5_moe": ("Qwen3_5Moe", {**HYBRID_MOE, **THREE_LAYERS}, 0.0),
    "qwen3_next": ("Qwen3Next", {**NEXT, **THREE_LAYERS}, 0.0),
}
"""Name -> (prefix of its classes in transformers, settings, mean of its norms)."""
RECURRENT = ("qwen3_5_moe", "qwen3_next")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (family, folder, oracle); recurrent families have an MTP module."""
    (classes, base, centre) = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("mixture")
    oracle = random_oracle(folder, classes, without_unknown_settings(base), centre)
    if request.param in RECURRENT:
        add_draft_module(folder, in_config=request.param != "qwen3_next")
    return request.param, folder, oracle


def add_draft_module(folder: Path, in_config: bool) -> None:
    """Write an MTP module of random weights. in_config: config.json names it."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    build = BuildContext("cpu", torch.float32, 1, 64)
    draft = architecture(raw["model_type"]).Draft(build_model(raw, build), build)
    draw = torch.Generator().manual_seed(5)
    tensors = {}
    for name, target in draft.weights().items():
        wide = len(target.shape) > 1
        tensors[f"mtp.{name}"] = torch.randn(target.shape, generator=draw) * (
            target.shape[-1] ** -0.5 if wide else 0.2
        )
    save_file(tensors, folder / "mtp.safetensors")
    if in_config:
        path.write_text(json.dumps(raw | {"mtp_num_hidden_layers": 1}))


def engine(folder: Path, drafter: object) -> LLM:
    """Return an engine for one request at a time."""
    return make_llm(folder, speculative_config=drafter, max_num_seqs=1)


@pytest.mark.default_cases("qwen3_moe, not renormalized", "mixtral", "qwen3_next")
def test_equals_transformers_with_and_without_drafts(pair) -> None:
    (family, folder, oracle) = pair
    drafters = [None, NGRAM, MTP] if family in RECURRENT else [None, NGRAM]
    engines = [engine(folder, drafter) for drafter in drafters]
    for ids, count in zip(prompts(2, 150), (8, 16), strict=True):
        assert logits_error(engines[0], oracle, ids) < RELATIVE
        outputs = [generate_greedy(llm, ids, count) for llm in engines]
        compare_tokens(oracle, ids, outputs[0].outputs[0].token_ids)
        assert all(bits(output) == bits(outputs[0]) for output in outputs)


def fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with all experts of a layer as one tensor."""
    table = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for path in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{path}.experts.") for name in tensors) // 3

        def all_of(name: str, path: str = path, count: int = count) -> Tensor:
            return torch.stack([tensors[f"{path}.experts.{e}.{name}.weight"] for e in range(count)])

        gate_up = torch.cat([all_of("gate_proj"), all_of("up_proj")], dim=1)
        table |= {f"{path}.experts.gate_up_proj": gate_up}
        table |= {f"{path}.experts.down_proj": all_of("down_proj")}
    return table


def as_multimodal(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as in a multimodal checkpoint."""
    text = {
        n.replace("model.", "model.language_model.", 1): t for n, t in fuse_experts(tensors).items()
    }
    return text | {"model.visual.patch_embed.proj.weight": torch.zeros(2, 3)}


@pytest.mark.default_cases("qwen3_moe")
@pytest.mark.parametrize("pair", ["qwen3_moe", "qwen3_5_moe", "qwen3_next"], indirect=True)
def test_fused_expert_tensors_are_equivalent(pair, tmp_path: Path) -> None:
    (family, folder, _) = pair
    raw = json.loads((folder / "config.json").read_text())
    change = fuse_experts
    if family == "qwen3_5_moe":
        change = as_multimodal
        raw = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": raw}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for path in folder.glob("*.safetensors"):
        save_file(change(load_file(path)), tmp_path / path.name)
    drafter = MTP if family in RECURRENT else None
    (prompt,) = prompts(1, 150)
    one, other = (generate_greedy(engine(path, drafter), prompt, 12) for path in (folder, tmp_path))
    assert bits(one) == bits(other)


def test_draft_module_with_dense_mlp(tmp_path: Path) -> None:
    """Determined by its tensors; config.json does not say."""
    random_oracle(tmp_path, "Qwen3Next", without_unknown_settings(NEXT), 0.0)
    add_draft_module(tmp_path, in_config=False)
    path = tmp_path / "mtp.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if ".mlp." not in n}
    for name, shape in (("gate", (64, 48)), ("up", (64, 48)), ("down", (48, 64))):
        tensors[f"mtp.layers.0.mlp.{name}_proj.weight"] = torch.randn(shape) * 0.1
    save_file(tensors, path)
    (prompt,) = prompts(1, 150)
    plain, drafted = (bits(generate_greedy(engine(tmp_path, d), prompt, 12)) for d in (None, MTP))
    assert plain == drafted
    config = json.loads((tmp_path / "config.json").read_text())
    config["intermediate_size"] = None
    config["mlp_only_layers"] = []
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no intermediate_size, and mtp.layers.0.mlp is"):
        make_llm(tmp_path, speculative_config=MTP)


@pytest.mark.parametrize("pair", ["qwen3_5_moe"], indirect=True)
def test_mtp_setting_without_tensors_is_served_without_drafts(pair, tmp_path: Path) -> None:
    """transformers saves a checkpoint with a module so, as quantizing tools do: the setting without
    the tensors."""
    (_, folder, _) = pair
    assert own_drafter(Checkpoint.read(folder)) == "mtp"
    for path in folder.iterdir():
        if path.name != "mtp.safetensors":
            shutil.copy(path, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert own_drafter(Checkpoint.read(tmp_path)) is None
    (prompt,) = prompts(1, 40)
    assert bits(generate_greedy(make_llm(tmp_path), prompt, 8)) == bits(
        generate_greedy(make_llm(folder), prompt, 8)
    )
    with pytest.raises(CheckpointError, match="none, by mtp_num_hidden_layers or by its tensors"):
        make_llm(tmp_path, speculative_config=MTP)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert own_drafter(Checkpoint.read(tmp_path)) == "mtp"


def test_mtp_without_module_is_refused(tmp_path: Path) -> None:
    random_oracle(tmp_path, "Qwen3Next", without_unknown_settings(NEXT), 0.0)
    with pytest.raises(CheckpointError, match="needs a checkpoint with an MTP module"):
        make_llm(tmp_path, speculative_config=MTP)


SHARED = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]


def test_draft_module_tensor_names() -> None:
    """The 19 of Qwen3.6-35B-A3B's, with its experts counted as two."""
    raw = {**HYBRID_MOE, "vocab_size": VOCAB}
    build = BuildContext("cpu", torch.float32, 1, 64)
    module = architecture(raw["model_type"])
    names = set(module.Draft(build_model(raw, build), build).weights())
    experts = {
        f"layers.0.mlp.experts.{e}.{n}_proj.weight"
        for e in range(6)
        for n in ("gate", "up", "down")
    }
    attention = {
        f"self_attn.{n}.weight"
        for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    mlp = {f"mlp.{name}" for name in (*SHARED, "gate.weight", "shared_expert_gate.weight")}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    mine = {"fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"}
    assert names - experts == mine | {f"layers.0.{name}" for name in attention | mlp | norms}
    assert len(names - experts) + 2 == 19 and experts <= names


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (QWEN3_MOE, {"num_experts_per_tok": 7}, "num_experts_per_tok=7.*1 to 6"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts=0.*1 or more"),
        (QWEN3_MOE, {"num_experts": 2**24}, "num_experts=16777216.*1 or more, up to 4096"),
        (MIXTRAL, {"num_local_experts": 5000}, "num_local_experts=5000.*up to 4096"),
        (QWEN3_MOE, {"norm_topk_prob": None}, "norm_topk_prob=None.*bool"),
        (QWEN3_MOE, {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\].*0 to 2"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3_MOE, {"intermediate_size": None}, "intermediate_size=None"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096.*None"),
        (MIXTRAL, {"num_local_experts": "8"}, "num_local_experts='8'"),
        (HYBRID_MOE, {"norm_topk_prob": False}, "norm_topk_prob=False.*True"),
        (HYBRID_MOE, {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        (HYBRID_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (HYBRID_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        (NEXT, {"moe_intermediate_size": None}, "moe_intermediate_size=None"),
        (NEXT, {"linear_num_value_heads": 5}, "linear_num_value_heads=5"),
    ],
)
def test_unsupported_settings_are_refused(base: Base, changes: Base, message: str) -> None:
    config: Callable[[Base], Any] = architecture(base["model_type"]).Config.read
    with pytest.raises(CheckpointError, match=message):
        config({**base, "vocab_size": VOCAB, **changes})


def test_sparse_layers() -> None:
    def sparse(**changes: Any) -> list[bool]:
        raw = {**NEXT, "vocab_size": VOCAB, "num_hidden_layers": 6, **changes}
        model: Any = build_model(raw, BuildContext("cpu", torch.float32, 1, 64))
        return [hasattr(block.mlp, "router") for block in model.blocks]

    assert sparse(mlp_only_layers=[2, 5]) == [True, True, False, True, True, False]
    assert sparse(mlp_only_layers=[], decoder_sparse_step=2) == [False, True] * 3
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [False, False, *[False, True] * 2]


def test_absurd_head_dims_are_refused_before_row_order() -> None:
    wide = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2**20)
    raw = {**NEXT, **wide, "vocab_size": VOCAB, "linear_key_head_dim": 2**24}
    with pytest.raises(CapacityError, match="of layers.0 needs .* allowed: .* Correct the sizes"):
        build_model(raw, BuildContext("cpu", torch.float32, 1, 64))


def test_qwen3_next_projection_rows() -> None:
    """16 key heads, 32 value heads, 128 wide: 768 rows per group of q, k, v and z."""
    from lockstep.layers.gated_delta_net import grouped_rows

    rows = grouped_rows(16, (128, 128, 256, 256)).tolist()
    q = 0
    k = 2048
    v = 4096
    z = v + 4096
    for head, d in ((0, 0), (3, 5), (15, 127)):
        assert rows[q + 128 * head + d] == 768 * head + d
        assert rows[k + 128 * head + d] == 768 * head + 128 + d
    for head, d in ((0, 0), (1, 1), (18, 77), (31, 127)):
        group = 768 * (head // 2) + 128 * (head % 2) + d
        assert rows[v + 128 * head + d] == group + 256
        assert rows[z + 128 * head + d] == group + 512
    pairs = grouped_rows(16, (2, 2)).tolist()
    for head in (0, 1, 18, 31):
        assert pairs[head] == 4 * (head // 2) + head % 2
        assert pairs[32 + head] == 4 * (head // 2) + 2 + head % 2
