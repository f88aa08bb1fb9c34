"""Prompts over packed caches on Hopper: pages unpacked into a scratch, rows and heads in turns."""

import importlib

import pytest
import torch

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.formats.kv import KVFormat, turned_back, unpacked
from lockstep.kernels.formats.kv.cases import NAMED
from lockstep.kernels.formats.kv.launch import opened
from tests.kernels.backends import Backend, same_bits
from tests.kernels.test_attention_partitions import gates_like

pytest.importorskip("triton")
LONG = ((0, 70), (0, 0), (300, 130), (5, 1))
FORMAT = pytest.mark.parametrize("format", NAMED.values(), ids=list(NAMED))


@FORMAT
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_scratch_holds_what_pages_unpack_to(format: KVFormat) -> None:
    """Of one KV head of two, every page that a row's keys reach."""
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_prefill_hopper")
    batch = paged(((0, 70), (0, 0), (60, 9)), 4, 2, 32, 64, torch.float16, format=format)
    places = (batch["page_table"], batch["cu_seqlens"], batch["starts"])
    for side in (batch["k_cache"], batch["v_cache"]):
        wanted = unpacked(side, torch.float16)
        given = opened(side, torch.float16, kernel.compile_target(torch.device("cpu")))
        found = kernel._unpacked(given, batch["q"], *places, 1, 1, False)
        found = found.unflatten(0, batch["page_table"].shape)
        for s, keys in enumerate((70, 0, 69)):
            own = wanted[batch["page_table"][s].long(), :, 1].flatten(0, 1)[:keys]
            assert same_bits(found[s, :, :, 0].flatten(0, 1)[:keys], own)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("gated", [False, True])
def test_sums_are_rotated_back_before_they_are_rounded(gated: bool) -> None:
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_prefill_hopper")
    format = NAMED["turboquant_4bit_nc"]
    found = torch.randn(21, 2, 128, generator=torch.Generator().manual_seed(0))
    cache = paged(((0, 1),), 2, 2, 128, 64, torch.float16, format=format)["v_cache"]
    side = opened(cache, torch.float16, kernel.compile_target(torch.device("cpu")))
    gates = gates_like(found.half()) if gated else None
    out = kernel.finished(found, gates, side, torch.empty(21, 2, 128, dtype=torch.float16))
    wanted = turned_back(found, cache).half()
    if gates is not None:
        wanted = importlib.import_module("lockstep.kernels.attention").gated(wanted, gates)
    assert same_bits(out, wanted)


@pytest.mark.gpu
@FORMAT
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layer", [(24, 4, 256, 64), (32, 8, 128, 64)], ids=str)
def test_a_scratch_and_triton_agree(
    format: KVFormat, layer: tuple[int, ...], gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, one row after another, some KV heads after others, one after another."""
    if torch.cuda.get_device_capability()[0] != 9:  # hopper.py's
        return
    kernel = importlib.import_module("lockstep.kernels.attention.quantized_prefill_hopper")
    batch = paged(LONG, *layer, torch.bfloat16, format=format)
    backend = Backend("triton", "cuda", torch.bfloat16)
    arguments = backend.place(batch | {"gates": gates_like(batch["q"]) if gated else None})
    wanted = backend.run(paged_attention, arguments)
    assert not wanted.isnan().any()
    head = 2 * batch["page_table"].shape[1] * 64 * layer[2] * 2
    for size in (kernel.SCRATCH_BYTES, layer[1] * head, 3 * head, 0):
        monkeypatch.setattr(kernel, "SCRATCH_BYTES", size)
        assert same_bits(kernel.paged_attention_scratch(**arguments), wanted), size
