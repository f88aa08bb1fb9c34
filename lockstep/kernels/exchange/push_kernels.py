# mypy: ignore-errors
"""Kernels that write a rank's columns into its peers' memory and wait for those of the peers.

Each rank has two buffers, used alternately. A peer that writes to a buffer again has received what
this rank sent in the exchange between, so this rank's kernel that read the buffer has ended.
"""

import triton
import triton.language as tl

from lockstep.kernels.device.activations import relu2 as relu2_of
from lockstep.kernels.device.activations import silu_product
from lockstep.kernels.device.tree_reduction import load_tree_sum
from lockstep.kernels.exchange.device_push import (
    clear_old_packets,
    end_exchange,
    memory_of,
    next_epoch,
    pack,
    post_flags,
    receive,
    tag_of,
    unpack,
    wait_for_flags,
)
from lockstep.kernels.norm.kernels import store_sum_and_norm


@triton.jit
def _columns(
    local, row, column, live, stride, part, dtype: tl.constexpr, PARTS: tl.constexpr,
    ACT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return values of one row of this rank's columns: sums of partials, or an activation."""
    local += row * stride
    if ACT == "silu_mul":
        gate = tl.load(local + column, mask=live, other=0.0)
        up = tl.load(local + WIDTH + column, mask=live, other=0.0)
        return silu_product(gate, up, dtype)
    elif ACT == "relu2":
        return relu2_of(tl.load(local + column, mask=live, other=0.0).to(tl.float32)).to(dtype)
    else:
        return load_tree_sum(local, column, part, live, PARTS).to(dtype)


@triton.jit
def _needed_columns(needed, row, WIDTH: tl.constexpr):
    """Return how many leading columns of a rank cross in a row."""
    if needed is None:
        return WIDTH
    else:
        return tl.minimum(tl.load(needed + row), WIDTH)


@triton.jit
def _tiles_per_row(needed, rows, TILES_PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many tiles of a row hold columns that cross, in the row with the most of them."""
    if needed is None:
        return TILES_PER_ROW
    else:
        largest = tl.full((), 0, tl.int32)
        lane = tl.arange(0, 128)
        for begin in range(0, rows, 128):
            counts = tl.load(needed + begin + lane, mask=begin + lane < rows, other=0)
            largest = tl.maximum(largest, tl.max(counts, 0))
        return tl.minimum(tl.cdiv(largest, BLOCK), TILES_PER_ROW)


@triton.jit
def _needed_packets(needed, row, WIDTH: tl.constexpr):
    """Return how many leading packets of a rank cross in a row, at least one in the first row.

    That one lets the peer know that this exchange has begun, so that the buffers may take turns.
    """
    if needed is None:
        return WIDTH // 2
    else:
        packets = (_needed_columns(needed, row, WIDTH) + 1) // 2
        return tl.where(row == 0, tl.maximum(packets, 1), packets)


@triton.jit
def _receive_tile(
    peers, inbox, out, needed, row, begin, tag, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    TOTAL: tl.constexpr, PEER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Receive BLOCK of a peer's columns of a row, from `begin` on, and store them in out.

    inbox: packets of this exchange in this rank's memory. OFFSET, WIDTH: of the peer's columns.
    """
    pair = begin // 2 + tl.arange(0, BLOCK // 2)
    at = row * (TOTAL // 2) + OFFSET // 2 + pair
    packets = receive(peers, inbox + at, pair < _needed_packets(needed, row, WIDTH), tag, PEER)
    column = begin + tl.arange(0, BLOCK)
    values = unpack(packets, out.dtype.element_ty)
    tl.store(out + row * TOTAL + OFFSET + column, values, mask=column < WIDTH)


@triton.jit
def push_packets_kernel(
    local, out, needed, peers, rows, stride, part, PARTS: tl.constexpr, ACT: tl.constexpr,
    WIDTHS: tl.constexpr, OFFSETS: tl.constexpr, TOTAL: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, PACKETS: tl.constexpr, PACKET_BYTES: tl.constexpr, BLOCK: tl.constexpr,
    TILES_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write all ranks' columns [rows, TOTAL] of 16 bits to out, sent in packets.

    A CTA has one tile: BLOCK of each rank's columns of a row, of which it sends its own part.

    Args:
        local: this rank's columns, or what ACT makes them of, rows `stride` elements apart; PARTS
            split-K partials are `part` elements apart.
        needed: [rows] int32, see the op; None: all columns.
        WIDTHS, OFFSETS: of the ranks' columns in out, even numbers.
        PACKETS, PACKET_BYTES: offset and size of the two buffers of packets.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    epoch = next_epoch(peers)
    tag = tag_of(epoch)
    clear_old_packets(peers, epoch, RANK, PACKETS, PACKET_BYTES)
    region = (epoch & 1) * (PACKET_BYTES // 16)
    tile = tl.program_id(0)
    row = tile // TILES_PER_ROW
    begin = tile % TILES_PER_ROW * BLOCK
    column = begin + tl.arange(0, BLOCK)
    pair = begin // 2 + tl.arange(0, BLOCK // 2)
    live = column < WIDTHS[RANK]
    values = _columns(local, row, column, live, stride, part, dtype, PARTS, ACT, WIDTHS[RANK])
    packets = pack(values, tag)
    at = region + row * (TOTAL // 2) + OFFSETS[RANK] // 2 + pair
    for step in tl.static_range(1, SIZE):
        peer_memory = memory_of(peers, (RANK + step) % SIZE, PACKETS, tl.uint64)
        tl.store(peer_memory + at, packets, mask=pair < _needed_packets(needed, row, WIDTHS[RANK]))
    tl.store(out + row * TOTAL + OFFSETS[RANK] + column, values, mask=live)
    inbox = memory_of(peers, RANK, PACKETS, tl.uint64)
    for step in tl.static_range(1, SIZE):
        _receive_tile(
            peers, inbox + region, out, needed, row, begin, tag, OFFSETS[(RANK + step) % SIZE],
            WIDTHS[(RANK + step) % SIZE], TOTAL, (RANK + step) % SIZE, BLOCK,
        )  # fmt: skip
    end_exchange(peers, epoch)


@triton.jit
def push_kernel(
    local, out, needed, peers, rows, stride, part, PARTS: tl.constexpr, ACT: tl.constexpr,
    WIDTHS: tl.constexpr, OFFSETS: tl.constexpr, TOTAL: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, PACKETS: tl.constexpr, PACKET_BYTES: tl.constexpr, BUFFERS: tl.constexpr,
    BUFFER_BYTES: tl.constexpr, FLAGS: tl.constexpr, BLOCK: tl.constexpr,
    TILES_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write all ranks' columns [rows, TOTAL] to out, sent as they are and announced by flags.

    CTA c has the tiles c, c + number of CTAs, ... of every rank, so that it waits for CTA c of each
    peer alone. Arguments are those of push_packets_kernel. BUFFERS, BUFFER_BYTES, FLAGS: offset and
    size of the two buffers, and offset of the flags.
    """
    dtype: tl.constexpr = out.dtype.element_ty
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    epoch = next_epoch(peers)
    clear_old_packets(peers, epoch, RANK, PACKETS, PACKET_BYTES)
    region = (epoch & 1) * (BUFFER_BYTES // 2 // (dtype.primitive_bitwidth // 8))
    lane = tl.arange(0, BLOCK)
    row_tiles = _tiles_per_row(needed, rows, TILES_PER_ROW, BLOCK)
    tiles = rows * row_tiles
    for tile in range(cta, tiles, ctas):
        row = tile // row_tiles
        column = tile % row_tiles * BLOCK + lane
        live = column < _needed_columns(needed, row, WIDTHS[RANK])
        values = _columns(local, row, column, live, stride, part, dtype, PARTS, ACT, WIDTHS[RANK])
        at = row * TOTAL + OFFSETS[RANK] + column
        for step in tl.static_range(1, SIZE):
            peer_memory = memory_of(peers, (RANK + step) % SIZE, BUFFERS, dtype) + region
            tl.store(peer_memory + at, values, mask=live)
        tl.store(out + at, values, mask=live)
    post_flags(peers, cta, epoch, RANK, SIZE, FLAGS)
    wait_for_flags(peers, cta, epoch, RANK, SIZE, FLAGS)
    inbox = memory_of(peers, RANK, BUFFERS, dtype) + region
    for tile in range(cta, tiles, ctas):
        row = tile // row_tiles
        column = tile % row_tiles * BLOCK + lane
        for step in tl.static_range(1, SIZE):
            at = row * TOTAL + OFFSETS[(RANK + step) % SIZE] + column
            live = column < _needed_columns(needed, row, WIDTHS[(RANK + step) % SIZE])
            # Not through L1, which the writes of other GPUs do not update.
            values = tl.load(inbox + at, mask=live, cache_modifier=".cg")
            tl.store(out + at, values, mask=live)
    end_exchange(peers, epoch)


@triton.jit
def push_add_rms_norm_kernel(
    x, local, weight, total, out, peers, x_stride, stride, part, eps, offset,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, D: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PACKETS: tl.constexpr, PACKET_BYTES: tl.constexpr,
    OWN_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a row of all ranks' columns of delta to a row of x and norm the sum: a CTA per row.

    local: this rank's WIDTH columns of delta, from column FIRST on, or PARTS partials of them.
    All other arguments, and the bits, are those of add_rms_norm_kernel of lockstep.kernels.norm.
    """
    dtype: tl.constexpr = total.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    epoch = next_epoch(peers)
    tag = tag_of(epoch)
    clear_old_packets(peers, epoch, RANK, PACKETS, PACKET_BYTES)
    base = (epoch & 1) * (PACKET_BYTES // 16) + row * (D // 2)
    column = tl.arange(0, OWN_BLOCK)
    values = load_tree_sum(local + row * stride, column, part, column < WIDTH, PARTS).to(dtype)
    packets = pack(values, tag)
    pair = tl.arange(0, OWN_BLOCK // 2)
    # To this rank as well: then all columns of the row arrive in the same way.
    for step in tl.static_range(1, SIZE + 1):
        peer_memory = memory_of(peers, (RANK + step) % SIZE, PACKETS, tl.uint64)
        tl.store(peer_memory + base + FIRST // 2 + pair, packets, mask=2 * pair < WIDTH)
    offs = tl.arange(0, BLOCK)
    scale = offset + tl.load(weight + offs, mask=offs < D, other=0.0).to(tl.float32)
    residual = tl.load(x + row * x_stride + offs, mask=offs < D, other=0.0).to(tl.float32)
    inbox = memory_of(peers, RANK, PACKETS, tl.uint64) + base
    pair = tl.arange(0, BLOCK // 2)
    row_packets = receive(peers, inbox + pair, 2 * pair < D, tag, -1)
    delta = unpack(row_packets, dtype)
    store_sum_and_norm(residual, delta, scale, total + row * D, out + row * D, offs, eps, D)
    end_exchange(peers, epoch)
