"""Journal of the answers of a server: it outlives the process, so that the next one goes on."""

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import ConfigError
from lockstep.serve.journal.block_file import (
    BlockFile,
    InUseError,
    NotAJournalError,
    TooSmallError,
)
from lockstep.serve.journal.saved_answer import (
    SavedAnswer,
    SavedEnd,
    SavedRequest,
    UpdateEncoder,
    decode,
    is_end,
    read_end,
)
from lockstep.settings import path_fault

log = logging.getLogger("lockstep.serve")

SYNC_SECONDS = 1.0
"""Interval of writes to the disk: what a loss of power may cost. A killed process loses nothing."""
MAX_AGE = 86_400.0
"""Seconds for which complete answers are kept."""
EXPIRY_SECONDS = 60.0
"""Interval at which answers older than MAX_AGE are looked for."""
MAX_IDENTITY_CHARACTERS = 200
"""Characters that the header has of a value of the identity: the last ones, as of a long path."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class _Entry:
    """Answer of the file. number: of its log. end: Unix time of its end, None while it is open."""

    number: int
    owner: str
    id: str
    end: float | None = None


class Recorder:
    """Writer of one answer. After the first failure it does nothing."""

    def __init__(self, journal: "Journal", entry: _Entry, encoder: UpdateEncoder) -> None:
        self._journal = journal
        self._entry = entry
        self._encoder = encoder

    def add(self, index: int, update: TokenUpdate) -> None:
        """Write an update of a completion."""
        self._journal.write(self._entry, self._encoder.encode(index, update))

    def end(self, error: Exception | None = None) -> None:
        """Write the end of the answer; from then on the journal may drop it."""
        if self._entry.end is not None:
            return
        named = None if error is None else (type(error).__name__, str(error))
        end = SavedEnd(time.time(), named)
        self._journal.write(self._entry, end.to_record())
        self._journal.close_entry(self._entry, end.time)

    def drop(self) -> None:
        """Remove the answer."""
        self._journal.drop(self._entry)


class Journal:
    """Answers in a BlockFile, by the id of the response and the API key of the client.

    Where the file is full, the oldest complete answers are dropped. An open answer is never
    dropped for another one: where no block is left, it cannot be resumed from then on. All methods
    but read() are called in one thread.

    was_cut: the machine has been started anew since the file was written, so that the last
    SYNC_SECONDS of it may be missing.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        """Open the file, or create it. Raises ConfigError."""
        self._file = _open(path, num_bytes)
        self._size = num_bytes
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._by_number: dict[int, _Entry] = {}
        # Complete answers, the oldest first.
        self._complete: dict[int, _Entry] = {}
        self._open_answers: list[SavedAnswer] = []
        self._failed = False
        self._is_dirty = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.was_cut = False
        self._salt = ""

    @property
    def path(self) -> str:
        """Path of the file."""
        return self._file.path

    def start(self, identity: Mapping[str, str]) -> None:
        """Read the answers, and begin to write.

        identity: what the bits and the texts of answers depend on. Answers of another identity are
        erased, with a warning that names the difference. Raises ConfigError where the open answers
        need more than the size of the file, or the file cannot be read or written.
        """
        try:
            self._open_for(identity)
        except OSError as error:
            raise ConfigError(
                f"journal={self.path!r} cannot be read or written: {path_fault(error)}. Free or "
                "repair the disk, or name another file with --journal."
            ) from None
        self._thread = threading.Thread(
            target=self._sync_often, name="lockstep-journal", daemon=True
        )
        self._thread.start()

    def _open_for(self, identity: Mapping[str, str]) -> None:
        """Read the answers, or erase those of another identity. Raises as start(), and OSError."""
        identity = {name: value[-MAX_IDENTITY_CHARACTERS:] for name, value in identity.items()}
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        label = self._file.label
        self.was_cut = label.get("boot") != boot
        self._salt = str(label.get("salt") or secrets.token_hex(16))
        differences = _differences(label.get("identity"), identity)
        if differences:
            self._discard(differences)
        else:
            self._read_all()
            self.drop_expired()
        self._resize()
        self._file.write_label({"salt": self._salt, "boot": boot, "identity": identity})

    def take_open_answers(self) -> list[SavedAnswer]:
        """Return the answers that were open when the file was opened, the oldest first, once."""
        answers = self._open_answers
        self._open_answers = []
        return answers

    def close(self) -> None:
        """Write everything to the disk and release the file."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._call(self._file.sync)
        self._file.close()

    def owner(self, api_key_digest: str) -> str:
        """Return the salted hash that the file has instead of an API key's; "" for no key."""
        if not api_key_digest:
            return ""
        data = f"{self._salt}:{api_key_digest}".encode()
        return hashlib.blake2b(data, digest_size=16).hexdigest()

    def begin(self, request: SavedRequest) -> Recorder | None:
        """Write a request; None, with a log line, where it does not fit.

        A request replaces an earlier one of the same owner and id.
        """
        if self._failed:
            return None
        old = self._entries.get((request.owner, request.id))
        if old is not None:
            self.drop(old)
        entry = _Entry(self._file.create(), request.owner, request.id)
        self._add(entry)
        self.write(entry, request.to_record())
        return Recorder(self, entry, UpdateEncoder()) if entry.number in self._by_number else None

    def resume(self, answer: SavedAnswer) -> Recorder | None:
        """Return the recorder of an answer that was open; None where it was dropped."""
        entry = self._entries.get((answer.request.owner, answer.request.id))
        if entry is None or entry.end is not None:
            return None
        return Recorder(self, entry, UpdateEncoder(answer.updates))

    def records(self, owner: str, response_id: str) -> list[bytes] | None:
        """Return the records of an answer, for read(); None where there is none."""
        entry = self._entries.get((owner, response_id))
        if entry is None:
            return None
        try:
            return self._file.read(entry.number)
        except OSError as error:
            log.warning("the answer %s cannot be read from the journal: %s", response_id, error)
            return None

    def read(self, records: Sequence[bytes]) -> SavedAnswer | None:
        """Return the answer of records; None where they are damaged.

        Any thread may call it, since 20,000 updates take half a second.
        """
        try:
            return self._without_old_times(decode(records))
        except (ValueError, TypeError, LookupError) as error:
            log.warning("an answer cannot be read from the journal: %s", error)
            return None

    def remove(self, owner: str, response_id: str) -> None:
        """Erase an answer, if it is there."""
        entry = self._entries.get((owner, response_id))
        if entry is not None:
            self.drop(entry)

    def write(self, entry: _Entry, record: bytes) -> None:
        """Append a record, and drop complete answers for it."""
        if entry.number not in self._by_number or self._failed:
            return
        try:
            if not self._make_room(entry, len(record)):
                self._give_up(entry)
                return
            self._file.append(entry.number, record)
        except OSError as error:
            self._fail(error)
        self._is_dirty = True

    def close_entry(self, entry: _Entry, end: float) -> None:
        """Note that an answer is complete."""
        entry.end = end
        if entry.number in self._by_number:
            self._complete[entry.number] = entry

    def drop_expired(self) -> None:
        """Erase the complete answers that are older than MAX_AGE."""
        oldest = time.time() - MAX_AGE
        while self._complete:
            entry = next(iter(self._complete.values()))
            if entry.end is None or entry.end >= oldest:
                return
            self._remove(entry, erase=True)

    def drop(self, entry: _Entry) -> None:
        """Erase an answer, if it is still there."""
        if entry.number in self._by_number:
            self._remove(entry, erase=True)

    def _make_room(self, entry: _Entry, num_bytes: int) -> bool:
        """Drop the oldest complete answers for a record; return False, and drop none, where the
        space of all of them is too little.
        """
        num_missing = self._file.num_missing_blocks(entry.number, num_bytes)
        dropped: list[_Entry] = []
        for complete in self._complete.values():
            if num_missing <= 0:
                break
            dropped.append(complete)
            num_missing -= self._file.num_blocks_of(complete.number)
        if num_missing > 0:
            return False
        for complete in dropped:
            self._remove(complete, erase=False)
        return True

    def _add(self, entry: _Entry) -> None:
        self._by_number[entry.number] = entry
        self._entries[entry.owner, entry.id] = entry

    def _remove(self, entry: _Entry, erase: bool) -> None:
        del self._by_number[entry.number]
        self._complete.pop(entry.number, None)
        if self._entries.get((entry.owner, entry.id)) is entry:
            del self._entries[entry.owner, entry.id]
        self._call(lambda: self._file.remove(entry.number, erase))

    def _give_up(self, entry: _Entry) -> None:
        log.warning(
            "the journal is full of open answers: %s cannot be resumed, and goes on without it. "
            "Raise --journal-size.",
            entry.id,
        )
        self._remove(entry, erase=True)

    def _read_all(self) -> None:
        """Index all answers, and note the open ones."""
        complete: list[_Entry] = []
        for number in self._file.logs:
            try:
                records = self._file.read(number)
                end = read_end(records[-1])
                answer = decode(records if end is None else [records[0], records[-1]])
            except (OSError, ValueError, TypeError, KeyError, LookupError) as error:
                log.warning("an answer of the journal cannot be read, and is dropped: %s", error)
                self._file.remove(number, erase=True)
                continue
            end_time = None if end is None else end.time
            entry = _Entry(number, answer.request.owner, answer.request.id, end_time)
            self._add(entry)
            if end is None:
                self._open_answers.append(self._without_old_times(answer))
            else:
                complete.append(entry)
        complete.sort(key=lambda entry: entry.end or 0.0)
        self._complete = {entry.number: entry for entry in complete}

    def _without_old_times(self, answer: SavedAnswer) -> SavedAnswer:
        """Return an answer without times of a clock that has started anew since."""
        if not self.was_cut:
            return answer
        now = time.monotonic()
        for _, update in answer.updates:
            metrics = update.metrics
            metrics.arrival_time = now
            metrics.scheduled_time = None
            metrics.first_token_time = None
            metrics.finished_time = None
        return replace(answer, request=replace(answer.request, arrival=now))

    def _discard(self, differences: list[str]) -> None:
        if self._file.logs:
            num_open = sum(not is_end(self._file.read(number)[-1]) for number in self._file.logs)
            log.warning(
                "the journal %s is not resumed, and its answers are erased (%d were open), since "
                "answers would have other bits: %s.",
                self._file.path,
                num_open,
                "; ".join(differences),
            )
        self._file.clear()

    def _resize(self) -> None:
        """Give the file its size, and drop the oldest complete answers for that."""
        while True:
            try:
                self._file.resize(self._size)
                return
            except TooSmallError as error:
                if not self._complete:
                    raise ConfigError(
                        f"journal_size={self._size >> 20} MiB is less than the open answers of "
                        f"{self.path!r} need; allowed: from {(error.num_bytes >> 20) + 1} MiB. "
                        "Raise --journal-size, or delete the file."
                    ) from None
                self._remove(next(iter(self._complete.values())), erase=True)
            except OSError as error:
                raise ConfigError(
                    f"journal={self.path!r} cannot be resized: {path_fault(error)}. Free the disk, "
                    "or lower --journal-size."
                ) from None

    def _sync_often(self) -> None:
        while not self._stop.wait(SYNC_SECONDS):
            if self._is_dirty:
                self._is_dirty = False
                self._call(self._file.sync)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            log.error(
                "the journal %s cannot be written: %s. Answers go on, but none that begins now can "
                "be resumed after the end of the server. Free the disk, and restart the server.",
                self._file.path,
                error,
            )
        self._failed = True


def _open(path: str, num_bytes: int) -> BlockFile:
    """Open the file of a journal. Raises ConfigError."""
    try:
        return BlockFile(path, num_bytes)
    except InUseError:
        raise ConfigError(
            f"journal={path!r} is in use by another process; allowed: one server per file. Stop "
            "that server, or name another file with --journal."
        ) from None
    except NotAJournalError as error:
        raise ConfigError(
            f"journal={path!r} is not a journal that this release can read: {error}. Name another "
            "file with --journal, or delete this one."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"journal={path[:200]!r} cannot be opened: {path_fault(error)}. Name a file in a "
            "folder that can be written, on a disk with space for --journal-size."
        ) from None


def _differences(before: object, now: Mapping[str, str]) -> list[str]:
    """Return what differs between the identity of a file and the present one, by name."""
    if not isinstance(before, dict):
        return [] if before is None else ["its header has no identity"]
    return [
        f"{name} was {before.get(name)}, and is {now.get(name)}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
