"""A random walk of pages and slots between device and host memory, beside a dict."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.cache.host_tier import PAGES, SLOTS, Move, Moves
from lockstep.worker.transfers import CopyStream, Transfers

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]
PAGE_SHAPES: Shapes = (((4, 2), torch.bfloat16), ((4, 3), torch.float32), ((4, 1), torch.uint8))
SLOT_SHAPES: Shapes = (((5, 3), torch.float32), ((7,), torch.bfloat16), ((2, 2), torch.float32))
PAGE_BYTES = 16 + 48 + 4
SLOT_BYTES = 60 + 14 + 16
SLOT_PLACE = -(-SLOT_BYTES // PAGE_BYTES)
"""Host pages of a slot."""
NUM_PAGES = 9
NUM_SLOTS = 5


def tensors(shapes: Shapes, units: int, device: str = "cpu") -> list[Tensor]:
    """Tensors of so many units, of random bytes."""
    found = []
    for shape, dtype in shapes:
        size = torch.Size(shape).numel() * dtype.itemsize
        drawn = torch.randint(256, (units, size), dtype=torch.uint8).to(device)
        found.append(drawn.view(dtype).view(units, *shape))
    return found


def content(parts: Sequence[Tensor], unit: int) -> Tensor:
    """The bytes of a unit, part after part, as they are now in the order of the steps."""
    return torch.cat([part[unit].flatten().view(torch.uint8) for part in parts])


def fill(parts: Sequence[Tensor], unit: int) -> None:
    """Other bytes in a unit: a step writes it."""
    for part in parts:
        part[unit].flatten().view(torch.uint8).add_(37)


class Walk:
    """Units of a device, host memory behind them, and what a dict says is in each place of it.

    pause: called among the steps.
    """

    def __init__(
        self, rng: random.Random, stream: CopyStream, most: int, device: str = "cpu"
    ) -> None:
        self.rng = rng
        torch.manual_seed(rng.randrange(1 << 30))
        self.device = {
            PAGES: tensors(PAGE_SHAPES, NUM_PAGES, device),
            SLOTS: tensors(SLOT_SHAPES, NUM_SLOTS, device),
        }
        rows = 6 + 3 * SLOT_PLACE
        sizes = [7] * (rows // 7) + [rows % 7]
        pins = stream.pins
        host = [torch.empty(n, PAGE_BYTES, dtype=torch.uint8, pin_memory=pins) for n in sizes]
        self.transfers = Transfers(self.device[PAGES], self.device[SLOTS], host, stream, most)
        self.places: dict[str, list[tuple[int, ...]]] = {PAGES: [(p,) for p in range(6)], SLOTS: []}
        for first in range(6, rows, SLOT_PLACE):
            self.places[SLOTS].append(tuple(range(first, first + SLOT_PLACE))[::-1])
        self.model: dict[tuple[int, ...], Tensor] = {}
        self.found: list[tuple[Tensor, Tensor]] = []

    def run(self, turns: int, pause: Callable[[], None]) -> None:
        """Moves out and back; what was moved out is written over at once."""
        for _ in range(turns):
            chosen = {name: self.drawn(name) for name in self.device}
            pause()
            if self.rng.random() < 0.5:
                self.out(chosen)
            else:
                self.back(chosen)

    def drawn(self, name: str) -> list[Move]:
        """Some units, each with a place."""
        count = self.rng.randrange(len(self.places[name]) + 1)
        count = min(count, len(self.device[name][0]))
        units = self.rng.sample(range(len(self.device[name][0])), count)
        places = self.rng.sample(self.places[name], count)
        return [Move(unit, place) for unit, place in zip(units, places, strict=True)]

    def out(self, chosen: Moves) -> None:
        """Units go to their places."""
        for name, moves in chosen.items():
            for move in moves:
                self.model[move.host_pages] = content(self.device[name], move.unit)
        self.transfers.evict(chosen)
        for name, moves in chosen.items():
            for move in moves:
                fill(self.device[name], move.unit)

    def back(self, chosen: Moves) -> None:
        """What is in places comes back; it is looked at by the step behind."""
        known = {n: [m for m in moves if m.host_pages in self.model] for n, moves in chosen.items()}
        self.transfers.fetch(known)
        for name, moves in known.items():
            for move in moves:
                pair = (content(self.device[name], move.unit), self.model[move.host_pages])
                self.found.append(pair)

    def check(self) -> None:
        """All that came back was what had gone."""
        assert len(self.found) > 10
        for came, went in self.found:
            assert torch.equal(came, went)
