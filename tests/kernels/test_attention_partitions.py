"""The partition of paged attention changes no bit: rows, spans, parallel spans, warps, stages."""

import importlib

import pytest
import torch

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.formats.kv import KVFormat
from lockstep.kernels.formats.kv.cases import KERNEL_FORMATS
from tests.kernels.backends import INTERPRETED, Backend, backends, same_bits

TRITON = [param for param in backends() if param.values[0].name == INTERPRETED]
ROWS = ((0, 1), (1022, 3), (0, 0), (255, 2))
PARTITIONS = [(16, 1, 2, False, 4, 2), (16, 2, 2, True, 4, 2)]
"""Partitions besides the whole row in one span: (rows, span, parallel_spans, folds, warps,
stages)."""
GPU_PARTITIONS = [
    (16, 1, 5, False, 4, 3),
    (16, 2, 1, True, 4, 2),
    (16, 2, 2, False, 4, 2),
    (32, 1, 3, False, 4, 3),
    (32, 4, 2, True, 8, 2),
    (64, 2, 2, True, 4, 2),
    (64, 8, 1, True, 8, 2),
]
"""Further partitions, too many for the interpreter."""


def random_gates(q: torch.Tensor) -> torch.Tensor:
    """Return random projections whose output gates are those of q [T, H, D]: [T, 2 H D + 48]."""
    tokens, heads, dim = q.shape
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, 2 * heads * dim + 48, generator=generator).to(q.dtype)


SMALL = (3, 1, 16, 64)
REAL = (24, 4, 256, 64)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", TRITON)
def test_partitions_agree(backend: Backend, gated: bool) -> None:
    kernel = importlib.import_module("lockstep.kernels.attention.triton")
    layer = SMALL if backend.interpreted else REAL
    batch = paged(ROWS, *layer, backend.dtype, min_columns=1280 // layer[-1])
    arguments = backend.place(batch | {"gates": random_gates(batch["q"]) if gated else None})
    run = kernel.paged_attention_triton
    expected = run(**arguments, partition=kernel.Partition(16, 8, 1, True, 4, 2))
    assert not expected.isnan().any()
    assert same_bits(backend.run(paged_attention, arguments), expected)
    for sizes in PARTITIONS + ([] if backend.interpreted else GPU_PARTITIONS):
        assert same_bits(run(**arguments, partition=kernel.Partition(*sizes)), expected), sizes


HEADS = [(6, 1, 64, 64), (3, 1, 32, 64), (32, 8, 128, 64), (24, 4, 256, 64)]
PROMPTS = ((0, 600), (1022, 3), (0, 0), (255, 200))
FORMATS = pytest.mark.parametrize("format", KERNEL_FORMATS.values(), ids=list(KERNEL_FORMATS))


# By default one format with scales and the rotated one whose codes cross bytes.
DEFAULT_FORMATS = ("int8_per_token_head", "turboquant_3bit_nc")


@pytest.mark.default_cases("int8_per_token_head")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "format",
    [
        pytest.param(format, id=name, marks=() if name in DEFAULT_FORMATS else pytest.mark.slow)
        for name, format in KERNEL_FORMATS.items()
    ],
)
@pytest.mark.parametrize("backend", TRITON)
def test_partitions_of_quantized_caches_agree(backend: Backend, format: KVFormat) -> None:
    """With rotated values, the CTAs that combine leave the rotation to another kernel."""
    kernel = importlib.import_module("lockstep.kernels.attention.triton")
    run = kernel.paged_attention_triton
    rows = ((250, 9), (0, 0), (5, 3)) if backend.interpreted else PROMPTS
    first, *rest = [SMALL] if backend.interpreted else HEADS
    few_partitions = [(16, 1, 2, False, 4, 2), (16, 1, 1, True, 4, 2)]
    all_partitions = few_partitions + ([] if backend.interpreted else GPU_PARTITIONS)
    for layer, partitions in [
        (first, all_partitions),
        *((layer, all_partitions[-2:]) for layer in rest),
    ]:
        batch = paged(rows, *layer, backend.dtype, format=format)
        for gates in (random_gates(batch["q"]), None):
            arguments = backend.place(batch | {"gates": gates})
            expected = run(**arguments, partition=kernel.Partition(16, 8, 1, False, 4, 2))
            assert not expected.isnan().any()
            for sizes in partitions if gates is not None else partitions[-1:]:
                actual = run(**arguments, partition=kernel.Partition(*sizes))
                assert same_bits(actual, expected), (layer, sizes, gates is None)


@pytest.mark.gpu
@FORMATS
def test_long_prompt_is_deterministic(format: KVFormat) -> None:
    """Run 1,100 tokens repeatedly in the default partition."""
    kernel = importlib.import_module("lockstep.kernels.attention.triton")
    backend = Backend("triton", "cuda", torch.bfloat16)
    for layer in HEADS:
        batch = paged(((0, 1_100),), *layer, torch.bfloat16, format=format)
        arguments = backend.place(batch | {"gates": random_gates(batch["q"])})
        expected = kernel.paged_attention_triton(
            **arguments, partition=kernel.Partition(16, 8, 1, False, 4, 2)
        )
        for _ in range(3):
            assert same_bits(kernel.paged_attention_triton(**arguments), expected), layer


LONG = ((0, 70), (12, 130), (250, 9), (64, 300), (1000, 257), (0, 0), (5, 1), (0, 512))


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layer", [(24, 4, 256, 64), (32, 8, 128, 64), (5, 1, 128, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gluon_and_triton_agree(dtype: torch.dtype, layer: tuple[int, ...], gated: bool) -> None:
    """Compare two kernels that share only the definition: one to many splits, tiles and rows."""
    traits = dict(device="cuda", dtype=dtype, heads=layer[0], kv_heads=layer[1], head_dim=layer[2])
    if torch.cuda.get_device_capability()[0] != 9:  # wgmma is Hopper's
        assert paged_attention.explain(**traits)["hopper"]
        return
    assert paged_attention.choose(**traits) == "hopper"
    kernel = importlib.import_module("lockstep.kernels.attention.hopper")
    batch = paged(LONG, *layer, dtype)
    backend = Backend("triton", "cuda", dtype)
    arguments = backend.place(batch | {"gates": random_gates(batch["q"]) if gated else None})
    sizes = (arguments[name] for name in ("q", "k_cache", "v_cache", "query_len"))
    assert kernel.fits(*sizes)
    actual = kernel.paged_attention_hopper(**arguments)
    assert not actual.isnan().any()
    assert same_bits(actual, backend.run(paged_attention, arguments))


DECODING = ((0, 1), (1600, 4), (0, 0), (255, 2), (63, 4), (700, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layer", [(24, 4, 256, 64), (32, 8, 128, 64), (5, 1, 128, 64)], ids=str)
@FORMATS
def test_dequantizing_warps_and_triton_agree(
    format: KVFormat, layer: tuple[int, ...], gated: bool
) -> None:
    """Compare over quantized caches: whole and partial rows, one and both of the two consumer
    warpgroups."""
    quantizers = (format.k, format.v)
    traits = dict(device="cuda", dtype=torch.bfloat16, heads=layer[0], kv_heads=layer[1])
    traits |= dict(head_dim=layer[2], quantizers=quantizers)
    if torch.cuda.get_device_capability()[0] != 9:  # wgmma is Hopper's
        assert paged_attention.explain(**traits)["quantized_hopper"]
        return
    assert paged_attention.choose(**traits) == "quantized_hopper"
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_hopper")
    batch = paged(DECODING, *layer, torch.bfloat16, format=format)
    backend = Backend("triton", "cuda", torch.bfloat16)
    arguments = backend.place(batch | {"gates": random_gates(batch["q"]) if gated else None})
    expected = backend.run(paged_attention, arguments)
    assert not expected.isnan().any()
    run = kernel.paged_attention_quantized_hopper
    default = kernel.choose_shape(
        len(DECODING), 4 * layer[0] // layer[1], layer[1], layer[2], 7, 132
    )
    for ctas in (1, 2, 3, default.ctas_per_row):
        assert same_bits(run(**arguments, shape=default._replace(ctas_per_row=ctas)), expected), (
            ctas
        )
    assert same_bits(run(**arguments), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("layer", [(32, 8, 128, 64), (5, 1, 128, 64)], ids=str)
@FORMATS
def test_register_dequantization_and_triton_agree(
    format: KVFormat, layer: tuple[int, ...], tokens: int, gated: bool
) -> None:
    """Compare few rows over quantized caches: whole and partial rows."""
    if torch.cuda.get_device_capability()[0] != 9:  # the order within a group is free on Hopper
        return
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_decode_hopper")
    rows = tuple((start, min(count, tokens)) for start, count in DECODING)
    batch = paged(rows, *layer, torch.bfloat16, format=format)
    backend = Backend("triton", "cuda", torch.bfloat16)
    arguments = backend.place(batch | {"gates": random_gates(batch["q"]) if gated else None})
    expected = backend.run(paged_attention, arguments)
    count = tokens * layer[0] // layer[1]
    caches = (arguments["k_cache"], arguments["v_cache"])
    if not (format.k.mma_path and format.v.mma_path):
        assert not kernel.fits_decode(arguments["q"], *caches, count)
        return
    default = kernel.choose_division(len(rows), count, layer[1], 7, 132)
    for ctas in (1, 2, 3, default.ctas_per_row):
        division = default._replace(ctas_per_row=ctas)
        actual = kernel.paged_attention_quantized_decode(**arguments, division=division)
        assert same_bits(actual, expected), ctas
