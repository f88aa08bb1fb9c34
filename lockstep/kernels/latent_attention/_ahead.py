# mypy: ignore-errors
"""latent_attention of few rows: the fold of triton.py by three kernels, so that a GPU is not idle.

Scores depend on no other score. So one kernel makes those of a tile in each program, and leaves
them in memory; another goes through the tiles of a segment in their order, each program with some
columns of the values, and leaves an entry; triton.py's second kernel folds the entries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.latent_attention._device import block_of, empty_fold, row_of, score, take_in
from lockstep.kernels.latent_attention.triton import ONES, Tile, fold_entries

COLUMNS = 128
"""Columns of a program of the second kernel."""
WARPS = 4
STAGES = 3
"""Tiles of scores and values on their way to one."""


@triton.jit(do_not_specialize=["table_stride", "tiles"])
def _scores_kernel(
    q_latent, q_rope, latents, ropes, page_table, cu_seqlens, starts, scores, scale, table_stride,
    tiles,
    PAGE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, TILE: tl.constexpr, SEGMENT: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """A tile of keys for a block of (token, head): scores [S, blocks, tiles, ROWS, TILE]."""
    s = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    at = tl.program_id(2) * TILE
    first, count, start = row_of(cu_seqlens, starts, s)
    row, behind, _ = block_of(block, start, count, H, ROWS, SEGMENT, NEAR, FAR)
    end = start + (tl.minimum(row + ROWS, behind) - 1) // H + 1
    if (row >= behind) | (at >= end):
        return
    page = tl.load(page_table + s * table_stride + at // PAGE).to(tl.int64)
    key = tl.arange(0, TILE)
    slot = (page * PAGE + at % PAGE + key)[:, None]
    live = (at + key < start + count)[:, None]
    c = tl.arange(0, BLOCK_C)[None, :]
    r = tl.arange(0, BLOCK_R)[None, :]
    m = row + tl.arange(0, ROWS)
    mine = (m < behind)[:, None]
    place = (first * H + m)[:, None]
    latent = tl.load(latents + slot * C + c, mask=live & (c < C), other=0.0)
    rope = tl.load(ropes + slot * R + r, mask=live & (r < R), other=0.0)
    ql = tl.load(q_latent + place * C + c, mask=mine & (c < C), other=0.0)
    qr = tl.load(q_rope + place * R + r, mask=mine & (r < R), other=0.0)
    found = score(ql, qr, latent, rope, at, start + m // H, scale, TILE)
    lane = tl.arange(0, ROWS)[:, None] * TILE + key[None, :]
    to = ((s * tl.num_programs(1) + block) * tiles + tl.program_id(2)) * (ROWS * TILE)
    tl.store(scores + to + lane, found)


@triton.jit(do_not_specialize=["table_stride", "tiles", "entries", "blocks", "Q"])
def _values_kernel(
    scores, latents, page_table, cu_seqlens, starts, tops, norms, parts, table_stride, tiles,
    entries, blocks, Q,
    PAGE: tl.constexpr, H: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, ONES: tl.constexpr, SEGMENT: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a block's segment: its entry, as _attend_kernel leaves it."""
    s = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    _, count, start = row_of(cu_seqlens, starts, s)
    row, behind, segment = block_of(block, start, count, H, ROWS, SEGMENT, NEAR, FAR)
    end = start + (tl.minimum(row + ROWS, behind) - 1) // H + 1
    begin = tl.program_id(1) * segment
    if (row >= behind) | (begin >= end):
        return
    stop = tl.minimum(end, begin + segment)
    keys = start + count
    key = tl.arange(0, TILE)
    c = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, ROWS)[:, None] * TILE + key[None, :]
    scores += (s * blocks + block) * tiles * (ROWS * TILE)
    pages = page_table + s * table_stride
    top, norm, total = empty_fold(ROWS, ONES, COLUMNS)
    for at in range(begin, stop, TILE):
        page = tl.load(pages + at // PAGE).to(tl.int64)
        slot = page * PAGE + at % PAGE + key
        live = (at + key < keys)[:, None] & (c < C)[None, :]
        values = tl.load(latents + slot[:, None] * C + c[None, :], mask=live, other=0.0)
        found = tl.load(scores + at // TILE * (ROWS * TILE) + lane)
        top, norm, total = take_in(found, values, top, norm, total)
    m = row + tl.arange(0, ROWS)
    used = (m < behind) & (begin <= start + m // H)
    entry = (s * Q + m // H) * entries * H + begin // segment * H + m % H
    alone = used & (tl.program_id(2) == 0)
    tl.store(tops + entry, top, mask=alone)
    tl.store(norms + entry, tl.max(norm, 1), mask=alone)
    mask = used[:, None] & (c < C)[None, :]
    tl.store(parts + (entry[:, None] * C + c[None, :]), total, mask=mask)


def attend_ahead(
    out: Tensor,
    q_latent: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    ropes: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    query_len: int,
    scale: float,
    tile: Tile,
) -> None:
    """Fills out [T, H, C]. The other arguments: latent_attention's, of contiguous tensors; scale:
    times log2(e). A page holds whole tiles."""
    rows = len(starts)
    _, heads, latent = out.shape
    rope = q_rope.shape[2]
    columns, page = page_table.shape[1], latents.shape[1]
    tiles = columns * page // tile.keys
    entries = triton.cdiv(columns * page, tile.near)
    blocks = tile.blocks(query_len, heads)
    count = rows * query_len * heads * entries
    f32 = dict(dtype=torch.float32, device=out.device)
    scores = torch.empty(rows * blocks * tiles * tile.rows * tile.keys, **f32)
    kept = [torch.empty(count * size, **f32) for size in (1, 1, latent)]
    block_c = triton.next_power_of_2(max(latent, 16))
    block_r = triton.next_power_of_2(max(rope, 16))
    _scores_kernel[(rows, blocks, tiles)](
        q_latent, q_rope, latents, ropes, page_table, cu_seqlens, starts, scores, scale,
        page_table.stride(0), tiles, page, heads, latent, rope, tile.rows, block_c, block_r,
        tile.keys, *tile.law[:3], num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    width = min(block_c, COLUMNS)
    _values_kernel[(rows * blocks, entries, triton.cdiv(latent, width))](
        scores, latents, page_table, cu_seqlens, starts, *kept, page_table.stride(0), tiles,
        entries, blocks, query_len, page, heads, latent, tile.rows, width, tile.keys, ONES,
        *tile.law[:3], num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
    )  # fmt: skip
    fold_entries(kept, cu_seqlens, starts, out, entries, query_len, tile.near, tile)
