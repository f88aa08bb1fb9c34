"""GGUF tensors as device weights: no value changes, and none needs many more bytes."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.errors import CheckpointError
from lockstep.kernels.backends import load
from lockstep.kernels.formats.weights import GgufWeight, IntWeight, QuantizedWeight
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear
from lockstep.quantization import CheckpointLinear, TensorInfo, WeightFormat, read_weight_format
from lockstep.quantization.gguf_blocks import LAYOUTS, dequantize
from lockstep.quantization.weight_sink import FLOAT_DTYPES, FusedExpertSink, WeightSink
from tests.quantization.test_gguf_blocks import SCALE_OFFSETS, valid_blocks

BYTES = {
    "Q4_0": 0.5625, "Q4_1": 0.625, "Q5_0": 0.6875, "Q5_1": 0.75, "Q8_0": 1.0625,
    "Q2_K": 0.390625, "Q3_K": 0.4453125, "Q4_K": 0.578125, "Q5_K": 0.703125, "Q6_K": 0.8203125,
    "IQ4_NL": 0.5625, "IQ4_XS": 0.5390625, "MXFP4": 0.5625,
}  # fmt: skip
"""Bytes per weight on the device, for columns that are a multiple of 256."""


def gguf(**settings: object) -> WeightFormat:
    """Return the weight format of a GGUF file."""
    result = read_weight_format({"quant_method": "gguf", **settings})
    assert result is not None
    return result


def module(kind: str, n: int, k: int) -> CheckpointLinear:
    """Return a linear layer whose weight has this type."""
    info = TensorInfo("blk.0.ffn_up.weight", (n, k), kind)
    return CheckpointLinear(
        "layers.0.mlp.up_proj", ("model.layers.0.mlp.up_proj",), n, k, {"weight": info}
    )


def loaded(kind: str, blocks: Tensor, k: int) -> QuantizedWeight:
    """Return the weight that the blocks fill."""
    weight_format = gguf()
    mine = module(kind, len(blocks), k)
    layout = weight_format.layout(mine)
    assert layout is not None
    weight = layout.empty(len(blocks), k, "cpu")
    slot = weight_format.sinks(mine, weight)["weight"]
    assert slot.mismatch(blocks) is None
    slot.fill(blocks)
    return weight


@pytest.mark.parametrize("kind", LAYOUTS)
def test_device_weight_equals_file_values(kind: str) -> None:
    blocks = valid_blocks(kind, rows=19, columns=768)
    weight = loaded(kind, blocks, 768)
    values = dequantize(kind, blocks)
    assert values.isfinite().all() and values.std() > 0
    assert torch.equal(weight.dequantize(torch.float32).view(torch.int32), values.view(torch.int32))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weight.dequantize(dtype), values.to(dtype))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_gguf_bytes_on_device(kind: str) -> None:
    mine = module(kind, 64, 1024)
    layout = gguf().layout(mine)
    assert layout is not None
    size = layout.empty(64, 1024, "meta").nbytes / (64 * 1024)
    assert size == BYTES[kind]
    stored = LAYOUTS[kind].nbytes / LAYOUTS[kind].columns
    assert stored <= size <= 1.2 * stored
    expected = IntWeight if kind in ("Q4_0", "Q8_0") else GgufWeight
    assert layout.kind is expected and kind in str(layout) + "Q4_0Q8_0"


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "Q4_K"])
def test_gguf_experts_are_loaded_together(kind: str) -> None:
    """Three experts of 128 rows fill one weight, as in a mixture's layer."""
    (n, k) = (3 * 128, 256)
    blocks = valid_blocks(kind, n, k)
    weight_format = gguf()
    parts = [module(kind, 128, k) for _ in range(3)]
    layout = weight_format.layout(parts[0])
    assert layout is not None
    weight = layout.empty(n, k, "cpu")
    full = weight_format.sinks(module(kind, n, k), weight)["weight"]
    slots = [
        weight_format.sinks(part, weight.rows(128 * i, 128 * i + 128))["weight"]
        for i, part in enumerate(parts)
    ]
    stacked = FusedExpertSink.sinks(full, slots)
    assert stacked[0] is not slots[0]
    for slot, mine in zip(stacked, blocks.split(128), strict=True):
        slot.fill(mine)
    assert torch.equal(weight.dequantize(torch.float32), dequantize(kind, blocks))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_gguf_layers_are_dense_only_on_cpu(device: str) -> None:
    """A fused layer of two types: on a GPU a weight for each, on a CPU one dense weight."""
    tensors = {
        f"attn.{name}_proj": {"weight": TensorInfo(name, (32, 256), kind)}
        for name, kind in (("q", "Q4_K"), ("k", "Q4_K"), ("v", "Q6_K"))
    }
    build = BuildContext(
        device, torch.bfloat16, 1, 1, arch=90, weight_format=gguf(), tensors=tensors
    )
    load()
    with FakeTensorMode():
        layer = Linear(build.for_layer("attn"), 256, {f"{name}_proj": 32 for name in "qkv"})
    packed = [gemm.quantized for gemm in layer.gemms]
    if device == "cpu":
        assert packed == [None]
        assert {WeightSink.of(target).dtypes for target in layer.weights().values()} == {
            FLOAT_DTYPES
        }
    else:
        assert [type(weight) for weight in packed] == [GgufWeight] * 2
        assert [product.shape for product in layer.gemms] == [(64, 256), (32, 256)]


def test_mxfp4_extreme_exponents() -> None:
    blocks = valid_blocks("MXFP4", rows=8, columns=32)
    blocks[:, 0] = torch.tensor([0, 1, 2, 3, 250, 251, 252, 255])
    values = dequantize("MXFP4", blocks)
    assert torch.equal(loaded("MXFP4", blocks, 32).dequantize(torch.float32), values)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_dense_gguf_tensors_stay_dense(kind: str) -> None:
    assert gguf().layout(module(kind, 8, 256)) is None
    assert gguf().layout(CheckpointLinear("layers.0.x", ("x",), 8, 256, None)) is None


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "MXFP4"])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_non_finite_gguf_scales_are_refused(kind: str, number: float) -> None:
    blocks = valid_blocks(kind, rows=4, columns=256)
    size = LAYOUTS[kind].nbytes
    at = SCALE_OFFSETS.get(kind, (0,))[-1]
    blocks.view(-1, size)[2, at : at + 2] = torch.tensor([number]).half().view(torch.uint8)
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj.weight has scales.*NaN"):
        loaded(kind, blocks, 256)


def test_unsupported_gguf_types_are_named() -> None:
    with pytest.raises(CheckpointError, match="IQ3_S.*allowed.*Q4_K"):
        gguf().layout(module("IQ3_S", 8, 256))
    with pytest.raises(CheckpointError, match="quantization_config.types='IQ3_S'"):
        gguf(types=["Q4_K", "IQ3_S"])
    assert gguf(types=["Q6_K", "Q4_K", "Q6_K"]).name == "gguf-Q4_K-Q6_K"
    assert gguf().name == "gguf"


def test_gguf_row_length_mismatch() -> None:
    weight_format = gguf()
    mine = module("Q4_K", 4, 512)
    layout = weight_format.layout(mine)
    assert layout is not None
    slot = weight_format.sinks(mine, layout.empty(4, 512, "cpu"))["weight"]
    assert "shape (4, 144)" in str(slot.mismatch(torch.zeros(4, 144, dtype=torch.uint8)))
    assert "expected uint8" in str(slot.mismatch(torch.zeros(4, 288)))
