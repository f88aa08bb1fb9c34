"""Copies of pages and slots between device and host: preempted rows and evicted prefixes.

A unit (a page or a slot) is the concatenation of its bytes in all layers. On a GPU, copies go
through a staging buffer. To the host: a kernel gathers units into the buffer in the steps' stream,
and a copy stream copies it to pinned memory, so the step that overwrites a page waits for the
gather only. Back: the copy stream fills the buffer, also while a step runs, and a kernel scatters
it in the steps' stream, which waits for these copies only. All copies share one stream, so no copy
reads host memory that is still being written. On a CPU every call is synchronous.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from lockstep.cache.host_tier import PAGES, SLOTS, Move, Moves
from lockstep.kernels.stream_copies import copy_to_device

STAGING_BYTES = 32 << 20
"""Bytes of a staging buffer."""
BUFFERS = 2
"""Staging buffers: one is copied while the other is filled."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Word types; units are copied in the widest that divides every part."""
Mark = Any
"""Event in a stream; None on a CPU."""
Copy = tuple[Tensor, Tensor]
"""Destination and source of a copy."""


@dataclass(frozen=True)
class Span:
    """Adjacent parts of a unit: [units, words] each. begin, end: word range in the unit."""

    parts: list[Tensor]
    begin: int
    end: int

    @property
    def words(self) -> int:
        """Return the words of one unit."""
        return self.end - self.begin

    def columns(self, lines: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part with its columns of staging lines [units, words]."""
        yield from zip(self.parts, lines.split([p.shape[1] for p in self.parts], 1), strict=True)


class Units:
    """Units of one kind, pages or slots: tensors that are indexed by unit first.

    words: length of a unit, in type `word`. spans: its parts, grouped into at most max_bytes each.
    """

    def __init__(self, tensors: Sequence[Tensor], word: torch.dtype, max_bytes: int) -> None:
        self.word = word
        self.words = 0
        self.spans: list[Span] = []
        for part in (t.view(t.shape[0], -1).view(torch.uint8).view(word) for t in tensors):
            begin = self.words
            self.words += part.shape[1]
            last = self.spans[-1] if self.spans else None
            if last and (self.words - last.begin) * self.word.itemsize <= max_bytes:
                self.spans[-1] = Span([*last.parts, part], last.begin, self.words)
            else:
                self.spans.append(Span([part], begin, self.words))

    @property
    def nbytes(self) -> int:
        """Return the bytes of one unit."""
        return self.words * self.word.itemsize


class CopyStream:
    """Stream of copies between host and device, overlapped with the steps; synchronous on a CPU.

    pins: host memory must be pinned.
    """

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.pins = device == "cuda"

    def mark(self) -> Mark:
        """Record an event after the work queued so far in the steps' stream."""
        return torch.cuda.current_stream().record_event() if self.stream else None

    def copy(self, copies: Sequence[Copy], after: Mark) -> Mark:
        """Run copies after an event and after all earlier copies -> event after them."""
        if self.stream is None:
            for to, source in copies:
                to.copy_(source)
            return None
        self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, mark: Mark) -> None:
        """Make later work of the steps' stream wait for an event."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(mark)


@dataclass
class Staging:
    """Staging buffer [words] int64. idle: event after its last use."""

    buffer: Tensor
    idle: Mark

    def lines(self, units: int, words: int, word: torch.dtype) -> Tensor:
        """Return its head as [units, words]."""
        return self.buffer.view(word)[: units * words].view(units, words)


class Transfers:
    """Copier of pages and slots.

    Host memory of a unit is a list of tensors that hold its bytes in order; the last may be longer.
    paged, state: tensors of pages and of slots. host: host tier, tensors [host pages, bytes of a
    page] uint8, equally long except the last. max_bytes: of a staging buffer; buffers are allocated
    at first use.
    """

    def __init__(
        self,
        paged: Sequence[Tensor],
        state: Sequence[Tensor],
        host: Sequence[Tensor],
        stream: CopyStream,
        max_bytes: int = STAGING_BYTES,
    ) -> None:
        sizes = [t[0].nbytes for t in (*paged, *state)]
        word = next(w for w in WORDS if not any(size % w.itemsize for size in sizes))
        self.pages = Units(paged, word, max_bytes)
        self.slots = Units(state, word, max_bytes)
        self.units = {PAGES: self.pages, SLOTS: self.slots}
        self.host = host
        self.stream = stream
        self.max_bytes = max_bytes
        self._buffers: Iterator[Staging] | None = None

    def save(self, units: Units, ids: Sequence[int]) -> list[list[Tensor]]:
        """Copy units into new host memory -> host tensors of each."""
        count = max(self.max_bytes // max(units.nbytes, 1), 1)
        host_tensors = []
        for begin in range(0, len(ids), count):
            size = (len(ids[begin : begin + count]), units.words)
            lines = torch.empty(size, dtype=units.word, pin_memory=self.stream.pins)
            host_tensors += [[line] for line in lines]
        self.copy_out(units, ids, host_tensors)
        return host_tensors

    def evict(self, moves: Moves) -> None:
        """Copy pages and slots to their host pages, in the order of the steps."""
        for name, chosen in moves.items():
            self.copy_out(self.units[name], *self._resolve(self.units[name], chosen))

    def fetch(self, moves: Moves) -> None:
        """Copy host pages into pages and slots, before later steps."""
        for name, chosen in moves.items():
            self.copy_in(self.units[name], *self._resolve(self.units[name], chosen))

    def _resolve(self, units: Units, moves: Sequence[Move]) -> tuple[list[int], list[list[Tensor]]]:
        """Return the units of moves, and the host tensors of each."""
        host = [tensor.view(units.word) for tensor in self.host]
        count = len(host[0]) if host else 1
        host_tensors = [[host[p // count][p % count] for p in move.host_pages] for move in moves]
        return [move.unit for move in moves], host_tensors

    def copy_out(
        self, units: Units, ids: Sequence[int], host_tensors: Sequence[Sequence[Tensor]]
    ) -> None:
        """Copy units to host tensors, in the order of the steps."""
        for span, index, chosen in self._batches(units, ids, host_tensors):
            staging = self._next_staging(index.device)
            lines = staging.lines(len(chosen), span.words, units.word)
            # The copy stream may still read the buffer from its previous use.
            self.stream.wait(staging.idle)
            for part, column in span.columns(lines):
                torch.index_select(part, 0, index, out=column)
            staging.idle = self.stream.copy(_pairs(span, lines, chosen), self.stream.mark())

    def copy_in(
        self, units: Units, ids: Sequence[int], host_tensors: Sequence[Sequence[Tensor]]
    ) -> None:
        """Copy host tensors into units, before later steps."""
        for span, index, chosen in self._batches(units, ids, host_tensors):
            staging = self._next_staging(index.device)
            lines = staging.lines(len(chosen), span.words, units.word)
            copies = [(line, host) for host, line in _pairs(span, lines, chosen)]
            # The scatter waits for this copy only, not for copies of other buffers.
            self.stream.wait(self.stream.copy(copies, staging.idle))
            for part, column in span.columns(lines):
                part.index_copy_(0, index, column)
            staging.idle = self.stream.mark()

    def _batches(
        self, units: Units, ids: Sequence[int], host_tensors: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[Span, Tensor, Sequence[Sequence[Tensor]]]]:
        """Yield what fits into a staging buffer: span, unit ids on the device, host tensors."""
        for span in units.spans:
            count = max(self.max_bytes // (span.words * units.word.itemsize), 1)
            for begin in range(0, len(ids), count):
                chosen = torch.tensor(ids[begin : begin + count])
                index = torch.empty_like(chosen, device=span.parts[0].device)
                copy_to_device(chosen, index)
                yield span, index, host_tensors[begin : begin + count]

    def _next_staging(self, device: torch.device) -> Staging:
        """Return the staging buffer that was used longest ago."""
        if self._buffers is None:
            spans = [*self.pages.spans, *self.slots.spans]
            longest = max(span.words for span in spans) * self.pages.word.itemsize
            words = -(-max(self.max_bytes, longest) // torch.int64.itemsize)
            buffers = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(BUFFERS)]
            self._buffers = cycle([Staging(buffer, self.stream.mark()) for buffer in buffers])
        return next(self._buffers)


def _pairs(
    span: Span, lines: Tensor, host_tensors: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a host tensor and the part of a staging line that belongs to it."""
    pairs = []
    for line, tensors in zip(lines, host_tensors, strict=True):
        at = 0
        for host in tensors:
            first = max(span.begin, at)
            last = min(span.end, at + len(host))
            if first < last:
                part = line[first - span.begin : last - span.begin]
                pairs.append((host[first - at : last - at], part))
            at += len(host)
    return pairs
