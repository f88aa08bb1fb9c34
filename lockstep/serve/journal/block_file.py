"""File of a fixed size with byte records of many logs, in blocks.

The file is a header and an array of blocks. A log is a chain of blocks, so a log that ends gives
its blocks back, however old it is, and no log is ever copied. Records survive the process as soon
as they are written, and the machine once sync() has returned. Every block and every record has a
checksum: reading ends at the first one that does not match.
"""

import fcntl
import json
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from zlib import crc32

MAGIC = b"LOCKSTEP-JOURNAL"
VERSION = 1
HEADER_BYTES = 4096
BLOCK_BYTES = 4096
MODE = 0o600
"""Permissions of the file: prompts and answers are for its owner only."""
_HEADER = struct.Struct("<16sIIIIII")
"""Magic, version, bytes per block, blocks, epoch, bytes of the label, and the checksum of all."""
_BLOCK = struct.Struct("<QII")
"""Log, index of the block in its log, and the checksum of both. Log 0 is no log."""
_RECORD = struct.Struct("<III")
"""Epoch, bytes of the record, and the checksum of log, number, epoch and bytes."""
_SEED = struct.Struct("<QQI")


class NotAJournalError(ValueError):
    """The file has other content, which must not be overwritten."""


class InUseError(ValueError):
    """The file is open in another process."""


class TooSmallError(ValueError):
    """The file cannot shrink to the requested size. num_bytes: what its logs need."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"its logs need {num_bytes} bytes")
        self.num_bytes = num_bytes


@dataclass
class _Log:
    """Chain of blocks. num_bytes: bytes of its records. num_records: their number."""

    blocks: list[int] = field(default_factory=list)
    num_bytes: int = 0
    num_records: int = 0


class BlockFile:
    """File of logs, which one process has open.

    label: JSON object of the caller in the file's header; {} in a new file. epoch: how often the
    file was opened. Records of later epochs never come before those of earlier ones, so that
    remains of a damaged tail are not taken for new records.

    Methods are for one thread, but for sync(). They raise OSError where the disk fails.
    """

    def __init__(
        self, path: str | os.PathLike[str], num_bytes: int, block_bytes: int = BLOCK_BYTES
    ) -> None:
        """Open a file, or create it.

        num_bytes: size of the file, at least a header and one block. A file of another size keeps
        its logs and is resized by resize().

        Raises OSError, NotAJournalError, InUseError.
        """
        self.path = os.fspath(path)
        self.block_bytes = block_bytes
        self.label: dict[str, object] = {}
        self.epoch = 0
        self._logs: dict[int, _Log] = {}
        self._free: deque[int] = deque()
        self._num_blocks = 0
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            self._lock()
            os.fchmod(self._fd, MODE)
            if self._is_new():
                self._num_blocks = self._blocks_in(num_bytes)
                self._allocate()
                self._free.extend(range(self._num_blocks))
            else:
                self._read_header()
                self._recover()
            self._next_log = max(self._logs, default=0) + 1
            self.epoch += 1
            self.write_label(self.label)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return HEADER_BYTES + self._num_blocks * self.block_bytes

    @property
    def num_free_bytes(self) -> int:
        """Bytes of the blocks that belong to no log."""
        return len(self._free) * self.block_bytes

    @property
    def logs(self) -> list[int]:
        """Numbers of all logs, in the order of their creation."""
        return sorted(self._logs)

    def write_label(self, label: Mapping[str, object]) -> None:
        """Replace the label. Raises ValueError for one that does not fit into the header."""
        text = json.dumps(label).encode()
        if len(text) > HEADER_BYTES - _HEADER.size:
            raise ValueError(f"a label of {len(text)} bytes does not fit")
        self.label = dict(label)
        fields = (VERSION, self.block_bytes, self._num_blocks, self.epoch, len(text))
        crc = crc32(text, crc32(struct.pack("<5I", *fields), crc32(MAGIC)))
        header = _HEADER.pack(MAGIC, *fields, crc) + text
        os.pwrite(self._fd, header.ljust(HEADER_BYTES, b"\0"), 0)

    def create(self) -> int:
        """Return the number of a new, empty log."""
        log = self._next_log
        self._next_log += 1
        self._logs[log] = _Log()
        return log

    def num_missing_blocks(self, log: int, num_bytes: int) -> int:
        """Return how many more blocks must be free for a record of this size; 0 for none."""
        chain = self._logs[log]
        end = chain.num_bytes + _RECORD.size + num_bytes
        return max(0, -(-end // self._room) - len(chain.blocks) - len(self._free))

    def append(self, log: int, data: bytes) -> bool:
        """Append a record; return False, and write nothing, where too few blocks are free."""
        chain = self._logs[log]
        if self.num_missing_blocks(log, len(data)):
            return False
        seed = crc32(_SEED.pack(log, chain.num_records, self.epoch))
        record = _RECORD.pack(self.epoch, len(data), crc32(data, seed)) + data
        begin = 0
        while begin < len(record):
            index, offset = divmod(chain.num_bytes + begin, self._room)
            part = record[begin : begin + self._room - offset]
            begin += len(part)
            if index < len(chain.blocks):
                os.pwrite(self._fd, part, self._offset(chain.blocks[index]) + _BLOCK.size + offset)
                continue
            block = self._free.popleft()
            chain.blocks.append(block)
            os.pwrite(self._fd, _block_header(log, index) + part, self._offset(block))
        chain.num_bytes += len(record)
        chain.num_records += 1
        return True

    def read(self, log: int) -> list[bytes]:
        """Return the records of a log."""
        chain = self._logs[log]
        data = b"".join(
            os.pread(self._fd, self._room, self._offset(block) + _BLOCK.size)
            for block in chain.blocks
        )
        return [record for record, _ in _records(log, data)][: chain.num_records]

    def num_blocks_of(self, log: int) -> int:
        """Return how many blocks a log has."""
        return len(self._logs[log].blocks)

    def remove(self, log: int, erase: bool = False) -> None:
        """Give the blocks of a log back. erase: overwrite them, so that nothing can be read."""
        blocks = self._logs.pop(log).blocks
        for number, block in enumerate(blocks):
            if erase:
                os.pwrite(self._fd, bytes(self.block_bytes), self._offset(block))
            elif number == 0:
                # Without its first block, nothing of a log is read again.
                os.pwrite(self._fd, bytes(_BLOCK.size), self._offset(block))
        self._free.extend(blocks)

    def clear(self) -> None:
        """Erase all logs."""
        for log in self.logs:
            self.remove(log, erase=True)

    def resize(self, num_bytes: int) -> None:
        """Change the size of the file; logs move out of the part that is cut off.

        Raises TooSmallError where the logs need more.
        """
        num_blocks = self._blocks_in(num_bytes)
        if num_blocks == self._num_blocks:
            return
        num_used = self._num_blocks - len(self._free)
        if num_used > num_blocks:
            raise TooSmallError(HEADER_BYTES + num_used * self.block_bytes)
        begin = self._num_blocks
        self._num_blocks = num_blocks
        self._free = deque(block for block in self._free if block < num_blocks)
        self._free.extend(range(begin, num_blocks))
        for chain in self._logs.values():
            for index, block in enumerate(chain.blocks):
                if block >= num_blocks:
                    chain.blocks[index] = self._free.popleft()
                    data = os.pread(self._fd, self.block_bytes, self._offset(block))
                    os.pwrite(self._fd, data, self._offset(chain.blocks[index]))
        # The new size is valid before blocks are cut off, and after blocks are added.
        if num_blocks > begin:
            self._allocate()
        self.write_label(self.label)
        os.ftruncate(self._fd, self.num_bytes)

    def sync(self) -> None:
        """Write everything to the disk, so that it survives the machine. For any thread."""
        os.fdatasync(self._fd)

    @property
    def _room(self) -> int:
        """Bytes of a block that hold records."""
        return self.block_bytes - _BLOCK.size

    def _blocks_in(self, num_bytes: int) -> int:
        return max(1, (num_bytes - HEADER_BYTES) // self.block_bytes)

    def _offset(self, block: int) -> int:
        return HEADER_BYTES + block * self.block_bytes

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError("another process has it open") from None

    def _allocate(self) -> None:
        """Reserve the disk space, so that no later write finds the disk full."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, 0, self.num_bytes)
        else:
            os.ftruncate(self._fd, max(self.num_bytes, os.fstat(self._fd).st_size))

    def _is_new(self) -> bool:
        """Return whether the file is empty, or its creation was cut off before the header."""
        size = os.fstat(self._fd).st_size
        return size == 0 or not os.pread(self._fd, HEADER_BYTES, 0).strip(b"\0")

    def _read_header(self) -> None:
        header = os.pread(self._fd, HEADER_BYTES, 0)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise NotAJournalError("it has other content")
        _, version, block_bytes, num_blocks, epoch, num_text, crc = _HEADER.unpack_from(header)
        text = header[_HEADER.size : _HEADER.size + num_text]
        fields = struct.pack("<5I", version, block_bytes, num_blocks, epoch, num_text)
        if crc32(text, crc32(fields, crc32(MAGIC))) != crc:
            raise NotAJournalError("its header is damaged")
        if version != VERSION:
            raise NotAJournalError(f"it has version {version}, this release reads {VERSION}")
        self.block_bytes = block_bytes
        self._num_blocks = num_blocks
        self.epoch = epoch
        self.label = json.loads(text)

    def _recover(self) -> None:
        """Find the logs, cut them off at their first damaged block or record, and free the rest."""
        blocks: dict[int, dict[int, int]] = {}
        unused: list[int] = []
        size = os.fstat(self._fd).st_size
        num_whole = min(self._num_blocks, max(0, size - HEADER_BYTES) // self.block_bytes)
        if num_whole:
            with mmap.mmap(self._fd, size, access=mmap.ACCESS_READ) as content:
                for block in range(num_whole):
                    offset = self._offset(block)
                    log, index, _ = _BLOCK.unpack_from(content, offset)
                    if log and content[offset : offset + _BLOCK.size] == _block_header(log, index):
                        # There are two of a block where a resize was cut off: equal ones.
                        other = blocks.setdefault(log, {}).setdefault(index, block)
                        unused += [block] if other != block else []
                for log, by_index in blocks.items():
                    self._recover_log(log, by_index, content)
        self._allocate()
        used = {block for chain in self._logs.values() for block in chain.blocks}
        self._free.extend(block for block in range(self._num_blocks) if block not in used)
        unused += [block for parts in blocks.values() for block in parts.values()]
        for block in set(unused) - used:
            # A later record could make the blocks after a gap part of their log again.
            os.pwrite(self._fd, bytes(_BLOCK.size), self._offset(block))

    def _recover_log(self, log: int, by_index: Mapping[int, int], content: mmap.mmap) -> None:
        chain: list[int] = []
        while len(chain) in by_index:
            chain.append(by_index[len(chain)])
        parts = (
            content[self._offset(block) + _BLOCK.size : self._offset(block + 1)] for block in chain
        )
        ends = [end for _, end in _records(log, b"".join(parts))]
        if ends:
            self._logs[log] = _Log(chain[: -(-ends[-1] // self._room)], ends[-1], len(ends))


def _block_header(log: int, index: int) -> bytes:
    return _BLOCK.pack(log, index, crc32(struct.pack("<QI", log, index), 1))


def _records(log: int, data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the records of a log, each with the offset of its end, up to the first damaged one."""
    begin = 0
    last_epoch = 0
    number = 0
    while begin + _RECORD.size <= len(data):
        epoch, size, crc = _RECORD.unpack_from(data, begin)
        end = begin + _RECORD.size + size
        if end > len(data) or epoch < last_epoch:
            return
        record = data[begin + _RECORD.size : end]
        if crc32(record, crc32(_SEED.pack(log, number, epoch))) != crc:
            return
        yield record, end
        begin = end
        last_epoch = epoch
        number += 1
