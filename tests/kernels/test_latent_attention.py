"""Latent attention: the textbook's formula, per-token bounds, and bits that no division changes."""

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
"""(heads, latent, rope, page size) of DeepSeek-V3: what a GPU is tried on."""


def seen(batch: dict[str, Any], s: int, tokens: int) -> Tensor:
    """What row s holds in latents and ropes, its first tokens: [tokens, C + R]."""
    pages = batch["page_table"][s].long()
    return torch.cat(
        [batch[name][pages].flatten(0, 1)[:tokens] for name in ("latents", "ropes")], -1
    )


def test_absorbed_attention_is_attention_over_expanded_keys_and_values() -> None:
    """In double precision, with projections that the op never sees."""
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
    found = torch.einsum("thc,hvc->thv", latent_attention(**batch).double(), values_of)
    turned = batch["q_rope"].double()
    at = 0
    for s, (start, count) in enumerate(rows):
        held = seen(batch, s, start + count).double()
        keys = torch.einsum("kc,hnc->hkn", held[:, :latent], keys_of)
        shared = held[:, latent:].expand(heads, -1, -1)
        values = torch.einsum("kc,hvc->hkv", held[:, :latent], values_of)
        queries = torch.cat([q[at : at + count], turned[at : at + count]], -1).transpose(0, 1)
        mask = torch.arange(start + count) <= start + torch.arange(count)[:, None]
        expected = F.scaled_dot_product_attention(
            queries, torch.cat([keys, shared], -1), values, mask, scale=batch["scale"]
        )
        close = dict(rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[at : at + count], expected.transpose(0, 1), **close)
        at += count


def test_pairs_turn_as_complex_numbers_and_latents_are_normed() -> None:
    given = latent_rope(5, 4, 12, 32, 8, torch.float32)
    angles = torch.complex(given["cos"], given["sin"])[given["positions"]]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * angles[:, None]).flatten(-2)

    q = latent_rope_and_cache(**given)
    torch.testing.assert_close(q, turned(given["q"][..., 12:]))
    slots = given["slot_mapping"]
    key = given["ropes"].flatten(0, 1)[slots]
    torch.testing.assert_close(key, turned(given["kv"][:, None, 32:])[:, 0])
    normed = F.rms_norm(given["kv"][:, :32], (32,), given["weight"], 1e-6)
    torch.testing.assert_close(given["latents"].flatten(0, 1)[slots], normed)


def layer_of(backend: Backend) -> tuple[int, ...]:
    return REAL if backend.on_gpu else LAYER


def pieces(backend: Backend, cuts: list[int]) -> Tensor:
    """One row in the cache, up to the last cut; its queries in pieces between the cuts."""
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
def test_prompts_verification_and_decoding_agree(backend: Backend) -> None:
    """100 tokens in one chunk, and in windows of every length across a segment's end."""
    begin = 1010 if backend.on_gpu else 500
    end = begin + 100
    whole = pieces(backend, [begin, end])
    for width in (1, 4) if backend.interpreted else (1, 2, 3, 4, 5, 6, 7, 8, 64):
        cuts = range(begin + 9, min(begin + 9 + 4 * width, end), width)
        assert same_bits(pieces(backend, [begin, *cuts, end]), whole), width


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_alone_elsewhere_and_beside_others(backend: Backend) -> None:
    """Batch mates, an empty row, a wider page table, a larger bound, other pages."""
    rows = ((254, 4), (0, 0), (511, 2), (3, 9), (255, 1))
    batch = paged_latents(rows, *layer_of(backend), backend.dtype)
    out = backend.run(latent_attention, batch)
    bounds = batch["cu_seqlens"].tolist()
    order = torch.randperm(len(batch["latents"]), generator=torch.Generator().manual_seed(9))
    place = torch.argsort(order)
    for s, (start, count) in enumerate(rows):
        mine = slice(bounds[s], bounds[s + 1])
        alone = dict(batch)
        alone |= {name: batch[name][mine] for name in ("q_latent", "q_rope")}
        alone["page_table"] = F.pad(batch["page_table"][s : s + 1], (0, 24))
        alone["starts"] = torch.tensor([start], dtype=torch.int32)
        alone["cu_seqlens"] = torch.tensor([0, count], dtype=torch.int32)
        alone["query_len"] = max(count, 1) + 2
        moved = alone | {name: batch[name][order] for name in ("latents", "ropes")}
        moved["page_table"] = place[alone["page_table"].long()].int()
        for arguments in (alone, moved):
            assert same_bits(backend.run(latent_attention, arguments), out[mine]), (s, count)


@pytest.mark.parametrize("backend", backends(op=latent_attention))
def test_no_token_sees_a_key_behind_its_own(backend: Backend) -> None:
    """Every key behind a token's own is poisoned: with numbers where its window holds them, since
    zero times NaN is NaN; with NaN where it does not."""
    start = 253
    window = 5
    batch = paged_latents(((start, window),), *layer_of(backend), backend.dtype, seed=5)
    whole = backend.run(latent_attention, batch)
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
            found = backend.run(latent_attention, part)
            assert same_bits(found[: t + 1], whole[: t + 1]), (t, width)


MODULES = ("triton", "hopper")
ROWS = ((0, 1), (2046, 3), (0, 0), (255, 2))
LONG = ((4094, 3), (1023, 2), (8190, 3), (8960, 70))


@pytest.mark.parametrize("backend", TRITON)
def test_partitions_agree(backend: Backend) -> None:
    """All keys in one program, entries of spans, and of segments, by any number of programs: the
    bits of triton.py, whichever kernel it is."""
    triton = import_module("lockstep.kernels.latent_attention.triton")
    layer = (2, 16, 16, 64) if backend.interpreted else REAL
    rows = ROWS if backend.interpreted else (*ROWS, *LONG)
    batch = paged_latents(rows, *layer, backend.dtype, min_columns=9216 // layer[-1])
    arguments = backend.place(batch)
    whole = triton.latent_attention_triton(**arguments, partition=triton.Partition(0, 1))
    assert not whole.isnan().any()
    assert same_bits(backend.run(latent_attention, arguments), whole)
    arch = architecture.sm_number(backend.device)
    tile = triton.choose_tile(backend.dtype, arch)
    run = latent_attention.backends[backend.name].run
    for sizes in ((0, 1), (tile.near_split, 3), (tile.span, 1), (tile.span, 3)):
        assert same_bits(run(**arguments, partition=triton.Partition(*sizes)), whole), sizes


@pytest.mark.parametrize("backend", TRITON)
def test_a_token_folds_by_its_own_position(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows with tokens on both sides of the position from which segments are longer: each has
    the bits that it has where all tokens fold as it does, in every division."""
    kernels = [import_module(f"lockstep.kernels.latent_attention.{name}") for name in MODULES]
    tile = kernels[0].choose_tile(backend.dtype, architecture.sm_number(backend.device))
    far = 3 * tile.num_keys + tile.num_keys // 2
    far_split = 2 * tile.num_keys
    near_only = replace(tile, kv_split=tile.num_keys, near_split=tile.num_keys, far=0)
    far_only = replace(near_only, kv_split=far_split)
    layer = (5, 16, 16, 64) if backend.interpreted else (24, 512, 64, 64)
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
    for unit in (0, both.near_split, both.span):
        assert same_bits(found(both, unit), expected), unit


def test_how_the_work_is_divided() -> None:
    """Few rows leave every segment, and more of them while that is little beside their keys; others
    every span, many rows nothing."""
    kernel = import_module("lockstep.kernels.latent_attention.triton")
    tile = kernel.choose_tile(torch.bfloat16, 90)

    def unit(rows: int, query_len: int, keys: int) -> int:
        return kernel.choose_partition(rows, query_len, 128, 512, keys, tile).unit

    assert unit(1, 1, 4096) == tile.near_split
    assert unit(8, 4, 32768) == tile.near_split
    assert unit(4, 8, 131072) == unit(8, 4, 163840) == tile.span
    assert unit(64, 1, 4096) == unit(1, 2048, 4096) == unit(64, 4, 163840) == 0


@pytest.mark.parametrize("backend", HEADS)
def test_head_linear_row_alone(backend: Backend) -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(200, 3, 96, generator=draw).to(backend.dtype)
    weight = torch.randn(3, 80, 96, generator=draw).to(backend.dtype)
    whole = backend.run(head_linear, dict(x=x, weight=weight))
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double()).to(backend.dtype)
    close = dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(whole.cpu(), expected, **close)
    for rows in (1, 2, 5, 16, 17, 40, 130):
        found = backend.run(head_linear, dict(x=x[37 : 37 + rows], weight=weight))
        assert same_bits(found, whole[37 : 37 + rows]), rows
