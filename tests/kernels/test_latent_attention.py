"""Latent attention equals the textbook formula, respects per-token bounds, and has the same bits
for every partition."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels import architecture
from lockstep.kernels.head_linear import head_linear
from lockstep.kernels.latent_attention import latent_attention, latent_rope_and_cache
from lockstep.kernels.latent_attention.cases import latent_rope, paged_latents
from tests.kernels.backends import Backend, backends, same_bits

BACKENDS = backends(pytest.mark.slow, op=latent_attention)
TRITON = backends(op=latent_attention)[1:]
HEADS = backends(pytest.mark.slow)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LAYER = (5, 40, 12, 16)
REAL = (128, 512, 64, 64)
"""(heads, latent, rope, page size) of DeepSeek-V3, used on a GPU."""


def cached_keys(batch: dict[str, Any], s: int, tokens: int) -> Tensor:
    """Return row s's first tokens in latents and ropes: [tokens, C + R]."""
    pages = batch["page_table"][s].long()
    return torch.cat(
        [batch[name][pages].flatten(0, 1)[:tokens] for name in ("latents", "ropes")], -1
    )


def test_absorbed_attention_equals_expanded_attention() -> None:
    """In double precision, with projections that the op does not get."""
    rows = ((0, 5), (300, 3), (255, 2))
    heads = 3
    latent = 24
    rope = 8
    plain = 14
    batch = paged_latents(rows, heads, latent, rope, 16, torch.float32)
    draw = torch.Generator().manual_seed(3)
    keys_of = torch.randn(heads, plain, latent, generator=draw).double()
    values_of = torch.randn(heads, 10, latent, generator=draw).double()
    q = torch.randn(10, heads, plain, generator=draw).double()
    batch["q_latent"] = torch.einsum("thn,hnc->thc", q, keys_of).float()
    actual = torch.einsum("thc,hvc->thv", latent_attention(**batch).double(), values_of)
    turned = batch["q_rope"].double()
    at = 0
    for s, (start, count) in enumerate(rows):
        retained = cached_keys(batch, s, start + count).double()
        keys = torch.einsum("kc,hnc->hkn", retained[:, :latent], keys_of)
        shared = retained[:, latent:].expand(heads, -1, -1)
        values = torch.einsum("kc,hvc->hkv", retained[:, :latent], values_of)
        queries = torch.cat([q[at : at + count], turned[at : at + count]], -1).transpose(0, 1)
        mask = torch.arange(start + count) <= start + torch.arange(count)[:, None]
        expected = F.scaled_dot_product_attention(
            queries, torch.cat([keys, shared], -1), values, mask, scale=batch["scale"]
        )
        close = dict(rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(actual[at : at + count], expected.transpose(0, 1), **close)
        at += count


def test_rope_rotates_pairs_and_latents_are_normed() -> None:
    arguments = latent_rope(5, 4, 12, 32, 8, torch.float32)
    angles = torch.complex(arguments["cos"], arguments["sin"])[arguments["positions"]]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angles[:, None]).flatten(-2)

    q = latent_rope_and_cache(**arguments)
    torch.testing.assert_close(q, turned(arguments["q"][..., 12:]))
    slots = arguments["slot_mapping"]
    key = arguments["ropes"].flatten(0, 1)[slots]
    torch.testing.assert_close(key, turned(arguments["kv"][:, None, 32:])[:, 0])
    normed = F.rms_norm(arguments["kv"][:, :32], (32,), arguments["weight"], 1e-6)
    torch.testing.assert_close(arguments["latents"].flatten(0, 1)[slots], normed)


def layer_of(backend: Backend) -> tuple[int, ...]:
    return REAL if backend.on_gpu else LAYER


def run_queries_in_chunks(backend: Backend, cuts: list[int]) -> Tensor:
    """Run one cached row up to the last cut, with its queries in chunks between the cuts."""
    one = paged_latents(((0, cuts[-1]),), *layer_of(backend), backend.dtype, seed=3)
    out = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        part = {**one, "query_len": end - begin}
        part |= {name: one[name][begin:end] for name in ("q_latent", "q_rope")}
        part["starts"] = torch.tensor([begin], dtype=torch.int32)
        part["cu_seqlens"] = torch.tensor([0, end - begin], dtype=torch.int32)
        out.append(backend.run(latent_attention, part))
    return torch.cat(out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_attention_prefill_verify_and_decode_agree(backend: Backend) -> None:
    """100 tokens in one chunk, and in windows of every length across a split's end."""
    begin = 1010 if backend.on_gpu else 500
    end = begin + 100
    full = run_queries_in_chunks(backend, [begin, end])
    for width in (1, 4) if backend.interpreted else (1, 2, 3, 4, 5, 6, 7, 8, 64):
        cuts = range(begin + 9, min(begin + 9 + 4 * width, end), width)
        assert same_bits(run_queries_in_chunks(backend, [begin, *cuts, end]), full), width


@pytest.mark.parametrize("backend", BACKENDS)
def test_latent_attention_row_is_batch_and_page_independent(backend: Backend) -> None:
    """Vary batch mates, an empty row, a wider page table, a larger bound, other pages."""
    rows = ((254, 4), (0, 0), (511, 2), (3, 9), (255, 1))
    batch = paged_latents(rows, *layer_of(backend), backend.dtype)
    out = backend.run(latent_attention, batch)
    bounds = batch["cu_seqlens"].tolist()
    order = torch.randperm(len(batch["latents"]), generator=torch.Generator().manual_seed(9))
    index = torch.argsort(order)
    for s, (start, count) in enumerate(rows):
        mine = slice(bounds[s], bounds[s + 1])
        alone = dict(batch)
        alone |= {name: batch[name][mine] for name in ("q_latent", "q_rope")}
        alone["page_table"] = F.pad(batch["page_table"][s : s + 1], (0, 24))
        alone["starts"] = torch.tensor([start], dtype=torch.int32)
        alone["cu_seqlens"] = torch.tensor([0, count], dtype=torch.int32)
        alone["query_len"] = max(count, 1) + 2
        moved = alone | {name: batch[name][order] for name in ("latents", "ropes")}
        moved["page_table"] = index[alone["page_table"].long()].int()
        for arguments in (alone, moved):
            assert same_bits(backend.run(latent_attention, arguments), out[mine]), (s, count)


@pytest.mark.parametrize("backend", backends(op=latent_attention))
def test_attention_is_causal(backend: Backend) -> None:
    """Poison all keys after a token's own: with finite numbers inside its window, since zero times
    NaN is NaN, and with NaN outside of it."""
    start = 253
    window = 2 if backend.interpreted else 5
    batch = paged_latents(((start, window),), *layer_of(backend), backend.dtype, seed=5)
    full = backend.run(latent_attention, batch)
    pages = batch["page_table"][0].long()
    size = batch["latents"].shape[1]
    for t in reversed(range(window)):
        for width, poison in ((window, 1000.0), (t + 1, torch.nan)):
            part = backend.fresh(batch) | {"query_len": width}
            part |= {name: part[name][:width] for name in ("q_latent", "q_rope")}
            part["cu_seqlens"] = torch.tensor([0, width], dtype=torch.int32)
            for slot in range(start + t + 1, len(pages) * size):
                for name in ("latents", "ropes"):
                    part[name][pages[slot // size], slot % size] = poison
            actual = backend.run(latent_attention, part)
            assert same_bits(actual[: t + 1], full[: t + 1]), (t, width)


MODULES = ("triton", "hopper")
ROWS = ((0, 1), (2046, 3), (0, 0), (255, 2))
LONG = ((4094, 3), (1023, 2), (8190, 3), (8960, 70))


@pytest.mark.parametrize("backend", TRITON)
def test_partitions_agree(backend: Backend) -> None:
    """Each kernel gives the bits of triton.py: with all keys in one CTA, with partials of spans and
    of splits, and with any number of CTAs."""
    triton = import_module("lockstep.kernels.latent_attention.triton")
    layer = (2, 16, 16, 64) if backend.interpreted else REAL
    rows = ROWS if backend.interpreted else (*ROWS, *LONG)
    batch = paged_latents(rows, *layer, backend.dtype, min_columns=9216 // layer[-1])
    arguments = backend.place(batch)
    full = triton.latent_attention_triton(**arguments, partition=triton.Partition(0, 1))
    assert not full.isnan().any()
    assert same_bits(backend.run(latent_attention, arguments), full)
    arch = architecture.sm_number(backend.device)
    tile = triton.choose_tile(backend.dtype, arch)
    run = latent_attention.backends[backend.name].run
    units = ((tile.near_split, 3), (tile.span, 3))
    for sizes in units if backend.interpreted else ((0, 1), *units, (tile.span, 1)):
        assert same_bits(run(**arguments, partition=triton.Partition(*sizes)), full), sizes


@pytest.mark.parametrize("backend", TRITON)
def test_split_length_follows_token_position(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows across the position at which splits become longer: each token has the bits that it
    has when all tokens use its split length, in every partition."""
    kernels = [import_module(f"lockstep.kernels.latent_attention.{name}") for name in MODULES]
    tile = kernels[0].choose_tile(backend.dtype, architecture.sm_number(backend.device))
    far = 3 * tile.num_keys + tile.num_keys // 2
    far_split = 2 * tile.num_keys
    near_only = replace(tile, kv_split=tile.num_keys, near_split=tile.num_keys, far=0)
    far_only = replace(near_only, kv_split=far_split)
    layer = (2, 16, 16, 64) if backend.interpreted else (24, 512, 64, 64)
    rows = ((far - 3, 7), (far - 4, 4), (far, 2), (0, 0), (8 * tile.num_keys - 1, 3))
    batch = paged_latents(rows, *layer, backend.dtype)
    run = latent_attention.backends[backend.name].run
    partition = kernels[0].Partition

    def found(tile: Any, unit: int) -> Tensor:
        for kernel in kernels:
            monkeypatch.setattr(kernel, "choose_tile", lambda *_: tile)
        return run(**backend.place(batch), partition=partition(unit, 2 if unit else 1)).cpu()

    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    near_bits = found(near_only, 0)
    far_bits = found(far_only, 0)
    assert not same_bits(near_bits, far_bits)
    expected = torch.where((positions < far)[:, None, None], near_bits, far_bits)
    both = replace(far_only, far=far)
    for unit in (0, both.span) if backend.interpreted else (0, both.near_split, both.span):
        assert same_bits(found(both, unit), expected), unit


def test_partition_choice() -> None:
    """Few rows store every split if that is cheap compared with their keys, more rows store every
    span, and many rows no partials."""
    kernel = import_module("lockstep.kernels.latent_attention.triton")
    tile = kernel.choose_tile(torch.bfloat16, 90)

    def unit(rows: int, query_len: int, keys: int) -> int:
        return kernel.choose_partition(rows, query_len, 128, 512, keys, tile).unit

    assert unit(1, 1, 4096) == tile.near_split
    assert unit(8, 4, 32768) == tile.near_split
    assert unit(4, 8, 131072) == unit(8, 4, 163840) == tile.span
    assert unit(64, 1, 4096) == unit(1, 2048, 4096) == unit(64, 4, 163840) == 0


@pytest.mark.parametrize("backend", HEADS)
def test_head_linear_row_is_batch_independent(backend: Backend) -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(200, 3, 96, generator=draw).to(backend.dtype)
    weight = torch.randn(3, 80, 96, generator=draw).to(backend.dtype)
    full = backend.run(head_linear, dict(x=x, weight=weight))
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double()).to(backend.dtype)
    close = dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(full.cpu(), expected, **close)
    for rows in (1, 2, 5, 16, 17, 40, 130):
        actual = backend.run(head_linear, dict(x=x[37 : 37 + rows], weight=weight))
        assert same_bits(actual, full[37 : 37 + rows]), rows
