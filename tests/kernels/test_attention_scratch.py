"""Prompts over quantized caches on Hopper, whose pages are dequantized into a scratch buffer in
groups."""

import importlib

import pytest
import torch

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.formats.kv import KVFormat, dequantize, rotate_back
from lockstep.kernels.formats.kv.cases import KERNEL_FORMATS
from lockstep.kernels.formats.kv.launch import kv_operand
from tests.kernels.backends import Backend, same_bits
from tests.kernels.test_attention_partitions import random_gates

pytest.importorskip("triton")
LONG = ((0, 70), (0, 0), (300, 130), (5, 1))
FORMAT = pytest.mark.parametrize("format", KERNEL_FORMATS.values(), ids=list(KERNEL_FORMATS))


@FORMAT
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_scratch_equals_dequantized_pages(format: KVFormat) -> None:
    """Check every page that a row's keys reach, for one KV head of two."""
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_prefill_hopper")
    batch = paged(((0, 70), (0, 0), (60, 9)), 4, 2, 32, 64, torch.float16, format=format)
    row_arguments = (batch["page_table"], batch["cu_seqlens"], batch["starts"])
    for side in (batch["k_cache"], batch["v_cache"]):
        expected = dequantize(side, torch.float16)
        operand = kv_operand(side, torch.float16, kernel.compile_target(torch.device("cpu")))
        actual = kernel._dequantize_pages(operand, batch["q"], *row_arguments, 1, 1, False)
        actual = actual.unflatten(0, batch["page_table"].shape)
        for s, keys in enumerate((70, 0, 69)):
            page_keys = expected[batch["page_table"][s].long(), :, 1].flatten(0, 1)[:keys]
            assert same_bits(actual[s, :, :, 0].flatten(0, 1)[:keys], page_keys)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("gated", [False, True])
def test_rotation_is_undone_before_rounding(gated: bool) -> None:
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_prefill_hopper")
    format = KERNEL_FORMATS["turboquant_4bit_nc"]
    actual = torch.randn(21, 2, 128, generator=torch.Generator().manual_seed(0))
    cache = paged(((0, 1),), 2, 2, 128, 64, torch.float16, format=format)["v_cache"]
    side = kv_operand(cache, torch.float16, kernel.compile_target(torch.device("cpu")))
    gates = random_gates(actual.half()) if gated else None
    out = kernel.finish_rotated(actual, gates, side, torch.empty(21, 2, 128, dtype=torch.float16))
    expected = rotate_back(actual, cache).half()
    if gates is not None:
        expected = importlib.import_module("lockstep.kernels.attention").apply_gates(
            expected, gates
        )
    assert same_bits(out, expected)


@pytest.mark.gpu
@FORMAT
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layer", [(24, 4, 256, 64), (32, 8, 128, 64)], ids=str)
def test_scratch_and_triton_agree(
    format: KVFormat, layer: tuple[int, ...], gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare groups of all rows, of one row, of some KV heads, and of one KV head."""
    if torch.cuda.get_device_capability()[0] != 9:  # hopper.py's
        return
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_prefill_hopper")
    batch = paged(LONG, *layer, torch.bfloat16, format=format)
    backend = Backend("triton", "cuda", torch.bfloat16)
    arguments = backend.place(batch | {"gates": random_gates(batch["q"]) if gated else None})
    expected = backend.run(paged_attention, arguments)
    assert not expected.isnan().any()
    head_bytes = 2 * batch["page_table"].shape[1] * 64 * layer[2] * 2
    for scratch_bytes in (kernel.SCRATCH_BYTES, layer[1] * head_bytes, 3 * head_bytes, 0):
        monkeypatch.setattr(kernel, "SCRATCH_BYTES", scratch_bytes)
        assert same_bits(kernel.paged_attention_quantized_prefill(**arguments), expected), (
            scratch_bytes
        )
