"""Backends of a model's linear layers, and the build report about them."""

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.kernels.backends import load
from lockstep.kernels.exchange.group import DryGroup
from lockstep.kernels.formats.weights import Fp4Weight, IntWeight, QuantizedWeight, quantize_int
from lockstep.kernels.fp8_linear import fp8_linear
from lockstep.kernels.linear import linear, partition_length
from lockstep.kernels.linear.probe import Probed
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Embedding, Gemm, Head, Linear, PartialLinear, probe
from lockstep.layers.sharding import Columns
from lockstep.models.loader import finish
from lockstep.quantization import TensorInfo, WeightSink, fp8, read_weight_format
from lockstep.worker.memory_estimate import weight_bytes
from tests.layers.rounding import Rounding


@pytest.fixture
def probe_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Replace the probe by one that accepts 96 and 128 rows.

    Returns: (number of weights, split_k, allow_partials) of each call.
    """
    calls: list[tuple[int, int, bool]] = []

    def pretend(
        self: Probed,
        rows: Sequence[int],
        weights: Sequence[Tensor],
        split_k: int,
        allow_partials: bool,
    ) -> None:
        calls.append((len(weights), split_k, allow_partials))
        slow = "slower, 2 us against 1"
        self.verdicts |= {count: None if count > 64 else slow for count in rows}

    monkeypatch.setattr(Probed, "probe", pretend)
    return calls


def pretend_gpu(build: BuildContext, layer: nn.Module) -> None:
    """Mark a layer as built for a GPU."""
    product = next(part for part in layer.modules() if isinstance(part, Gemm))
    product.linear = build.probed.setdefault((*product.shape, build.dtype), Probed(linear, linear))
    build.choices[-1].backend = "triton"
    build.choices[-1].refused = {"cublas": "not asked"}


def test_probe_is_once_per_shape_and_reported(
    probe_calls: list[tuple[int, int, bool]],
) -> None:
    build = BuildContext("cpu", torch.bfloat16, 1, 1)
    model = nn.ModuleList()
    for layer in (Linear, Linear, PartialLinear):
        model.append(layer(build, 8, {"w": 16 if layer is Linear else 24}))
        pretend_gpu(build, model[-1])
    model.append(Head(build, 40, 8))
    pretend_gpu(build, model[-1])
    inexact = BuildContext("cpu", torch.bfloat16, 1, 1, exact=False, choices=build.choices)
    drafter = Linear(inexact, 8, {"w": 16})
    probe(build, nn.ModuleList([*model, drafter]), (64, 96, 128), 2048)
    # A head computes no prompt's tokens, so it has one call.
    assert probe_calls == [(2, 1, False), (2, 1, False), (1, 1, True), (1, 1, True), (1, 1, False)]
    for choice, rows in zip(build.choices, ["96, 128, 2048"] * 3 + ["96, 128"], strict=False):
        assert choice.backend == f"triton, cublas at {rows} rows"
        assert choice.refused == {"cublas": "at 64 rows slower, 2 us against 1"}
    assert build.choices[4].backend == "draft" and build.choices[4].refused == {}


def test_no_refusal_where_all_rows_are_supported(probe_calls: list[tuple[int, int, bool]]) -> None:
    build = BuildContext("cpu", torch.bfloat16, 1, 1)
    layer = Linear(build, 8, {"w": 16})
    pretend_gpu(build, layer)
    probe(build, layer, (96,), 2048)
    assert build.choices[0].backend == "triton, cublas at 96, 2048 rows"
    assert build.choices[0].refused == {} and len(probe_calls) == 2


def test_cpu_layers_are_not_probed(probe_calls: list[tuple[int, int, bool]]) -> None:
    build = BuildContext("cpu", torch.float32, 1, 1)
    layer = Linear(build, 8, {"w": 16})
    probe(build, layer, (96,), 2048)
    assert probe_calls == [] and build.choices[0].backend in ("reference", "cpu", "numba")
    assert build.choices[0].size == "16x8"


def test_part_of_a_fused_weight_is_its_rows() -> None:
    layer = Linear(
        BuildContext("cpu", torch.float32, 1, 1, exact=False), 8, {"a": 16, "b": 4, "c": 6}
    )
    x = torch.randn(3, 8)
    for part in range(3):
        layer.part(part).normal_()
    layer.part(0).fill_(torch.nan)
    actual = layer.from_part(1, x)
    full = layer(x, None)
    assert actual.shape == (3, 10)
    torch.testing.assert_close(actual, full[:, 16:])


@pytest.mark.parametrize("kind", [Linear, PartialLinear])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "draft"])
def test_bias_is_added_to_the_rounded_product(kind: type[Linear], exact: bool) -> None:
    """Product and bias are rounded to the dtype; a row's bits are independent of others."""
    torch.manual_seed(0)
    layer = kind(
        BuildContext("cpu", torch.bfloat16, 1, 1, exact=exact), 8, {"a": 16, "b": 4}, bias=True
    )
    for parameter in layer.parameters():
        parameter.data.normal_()
    x = torch.randn(33, 8).bfloat16()
    product = layer.gemms[0]
    assert layer.bias is not None and not product.allow_partials
    expected = (product(x).float() + layer.bias.float()).bfloat16()
    assert torch.equal(layer(x, None), expected)
    if exact:
        assert torch.equal(layer(x[5:6], None), expected[5:6])


def test_names_of_fused_weights() -> None:
    layer = Linear(
        BuildContext("cpu", torch.float32, 1, 1, exact=False), 8, {"a": 16, "b": 4}, bias=True
    )
    for part in range(2):
        layer.part(part).normal_()
    layer.bias.data.copy_(torch.arange(20))
    table = layer.weights()
    assert set(table) == {"a.weight", "b.weight", "a.bias", "b.bias"}
    assert torch.equal(table["b.weight"], layer.part(1))
    assert table["b.bias"].tolist() == [16, 17, 18, 19]
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer.from_part(1, x), layer(x, None)[:, 16:])
    plain = Linear(BuildContext("cpu", torch.float32, 1, 1), 8, {"a": 16, "b": 4})
    assert list(plain.weights()) == ["a.weight", "b.weight"]
    assert (
        PartialLinear(BuildContext("cpu", torch.float32, 1, 1), 8, {"w": 16})
        .gemms[0]
        .allow_partials
    )


def test_parts_are_the_outputs_of_each_fused_weight() -> None:
    """The layer is one GEMM, or one per weight whose outputs are not adjacent."""
    build = BuildContext("cpu", torch.float32, 1, 1)
    layer = Linear(build, 8, {"a": 16, "b": 24})
    weight = torch.randn(40, 8)
    x = torch.randn(5, 8)
    layer.gemms[0].weight.data.copy_(weight)
    expected = layer(x, None).split([16, 24], dim=1)
    assert all(map(torch.equal, layer.parts(x, None), expected))
    rows = [nn.Parameter(part, requires_grad=False) for part in weight.split([16, 24])]
    layer.gemms = nn.ModuleList(Gemm(build, 8, [(None, len(part))], existing=part) for part in rows)
    layer.gemm_begins = (0, 16, 40)
    actual = layer.parts(x, None)
    assert all(map(torch.equal, actual, layer(x, None).split([16, 24], dim=1)))
    assert all(part.is_contiguous() for part in actual)
    torch.testing.assert_close(torch.cat(actual, 1), torch.cat(expected, 1))


MAX_DEQUANTIZED = "lockstep.layers.linear.MAX_DEQUANTIZED"


@pytest.mark.parametrize("maximum", [10**6, 0])
@pytest.mark.parametrize("packed", ["a", "b", "c"])
def test_quantized_rows_equal_dequantized_in_one_or_several_gemms(
    packed: str, maximum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the fused weights is quantized. If none is small, each run of equal formats is a
    GEMM."""
    monkeypatch.setattr(MAX_DEQUANTIZED, maximum)
    sizes = {"a": 16, "b": 8, "c": 24}
    layer = Linear(
        BuildContext("cpu", torch.float32, 1, 1, weight_format=Rounding(of=packed)), 12, sizes
    )
    assert len(layer.gemms) == (1 if maximum else 3 if packed == "b" else 2)
    plain = Linear(BuildContext("cpu", torch.float32, 1, 1), 12, sizes)
    filled = layer.weights()
    for name, target in plain.weights().items():
        target.copy_(torch.randn(target.shape))
        WeightSink.of(filled[name]).fill(target.clone())
        if name == f"{packed}.weight":
            target.copy_(quantize_int(target, 4, 4).dequantize(torch.float32))
    for product in layer.gemms:
        product.finish()
        assert not product.quantized_parts
    x = torch.randn(5, 12)
    assert torch.equal(layer(x, None), plain(x, None))
    assert torch.equal(layer.from_part(1, x), plain.from_part(1, x))


def test_partial_fp8_blocks_fuse_into_one_gemm() -> None:
    """FP8 in blocks of 128 rows: projections of 256 and 72 rows, as in DeepSeek-V3's latents."""
    sizes = {"a": 256, "b": 72}
    weight_format = fp8.read({"weight_block_size": [128, 128]})
    layer = Linear(
        BuildContext("cpu", torch.float32, 1, 1, weight_format=weight_format), 256, sizes
    )
    plain = Linear(BuildContext("cpu", torch.float32, 1, 1), 256, sizes)
    filled = layer.weights()
    for name, target in plain.weights().items():
        codes = torch.randn(target.shape).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-len(target) // 128), 2) + 0.5
        WeightSink.of(filled[name]).fill(codes.clone())
        WeightSink.of(filled[f"{name}_scale_inv"]).fill(scales.clone())
        wide = scales.repeat_interleave(128, 0)[: len(target)].repeat_interleave(128, 1)
        target.copy_(codes.float() * wide)
    for product in layer.gemms:
        product.finish()
    x = torch.randn(5, 256)
    assert len(layer.gemms) == 1
    assert torch.equal(layer(x, None), plain(x, None))
    assert torch.equal(layer.from_part(1, x), plain.from_part(1, x))


def test_gpu_dequantizes_only_small_weights_fused_with_dense_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MAX_DEQUANTIZED, 16 * 12)
    load()
    build = BuildContext("cuda:0", torch.bfloat16, 1, 1, weight_format=Rounding(of="a"), arch=90)
    with FakeTensorMode():
        alone = Linear(build, 12, {"a": 8}).gemms
        fused = Linear(build, 12, {"a": 16, "b": 8}).gemms
        larger = Linear(build, 12, {"a": 17, "b": 8}).gemms
    assert alone[0].quantized is not None
    assert len(fused) == 1 and fused[0].quantized is None and fused[0].shape == (24, 12)
    message = [choice.storage_format for choice in build.choices]
    assert message[0] == "IntWeight(bits=4, group=4, scale_dtype=float32)"
    assert message[1] == f"{message[0]}, 16 rows, dequantized when loaded"
    assert [product.quantized is not None for product in larger] == [True, False]


@pytest.mark.parametrize("maximum", [10**6, 0], ids=["one GEMM", "two"])
def test_split_partials_leaves_those_of_the_last_gemm(
    maximum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MAX_DEQUANTIZED, maximum)
    build = BuildContext("cpu", torch.float32, 1, 1, weight_format=Rounding(of="a"))
    layer = Linear(build, 12, {"a": 16, "b": 8, "c": 24}, partials_from=1)
    allowed = [cast(Gemm, gemm).allow_partials for gemm in layer.gemms]
    assert allowed == ([False] if maximum else [False, True])
    for target in layer.weights().values():
        WeightSink.of(target).fill(torch.randn(WeightSink.of(target).shape))
    for gemm in layer.gemms:
        cast(Gemm, gemm).finish()
    x = torch.randn(5, 12)
    expected = layer(x, None).split([16, 32], dim=1)
    assert all(map(torch.equal, layer.split_partials(x, None), expected))
    if not maximum:
        partials = torch.randn(4, 5, 32)
        cast(Gemm, layer.gemms[1]).linear = lambda *arguments: partials
        first, last = layer.split_partials(x, None)
        assert torch.equal(first, expected[0]) and last is partials


def test_no_partials_of_a_last_gemm_that_has_other_weights_or_a_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MAX_DEQUANTIZED, 0)
    build = BuildContext("cpu", torch.float32, 1, 1, weight_format=Rounding(of="a"))
    sizes = {"a": 16, "b": 8, "c": 24}
    layers = (
        Linear(build, 12, sizes, partials_from=2),
        Linear(build, 12, sizes, partials_from=1, bias=True),
    )
    for layer in layers:
        assert len(layer.gemms) == 2
        assert not any(cast(Gemm, gemm).allow_partials for gemm in layer.gemms)


@pytest.mark.parametrize(("outputs", "split_k"), [(96, 8), (192, 1)])
def test_partitions_of_a_last_gemm_follow_from_its_outputs_on_all_ranks(
    outputs: int, split_k: int
) -> None:
    """A rank's share of the gates of Qwen3.6-27B, and of twice as many, has at most 128 outputs."""
    load()
    counts = []
    for size in (1, 2, 8):
        build = BuildContext(
            "cuda:0", torch.bfloat16, 1, 1, weight_format=Rounding(of="wide"), arch=90,
            group=DryGroup(size - 1, size),
        )  # fmt: skip
        sizes = {"wide": Columns.heads(16, 1024), "gates": Columns.heads(16, outputs // 16)}
        with FakeTensorMode():
            layer = Linear(build, 5120, sizes, partials_from=1)
        wide, gates = (cast(Gemm, gemm) for gemm in layer.gemms)
        assert gates.shape == (outputs // size, 5120) and gates.allow_partials
        counts.append((wide.split_k, gates.split_k))
    assert set(counts) == {(1, split_k)}


def finished(weight: QuantizedWeight) -> None:
    """Finish a Gemm that keeps this weight, as it is kept on a GPU."""
    weight.fill_dummy(torch.Generator().manual_seed(0))
    product = Gemm(BuildContext("cpu", torch.bfloat16, 1, 1), 128, [(None, 4)])
    product.weight = None
    product.quantized = weight
    product.prepack = None
    product.finish()


def test_launches_do_not_synchronize() -> None:
    """A captured step may be the first to launch a weight, and may read no value of it."""
    weight = Fp4Weight.empty(4, 128)
    finished(weight)
    weight.factors.fill_(float("nan"))
    assert "has_split_factors" in vars(weight)
    assert weight.has_split_factors and weight.rows(1, 3).has_split_factors
    integers = IntWeight.empty(4, 128)
    finished(integers)
    integers.scales.fill_(float("nan"))
    assert "max_scale" in vars(integers)
    assert 0 < integers.max_scale == integers.rows(1, 3).max_scale < 1


@pytest.fixture
def gguf_build() -> BuildContext:
    """Return the context of a model whose head and embedding are quantized, and stay so."""
    pytest.importorskip("numba")
    load()
    weight_format = read_weight_format({"quant_method": "gguf", "types": ["Q8_0"]})
    tensors = {
        name: {"weight": TensorInfo(f"{name}.weight", (48, 64), "Q8_0")}
        for name in ("lm_head", "embed_tokens")
    }
    return BuildContext(
        "cpu", torch.float32, 1, 1, weight_format=weight_format, tensors=tensors, prefixes=("",)
    )


def test_quantized_head_of_a_drafter_has_the_storage_of_the_target(
    gguf_build: BuildContext,
) -> None:
    head = Head(gguf_build, 48, 64)
    assert head.quantized is not None
    head.quantized.fill_dummy(torch.Generator().manual_seed(0))
    drafts = gguf_build.for_layer("draft")
    drafts.exact = False
    shared = Head(drafts, 48, 64, head)
    assert list(head.weights()) == ["lm_head.weight"] and not shared.weights()
    finish(head, shared)
    assert head.prepacked is not None and shared.prepacked is head.prepacked
    assert weight_bytes(head, shared) == weight_bytes(head)
    x = torch.randn(3, 64)
    assert torch.equal(shared(x), head(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_partitions_of_fp8_products_are_whole_blocks(dtype: torch.dtype) -> None:
    """A partition that ends within a block of 128 columns would add the block's rest twice."""
    load()
    weight_format = read_weight_format(None, "fp8", "fp8")
    build = BuildContext("cuda:0", dtype, 1, 1, weight_format=weight_format, arch=90)
    for k in (640, 2560, 5120, 17408):
        with FakeTensorMode():
            (product,) = Linear(build, k, {"a": 256}).gemms
        assert product.product is fp8_linear and product.split_k in (1, 2)
        assert product.split_k == 1 or partition_length(k, product.split_k) % 128 == 0


def test_head_of_a_drafter_has_the_prepacked_codes_of_the_target() -> None:
    """It would dequantize the whole weight for every draft. The budget has the prepacked bytes."""
    load()
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weight_format = read_weight_format(settings, None, "fp8")
    tensors = {
        "lm_head": {
            "weight": TensorInfo("lm_head.weight", (48, 64), "F8_E4M3"),
            "weight_scale_inv": TensorInfo("lm_head.weight_scale_inv", (1, 1), "F32"),
        }
    }
    build = BuildContext(
        "cpu", torch.float32, 1, 1, weight_format=weight_format, tensors=tensors, prefixes=("",)
    )
    head = Head(build, 48, 64)
    assert head.quantized is not None
    head.quantized.fill_dummy(torch.Generator().manual_seed(0))
    drafts = build.for_layer("draft")
    drafts.exact = False
    shared = Head(drafts, 48, 64, head)
    finish(head, shared)
    assert head.prepacked is not None and shared.prepacked is head.prepacked
    # Codes and scales of 128 columns, of which the weight has 64: 2 and 4 bytes per output.
    assert build.memory_budget.taken == weight_bytes(head, shared) == 48 * (128 * 2 + 4)
    x = torch.randn(3, 64)
    assert torch.equal(shared(x), head(x))


def test_tied_quantized_head_fills_the_embedding(gguf_build: BuildContext) -> None:
    """It loads the embedding's tensor, and keeps it quantized."""
    embedding = Embedding(gguf_build, 48, 64)
    head = Head(gguf_build, 48, 64, embedding=embedding)
    assert list(head.weights()) == list(embedding.weights()) == ["embed_tokens.weight"]
    assert head.quantized is not None
    head.quantized.fill_dummy(torch.Generator().manual_seed(0))
    values = head.quantized.dequantize(torch.float32)
    finish(nn.ModuleList([embedding, head]))
    assert head.prepacked is not None and head.quantized is head.weight is None
    assert torch.equal(embedding.weight, values)
