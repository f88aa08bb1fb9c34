"""DeepSeek-V3 and Kimi-K2 equal transformers in every way of serving, and refuse what is not
supported."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models import KIMI_K2
from lockstep import LLM
from lockstep.errors import CheckpointError, ConfigError
from lockstep.kernels.formats.kv import HadamardRotation, KVFormat
from lockstep.kernels.formats.kv.hadamard import K_BLOCK
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.kernels.formats.kv.unquantized import Unquantized
from lockstep.layers.build_context import BuildContext
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.deepseek_v3 import Config, Draft, Model
from lockstep.spec import own_drafter
from lockstep.step import StepContext, StepShape
from tests.models.dense import (
    NGRAM,
    VOCAB,
    bits,
    generate_greedy,
    greedy,
    make_llm,
    prompts,
    random_oracle,
)
from tests.models.oracle import RELATIVE, compare_tokens, logits_error, logits_errors
from tests.quantization.stored import fp8_weight
from tests.tiny_model import DEEPSEEK, KIMI

MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
UNKNOWN_SETTINGS = (
    "model_type",
    "scoring_func",
    "topk_method",
    "torch_dtype",
    "rope_scaling",
    "rope_theta",
)
"""Settings that transformers' class does not know, or names differently."""
Base = dict[str, Any]

REAL = {
    **DEEPSEEK,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {**DEEPSEEK["rope_scaling"], "original_max_position_embeddings": 4096},  # type: ignore[dict-item]
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""config.json of DeepSeek-V3."""


def oracle_of(folder: Path, base: Base) -> Any:
    """Return a random transformers model of these settings, saved in the folder."""
    known = {name: value for name, value in base.items() if name not in UNKNOWN_SETTINGS}
    scaling = base["rope_scaling"] or {"type": "default"}
    rope = {n: v for n, v in scaling.items() if n != "type"} | {"rope_type": scaling["type"]}
    known["rope_parameters"] = rope | {"rope_theta": float(base["rope_theta"])}
    oracle = random_oracle(folder, "DeepseekV3", known)
    for name, buffer in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.2)
    oracle.save_pretrained(folder)
    return oracle


def add_draft_module(folder: Path) -> None:
    """Write an MTP module of random weights, with its copies of embedding and head."""
    raw = json.loads((folder / "config.json").read_text())
    build = BuildContext("cpu", torch.float32, 1, 64)
    module = Draft(Model(Config.read(raw), build), build)
    module.twins = ["embed_tokens", "shared_head.head"]
    draw = torch.Generator().manual_seed(5)
    tensors = {}
    for name, target in module.weights().items():
        wide = len(target.shape) > 1
        size = target.shape[-1] ** -0.5 if wide else 0.2
        prefix = f"model.layers.{raw['num_hidden_layers']}."
        tensors[prefix + name] = torch.randn(target.shape, generator=draw) * size
    save_file(tensors, folder / "mtp.safetensors")


@pytest.fixture(scope="module", params=["deepseek_v3", "kimi_k2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (name, folder, oracle).

    DeepSeek-V3 has latent queries, YaRN, groups, a dense layer and an MTP module. Kimi-K2 has one
    query projection, another theta, one group, two shared experts, tied embeddings, and no module.
    """
    folder = tmp_path_factory.mktemp(request.param)
    oracle = oracle_of(folder, {"deepseek_v3": DEEPSEEK, "kimi_k2": KIMI}[request.param])
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": request.param}))
    if request.param == "deepseek_v3":
        add_draft_module(folder)
    return request.param, folder, oracle


@pytest.mark.default_cases("deepseek_v3")
def test_equals_transformers_with_chunks_and_every_drafter(pair) -> None:
    (name, folder, oracle) = pair
    plain = make_llm(folder)
    chunked = make_llm(folder, max_num_batched_tokens=70, enable_prefix_caching=False)
    rest = [make_llm(folder, speculative_config=NGRAM), chunked]
    if name == "deepseek_v3":
        rest.append(make_llm(folder, speculative_config=MTP))
    for ids in prompts(2, 300):
        assert logits_error(plain, oracle, ids) < RELATIVE
        assert logits_error(chunked, oracle, ids) < RELATIVE
        expected = generate_greedy(plain, ids, 12)
        compare_tokens(oracle, ids, expected.outputs[0].token_ids)
        assert all(bits(generate_greedy(other, ids, 12)) == bits(expected) for other in rest)


@pytest.mark.slow
def test_adaptive_drafts_change_no_bit(pair) -> None:
    """The adaptive drafter stores latents in steps without drafts."""
    (name, folder, _) = pair
    if name == "kimi_k2":
        assert own_drafter(Checkpoint.read(folder)) is None
        with pytest.raises(CheckpointError, match="needs a checkpoint with an MTP module"):
            make_llm(folder, speculative_config=MTP)
        return
    assert own_drafter(Checkpoint.read(folder)) == "mtp"
    (prompt,) = prompts(1, 16)
    adaptive = make_llm(folder, speculative_config={**MTP, "adaptive": True})
    assert bits(generate_greedy(adaptive, prompt, 64)) == bits(
        generate_greedy(make_llm(folder), prompt, 64)
    )


def test_keep_stores_latents_without_queries() -> None:
    """The latents equal those of drafting, and the query weights are not read."""
    torch.manual_seed(0)
    config = Config.read({**DEEPSEEK, "vocab_size": 50})
    draft = Draft(Model(config, BuildContext("cpu", torch.float32, 1, 64)), inexact_build())
    for parameter in draft.parameters():
        parameter.data.normal_()
    mixer = draft.blocks[0].self_attn
    mixer.attend = lambda q, *rest: torch.zeros_like(q)
    ids = torch.arange(5)
    unread = dict.fromkeys(StepContext.__dataclass_fields__)
    indices = dict(shape=StepShape.uniform(1, 5), positions=ids + 3, slot_mapping=ids + 64)
    step = StepContext(**{**unread, **indices})  # type: ignore[arg-type]
    hidden = torch.randn(5, config.hidden_size)
    actual = []
    for call in (draft, draft.write_cache):
        mixer.bind(mixer.cache_spec().allocate(2, 64, "cpu"))
        call(ids, hidden, step)
        actual.append(mixer.cache_tensors())
        mixer.down.part(0).fill_(torch.nan)
        mixer.q_up.part(0).fill_(torch.nan)
    for expected, kept in zip(*actual, strict=True):
        assert expected[1, :5].all() and not expected[1, 5:].any()
        torch.testing.assert_close(kept, expected)


def inexact_build() -> BuildContext:
    """Return the build context of a draft module."""
    return BuildContext("cpu", torch.float32, 1, 64, exact=False)


def test_mtp_setting_without_tensors_gives_no_drafter(tmp_path: Path) -> None:
    oracle_of(tmp_path, DEEPSEEK)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert own_drafter(Checkpoint.read(tmp_path)) is None


@pytest.mark.default_cases("kimi_k2")
def test_kimi_k25_text_model(pair, tmp_path: Path) -> None:
    """With its tensor names, and with unused tensors of older files and of the vision tower."""
    (_, folder, _) = pair
    text = json.loads((folder / "config.json").read_text())
    raw = {"model_type": "kimi_k25", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for path in folder.glob("*.safetensors"):
        tensors = {f"language_model.{name}": x for name, x in load_file(path).items()}
        if path.name != "mtp.safetensors":
            tensors["vision_tower.patch_embed.proj.weight"] = torch.zeros(2, 3)
            inverse = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
            tensors[inverse] = torch.zeros(6)
        save_file(tensors, tmp_path / path.name)
    (prompt,) = prompts(1, 16)
    assert bits(generate_greedy(make_llm(tmp_path), prompt, 12)) == bits(
        generate_greedy(make_llm(folder), prompt, 12)
    )


BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def is_unquantized(name: str, tensor: Tensor) -> bool:
    """Return True for what DeepSeek's FP8 checkpoints keep in bf16: embeddings, heads, norms,
    routers, eh_proj."""
    module = name.removesuffix(".weight")
    ends = ("embed_tokens", "lm_head", "shared_head.head", "mlp.gate", "eh_proj")
    return tensor.dim() != 2 or module.endswith(ends)


@pytest.mark.slow
def test_fp8_blocks_equal_dequantized_model(tmp_path: Path) -> None:
    """Blocks that heads split, a partial last block, and kv_b_proj, which is dequantized and split
    into heads."""
    base = {**DEEPSEEK, "hidden_size": 136, "kv_lora_rank": 132, "moe_intermediate_size": 130}
    plain = tmp_path / "plain"
    oracle_of(plain, {**base, "num_hidden_layers": 2})
    add_draft_module(plain)
    raw = json.loads((plain / "config.json").read_text())
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": BLOCKS}))
    write = fp8_weight("block", "weight_scale_inv")
    result = 0
    for path in plain.glob("*.safetensors"):
        values = load_file(path)
        stored: dict[str, Tensor] = {}
        for name, tensor in values.items():
            if is_unquantized(name, tensor):
                stored[name] = tensor
                continue
            result += 1
            one = write(*tensor.shape, result)
            values[name] = one.value
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": part for suffix, part in one.tensors.items()}
        save_file(values, path)
        save_file({name: x.contiguous() for name, x in stored.items()}, packed / path.name)
    assert result == 2 * (5 + 3) + 8 * 3 * 2 - 8 * 3 + 3 + 5 + 3 + 8 * 3 - 3
    (prompt,) = prompts(1, 16)
    expected = bits(generate_greedy(make_llm(plain), prompt, 12))
    for drafter in (None, MTP):
        assert (
            bits(generate_greedy(make_llm(packed, speculative_config=drafter), prompt, 12))
            == expected
        )


def test_cache_bytes_per_token(pair) -> None:
    """Latent and rotary key, in each of three layers, and in the draft module's."""
    (name, folder, _) = pair
    drafter = MTP if name == "deepseek_v3" else None
    plan = make_llm(folder, speculative_config=drafter).engine.plan
    assert plan.page_bytes == 64 * (40 + 12) * 4 * (4 if drafter else 3)
    assert plan.num_slots == 0


def num_parameters(base: Base) -> tuple[int, int]:
    """Return the parameters of the target, and of its MTP module without what it shares; without
    the correction biases, which no optimiser trains."""
    build = BuildContext("cpu", torch.bfloat16, 1, 64)
    build.memory_budget.bounded = False
    with FakeTensorMode():
        model = Model(Config.read(base), build)
        draft = Draft(model, build)
        results = []
        for root in (model, draft):
            names = {n: p for n, p in root.named_parameters() if not n.endswith(".bias")}
            shared = {id(p) for p in model.parameters()} if root is draft else set()
            results.append(sum(p.numel() for p in names.values() if id(p) not in shared))
    return results[0], results[1]


def test_parameter_counts_of_a_published_model() -> None:
    """671 B; the module without its copies of embedding and head."""
    assert num_parameters(REAL) == (671_026_404_352, 11_610_067_968)


@pytest.mark.slow
def test_parameter_count_of_kimi_k2() -> None:
    assert num_parameters(KIMI_K2)[0] == 1_026_408_209_408


@pytest.mark.parametrize(
    ("base", "factor", "theta"), [(REAL, 1.873854, 10000.0), (KIMI_K2, 1.813260, 50000.0)]
)
def test_attention_scale_follows_yarn(base: Base, factor: float, theta: float) -> None:
    config = Config.read(base)
    assert math.isclose(config.latents.scale, 192**-0.5 * factor, rel_tol=1e-6)
    assert config.rope.theta == theta and config.rope.width == 64
    assert config.rope.frequencies(4096)[1] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace=4.*0 to 3"),
        ({"kv_lora_rank": None}, "kv_lora_rank=None"),
        ({"qk_rope_head_dim": 11}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.type='ntk'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "rope_scaling.mscale_all_dim=1.0",
        ),
    ],
)
def test_unsupported_settings_are_refused(changes: Base, message: str) -> None:
    read: Callable[[Base], Config] = Config.read
    with pytest.raises(CheckpointError, match=message):
        read({**DEEPSEEK, "vocab_size": VOCAB, **changes})


@pytest.mark.parametrize(
    "name",
    ["first_k_dense_replace", "n_group", "n_shared_experts", "routed_scaling_factor", "topk_group"],
)
def test_expert_settings_have_no_default(name: str) -> None:
    """For a missing setting, transformers uses DeepSeek-V3's own value and Kimi's code uses 1."""
    raw = {**DEEPSEEK, "vocab_size": VOCAB}
    del raw[name]
    with pytest.raises(CheckpointError, match=f"config.json has no {name}"):
        Config.read(raw)


def test_top_k_beyond_selected_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="top_k=5 out of top_groups=2 of groups=4 of experts=8"):
        Config.read({**DEEPSEEK, "vocab_size": VOCAB, "num_experts_per_tok": 5})


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", ["deepseek_v3", pytest.param("kimi_k2", marks=pytest.mark.slow)], indirect=True
)
def test_preemption_changes_no_bit(pair) -> None:
    """Rows are preempted and restored, since the cache has room for less than two of them."""
    (_, folder, _) = pair
    alone = make_llm(folder)
    expected = [bits(generate_greedy(alone, ids, 40)) for ids in prompts(4, 150)]
    few: LLM = make_llm(folder, num_gpu_blocks=6, speculative_config=NGRAM, max_model_len=256)
    arguments = [{"prompt_token_ids": ids} for ids in prompts(4, 150)]
    assert [bits(output) for output in few.generate(arguments, greedy(40))] == expected


MAX_ERRORS = {
    "rotated": (1.0, RELATIVE),
    "int8_per_token_head": (0.5, 0.06),
    "fp8": (0.5, 0.3),
    "turboquant_4bit_nc": (0.5, 0.7),
}
"""Format of latents -> (share of positions, maximum relative error of their logits).

If the error routes a token to another of the random experts, its logits change a lot. A rotation
alone adds no error.
"""


def test_latent_formats_are_close_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = Unquantized(torch.float32, HadamardRotation(99, K_BLOCK))
    monkeypatch.setitem(
        KV_FORMATS, "rotated", KVFormat("rotated", quantizer, quantizer, latent=quantizer)
    )
    oracle = oracle_of(tmp_path, {**DEEPSEEK, "kv_lora_rank": 32})
    for name, (share, maximum) in MAX_ERRORS.items():
        llm = make_llm(tmp_path, kv_cache_dtype=name)
        for ids in prompts(2, 300):
            assert logits_errors(llm, oracle, ids).quantile(share) < maximum, name
