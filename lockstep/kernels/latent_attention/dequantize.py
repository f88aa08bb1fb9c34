# mypy: ignore-errors
"""Packed latents, unpacked ahead for a kernel that reads tiles of the model's dtype.

attention/quantized_prefill_hopper.py does so with keys and values, by pages of one KV head each, a
program a page. Here a captured step's page table may be far longer than its rows, and latents and
rotary keys go side by side: programs stride over a row instead. What both read a tile with is
shared.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.compile_target import compile_target
from lockstep.kernels.device.kv_tile import cache_tile
from lockstep.kernels.device.ragged_rows import row_of
from lockstep.kernels.formats.kv import KVCache
from lockstep.kernels.formats.kv.launch import opened

TOGETHER = 16
"""Tokens that a program unpacks at once."""
WARPS = 4
PROGRAMS = 2048
"""Programs that share the rows: 16 for each of an H200's multiprocessors. An estimate."""
MOST_BYTES = 2 << 30
"""Bytes that rows may take at once, unpacked."""


@triton.jit(do_not_specialize=["table_stride", "columns", "constant"])
def _unpack_kernel(
    codes, numbers, constant, ropes, page_table, cu_seqlens, starts, latents_out, ropes_out, table,
    table_stride, columns,
    L_PAGE: tl.constexpr, L_TOKEN: tl.constexpr, R_PAGE: tl.constexpr, R_TOKEN: tl.constexpr,
    PAGE: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr, SHARE: tl.constexpr,
    FETCH: tl.constexpr, UNPACK: tl.constexpr,
):  # fmt: skip
    """Every so-manieth TILE of a row's tokens, as _tile_device reads them, and their page's new
    number."""
    s = tl.program_id(0).to(tl.int64)
    _, count, start = row_of(cu_seqlens, starts, s)
    keys = start + count
    c = tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    for at in range(tl.program_id(1) * TILE, keys, tl.num_programs(1) * TILE):
        place = s * columns + at // PAGE
        tl.store(table + place, place.to(tl.int32))
        page = tl.load(page_table + s * table_stride + at // PAGE)
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


def unpacked_groups(
    latents: KVCache,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    most: int = MOST_BYTES,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """latent_attention's arguments of these names for some rows after others, with latents of the
    turned keys' dtype, on pages of their own: as many rows at once as `most` bytes hold, one at
    least. Each group lies where the one before it lay. Latents that are not packed: all at once.

    Zeros stand from a row's last token to the end of its TOGETHER; what stands behind, nobody has
    written.
    """
    if isinstance(latents, Tensor):
        yield latents, ropes, page_table, cu_seqlens, starts
        return
    columns = page_table.shape[1]
    _, page, dim = latents.shape
    rope = ropes.shape[2]
    row_bytes = columns * page * (dim + rope) * ropes.itemsize
    together = max(1, min(len(starts), most // row_bytes))
    empty = ropes.new_empty
    found = empty(together * columns, page, dim)
    keys = empty(together * columns, page, rope)
    table = empty(together, columns, dtype=torch.int32)
    held = opened(latents, ropes.dtype, compile_target(ropes.device))
    for begin in range(0, len(starts), together):
        own = starts[begin : begin + together]
        bounds = cu_seqlens[begin : begin + len(own) + 1]
        parallel = triton.cdiv(PROGRAMS, len(own))
        _unpack_kernel[(len(own), min(parallel, triton.cdiv(columns * page, TOGETHER)))](
            held.codes, held.numbers, held.constant, ropes, page_table[begin:], bounds, own, found,
            keys, table, page_table.stride(0), columns,
            *held.codes.stride()[:2], *ropes.stride()[:2], page, dim, rope,
            triton.next_power_of_2(dim), triton.next_power_of_2(rope), TOGETHER, held.beside,
            held.share, held.fetch, held.unpack, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        yield found, keys, table[: len(own)], bounds, own
