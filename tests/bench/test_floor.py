"""Roofline floors follow from the model's tensors, and need no memory for them."""

import json
import pickle
import resource
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.bench.floor import prompt_floor, sketch, step_floor
from lockstep.layers.linear import Gemm, Head
from lockstep.spec import read
from lockstep.worker.device_rates import H200, rates_of
from lockstep.worker.roofline import Floor, Part, StepCosts, StepFloors, distinct_experts
from tests.bundled_model import make_engine
from tests.spec.blocks import make_block_model
from tests.tiny_model import CONFIG, DEEPSEEK, HYBRID_MOE, QWEN3, make_model

# The text part of Qwen3.6-27B's config.json.
LARGE_CONFIG = {
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": False,
}

# Qwen3-8B's config.json.
DENSE_CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

# The text part of Qwen3.6-35B-A3B's config.json.
MIXTURE_CONFIG = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), vocab_size=1000)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("large"), **LARGE_CONFIG)


MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def part(floor: Floor, name: str) -> Part:
    return next(p for p in floor.parts if p.name == name)


def test_bytes_by_hand(tiny: Path) -> None:
    """A hybrid of 3 Gated DeltaNet layers and one attention layer, tied head, K=1, 2 rows."""
    hidden = 48
    inner = 64
    vocab = 1000
    model = sketch(tiny, torch.bfloat16, read({**NGRAM, "num_speculative_tokens": 1}))
    floor = step_floor(model, rows=2, context=100).verify
    assert part(floor, "Head").bytes == 2 * vocab * hidden
    assert part(floor, "Head").flops == 2 * vocab * hidden * 4
    assert part(floor, "Embedding").bytes == 2 * hidden * 4
    assert part(floor, "GatedMLP").bytes == 4 * 2 * 3 * hidden * inner
    assert part(floor, "AddRMSNorm").bytes == (2 * 4 + 1) * 2 * hidden
    attention = hidden * 16 * (2 * 6 + 1 + 1) + 6 * 16 * hidden + 2 * 16
    lines_of_cos_and_sin = 4 * 2 * 2 * 4
    assert part(floor, "Attention").bytes == 2 * attention + lines_of_cos_and_sin
    channels = 2 * 2 * 16 + 4 * 16
    matrices = hidden * (channels + 4 * 16 + 4 + 4) + 4 * 16 * hidden
    other_weights = 2 * (channels * 4 + 16) + 4 * (4 + 4)
    assert part(floor, "GatedDeltaNet").bytes == 3 * (2 * matrices + other_weights)
    assert part(floor, "GatedDeltaNet").flops == 3 * 2 * matrices * 4
    assert part(floor, "KV read").bytes == 2 * 100 * 2 * 16 * 2
    assert part(floor, "KV written").bytes == 4 * 2 * 16 * 2
    window = 2 * (4 * (4 * 16 + 2 * 16 + 4) + channels * 2)
    assert part(floor, "state").bytes == 2 * 2 * 3 * (4 * 4 * 16 * 16 + window)
    assert floor.total.bytes == sum(p.bytes for p in floor.parts)


def test_draft_module_is_read_once_per_draft(tiny: Path) -> None:
    floors = []
    for k in (1, 3):
        model = sketch(tiny, torch.bfloat16, read({**MTP, "num_speculative_tokens": k}))
        floors.append(step_floor(model, rows=2, context=100).drafts)
    one, three = floors
    for name in ("GatedMLP", "Attention", "Head", "GatheredLinear", "KV read"):
        assert part(three, name).bytes == 3 * part(one, name).bytes > 0


def test_reads_per_step_of_draft_models_and_blocks(tiny: Path, tmp_path: Path) -> None:
    """A draft model is read K + 1 times, and DFlash's layers once for any K."""
    raw = json.loads((tiny / "config.json").read_text())
    make_block_model(tmp_path, raw["vocab_size"], raw["hidden_size"], [0, 1])
    folders = {"draft_model": str(tiny), "dflash": str(tmp_path)}
    for method, passes in (("draft_model", (2, 4)), ("dflash", (1, 1))):
        for k, count in zip((1, 3), passes, strict=True):
            options = {"method": method, "model": folders[method], "num_speculative_tokens": k}
            model = sketch(tiny, torch.bfloat16, read(options))
            head_read = part(step_floor(model, rows=2, context=100).drafts, "Head")
            assert model.draft is not None
            head = next(m for m in model.draft.modules() if isinstance(m, Head))
            assert head_read.bytes == count * head.stored.nbytes, (method, k)


def test_lookup_drafters_read_nothing(tiny: Path) -> None:
    floor = step_floor(sketch(tiny, torch.bfloat16, read(NGRAM)), rows=2, context=100)
    assert floor.drafts.ms == 0 and floor.ms == floor.verify.ms and floor.query_len == 4


@pytest.mark.default_cases("8")
@pytest.mark.parametrize(("rows", "ms"), [(1, 12.05), (8, 12.99), (64, 20.49)])
def test_known_floors_of_a_large_model(large: Path, rows: int, ms: float) -> None:
    """Roofline of Qwen3.6-27B in bf16 at context 4,096: 51.25 GB of weights, 151 MB of state."""
    floor = step_floor(sketch(large, torch.bfloat16, None), rows, 4096)
    assert floor.ms == pytest.approx(ms, abs=0.01)


def test_a_state_of_16_bits_is_half_of_the_bytes(large: Path) -> None:
    """48 layers of 48 heads have 128 x 128 states, read and written; windows keep their size."""
    wide, narrow = (
        step_floor(sketch(large, torch.bfloat16, None, state_dtype=state_dtype), 64, 4096)
        for state_dtype in (torch.float32, torch.bfloat16)
    )
    saved = part(wide.verify, "state").bytes - part(narrow.verify, "state").bytes
    assert saved == 2 * 64 * 48 * 48 * 128 * 128 * 2
    assert narrow.ms == pytest.approx(18.24, abs=0.01)


@pytest.mark.default_cases("8")
@pytest.mark.parametrize(("rows", "ms"), [(1, 3.66), (8, 4.64), (64, 12.51)])
def test_known_floors_of_a_dense_model(tmp_path: Path, rows: int, ms: float) -> None:
    """Qwen3-8B reads 15.1 GB of weights per step and has 147 KB of KV per token."""
    folder = make_model(tmp_path / "dense", QWEN3, **DENSE_CONFIG)
    floor = step_floor(sketch(folder, torch.bfloat16, None), rows, 4096)
    assert floor.ms == pytest.approx(ms, abs=0.01)


@pytest.mark.slow
def test_known_floors_of_a_mixture(tmp_path: Path) -> None:
    """Qwen3.6-35B-A3B at context 2,048: a token reads a tenth of 34.7 billion parameters."""
    folder = make_model(tmp_path / "mixture", HYBRID_MOE, **MIXTURE_CONFIG)
    model = sketch(folder, torch.bfloat16, read({**MTP, "num_speculative_tokens": 1}))
    assert sum(p.numel() for p in model.model.parameters()) == 34_660_610_688
    assert model.draft is not None
    shared = ("head", "embed.")
    own_parameters = (
        p.numel() for name, p in model.draft.named_parameters() if not name.startswith(shared)
    )
    assert sum(own_parameters) == 844_640_768
    model = replace(model, draft=None, drafts=0)
    floors = [step_floor(model, rows, 2048).ms for rows in (1, 8, 64)]
    assert floors == pytest.approx([1.41, 4.58, 16.45], abs=0.01)


def test_expected_number_of_read_experts(tmp_path: Path) -> None:
    """Tokens read 3 of 6 experts if there is one, and 5.6 if there are four; each uses 3."""
    assert [distinct_experts(6, 3, tokens) for tokens in (0, 1, 2, 4)] == [0, 3, 4.5, 5.625]
    assert distinct_experts(256, 8, 100000) == pytest.approx(256)
    folder = make_model(tmp_path / "tiny", HYBRID_MOE, vocab_size=1000)
    model = sketch(folder, torch.bfloat16, None)
    expert = 3 * 48 * 22
    other_weights = 48 * (6 + 1) + 3 * 48 * 14
    for rows, read_experts in ((1, 3.0), (4, 5.625)):
        mixture = part(step_floor(model, rows, 64).verify, "MoE")
        assert mixture.bytes == 4 * 2 * (expert * read_experts + other_weights)
        assert mixture.flops == 4 * 2 * (3 * expert + other_weights) * rows


@pytest.mark.slow
def test_drafts_and_prompt_of_a_large_model(large: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = sketch(large, torch.bfloat16, read(MTP))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    floor = step_floor(model, 1, 4096)
    assert part(floor.drafts, "Head").bytes == 3 * 2 * 32768 * 5120
    assert floor.drafts.ms == pytest.approx(0.83, abs=0.02)
    assert floor.ms == floor.verify.ms + floor.drafts.ms
    full = sketch(large, torch.bfloat16, read({**MTP, "draft_vocab_size": "full"}))
    assert step_floor(full, 1, 4096).drafts.ms == pytest.approx(2.37, abs=0.02)
    prompt = prompt_floor(model, 8192)
    assert prompt.ms == prompt.total.matrix_ms > prompt.total.memory_ms
    weights = sum(p.numel() for p in model.model.parameters()) - 2 * 248320 * 5120
    assert prompt.total.flops == pytest.approx(2 * weights * 8192, rel=1e-3)


def test_floor_is_the_larger_of_memory_and_compute() -> None:
    bound = Floor((Part("a", int(H200.memory)), Part("b", 0, int(3 * H200.matrix))))
    assert bound.ms == pytest.approx(3000.0)
    assert Floor((Part("a", int(H200.memory), 5),)).ms == pytest.approx(1000.0)


@pytest.mark.parametrize("config", [CONFIG, HYBRID_MOE, DEEPSEEK])
def test_the_floors_of_a_server_are_those_of_the_bench(tmp_path: Path, config: Any) -> None:
    """The server computes floors from pickled costs, for any rows, drafts and context."""
    model = sketch(make_model(tmp_path, config), torch.bfloat16, read(MTP))
    costs = pickle.loads(pickle.dumps(StepCosts.of(model.model, model.draft, model.passes)))
    floors = StepFloors(costs, H200)
    for rows, drafts, context in ((1, 0, 1), (3, 3, 500), (3, 3, 700), (7, 1, 0)):
        step = step_floor(replace(model, drafts=drafts), rows, context)
        seconds = floors.seconds(rows, drafts, rows * context)
        assert 1e3 * seconds == pytest.approx(step.ms, rel=1e-9)


def test_engine_reports_its_step_costs() -> None:
    """An engine reports the costs of its checkpoint's sketch, and the rates of this machine."""
    llm = make_engine("mtp")
    config = llm.engine.config
    model = sketch(llm.engine.plan.model_path, torch.float32, config.speculative_config)
    assert llm.engine.facts.costs.step(2, 3, 100) == step_floor(model, 2, 100)
    rates = rates_of("cpu")
    assert rates is not None
    assert 1e8 < rates.memory < 1e13 and rates.seconds(1e9, 1e30) == 1e9 / rates.memory


def test_device_without_memory_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "ones", full)
    assert rates_of("cpu") is None


def test_dtype_counts(tiny: Path) -> None:
    half, full = (sketch(tiny, t, None) for t in (torch.bfloat16, torch.float32))
    mlp = [part(step_floor(m, 1, 64).verify, "GatedMLP").bytes for m in (half, full)]
    assert mlp[1] == 2 * mlp[0] and CONFIG["num_hidden_layers"] == 4


@pytest.mark.default_cases("settings1")
@pytest.mark.parametrize(
    ("settings", "per_weight"), [({"sym": True}, 0.5156), ({"sym": False}, 0.5313)]
)
def test_quantized_weights_count_stored_bytes(
    tmp_path: Path, settings: dict[str, bool], per_weight: float
) -> None:
    """GPTQ int4 in groups of 128 at the dimensions of Qwen3.6-27B: 24.3e9 quantized weights."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, **settings}
    model = sketch(
        make_model(tmp_path, quantization_config=gptq, **LARGE_CONFIG), torch.bfloat16, None
    )
    linear_layers = [layer for layer in model.model.modules() if isinstance(layer, Gemm)]
    quantized = [layer for layer in linear_layers if layer.quantized_parts]
    num_weights = sum(prod(layer.shape) for layer in quantized)
    assert num_weights == pytest.approx(24.33e9, rel=1e-3)
    assert sum(layer.stored.nbytes for layer in quantized) / num_weights == pytest.approx(
        per_weight, abs=1e-4
    )
    assert step_floor(model, 1, 0).ms < 0.31 * 12.0


def test_latent_bytes_and_flops(tmp_path: Path) -> None:
    """Three layers have 5 heads, latents of 40 and rotary keys of 12; prompts read half of them."""
    folder = make_model(tmp_path / "model", DEEPSEEK)
    model = sketch(folder, torch.bfloat16, None)
    flops_per_key = 3 * 2 * 5 * (2 * 40 + 12)
    read = next(p for p in step_floor(model, 4, 1000).verify.parts if p.name == "KV read")
    assert read == Part("KV read", 4 * 1000 * 3 * 52 * 2, 4 * 1000 * flops_per_key)
    read = next(p for p in prompt_floor(model, 600).parts if p.name == "KV read")
    assert read.flops == 600 * 300 * flops_per_key
