# mypy: ignore-errors
"""Packed latents, unpacked ahead for a kernel that reads tiles of the model's dtype."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.kv import PackedKV
from lockstep.kernels.kv._launch import opened
from lockstep.kernels.kv._tile_device import cache_tile
from lockstep.kernels.latent_attention._device import row_of
from lockstep.kernels.packed._form import target_of

TOGETHER = 16
"""Tokens of a program."""
WARPS = 4
MOST_BYTES = 1 << 30
"""Bytes that latents of a step may take, unpacked."""


@triton.jit(do_not_specialize=["table_stride", "columns", "constant"])
def _unpack_kernel(
    codes, numbers, constant, ropes, page_table, cu_seqlens, starts, latents_out, ropes_out, table,
    table_stride, columns,
    L_PAGE: tl.constexpr, L_TOKEN: tl.constexpr, R_PAGE: tl.constexpr, R_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr, SHARE: tl.constexpr,
    FETCH: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """TILE tokens of one row's page, as _tile_device reads them, and the page's new number."""
    s = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE
    place = s * columns + at // PAGE
    tl.store(table + place, place.to(tl.int32))
    _, count, start = row_of(cu_seqlens, starts, s)
    keys = start + count
    if at < keys:
        page = tl.load(page_table + s * table_stride + at // PAGE)
        c = tl.arange(0, BLOCK_C)
        r = tl.arange(0, BLOCK_R)
        latent = cache_tile(
            codes, numbers, constant, 0, page, at, keys, c, L_PAGE, L_TOKEN, COUNT, 1, C, PAGE,
            TILE, SHARE, FETCH, UNPACK, latents_out.dtype.element_ty, False,
        )  # fmt: skip
        rope = cache_tile(
            ropes, None, None, 0, page, at, keys, r, R_PAGE, R_TOKEN, 0, 1, R, PAGE, TILE, 1, None,
            None, ropes_out.dtype.element_ty, False,
        )  # fmt: skip
        token = (place * PAGE + at % PAGE + tl.arange(0, TILE))[:, None]
        tl.store(latents_out + token * C + c[None], latent, mask=(c < C)[None])
        tl.store(ropes_out + token * R + r[None], rope, mask=(r < R)[None])


def unpacked_bytes(latents: PackedKV, ropes: Tensor, page_table: Tensor) -> int:
    """Bytes that unpacked_rows takes, from static sizes."""
    return page_table.numel() * latents.shape[1] * (latents.dim + ropes.shape[2]) * ropes.itemsize


def unpacked_rows(
    latents: PackedKV, ropes: Tensor, page_table: Tensor, cu_seqlens: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the rows of a step hold, of latent_attention's arguments: latents of the turned keys'
    dtype and turned keys [S P, page_size, ..], and the page table [S, P] of these. Zeros stand from
    a row's last token to the end of its TOGETHER; what stands behind, nobody has written."""
    rows, columns = page_table.shape
    _, page, dim = latents.shape
    rope = ropes.shape[2]
    lead = (rows * columns, page)
    found = torch.empty(*lead, dim, dtype=ropes.dtype, device=ropes.device)
    keys = torch.empty(*lead, rope, dtype=ropes.dtype, device=ropes.device)
    table = torch.empty_like(page_table, memory_format=torch.contiguous_format)
    held = opened(latents, ropes.dtype, target_of(ropes.device))
    _unpack_kernel[(rows, triton.cdiv(columns * page, TOGETHER))](
        held.codes, held.numbers, held.constant, ropes, page_table, cu_seqlens, starts, found, keys,
        table, page_table.stride(0), columns,
        *held.codes.stride()[:2], *ropes.stride()[:2], page, dim, rope,
        triton.next_power_of_2(dim), triton.next_power_of_2(rope), TOGETHER, held.beside,
        held.share, held.fetch, held.unpack, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return found, keys, table
