"""Every weight format as ranks load it: a rank's slice of a quantized weight has its rows'
values."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.layers.sharding import QuantizedShard
from lockstep.quantization import CheckpointLinear, WeightFormat, read_weight_format
from lockstep.quantization.gguf_blocks import LAYOUTS, dequantize
from tests.quantization.cases import CASES
from tests.quantization.disk import awq, gptq, random_codes
from tests.quantization.test_gguf_blocks import valid_blocks
from tests.quantization.test_gguf_format import module as gguf_module
from tests.quantization.test_stored import module_of
from tests.quantization.test_vectors import module as int_module

K = 256


def ranges_of(sizes: tuple[int, int], rank: int) -> tuple[tuple[int, int], ...]:
    """Return the half of each of two parts that a rank of two owns."""
    offsets = (0, sizes[0])
    return tuple(
        (offset + rank * size // 2, offset + (rank + 1) * size // 2)
        for offset, size in zip(offsets, sizes, strict=True)
    )


def load(
    weight_format: WeightFormat, module: CheckpointLinear, tensors: dict[str, Tensor]
) -> Tensor:
    """Load the module's columns of the checkpoint's tensors; return them dequantized."""
    layout = weight_format.layout(module)
    assert layout is not None
    weight = layout.empty(module.outputs, module.inputs, "cpu")
    for suffix, sink in weight_format.sinks(module, weight).items():
        sink = replace(sink, ranges=module.ranges)
        assert sink.mismatch(tensors[suffix]) is None, suffix
        sink.fill(sink.narrow(tensors[suffix]))
    return weight.dequantize(torch.float32)


def check(
    weight_format: WeightFormat,
    module: CheckpointLinear,
    tensors: dict[str, Tensor],
    sizes: tuple[int, int],
) -> None:
    """Compare the slices of both ranks with the rows of the whole weight, bit for bit."""
    full = load(weight_format, module, tensors)
    covered = torch.zeros(len(full), dtype=torch.bool)
    for rank in range(2):
        ranges = ranges_of(sizes, rank)
        part = replace(module, outputs=sum(sizes) // 2, ranges=ranges)
        rows = torch.cat([torch.arange(*pair) for pair in ranges])
        assert torch.equal(load(weight_format, part, tensors), full[rows])
        covered[rows] = True
    assert covered.all()


def read(method: str, **settings: Any) -> WeightFormat:
    """Return the weight format of these settings."""
    weight_format = read_weight_format({"quant_method": method, **settings})
    assert weight_format is not None
    return weight_format


SIZES = pytest.mark.parametrize("sizes", [(512, 256), (96, 48)], ids=["blocks", "within blocks"])


@pytest.mark.covering(strength=1)
@SIZES
@pytest.mark.parametrize("name", CASES)
def test_stored_formats(name: str, sizes: tuple[int, int]) -> None:
    case = CASES[name]
    weight_format = read_weight_format(case.settings)
    assert weight_format is not None
    tensors = case.write(sum(sizes), K, 5).tensors
    check(weight_format, module_of(tensors, sum(sizes), K), tensors, sizes)


@SIZES
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["gptq", "gptq by activation", "gptq 8 bits", "awq", "auto-round"])
def test_integers(kind: str, symmetric: bool, sizes: tuple[int, int]) -> None:
    n = sum(sizes)
    bits = 8 if kind == "gptq 8 bits" else 4
    codes = random_codes(n, K, bits, 32, sym=symmetric, shuffle=kind == "gptq by activation")
    common = {"bits": bits, "group_size": 32}
    if kind == "awq":
        weight_format = read("awq", **common, zero_point=not symmetric)
    elif kind == "auto-round":
        weight_format = read("auto-round", **common, sym=symmetric)
    else:
        ordered = kind == "gptq by activation"
        weight_format = read("gptq", **common, sym=symmetric, desc_act=ordered)
    tensors = awq(codes) if kind == "awq" else gptq(codes)
    check(weight_format, int_module(n, K, tensors), tensors, sizes)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_gguf(kind: str) -> None:
    sizes = (64, 32)
    blocks = valid_blocks(kind, rows=sum(sizes), columns=768)
    check(read("gguf"), gguf_module(kind, sum(sizes), 768), {"weight": blocks}, sizes)
    assert dequantize(kind, blocks).isfinite().all()


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_rounding_while_loading(method: str) -> None:
    weight_format = read_weight_format(None, method)
    assert weight_format is not None
    tensors = {"weight": torch.randn(96, K)}
    check(weight_format, module_of(tensors, 96, K), tensors, (64, 32))


def check_dummy(weight_format: WeightFormat, module: CheckpointLinear) -> None:
    """Compare the dummy weights of both ranks with the rows of a whole one, bit for bit."""
    sizes = (module.outputs * 2 // 3, module.outputs // 3)
    layout = weight_format.layout(module)
    assert layout is not None
    full = layout.empty(module.outputs, module.inputs, "cpu")
    full.fill_dummy(torch.Generator().manual_seed(3))
    values = full.dequantize(torch.float32)
    for rank in range(2):
        ranges = ranges_of(sizes, rank)
        part = replace(module, outputs=sum(sizes) // 2, whole_outputs=module.outputs, ranges=ranges)
        local = weight_format.layout(part)
        assert local is not None and weight_format.layout(part.whole) == layout
        weight = local.empty(part.outputs, part.inputs, "cpu")
        shard = QuantizedShard(layout, ranges, module.outputs)
        shard.fill_dummy(weight, torch.Generator().manual_seed(3))
        rows = torch.cat([torch.arange(*pair) for pair in ranges])
        assert torch.equal(weight.dequantize(torch.float32), values[rows])


@pytest.mark.parametrize("n", [768, 144], ids=["blocks", "within blocks"])
@pytest.mark.parametrize("name", CASES)
def test_dummies_of_stored_formats(name: str, n: int) -> None:
    weight_format = read_weight_format(CASES[name].settings)
    assert weight_format is not None
    check_dummy(weight_format, replace(module_of({}, n, K), tensors=None))


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_dummies_of_rounded_weights(method: str) -> None:
    weight_format = read_weight_format(None, method)
    assert weight_format is not None
    check_dummy(weight_format, replace(module_of({}, 144, K), tensors=None))


@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_dummies_of_integers(bits: int, desc_act: bool) -> None:
    settings = {"bits": bits, "group_size": 32, "sym": False}
    check_dummy(
        read("gptq", **settings, desc_act=desc_act),
        replace(module_of({}, 144, K), tensors=None),
    )
    check_dummy(read("auto-round", **settings), replace(module_of({}, 144, K), tensors=None))


def test_dummies_of_awq() -> None:
    module = replace(module_of({}, 144, K), tensors=None)
    check_dummy(read("awq", bits=4, group_size=32, zero_point=True), module)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_dummies_of_gguf(kind: str) -> None:
    check_dummy(read("gguf"), gguf_module(kind, 96, 768))
