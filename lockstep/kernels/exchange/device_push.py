# mypy: ignore-errors
"""Device functions of exchanges that write into peers' memory: packets, flags and the epoch.

Small tensors travel in packets: 8 bytes with 4 bytes of values and the number of the exchange.
So a packet needs no announcement, and one trip. Large tensors travel without packets; a flag that
follows announces them, which takes a fence of the whole system but half of the bytes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

EPOCH = tl.constexpr(0)
FINISHED = tl.constexpr(1)
ABORTED = tl.constexpr(2)
"""Words of `state`: exchanges that have ended, CTAs of this one that have ended, and whether an
exchange ended without its peers."""
MAX_POLLS = tl.constexpr(1 << 30)
"""Polls before a rank counts as gone, about 700 s. Ranks that end or hang are found sooner by the
host, which aborts the exchange."""
POLLS_PER_LOOK = tl.constexpr(4096)
"""Polls between two looks at the host's abort word, which take a trip over PCIe."""
TAGS = tl.constexpr(1 << 31)
"""Number of exchanges after which their 31-bit tags repeat."""


class Peers(NamedTuple):
    """Memory of the ranks: see peer_memory.PeerMemory.

    addresses: of every rank's shared memory. state [3] int64. host: address of two int32 words; the
    host writes the first one to abort, and a kernel writes 1 + the rank that did not answer into
    the second.
    """

    addresses: Any
    state: Any
    host: Any


@triton.jit
def next_epoch(peers):
    """Return the number of this exchange, which begins at 1."""
    return tl.load(peers.state + EPOCH) + 1


@triton.jit
def end_exchange(peers, epoch):
    """Advance the epoch once all CTAs of the exchange have read it. Call at the end of a CTA."""
    # Relaxed: the CTA has read the epoch, since it has used it.
    finished = tl.atomic_add(peers.state + FINISHED, 1, sem="relaxed", scope="gpu")
    if finished == tl.num_programs(0) - 1:
        tl.store(peers.state + FINISHED, 0)
        tl.store(peers.state + EPOCH, epoch)


@triton.jit
def memory_of(peers, RANK: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Return a pointer into a rank's shared memory. OFFSET: in bytes, a multiple of 16."""
    address = tl.multiple_of(peers.addresses[RANK] + OFFSET, 16)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def count_poll(peers, polls):
    """Return the number of polls after another one; it exceeds MAX_POLLS to end the wait.

    The wait ends at once if an earlier exchange was abandoned, and soon after the host aborts.
    """
    polls += 1
    if polls == 1:
        polls += tl.load(peers.state + ABORTED) * MAX_POLLS
    elif polls % POLLS_PER_LOOK == 0:
        words = peers.host.to(tl.pointer_type(tl.int32))
        polls += (tl.load(words, volatile=True) != 0).to(tl.int64) * MAX_POLLS
    return polls


@triton.jit
def report(peers, RANK: tl.constexpr):
    """Record that a rank did not answer; -1: one of several."""
    tl.store(peers.state + ABORTED, 1)
    tl.store(peers.host.to(tl.pointer_type(tl.int32)) + 1, 1 + RANK if RANK >= 0 else -1)


@triton.jit
def tag_of(epoch):
    """Return the tag of an exchange's packets, which is never 0 like fresh memory."""
    return ((epoch % TAGS) | TAGS).to(tl.uint64) << 32


@triton.jit
def clear_old_packets(peers, epoch, RANK: tl.constexpr, PACKETS: tl.constexpr, BYTES: tl.constexpr):
    """Clear the packets that the next exchange will use, before tags repeat.

    Without it, a packet that was written TAGS exchanges ago would have the tag of a new one. Call
    before this exchange sends anything: no peer begins the next exchange before the first CTA of
    this one has sent. PACKETS, BYTES: offset and size of the two buffers.
    """
    if ((epoch + 1) % TAGS < 2) & (tl.program_id(0) == 0):
        other = memory_of(peers, RANK, PACKETS, tl.int64) + ((epoch + 1) & 1) * (BYTES // 16)
        lane = tl.arange(0, 1024)
        for begin in range(0, BYTES // 16, 1024):
            tl.store(other + begin + lane, tl.zeros((1024,), tl.int64))
        tl.debug_barrier()


@triton.jit
def pack(values, tag):
    """Return the packets [n / 2] uint64 of 16-bit values [n]."""
    bits = values.to(tl.uint16, bitcast=True).to(tl.uint64)
    low, high = tl.split(tl.reshape(bits, (values.shape[0] // 2, 2)))
    return low | (high << 16) | tag


@triton.jit
def unpack(packets, dtype: tl.constexpr):
    """Return the 16-bit values [n] of packets [n / 2]."""
    pairs = tl.join(packets & 0xFFFF, (packets >> 16) & 0xFFFF).to(tl.uint16)
    return tl.reshape(pairs, (2 * packets.shape[0],)).to(dtype, bitcast=True)


@triton.jit
def receive(peers, pointers, live, tag, RANK: tl.constexpr):
    """Wait for packets and return them. pointers [n]: into own memory. live [n].

    RANK: the rank that sends them, -1 for several.
    """
    packets = tl.load(pointers, mask=live, other=0, volatile=True)
    missing = tl.max((live & ((packets >> 32) != (tag >> 32))).to(tl.int32), 0)
    polls = tl.full((), 0, tl.int64)
    while (missing != 0) & (polls < MAX_POLLS):
        packets = tl.load(pointers, mask=live, other=0, volatile=True)
        missing = tl.max((live & ((packets >> 32) != (tag >> 32))).to(tl.int32), 0)
        polls = count_poll(peers, polls)
    if missing != 0:
        report(peers, RANK)
    return packets


@triton.jit
def post_flags(
    peers, slot, epoch, RANK: tl.constexpr, SIZE: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Signal every peer that the CTA of this slot has written its columns.

    The barrier orders the writes of all threads before the flag, which one thread releases. Flags
    only grow, so a maximum stores one, without waiting for an old value. OFFSET: of the flags
    [slots, SIZE] int64 in shared memory.
    """
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):
        flags = memory_of(peers, (RANK + step) % SIZE, OFFSET, tl.int64)
        tl.atomic_max(flags + slot * SIZE + RANK, epoch, sem="release", scope="sys")


@triton.jit
def _wait_for_flag(peers, flag, epoch, PEER: tl.constexpr):
    """Wait until a peer's flag has reached the epoch."""
    polls = tl.full((), 0, tl.int64)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen < epoch) & (polls < MAX_POLLS):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls = count_poll(peers, polls)
    if seen < epoch:
        report(peers, PEER)


@triton.jit
def wait_for_flags(
    peers, slot, epoch, RANK: tl.constexpr, SIZE: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Wait until the CTAs of this slot on all peers have written. Returns at an abort as well."""
    flags = memory_of(peers, RANK, OFFSET, tl.int64) + slot * SIZE
    for step in tl.static_range(1, SIZE):
        _wait_for_flag(peers, flags + (RANK + step) % SIZE, epoch, (RANK + step) % SIZE)
    # What peers have written is read by all threads.
    tl.debug_barrier()
