"""Audit of served answers: an idle engine runs some ended requests again and compares the answers.

The second run is alone, without drafts and without cached prefixes, so the answers are equal unless
one of these changes tokens.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from tempfile import gettempdir

from lockstep.answer import Answer, Mismatch, exact_logprobs
from lockstep.engine.audit_record import MAX_RECORDS, AuditRecord, records_in, remove_unfinished
from lockstep.scheduling.request import Request

log = logging.getLogger("lockstep.engine")

MAX_PENDING = 1024
"""Maximum audits that wait for an idle engine."""
MAX_PENDING_BYTES = 64 << 20
"""Maximum estimated bytes of the requests and answers of these audits."""
LOGPROB_BYTES = 256
"""Bytes of a log-probability and of the dict of its position."""
GRAMMAR_BYTES = 64 << 10
"""Bytes of a grammar that has accepted no token, apart from its recipe: its first mask takes half
of them for 256,000 tokens.
"""


def is_audited(request_id: str, share: float) -> bool:
    """Return whether a share of all requests includes this one: a hash of its id decides."""
    digest = blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def answer_of(request: Request) -> Answer:
    """Return the answer of a request that has ended."""
    return Answer(
        tuple(request.output_token_ids),
        exact_logprobs(request.logprobs),
        request.metrics,
        ending=(request.finish_reason, request.stop_reason),
        prompt_logprobs=exact_logprobs(request.prompt_logprobs),
    )


def first_difference(served: Request, repeated: Request) -> Mismatch | None:
    """Return the first difference of the answers of a request and its audit, or None."""
    mismatch = answer_of(served).first_difference(answer_of(repeated))
    reported = served.metrics.forced_mismatch
    expected = repeated.metrics.forced_mismatch
    if mismatch is None and reported != expected:
        position = min(report.index for report in (reported, expected) if report is not None)
        return position, f"forced_mismatch {reported} instead of {expected}"
    return mismatch


def size_of(value: object) -> int:
    """Return the estimated bytes of plain data: numbers, texts, and containers and dataclasses of
    them, however deep.
    """
    size = 0
    pending = [value]
    while pending:  # no recursion: a client's JSON schema may be deep
        part = pending.pop()
        size += sys.getsizeof(part)
        if isinstance(part, dict):
            pending += (*part.keys(), *part.values())
        elif isinstance(part, list | tuple) and set(map(type, part)) == {int}:
            size += len(part) * sys.getsizeof(part[0])  # token ids, up to a context of them
        elif isinstance(part, list | tuple | set | frozenset):
            pending += part
        elif is_dataclass(part):
            pending += vars(part).values()
    return size


@dataclass
class _Audit:
    """Audit of a request that has ended. repeated: its second run, once that has begun."""

    served: Request
    repeated: Request | None = None

    @cached_property
    def size(self) -> int:
        """Return the estimated bytes of the request, its answer and its grammar."""
        served = self.served
        size = sum(map(size_of, (served.params, served.prompt_token_ids, served.output_token_ids)))
        if served.grammar is not None:
            size += size_of(served.grammar.recipe) + GRAMMAR_BYTES
        scored = (*served.logprobs, *served.prompt_logprobs)
        return size + sum(1 + len(position or ()) for position in scored) * LOGPROB_BYTES


class Auditor:
    """Queue of the requests that an idle engine runs again, and the counters of these audits.

    share: share of the requests that are audited. record: makes the record of a difference.
    folder: where the first difference is written; the folder of temporary files replaces it where
    it is not writable. num_records: records in both, those of earlier engines included, so that a
    difference stays visible after a restart until somebody removes its file.

    All methods belong to the thread of the engine.
    """

    def __init__(
        self,
        share: float,
        record: Callable[[Request, Answer, Answer, str], AuditRecord],
        folder: Path = Path(),
    ) -> None:
        self.share = share
        self.num_audited = 0
        self.num_differences = 0
        self.num_dropped = 0
        self._record = record
        self._folders = [folder, *_temporary_folders()]
        self._pending: deque[_Audit] = deque()
        self._pending_bytes = 0
        self._running: _Audit | None = None
        self._is_stopped = False
        self.num_records = 0

    @property
    def num_pending(self) -> int:
        """Return the number of audits that wait or run."""
        return len(self._pending) + (self._running is not None)

    def count_records(self) -> None:
        """Count the records in the folders, and write their paths to the log. Call it once, before
        the first audit. Unfinished records of killed processes are removed.
        """
        if not self.share:
            return
        for folder in self._folders:
            remove_unfinished(folder)
        records = self._records()
        self.num_records = len(records)
        if records:
            log.warning(
                "audit: answers differed before this start: %s. Reproduce: lockstep check --replay "
                "FILE. Remove a file that was examined.",
                ", ".join(map(str, records)),
            )

    def _records(self) -> list[Path]:
        """Return the paths of the records in the folders, those of other processes included."""
        return sorted({path for folder in self._folders for path in records_in(folder)})

    def begin(self) -> Request | None:
        """Return the request of the audit that runs next; None if no audit waits."""
        if not self._pending:
            return None
        audit = self._pending.popleft()
        self._pending_bytes -= audit.size
        self._running = audit
        audit.repeated = audit.served.audit()
        return audit.repeated

    def pause(self) -> Request | None:
        """Queue the running audit again, from its first token; return its request, to be aborted.

        None if no audit runs.
        """
        audit = self._take_running()
        if audit is None:
            return None
        # Last, so that an audit which takes long does not keep shorter ones from their turn.
        self._queue(audit)
        return audit.repeated

    def drop(self) -> Request | None:
        """Drop the running audit; return its request, to be aborted. None if no audit runs."""
        audit = self._take_running()
        if audit is None:
            return None
        self.num_dropped += 1
        return audit.repeated

    def drop_all(self) -> Request | None:
        """Drop all audits; return the request of the running one, to be aborted."""
        self.num_dropped += len(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        return self.drop()

    def stop(self) -> Request | None:
        """Drop all audits from now on; return the request of the running one, to be aborted."""
        self._is_stopped = True
        return self.drop_all()

    def take(self, updated: list[Request]) -> list[Request]:
        """Take the requests of a step: compare audits that ended, and queue chosen requests.

        Returns the requests that are no audits.
        """
        if not self.share:
            return updated
        for request in updated:
            if request.finish_reason is None:
                continue
            if request.is_audit:
                self._compare()
            elif is_audited(request.id, self.share):
                # A grammar that has accepted tokens keeps up to 10 MB.
                grammar = None if request.grammar is None else request.grammar.fresh()
                self._queue(_Audit(replace(request, grammar=grammar)))
        return [request for request in updated if not request.is_audit]

    def _queue(self, audit: _Audit) -> None:
        """Queue an audit; drop the oldest ones past the limits, and all after stop()."""
        if self._is_stopped:
            self.num_dropped += 1
            return
        self._pending.append(audit)
        self._pending_bytes += audit.size
        while len(self._pending) > MAX_PENDING or self._pending_bytes > MAX_PENDING_BYTES:
            self._pending_bytes -= self._pending.popleft().size
            self.num_dropped += 1

    def _take_running(self) -> _Audit | None:
        """Return the audit that runs, which then counts as ended; None if no audit runs."""
        audit = self._running
        self._running = None
        return audit

    def _compare(self) -> None:
        """Compare the answers of the running audit, which has ended."""
        audit = self._take_running()
        assert audit is not None and audit.repeated is not None
        self.num_audited += 1
        served = audit.served
        mismatch = first_difference(served, audit.repeated)
        if mismatch is None:
            return
        self.num_differences += 1
        position, what = mismatch
        remedy = ""
        if self.num_differences == 1:
            remedy = self._write(served, audit.repeated, f"position {position}: {what}")
        # The log never has tokens of answers.
        log.error(
            "audit: the answer of request %s differs at output position %d.%s",
            *(served.id, position, remedy),
        )

    def _write(self, served: Request, repeated: Request, what: str) -> str:
        """Write a record to the first folder that takes it; return how to use it.

        None is written where there are MAX_RECORDS.
        """
        num_records = len(self._records())
        if num_records >= MAX_RECORDS:
            return f" It was not written: {num_records} files are there already. Remove some."
        for folder in self._folders:
            try:
                record = self._record(served, answer_of(served), answer_of(repeated), what)
                path = record.write(folder)
            except Exception as error:  # an audit never ends the engine
                reason = f" It could not be written to {folder}: {error}."
            else:
                self.num_records += 1
                return f" Reproduce: lockstep check --replay {path}"
        return reason


def _temporary_folders() -> list[Path]:
    """Return the folder of temporary files; none where the system has none that is writable."""
    try:
        return [Path(gettempdir())]
    except FileNotFoundError:
        return []
