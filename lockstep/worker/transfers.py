"""Pages and slots between device and host memory: of preempted rows, and of what the cache evicts.

A unit, a page or a slot, is what it holds in all layers, one after the other: its bytes as they
lie. On a GPU they go through a staging buffer. Out: gathered into it among the steps, then copied
to pinned memory by a stream of its own, so that the step that writes the page next waits for the
gathering alone. Back: copied into it by that stream, also while a step runs, then scattered among
the steps, which wait for these copies alone. The copies themselves are in one order, so that
nothing reads host memory that is still on its way. On a CPU all is done when it is called.
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
"""Of a staging buffer."""
BUFFERS = 2
"""Copies from one go on while the other is filled."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Bytes move as the widest of these that every part of a page and a slot is a multiple of."""
Mark = Any
"""A point in the order of a stream's work; None on a CPU."""
Copy = tuple[Tensor, Tensor]
"""To, from."""


@dataclass(frozen=True)
class Span:
    """Parts of a unit that lie side by side in it: [units, words] each. begin, end: its words."""

    parts: list[Tensor]
    begin: int
    end: int

    @property
    def words(self) -> int:
        """Of one unit."""
        return self.end - self.begin

    def columns(self, lines: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part, and its words of lines [units, words]."""
        yield from zip(self.parts, lines.split([p.shape[1] for p in self.parts], 1), strict=True)


class Units:
    """All pages, or all slots, of tensors that are indexed by unit first.

    words: of one unit, of the type `word`. spans: its parts, as many together as `most` bytes hold.
    """

    def __init__(self, tensors: Sequence[Tensor], word: torch.dtype, most: int) -> None:
        self.word = word
        self.words = 0
        self.spans: list[Span] = []
        for part in (t.view(t.shape[0], -1).view(torch.uint8).view(word) for t in tensors):
            begin = self.words
            self.words += part.shape[1]
            last = self.spans[-1] if self.spans else None
            if last and (self.words - last.begin) * self.word.itemsize <= most:
                self.spans[-1] = Span([*last.parts, part], last.begin, self.words)
            else:
                self.spans.append(Span([part], begin, self.words))

    @property
    def nbytes(self) -> int:
        """Of one unit."""
        return self.words * self.word.itemsize


class CopyStream:
    """Where copies between host and device are made, beside the steps; on a CPU, among them. pins:
    whether host memory has to be pinned for that."""

    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.pins = device == "cuda"

    def mark(self) -> Mark:
        """Behind what the steps' stream has to do by now."""
        return torch.cuda.current_stream().record_event() if self.stream else None

    def copy(self, copies: Sequence[Copy], behind: Mark) -> Mark:
        """Makes copies behind a mark and behind all copies before. -> the mark behind them."""
        if self.stream is None:
            for to, source in copies:
                to.copy_(source)
            return None
        self.stream.wait_event(behind)
        with torch.cuda.stream(self.stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, mark: Mark) -> None:
        """What the steps' stream is given from now on comes behind a mark."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(mark)


@dataclass
class Staging:
    """A buffer [words] int64. idle: behind its last use."""

    buffer: Tensor
    idle: Mark

    def lines(self, units: int, words: int, word: torch.dtype) -> Tensor:
        """Its beginning as [units, words]."""
        return self.buffer.view(word)[: units * words].view(units, words)


class Transfers:
    """Moves pages and slots. A place in host memory is a row of tensors whose bytes, one after the
    other, are a unit's; the last may be longer than what is left.

    paged, state: the tensors of pages and slots. host: where what is evicted goes, tensors [host
    pages, bytes of a page] uint8, one after the other and equally long but for the last. most:
    bytes of a staging buffer; they are made when something moves for the first time.
    """

    def __init__(
        self,
        paged: Sequence[Tensor],
        state: Sequence[Tensor],
        host: Sequence[Tensor],
        stream: CopyStream,
        most: int = STAGING_BYTES,
    ) -> None:
        sizes = [t[0].nbytes for t in (*paged, *state)]
        word = next(w for w in WORDS if not any(size % w.itemsize for size in sizes))
        self.pages = Units(paged, word, most)
        self.slots = Units(state, word, most)
        self.units = {PAGES: self.pages, SLOTS: self.slots}
        self.host = host
        self.stream = stream
        self.most = most
        self._turn: Iterator[Staging] | None = None

    def save(self, units: Units, ids: Sequence[int]) -> list[list[Tensor]]:
        """Copies units into host memory of their own. -> the place of each."""
        count = max(self.most // max(units.nbytes, 1), 1)
        places = []
        for begin in range(0, len(ids), count):
            size = (len(ids[begin : begin + count]), units.words)
            lines = torch.empty(size, dtype=units.word, pin_memory=self.stream.pins)
            places += [[line] for line in lines]
        self.out(units, ids, places)
        return places

    def evict(self, moves: Moves) -> None:
        """Copies pages and slots to their host pages, as they are now in the order of the steps."""
        for name, chosen in moves.items():
            self.out(self.units[name], *self._placed(self.units[name], chosen))

    def fetch(self, moves: Moves) -> None:
        """Copies what is in host pages into pages and slots, for the steps that come from now
        on."""
        for name, chosen in moves.items():
            self.back(self.units[name], *self._placed(self.units[name], chosen))

    def _placed(self, units: Units, moves: Sequence[Move]) -> tuple[list[int], list[list[Tensor]]]:
        """The units of moves, and their places."""
        host = [tensor.view(units.word) for tensor in self.host]
        count = len(host[0]) if host else 1
        places = [[host[p // count][p % count] for p in move.place] for move in moves]
        return [move.unit for move in moves], places

    def out(self, units: Units, ids: Sequence[int], places: Sequence[Sequence[Tensor]]) -> None:
        """Copies units to their places, as they are now in the order of the steps."""
        for span, index, chosen in self._pieces(units, ids, places):
            staging = self._next_staging(index.device)
            lines = staging.lines(len(chosen), span.words, units.word)
            self.stream.wait(staging.idle)
            for part, column in span.columns(lines):
                torch.index_select(part, 0, index, out=column)
            staging.idle = self.stream.copy(_pairs(span, lines, chosen), self.stream.mark())

    def back(self, units: Units, ids: Sequence[int], places: Sequence[Sequence[Tensor]]) -> None:
        """Copies what is in places into units, for the steps that come from now on."""
        for span, index, chosen in self._pieces(units, ids, places):
            staging = self._next_staging(index.device)
            lines = staging.lines(len(chosen), span.words, units.word)
            copies = [(line, host) for host, line in _pairs(span, lines, chosen)]
            self.stream.wait(self.stream.copy(copies, staging.idle))
            for part, column in span.columns(lines):
                part.index_copy_(0, index, column)
            staging.idle = self.stream.mark()

    def _pieces(
        self, units: Units, ids: Sequence[int], places: Sequence[Sequence[Tensor]]
    ) -> Iterator[tuple[Span, Tensor, Sequence[Sequence[Tensor]]]]:
        """What a staging buffer holds at once, in turn: a span, the units' ids, their places."""
        for span in units.spans:
            count = max(self.most // (span.words * units.word.itemsize), 1)
            for begin in range(0, len(ids), count):
                chosen = torch.tensor(ids[begin : begin + count])
                index = torch.empty_like(chosen, device=span.parts[0].device)
                copy_to_device(chosen, index)
                yield span, index, places[begin : begin + count]

    def _next_staging(self, device: torch.device) -> Staging:
        """The buffer that was used longest ago."""
        if self._turn is None:
            spans = [*self.pages.spans, *self.slots.spans]
            longest = max(span.words for span in spans) * self.pages.word.itemsize
            words = -(-max(self.most, longest) // torch.int64.itemsize)
            buffers = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(BUFFERS)]
            self._turn = cycle([Staging(buffer, self.stream.mark()) for buffer in buffers])
        return next(self._turn)


def _pairs(
    span: Span, lines: Tensor, places: Sequence[Sequence[Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """(host, line): the tensors of the places that a span's lines lie in, and what is in each."""
    pairs = []
    for line, place in zip(lines, places, strict=True):
        at = 0
        for host in place:
            first = max(span.begin, at)
            last = min(span.end, at + len(host))
            if first < last:
                part = line[first - span.begin : last - span.begin]
                pairs.append((host[first - at : last - at], part))
            at += len(host)
    return pairs
