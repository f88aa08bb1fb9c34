"""Files of records: what survives a kill, a cut, flipped bits, a full file and other sizes."""

import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.serve.journal.block_file import (
    HEADER_BYTES,
    BlockFile,
    InUseError,
    NotAJournalError,
    TooSmallError,
)

BLOCK = 64
SIZE = HEADER_BYTES + 40 * BLOCK


def contents(file: BlockFile) -> dict[int, list[bytes]]:
    """Return the records of all logs."""
    return {log: file.read(log) for log in file.logs}


def reopened(path: Path, size: int = SIZE) -> dict[int, list[bytes]]:
    """Return the records that a new process finds."""
    file = BlockFile(path, size, BLOCK)
    try:
        return contents(file)
    finally:
        file.close()


def filled(path: Path) -> dict[int, list[bytes]]:
    """Write three logs alternately, with records shorter and longer than a block."""
    file = BlockFile(path, SIZE, BLOCK)
    logs = [file.create() for _ in range(3)]
    for number in range(8):
        for log in logs:
            assert file.append(log, bytes([65 + log]) * (number * 11 % 90))
    file.append(logs[0], b"")
    expected = contents(file)
    assert [len(expected[log]) for log in logs] == [9, 8, 8]
    file.close()
    return expected


def test_records_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    expected = filled(path)
    assert reopened(path) == expected
    file = BlockFile(path, SIZE, BLOCK)
    assert file.append(2, b"more") and file.create() == 4
    file.close()
    assert reopened(path) == {**expected, 2: [*expected[2], b"more"]}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_for_all_becomes_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.touch(0o644)
    filled(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_was_cut_at_any_byte_keeps_whole_records(tmp_path: Path) -> None:
    path, cut = tmp_path / "journal", tmp_path / "cut"
    expected = filled(path)
    for size in range(path.stat().st_size + 1):
        if 100 < size < HEADER_BYTES - 100:
            continue
        shutil.copy(path, cut)
        os.truncate(cut, size)
        if 0 < size < 42:  # within the header
            with pytest.raises(NotAJournalError):
                BlockFile(cut, SIZE, BLOCK)
            continue
        logs = reopened(cut)
        for log, records in logs.items():
            assert expected[log][: len(records)] == records, size
        if size == path.stat().st_size:
            assert logs == expected


def test_flipped_bits_end_a_log_and_no_other(tmp_path: Path) -> None:
    path, flipped = tmp_path / "journal", tmp_path / "flipped"
    expected = filled(path)
    data = path.read_bytes()
    used = len(data.rstrip(b"\0"))
    for offset in range(HEADER_BYTES, used):
        changed = bytearray(data)
        changed[offset] ^= 1 << offset % 8
        flipped.write_bytes(changed)
        logs = reopened(flipped)
        damaged = [log for log, records in expected.items() if logs.get(log) != records]
        assert len(damaged) <= 1, offset
        for log in damaged:
            records = logs.get(log, [])
            assert expected[log][: len(records)] == records


def test_records_after_a_damaged_tail_hide_the_old_ones(tmp_path: Path) -> None:
    """The old tail stays in the file, and a new record is as long as the damaged one was."""
    path = tmp_path / "journal"
    file = BlockFile(path, SIZE, BLOCK)
    log = file.create()
    for number in range(12):
        file.append(log, b"old %02d" % number)
    file.close()
    data = bytearray(path.read_bytes())
    data[data.index(b"old 05")] ^= 1
    path.write_bytes(data)
    file = BlockFile(path, SIZE, BLOCK)
    kept = [b"old %02d" % number for number in range(5)]
    assert file.read(log) == kept
    file.append(log, b"new 05")
    file.close()
    assert reopened(path) == {log: [*kept, b"new 05"]}


def test_random_use_equals_a_dict(tmp_path: Path) -> None:
    """Blocks are used again and again; the file is full now and then, and reopened at any time."""
    path = tmp_path / "journal"
    chance = random.Random(0)
    file = BlockFile(path, SIZE, BLOCK)
    expected: dict[int, list[bytes]] = {}
    num_refused = 0
    for _ in range(3000):
        action = chance.random()
        if not expected or action < 0.1:
            expected[file.create()] = []
        log = chance.choice(list(expected))
        if action < 0.85:
            record = chance.randbytes(chance.choice([0, 5, 30, 200]))
            if file.append(log, record):
                expected[log].append(record)
            else:
                num_refused += 1
                file.remove(log)
                del expected[log]
        elif action < 0.95:
            file.remove(log, erase=chance.random() < 0.5)
            del expected[log]
        else:
            file.close()
            file = BlockFile(path, SIZE, BLOCK)
            # Logs without a record are not in the file.
            expected = {log: records for log, records in expected.items() if records}
        assert contents(file) == expected
    assert num_refused > 20 and path.stat().st_size == SIZE
    for log in list(expected):
        file.remove(log)
    assert file.num_free_bytes == 40 * BLOCK
    file.close()


def test_erased_records_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    file = BlockFile(path, SIZE, BLOCK)
    log = file.create()
    file.append(log, b"secret" * 30)
    file.remove(log, erase=True)
    file.close()
    assert b"secret" not in path.read_bytes()


def test_resizing_keeps_logs(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    expected = filled(path)
    file = BlockFile(path, SIZE, BLOCK)
    file.resize(SIZE + 50 * BLOCK)
    last = file.create()
    while file.num_free_bytes > BLOCK:
        assert file.append(last, b"x" * 40)
    file.remove(1)
    with pytest.raises(TooSmallError, match="its logs need") as raised:
        file.resize(HEADER_BYTES + 10 * BLOCK)
    file.remove(last)
    needed = sum(file.num_blocks_of(log) for log in file.logs) * BLOCK + HEADER_BYTES
    assert needed < raised.value.num_bytes
    file.resize(needed)
    assert contents(file) == {log: expected[log] for log in (2, 3)} and not file.num_free_bytes
    file.close()
    assert path.stat().st_size == needed
    assert reopened(path, needed) == {log: expected[log] for log in (2, 3)}


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    code = f"""
from lockstep.serve.journal.block_file import BlockFile
file = BlockFile({str(path)!r}, {SIZE}, {BLOCK})
file.append(file.create(), b"theirs")
print("open", flush=True)
input()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == b"open\n"
    with pytest.raises(InUseError):
        BlockFile(path, SIZE, BLOCK)
    other.kill()
    other.communicate()
    assert reopened(path) == {1: [b"theirs"]}


@pytest.mark.parametrize("content", [b"my notes", b"LOCKSTEP-JOURNAL", b"x" * 10_000])
def test_other_files_are_not_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(NotAJournalError):
        BlockFile(path, SIZE, BLOCK)
    assert path.read_bytes() == content
