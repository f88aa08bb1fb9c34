"""DeepSeek-V3 and Kimi-K2: against transformers, in every way of serving, and what is refused."""

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
    ask,
    bits,
    greedy,
    make_llm,
    prompts,
    random_oracle,
)
from tests.models.oracle import RELATIVE, compare_tokens, logits_error, logits_errors
from tests.quantization.stored import fp8_weight
from tests.tiny_model import DEEPSEEK, KIMI

MTP = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
STRANGE = ("model_type", "scoring_func", "topk_method", "torch_dtype", "rope_scaling", "rope_theta")
"""Settings that transformers' class does not know, or calls otherwise."""
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
    """A model of transformers of these settings, its weights random, which it has saved."""
    known = {name: value for name, value in base.items() if name not in STRANGE}
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
    """Writes an MTP module of random weights, with its copies of embedding and head."""
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
    """(name, folder, oracle): latent queries, YaRN, groups, a dense layer and an MTP module; or one
    projection for queries, another theta, one group, two shared experts, tied, no module."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = oracle_of(folder, {"deepseek_v3": DEEPSEEK, "kimi_k2": KIMI}[request.param])
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": request.param}))
    if request.param == "deepseek_v3":
        add_draft_module(folder)
    return request.param, folder, oracle


def test_logits_and_greedy_tokens_whole_and_chunked_with_every_drafter(pair) -> None:
    (name, folder, oracle) = pair
    plain = make_llm(folder)
    chunked = make_llm(folder, max_num_batched_tokens=70, enable_prefix_caching=False)
    others = [make_llm(folder, speculative_config=NGRAM), chunked]
    if name == "deepseek_v3":
        others.append(make_llm(folder, speculative_config=MTP))
    for ids in prompts(2, 300):
        assert logits_error(plain, oracle, ids) < RELATIVE
        assert logits_error(chunked, oracle, ids) < RELATIVE
        wanted = ask(plain, ids, 24)
        compare_tokens(oracle, ids, wanted.outputs[0].token_ids)
        assert all(bits(ask(other, ids, 24)) == bits(wanted) for other in others)


def test_what_has_been_drafted_is_what_is_kept(pair) -> None:
    """The adaptive drafter keeps latents in steps that draft nothing."""
    (name, folder, _) = pair
    if name == "kimi_k2":
        assert own_drafter(Checkpoint.read(folder)) is None
        with pytest.raises(CheckpointError, match="needs a checkpoint with an MTP module"):
            make_llm(folder, speculative_config=MTP)
        return
    assert own_drafter(Checkpoint.read(folder)) == "mtp"
    (prompt,) = prompts(1, 16)
    adaptive = make_llm(folder, speculative_config={**MTP, "adaptive": True})
    assert bits(ask(adaptive, prompt, 64)) == bits(ask(make_llm(folder), prompt, 64))


def test_latents_are_kept_without_queries() -> None:
    """As drafting would have kept them, and nobody reads the weights of queries."""
    torch.manual_seed(0)
    config = Config.read({**DEEPSEEK, "vocab_size": 50})
    draft = Draft(Model(config, BuildContext("cpu", torch.float32, 1, 64)), inexact())
    for parameter in draft.parameters():
        parameter.data.normal_()
    mixer = draft.blocks[0].self_attn
    mixer.attend = lambda q, *rest: torch.zeros_like(q)
    ids = torch.arange(5)
    unread = dict.fromkeys(StepContext.__dataclass_fields__)
    places = dict(shape=StepShape.uniform(1, 5), positions=ids + 3, slot_mapping=ids + 64)
    step = StepContext(**{**unread, **places})  # type: ignore[arg-type]
    hidden = torch.randn(5, config.hidden_size)
    found = []
    for call in (draft, draft.keep):
        mixer.bind(mixer.cache_spec().allocate(2, 64, "cpu"))
        call(ids, hidden, step)
        found.append(mixer.cache_tensors())
        mixer.down.part(0).fill_(torch.nan)
        mixer.q_up.part(0).fill_(torch.nan)
    for wanted, kept in zip(*found, strict=True):
        assert wanted[1, :5].all() and not wanted[1, 5:].any()
        torch.testing.assert_close(kept, wanted)


def inexact() -> BuildContext:
    """What a draft module is built with."""
    return BuildContext("cpu", torch.float32, 1, 64, exact=False)


def test_a_folder_of_transformers_says_that_it_has_a_module_and_has_none(tmp_path: Path) -> None:
    oracle_of(tmp_path, DEEPSEEK)
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert own_drafter(Checkpoint.read(tmp_path)) is None


def test_the_text_part_of_kimi_k25(pair, tmp_path: Path) -> None:
    """Its names, and tensors of older files and of the part for images, which nobody uses."""
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
    assert bits(ask(make_llm(tmp_path), prompt, 24)) == bits(ask(make_llm(folder), prompt, 24))


BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def stays_plain(name: str, tensor: Tensor) -> bool:
    """What DeepSeek's FP8 checkpoints keep in bf16: embeddings, heads, norms, routers, eh_proj."""
    module = name.removesuffix(".weight")
    ends = ("embed_tokens", "lm_head", "shared_head.head", "mlp.gate", "eh_proj")
    return tensor.dim() != 2 or module.endswith(ends)


def test_fp8_blocks_are_the_model_of_their_values(tmp_path: Path) -> None:
    """Blocks that heads cut through, a last block that is partial, and kv_b_proj, which is unpacked
    and cut into heads."""
    base = {**DEEPSEEK, "hidden_size": 136, "kv_lora_rank": 132, "moe_intermediate_size": 130}
    plain = tmp_path / "plain"
    oracle_of(plain, {**base, "num_hidden_layers": 2})
    add_draft_module(plain)
    raw = json.loads((plain / "config.json").read_text())
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": BLOCKS}))
    write = fp8_weight("block", "weight_scale_inv")
    made = 0
    for path in plain.glob("*.safetensors"):
        values = load_file(path)
        stored: dict[str, Tensor] = {}
        for name, tensor in values.items():
            if stays_plain(name, tensor):
                stored[name] = tensor
                continue
            made += 1
            one = write(*tensor.shape, made)
            values[name] = one.value
            module = name.removesuffix(".weight")
            stored |= {f"{module}.{suffix}": part for suffix, part in one.tensors.items()}
        save_file(values, path)
        save_file({name: x.contiguous() for name, x in stored.items()}, packed / path.name)
    assert made == 2 * (5 + 3) + 8 * 3 * 2 - 8 * 3 + 3 + 5 + 3 + 8 * 3 - 3
    (prompt,) = prompts(1, 16)
    wanted = bits(ask(make_llm(plain), prompt, 24))
    for drafter in (None, MTP):
        assert bits(ask(make_llm(packed, speculative_config=drafter), prompt, 24)) == wanted


def test_what_a_token_takes_of_the_cache(pair) -> None:
    """Latent and turned key, in each of three layers, and in the draft module's."""
    (name, folder, _) = pair
    drafter = MTP if name == "deepseek_v3" else None
    plan = make_llm(folder, speculative_config=drafter).engine.plan
    assert plan.page_bytes == 64 * (40 + 12) * 4 * (4 if drafter else 3)
    assert plan.num_slots == 0


def counted(base: Base) -> tuple[int, int]:
    """Parameters of the target, and of its MTP module without what it shares; in neither the
    correction biases, which no optimiser trains."""
    build = BuildContext("cpu", torch.bfloat16, 1, 64)
    build.memory_budget.bounded = False
    with FakeTensorMode():
        model = Model(Config.read(base), build)
        draft = Draft(model, build)
        found = []
        for root in (model, draft):
            names = {n: p for n, p in root.named_parameters() if not n.endswith(".bias")}
            shared = {id(p) for p in model.parameters()} if root is draft else set()
            found.append(sum(p.numel() for p in names.values() if id(p) not in shared))
    return found[0], found[1]


def test_real_models_have_their_parameters() -> None:
    """671 B and 1.03 T; the module without its copies of embedding and head."""
    assert counted(REAL) == (671_026_404_352, 11_610_067_968)
    assert counted(KIMI_K2)[0] == 1_026_408_209_408


@pytest.mark.parametrize(
    ("base", "factor", "theta"), [(REAL, 1.873854, 10000.0), (KIMI_K2, 1.813260, 50000.0)]
)
def test_the_scale_of_scores_follows_the_context(base: Base, factor: float, theta: float) -> None:
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
def test_what_is_not_built_is_refused(changes: Base, message: str) -> None:
    read: Callable[[Base], Config] = Config.read
    with pytest.raises(CheckpointError, match=message):
        read({**DEEPSEEK, "vocab_size": VOCAB, **changes})


@pytest.mark.parametrize(
    "name",
    ["first_k_dense_replace", "n_group", "n_shared_experts", "routed_scaling_factor", "topk_group"],
)
def test_what_the_mixture_does_is_not_assumed(name: str) -> None:
    """transformers takes DeepSeek-V3's own value where a file lacks one, Kimi's code takes 1."""
    raw = {**DEEPSEEK, "vocab_size": VOCAB}
    del raw[name]
    with pytest.raises(CheckpointError, match=f"config.json has no {name}"):
        Config.read(raw)


def test_experts_that_cannot_be_chosen_are_refused() -> None:
    with pytest.raises(ConfigError, match="top_k=5 out of top_groups=2 of groups=4 of experts=8"):
        Config.read({**DEEPSEEK, "vocab_size": VOCAB, "num_experts_per_tok": 5})


@pytest.mark.parametrize(
    "pair", ["deepseek_v3", pytest.param("kimi_k2", marks=pytest.mark.slow)], indirect=True
)
def test_page_starved_runs_give_the_same_answers(pair) -> None:
    """Rows that are preempted and come back, since the cache holds less than two of them."""
    (_, folder, _) = pair
    alone = make_llm(folder)
    wanted = [bits(ask(alone, ids, 40)) for ids in prompts(4, 150)]
    few: LLM = make_llm(folder, num_gpu_blocks=6, speculative_config=NGRAM, max_model_len=256)
    given = [{"prompt_token_ids": ids} for ids in prompts(4, 150)]
    assert [bits(output) for output in few.generate(given, greedy(40))] == wanted


FORMATS = {
    "rotated": (1.0, RELATIVE),
    "int8_per_token_head": (0.5, 0.06),
    "fp8": (0.5, 0.3),
    "turboquant_4bit_nc": (0.5, 0.7),
}
"""The relative error of logits that a format of latents may bring to this share of positions: where
it sends a token to another of the random experts, much changes. A rotation alone brings none."""


def test_latents_in_every_format_against_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = Unquantized(torch.float32, HadamardRotation(99, K_BLOCK))
    monkeypatch.setitem(
        KV_FORMATS, "rotated", KVFormat("rotated", quantizer, quantizer, latent=quantizer)
    )
    oracle = oracle_of(tmp_path, {**DEEPSEEK, "kv_lora_rank": 32})
    for name, (share, most) in FORMATS.items():
        llm = make_llm(tmp_path, kv_cache_dtype=name)
        for ids in prompts(2, 300):
            assert logits_errors(llm, oracle, ids).quantile(share) < most, name
