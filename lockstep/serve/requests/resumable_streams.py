"""Streams that outlive their connection and, with a journal, their server process."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from lockstep.errors import RequestError
from lockstep.serve.http.errors import MAX_SHOWN_CHARACTERS, UnknownStreamError
from lockstep.serve.http.event_stream import Event, EventStream, ignored_fields_header
from lockstep.serve.http.request_context import current_owner
from lockstep.serve.journal.journal import EXPIRY_SECONDS, Journal
from lockstep.serve.journal.saved_answer import SavedAnswer, SavedRequest
from lockstep.serve.requests.event_log import EventLog
from lockstep.serve.requests.response_writer import ResponseWriter

if TYPE_CHECKING:
    from lockstep.serve.requests.service import Service

log = logging.getLogger("lockstep.serve")

Restore = Callable[[SavedAnswer], Awaitable[ResponseWriter]]
Key = tuple[str, str]
"""Owner and id of a response."""


class ResumableStream:
    """Answer whose events are recorded. keeps_running: it goes on without a reader."""

    def __init__(
        self,
        streams: "ResumableStreams",
        key: Key,
        writer: ResponseWriter,
        keeps_running: bool,
        was_cut: bool,
    ) -> None:
        self.key = key
        self.kind = writer.KIND
        self.writer = writer
        self.event_log = EventLog(key[1], writer.NAMED_EVENTS, was_cut)
        self._streams = streams
        self._keeps_running = keeps_running
        self._num_readers = 0
        self._timer: asyncio.TimerHandle | None = None
        # The event loop keeps only weak references to tasks.
        self._task = asyncio.create_task(self._run())
        self._watch()

    def response(self, begin: int, headers: Mapping[str, str] | None = None) -> EventStream:
        """Return the stream of the events from this number on."""
        self._num_readers += 1
        self._watch()
        events = self.event_log.read(begin)
        return EventStream(events, self.event_log.named_events, self._leave, headers)

    def end(self, error: Exception | None = None) -> None:
        """End the request and forget its events.

        error: last event for readers, where the answer is not complete.
        """
        self._stop_timer()
        self._streams.remove(self)
        self.writer.active.drop_record()
        self._task.cancel()
        # A task that has not begun runs no cleanup.
        self.writer.close()
        if not self.event_log.is_complete:
            self.event_log.finish(() if error is None else self.writer.error_events(error))

    async def _run(self) -> None:
        try:
            await self.event_log.record(self.writer)
        finally:
            self._streams.note_complete(self)
            self._watch()

    def _leave(self) -> None:
        self._num_readers -= 1
        self._watch()

    def _watch(self) -> None:
        """Start the time within which a reader must come, where there is none."""
        self._stop_timer()
        if self._num_readers:
            return
        seconds = self._streams.seconds
        if self.event_log.is_complete:
            expire: Callable[[], None] = self._forget
        elif self._keeps_running:
            return
        else:
            expire = self.end
        if seconds > 0:
            self._timer = asyncio.get_running_loop().call_later(seconds, expire)
        else:
            expire()

    def _forget(self) -> None:
        self._stop_timer()
        self._streams.remove(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


class ResumableStreams:
    """Recorded answers of a service, by owner and id.

    restorers: name of an API -> function that goes on with a saved answer of it. seconds: time that
    a stream has without a reader.
    """

    def __init__(self, service: "Service", journal: Journal | None) -> None:
        self.restorers: dict[str, Restore] = {}
        self.seconds = service.limits.resume_seconds
        self._journal = journal
        self._max_bytes = service.limits.max_stored_bytes
        self._streams: dict[Key, ResumableStream] = {}
        # Complete ones, the oldest first, with their bytes.
        self._complete: dict[ResumableStream, int] = {}
        self._is_restored = asyncio.Event()
        self._is_restored.set()
        # A lock lives as long as a client waits for its answer.
        self._locks: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()

    @property
    def are_kept(self) -> bool:
        """True where streams outlive their connection."""
        return self.seconds > 0

    def owner(self) -> str:
        """Return the owner of the present request: a hash of its API key, "" without keys."""
        owner = current_owner()
        return owner if self._journal is None else self._journal.owner(owner)

    def start(
        self,
        writer: ResponseWriter,
        body: bytes,
        background: bool = False,
    ) -> ResumableStream:
        """Record an answer from its beginning. Call it where writer.active was just started.

        body: of the HTTP request.
        """
        self.save(writer, body, True, background)
        return self._add((self.owner(), writer.active.parsed.id), writer, background)

    def respond(self, writer: ResponseWriter, body: bytes) -> EventStream:
        """Return a stream of events that can be resumed."""
        headers = ignored_fields_header(writer.ignored_fields)
        return self.start(writer, body).response(0, headers)

    def save(
        self,
        writer: ResponseWriter,
        body: bytes,
        is_stream: bool = False,
        background: bool = False,
    ) -> None:
        """Write an answer to the journal, if there is one."""
        if self._journal is None:
            return
        active = writer.active
        request = SavedRequest(
            kind=writer.KIND,
            id=active.parsed.id,
            engine_id=active.parsed.engine_id,
            owner=self.owner(),
            created=active.created,
            deadline=active.deadline,
            arrival=active.requests[0].metrics.arrival_time,
            prompts=[list(token_ids) for token_ids in active.parsed.prompts],
            seeds=[completion.seed for completion in active.requests],
            max_tokens=[completion.params.max_tokens for completion in active.requests],
            body=body.decode(json.detect_encoding(body), "surrogatepass"),
            conversation=writer.saved_conversation(),
            is_stream=is_stream,
            keeps_running=background,
        )
        active.attach(self._journal.begin(request))

    async def resume(
        self, kind: str, response_id: str, starting_after: int | None, last_event_id: str | None
    ) -> EventStream:
        """Return the events after the last one that the client has. Raises RequestError."""
        begin = event_begin(response_id, starting_after, last_event_id)
        stream = await self.get(kind, response_id)
        await check_certain(stream.event_log, begin)
        return stream.response(begin)

    async def get(self, kind: str, response_id: str) -> ResumableStream:
        """Return an answer, of this process or of an earlier one. Raises UnknownStreamError."""
        stream = await self.find(kind, response_id)
        if stream is None:
            raise UnknownStreamError(self._why_unknown(response_id), "id")
        return stream

    async def find(self, kind: str, response_id: str) -> ResumableStream | None:
        """Return an answer, of this process or of an earlier one; None where there is none."""
        await self._is_restored.wait()
        key = (self.owner(), response_id)
        stream = self._streams.get(key)
        if stream is None:
            # Two clients of an answer do not both read it; those of others do not wait.
            async with self._locks.setdefault(key, asyncio.Lock()):
                stream = self._streams.get(key) or await self._read_again(key, kind)
        return stream if stream is not None and stream.kind == kind else None

    async def delete(self, kind: str, response_id: str) -> None:
        """End an answer and erase it. Raises UnknownStreamError."""
        stream = await self.get(kind, response_id)
        stream.end(
            UnknownStreamError(f"{response_id!r} was deleted. Send the request again.", "id")
        )
        self.erase(response_id)

    def erase(self, response_id: str) -> None:
        """Erase a complete answer of the present client from the journal."""
        if self._journal is not None:
            self._journal.remove(self.owner(), response_id)

    async def whole(self, kind: str, response_id: str) -> Event:
        """Return a complete answer as one object. Raises RequestError."""
        await self._is_restored.wait()
        saved = await self._saved((self.owner(), response_id), kind)
        if saved is None or saved.end is None:
            await self.get(kind, response_id)  # raises where the answer is not known
            why = "it is in progress" if saved else "that needs a server with --journal"
            raise RequestError(
                f"{response_id[:MAX_SHOWN_CHARACTERS]!r} cannot be read as one object: {why}. Send "
                "stream=true.",
                "stream",
            )
        writer = await self._writer_of(saved)
        if writer is None:
            raise UnknownStreamError(self._why_unknown(response_id), "id")
        try:
            return await writer.response()
        finally:
            writer.close()

    async def restore(self) -> None:
        """Go on with the answers that were open when the last process ended."""
        if self._journal is None:
            return
        answers = self._journal.take_open_answers()
        self._is_restored.clear()
        num_resumed = 0
        try:
            for saved in answers:
                num_resumed += await self._restore(saved)
        finally:
            self._is_restored.set()
        if answers:
            log.warning(
                "%d of %d open answers of the last process go on", num_resumed, len(answers)
            )

    async def drop_expired(self) -> None:
        """Erase answers of the journal when they have expired, until cancelled."""
        while self._journal is not None:
            await asyncio.sleep(EXPIRY_SECONDS)
            self._journal.drop_expired()

    def remove(self, stream: ResumableStream) -> None:
        """Forget a stream, unless another one has its place."""
        self._complete.pop(stream, None)
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]

    def note_complete(self, stream: ResumableStream) -> None:
        """Limit the memory of complete streams."""
        if self._streams.get(stream.key) is not stream:
            return
        self._complete[stream] = stream.event_log.size
        while sum(self._complete.values()) > self._max_bytes:
            self.remove(next(iter(self._complete)))

    def _add(
        self,
        key: Key,
        writer: ResponseWriter,
        keeps_running: bool = False,
        was_cut: bool = False,
    ) -> ResumableStream:
        writer.active.keeps_output = True
        # A client may give an id again: it means the latest answer.
        old = self._streams.pop(key, None)
        if old is not None:
            self._complete.pop(old, None)
        stream = ResumableStream(self, key, writer, keeps_running, was_cut)
        writer.event_log = stream.event_log
        self._streams[key] = stream
        return stream

    async def _restore(self, saved: SavedAnswer) -> bool:
        """Go on with an open answer, and return whether that succeeded."""
        request = saved.request
        assert self._journal is not None
        try:
            # No client knows the id of an answer that was to be sent as a whole.
            if not (request.is_stream or request.keeps_running):
                self._journal.remove(request.owner, request.id)
                return False
            writer = await self.restorers[request.kind](saved)
        except Exception as error:
            log.warning("the answer %s cannot go on, and is dropped: %s", request.id, error)
            self._journal.remove(request.owner, request.id)
            return False
        writer.active.attach(self._journal.resume(saved))
        key = (request.owner, request.id)
        self._add(key, writer, request.keeps_running, self._journal.was_cut)
        return True

    async def _read_again(self, key: Key, kind: str) -> ResumableStream | None:
        """Return a complete answer of the journal as a stream; None where there is none."""
        saved = await self._saved(key, kind)
        if saved is None or saved.end is None:
            return None
        writer = await self._writer_of(saved)
        return None if writer is None else self._add(key, writer, keeps_running=True)

    async def _writer_of(self, saved: SavedAnswer) -> ResponseWriter | None:
        """Return the writer of a complete answer; None where this server cannot read it."""
        try:
            return await self.restorers[saved.request.kind](saved)
        except (RequestError, ValueError) as error:
            log.warning("the answer %s cannot be read again: %s", saved.request.id, error)
            return None

    async def _saved(self, key: Key, kind: str) -> SavedAnswer | None:
        """Return an answer of the journal; None where there is none of this API."""
        if self._journal is None:
            return None
        records = self._journal.records(*key)
        if records is None:
            return None
        saved = await asyncio.to_thread(self._journal.read, records)
        return saved if saved is not None and saved.request.kind == kind else None

    def _why_unknown(self, response_id: str) -> str:
        shown = repr(response_id[:MAX_SHOWN_CHARACTERS])
        if not self.are_kept:
            return (
                f"{shown} is not known: this server ends a stream with its connection. Start it "
                "with --journal or --resume-timeout, and send the request again."
            )
        where = "" if self._journal else " since it was last read, or the server was started again"
        return (
            f"{shown} is not known: more than {self.seconds:g} s have passed without a reader"
            f"{where}, later answers took its place, another API key made it, or it never was. "
            "Send the request again."
        )


async def check_certain(event_log: EventLog, begin: int) -> None:
    """Raise UnknownStreamError where the event before `begin` is not certain to have been sent."""
    if begin <= len(event_log.events) and not event_log.was_cut:
        return
    certain = await event_log.certain_events()
    if begin > certain:
        why = (
            f"the machine of the server stopped, and only the first {certain} events are certain "
            "to be those that were sent"
            if event_log.was_cut
            else f"the answer has {certain} events so far, and the first one is number 0"
        )
        raise UnknownStreamError(
            f"starting_after={begin - 1} is not known: {why}. Read the answer from its beginning.",
            "starting_after",
        )


def event_begin(response_id: str, starting_after: int | None, last_event_id: str | None) -> int:
    """Return the number of the first event that a client lacks.

    An EventSource that reconnects repeats its URL, so last_event_id is later than starting_after.
    Raises RequestError.
    """
    if last_event_id is None:
        return 0 if starting_after is None else starting_after + 1
    named_id, begin = parse_event_id(last_event_id)
    if named_id != response_id:
        raise RequestError(
            f"Last-Event-ID={last_event_id[:MAX_SHOWN_CHARACTERS]!r} is of another answer than "
            f"{response_id[:MAX_SHOWN_CHARACTERS]!r}. Send the id of its own event.",
            "Last-Event-ID",
        )
    return begin


def parse_event_id(event_id: str) -> tuple[str, int]:
    """Return the id of the response and the number of the event after this one.

    Raises RequestError.
    """
    response_id, _, number = event_id.rpartition(":")
    if not response_id or not (number.isascii() and number.isdigit() and len(number) <= 9):
        raise RequestError(
            f"Last-Event-ID={event_id[:MAX_SHOWN_CHARACTERS]!r} is not allowed; allowed: the id of "
            "an event of this server, such as chatcmpl-1:57. Send it as it came, or none.",
            "Last-Event-ID",
        )
    return response_id, int(number) + 1
