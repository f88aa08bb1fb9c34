"""Broadcast of messages to the processes of other ranks through shared memory.

A pickled message is copied once into a ring buffer that all ranks map. Each rank's pipe carries
only where the message is, which also wakes the rank.
"""

import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any

RING_BYTES = 8 << 20
"""Bytes of the ring. A schedule of 1,024 rows takes some 100 KB, and two are in flight."""
COUNTER = struct.Struct("q")
"""Number of messages that a rank has read; one counter per reader begins the memory."""
HEADER = struct.Struct("qq")
"""Offset and length of a message. Offset -1: it is too large for the ring and follows in the pipe.
"""
POLL_SECONDS = 50e-6
"""Interval at which the sender looks whether a full ring has been read."""


@dataclass(frozen=True)
class _Region:
    """Bytes of the ring that hold message number `number`."""

    begin: int
    end: int
    number: int


def mapped_bytes(memory: SharedMemory) -> memoryview:
    """Return the bytes of a shared memory that is not closed."""
    assert memory.buf is not None, "it is open"
    return memory.buf


class Broadcaster:
    """Sending end of a broadcast to `num_readers` ranks."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        self._base = COUNTER.size * num_readers
        self._memory = SharedMemory(create=True, size=self._base + RING_BYTES)
        self._bytes = mapped_bytes(self._memory)
        self._num_sent = 0
        self._end = 0
        self._unread: deque[_Region] = deque()
        self._has_name = True

    @property
    def name(self) -> str:
        """Name by which readers map the memory, until unname()."""
        return self._memory.name

    def unname(self) -> None:
        """Remove the name, once every reader has mapped the memory.

        The system frees the memory when the last process ends, however it ends.
        """
        if self._has_name:
            self._has_name = False
            self._memory.unlink()

    def close(self) -> None:
        """Free the sender's part."""
        self.unname()
        self._bytes.release()
        self._memory.close()

    def send(self, data: bytes, pipes: Sequence[Connection], check: Callable[[], None]) -> None:
        """Send a message, pickled, to every reader.

        Args:
            pipes: to the readers, in the order of their numbers.
            check: called while the ring is full; raises if a reader has ended.
        """
        if not pipes:
            return
        self._num_sent += 1
        if len(data) > RING_BYTES // 2:
            for pipe in pipes:
                pipe.send_bytes(HEADER.pack(-1, len(data)))
                pipe.send_bytes(data)
            return
        region = self._reserve(len(data), check)
        begin = self._base + region.begin
        self._bytes[begin : begin + len(data)] = data
        for pipe in pipes:
            pipe.send_bytes(HEADER.pack(region.begin, len(data)))

    def _reserve(self, size: int, check: Callable[[], None]) -> _Region:
        """Return a region that no reader reads any more."""
        begin = self._end if self._end + size <= RING_BYTES else 0
        region = _Region(begin, begin + size, self._num_sent)
        while self._overlaps(region):
            check()
            time.sleep(POLL_SECONDS)
        self._end = region.end
        self._unread.append(region)
        return region

    def _overlaps(self, region: _Region) -> bool:
        """Return whether a message that was not read by everybody is in this region."""
        counters = (
            COUNTER.unpack_from(self._bytes, COUNTER.size * reader)[0]
            for reader in range(self._num_readers)
        )
        num_read = min(counters)
        while self._unread and self._unread[0].number <= num_read:
            self._unread.popleft()
        return any(
            unread.begin < region.end and region.begin < unread.end for unread in self._unread
        )


class Receiver:
    """Receiving end of a broadcast. number: of this reader, from 0. decode: unpickles a message."""

    def __init__(
        self,
        name: str,
        number: int,
        num_readers: int,
        pipe: Connection,
        decode: Callable[[bytes | memoryview], Any] = pickle.loads,
    ) -> None:
        self._memory = SharedMemory(name)
        self._bytes = mapped_bytes(self._memory)
        self._counter = COUNTER.size * number
        self._base = COUNTER.size * num_readers
        self._pipe = pipe
        self._decode = decode
        self._num_read = 0

    def receive(self) -> Any:
        """Wait for the next message. Raises EOFError once the sender has ended."""
        offset, length = HEADER.unpack(self._pipe.recv_bytes())
        if offset < 0:
            message = self._decode(self._pipe.recv_bytes())
        else:
            begin = self._base + offset
            message = self._decode(self._bytes[begin : begin + length])
        self._num_read += 1
        COUNTER.pack_into(self._bytes, self._counter, self._num_read)
        return message
