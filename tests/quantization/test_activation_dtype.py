"""activation_dtype: which checkpoints may quantize activations, and whole models that do."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.errors import ConfigError
from lockstep.kernels import Op
from lockstep.kernels.fp8_linear import fp8_linear, quantize_add_rms_norm, quantize_silu_mul
from lockstep.kernels.linear import linear
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Gemm, Linear
from lockstep.layers.mlp import GatedMLP
from lockstep.layers.moe import MoE, Routing
from lockstep.layers.norm import AddRMSNorm
from lockstep.quantization import read_weight_format
from tests.models.random_checkpoint import MTP, build
from tests.quantization.cases import BLOCKS, FP8, NVFP4, compressed_settings, floats, ints, modelopt
from tests.quantization.disk import set_config
from tests.tiny_model import CONFIG, make_model

SIZES = {"hidden_size": 144, "intermediate_size": 300, "num_attention_heads": 2}
"""Two and three blocks of 128 columns, the last of them partial."""
QUESTIONS = [list(range(3, 90)), list(range(40, 60)), [7] * 33]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
EIGHT = {"num_bits": 8, "type": "float"}
MIXED = {"layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}}


def with_activations(settings: dict[str, Any], **activations: Any) -> dict[str, Any]:
    """Return settings of compressed-tensors whose group has these input_activations."""
    groups = settings["config_groups"]
    group = {**groups["group_0"], "input_activations": {**EIGHT, **activations}}
    return {**settings, "config_groups": {"group_0": group}}


CHANNEL = floats("channel")
ALLOWED = {
    "fp8 by blocks": BLOCKS,
    "fp8": FP8,
    "compressed-tensors, weights alone": CHANNEL,
    "compressed-tensors, dynamic": with_activations(CHANNEL, strategy="token", dynamic=True),
    "modelopt by channel": modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt by blocks": modelopt("FP8_PB_WO"),
    "modelopt mixed": modelopt(
        "MIXED_PRECISION",
        quantized_layers={**MIXED, "layers.0.mlp.down_proj": {"quant_algo": "FP8_PB_WO"}},
    ),
}
REFUSED = {
    "fp8, static": (
        {**FP8, "activation_scheme": "static"},
        r"quantization_config\.activation_scheme='static'",
    ),
    "compressed-tensors, static": (
        with_activations(CHANNEL, strategy="tensor", dynamic=False),
        r"group_0.*input_activations, whose scales are static",
    ),
    "compressed-tensors, static by default": (
        with_activations(CHANNEL, strategy="tensor"),
        r"group_0.*input_activations, whose scales are static",
    ),
    "modelopt, static": (modelopt("FP8"), "quant_algo='FP8', whose scales of activations"),
    "modelopt mixed, static": (
        modelopt(
            "MIXED_PRECISION",
            quantized_layers={**MIXED, "layers.0.mlp.down_proj": {"quant_algo": "FP8"}},
        ),
        "quant_algo='FP8'",
    ),
    "modelopt NVFP4": (modelopt("NVFP4"), "modelopt-NVFP4, which has no e4m3 weights"),
    "int4": (ints(), "compressed-tensors-pack-quantized, which has no e4m3 weights"),
    "nvfp4": (NVFP4, "nvfp4-pack-quantized, which has no e4m3 weights"),
    "int8": (
        compressed_settings("int-quantized", num_bits=8, type="int", strategy="channel"),
        "int-quantized, which has no e4m3 weights",
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
        "which has no e4m3 weights",
    ),
    "gguf": ({"quant_method": "gguf"}, "gguf, which has no e4m3 weights"),
    "plain": (None, "plain weights"),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_dynamic_e4m3_checkpoints_may_quantize_activations(name: str) -> None:
    for activations in ("auto", "fp8"):
        weight_format = read_weight_format(ALLOWED[name], None, activations)
        assert weight_format is not None
        quantizes = activations == "fp8"
        assert weight_format.quantizes_activations == quantizes
        is_noted = any("activations are not rounded" in note for note in weight_format.notes)
        assert not (is_noted and quantizes)


@pytest.mark.parametrize("name", REFUSED)
def test_other_checkpoints_are_refused_by_name(name: str) -> None:
    settings, why = REFUSED[name]
    read_weight_format(settings)
    with pytest.raises(ConfigError, match=why) as caught:
        read_weight_format(settings, None, "fp8")
    assert "activation_dtype='fp8' is not allowed with" in str(caught.value)
    assert "quantization='fp8'" in str(caught.value)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_rounded_integers_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="which has no e4m3 weights"):
        read_weight_format(None, method, "fp8")


def context(activations: str, **settings: Any) -> BuildContext:
    """Return a build of dummy weights with a scale per 128 x 128 block."""
    weight_format = read_weight_format(BLOCKS, None, activations)
    return BuildContext("cpu", torch.float32, 1, 1, weight_format=weight_format, **settings)


def products(layer: Linear) -> list[str]:
    """Return the op of each GEMM of a layer."""
    return [gemm.product.name for gemm in layer.gemms if isinstance(gemm, Gemm)]


def test_only_quantized_layers_of_the_target_quantize_activations() -> None:
    """A plain layer, a layer of a drafter, and small quantized weights next to plain ones."""
    build = context("fp8")
    assert products(Linear(build, 256, {"q_proj": 128})) == [fp8_linear.name]
    assert products(Linear(build, 256, {"gate": 128})) == [linear.name]
    both = Linear(build, 256, {"q_proj": 128, "gate": 16})
    assert products(both) == [fp8_linear.name, linear.name]
    joined = Linear(context("auto"), 256, {"q_proj": 128, "gate": 16})
    assert products(joined) == [linear.name]
    assert products(Linear(context("fp8", exact=False), 256, {"q_proj": 128})) == [linear.name]


def test_quantized_experts_are_refused_by_name() -> None:
    routing = Routing(experts=4, top_k=2)
    with pytest.raises(ConfigError, match=r"not allowed with .*experts\.0\..*experts multiply"):
        MoE(context("fp8"), 128, 128, routing)
    MoE(context("auto"), 128, 128, routing)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a hybrid's folder whose settings ask for e4m3 by blocks of 128 x 128."""
    path = make_model(tmp_path_factory.mktemp("blocks"), CONFIG, **SIZES)
    set_config(path, quantization_config=BLOCKS)
    return path


def answers(folder: Path, batch: bool = True, **settings: Any) -> list[list[Any]]:
    """Return the tokens and bits of log-probabilities of QUESTIONS, in one batch or one by one."""
    common = {"load_format": "dummy", "activation_dtype": "fp8", "max_num_seqs": 3, "seed": 5}
    llm = build(folder, **{**common, **settings})
    prompts = [{"prompt_token_ids": ids} for ids in QUESTIONS]
    groups = [prompts] if batch else [[prompt] for prompt in prompts]
    outputs = [out for group in groups for out in llm.generate(group, PARAMS)]
    return [bits(llm, out.outputs[0]) for out in outputs]


def bits(llm: LLM, answer: Any) -> list[Any]:
    """Return tokens and the bits of their log-probabilities."""
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, entry[token].logprob.hex()) for token, entry in pairs]


def test_answers_do_not_depend_on_drafts_chunks_or_batch(folder: Path) -> None:
    plain = answers(folder, batch=False)
    assert answers(folder) == plain
    assert answers(folder, speculative_config=MTP) == plain
    chunked = dict(max_num_batched_tokens=64, enable_prefix_caching=False)
    assert answers(folder, **chunked) == plain
    assert answers(folder, batch=False, speculative_config=MTP, dtype="float32", **chunked) == plain
    assert answers(folder, activation_dtype="auto") != plain


def test_producers_that_quantize_change_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let norms and activations quantize on the CPU too, which products on a GPU alone ask for."""
    kernels = "add_rms_norm=reference,silu_mul=reference"  # the ops whose bits the fused ones have
    plain = answers(folder, kernels=kernels)
    calls = Counter[str]()

    def reads_codes(gemm: Gemm) -> bool:
        return gemm.product is fp8_linear

    def counting(op: Op) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls[op.name] += 1
            return op.reference(*args, **options)

        return call

    monkeypatch.setattr(Gemm, "takes_codes", property(reads_codes))
    for op in (quantize_silu_mul, quantize_add_rms_norm):
        backend = op.backends["reference"]
        monkeypatch.setitem(op.backends, "reference", backend._replace(run=counting(op)))
    assert answers(folder, kernels=kernels) == plain
    mlps = calls[quantize_silu_mul.name]
    # The first layer's first norm has nothing to add; the last norm's reader is no linear layer.
    layers = CONFIG["num_hidden_layers"]
    assert mlps > 0 and calls[quantize_add_rms_norm.name] * layers == mlps * (2 * layers - 1)


def test_producers_that_quantize_choose_no_other_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that is chosen is explained and examined, so it must be one that runs."""
    build = context("fp8")
    monkeypatch.setattr(Gemm, "takes_codes", property(lambda gemm: gemm.product is fp8_linear))
    mlp = GatedMLP(build, 256, 384)
    AddRMSNorm(build, 256, 1e-6, reader=mlp.first_linear)
    ops = {choice.op for choice in build.choices}
    assert ops == {"rms_norm", fp8_linear.name, quantize_silu_mul.name, quantize_add_rms_norm.name}


def test_layers_that_other_readers_need_quantize_themselves() -> None:
    """Layers with an adapter, a plain part or a gathered input; and a layer of 16-bit products."""
    build = context("fp8")
    assert not Linear(build, 256, {"q_proj": 128}).takes_codes  # a CPU quantizes in its product
    on_gpu = Linear(build, 256, {"q_proj": 128, "gate": 16})
    on_gpu.gemms[0].prepack = None
    assert on_gpu.takes_codes and on_gpu.reads_plain
    on_gpu.add_adapters = lambda y, x, ctx: y
    assert not on_gpu.takes_codes
    alone = Linear(build, 256, {"q_proj": 128})
    alone.gemms[0].prepack = None
    assert alone.takes_codes and not alone.reads_plain
    alone.gather_inputs = lambda x: x
    assert not alone.takes_codes
    usual = Linear(context("auto"), 256, {"q_proj": 128})
    usual.gemms[0].prepack = None
    assert not usual.takes_codes and usual.reads_plain


def test_numerics_name_the_activations(folder: Path) -> None:
    settings: dict[str, Any] = {"load_format": "dummy"}
    served = build(folder, activation_dtype="fp8", **settings).engine
    usual = build(folder, **settings).engine
    name = "/weights-float32+fp8-128x128/"
    assert f"{name}activations-fp8/kv-" in served.numerics and f"{name}kv-" in usual.numerics
    assert served.plan.fingerprint != usual.plan.fingerprint
    by_op = {choice["op"] for choice in served.explain()["layers"]}
    assert fp8_linear.name in by_op
