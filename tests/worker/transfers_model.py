"""A random walk of pages and slots between device and host memory, compared with a dict."""

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
SLOT_HOST_PAGES = -(-SLOT_BYTES // PAGE_BYTES)
"""Host pages per slot."""
NUM_PAGES = 9
NUM_SLOTS = 5


def tensors(shapes: Shapes, units: int, device: str = "cpu") -> list[Tensor]:
    """Return tensors of random bytes for this many units."""
    fetched = []
    for shape, dtype in shapes:
        size = torch.Size(shape).numel() * dtype.itemsize
        random_moves = torch.randint(256, (units, size), dtype=torch.uint8).to(device)
        fetched.append(random_moves.view(dtype).view(units, *shape))
    return fetched


def content(parts: Sequence[Tensor], unit: int) -> Tensor:
    """Return a copy of a unit's bytes, part after part, in stream order."""
    return torch.cat([part[unit].flatten().view(torch.uint8) for part in parts])


def fill(parts: Sequence[Tensor], unit: int) -> None:
    """Overwrite a unit, as a step does."""
    for part in parts:
        part[unit].flatten().view(torch.uint8).add_(37)


class Walk:
    """Pages and slots of a device, host memory, and a dict of the contents of each host location.

    pause: called between the moves.
    """

    def __init__(
        self, rng: random.Random, stream: CopyStream, max_copy_bytes: int, device: str = "cpu"
    ) -> None:
        self.rng = rng
        torch.manual_seed(rng.randrange(1 << 30))
        self.device = {
            PAGES: tensors(PAGE_SHAPES, NUM_PAGES, device),
            SLOTS: tensors(SLOT_SHAPES, NUM_SLOTS, device),
        }
        rows = 6 + 3 * SLOT_HOST_PAGES
        sizes = [7] * (rows // 7) + [rows % 7]
        pins = stream.pins
        host = [torch.empty(n, PAGE_BYTES, dtype=torch.uint8, pin_memory=pins) for n in sizes]
        self.transfers = Transfers(
            self.device[PAGES], self.device[SLOTS], host, stream, max_copy_bytes
        )
        self.locations: dict[str, list[tuple[int, ...]]] = {
            PAGES: [(p,) for p in range(6)],
            SLOTS: [],
        }
        for first in range(6, rows, SLOT_HOST_PAGES):
            self.locations[SLOTS].append(tuple(range(first, first + SLOT_HOST_PAGES))[::-1])
        self.model: dict[tuple[int, ...], Tensor] = {}
        self.fetched: list[tuple[Tensor, Tensor]] = []

    def run(self, num_moves: int, pause: Callable[[], None]) -> None:
        """Evict and fetch at random; evicted units are overwritten immediately."""
        for _ in range(num_moves):
            chosen = {name: self.random_moves(name) for name in self.device}
            pause()
            if self.rng.random() < 0.5:
                self.evict(chosen)
            else:
                self.fetch(chosen)

    def random_moves(self, name: str) -> list[Move]:
        """Return random units, each with a host location."""
        count = self.rng.randrange(len(self.locations[name]) + 1)
        count = min(count, len(self.device[name][0]))
        units = self.rng.sample(range(len(self.device[name][0])), count)
        locations = self.rng.sample(self.locations[name], count)
        return [Move(unit, index) for unit, index in zip(units, locations, strict=True)]

    def evict(self, chosen: Moves) -> None:
        """Evict units to their host locations."""
        for name, moves in chosen.items():
            for move in moves:
                self.model[move.host_pages] = content(self.device[name], move.unit)
        self.transfers.evict(chosen)
        for name, moves in chosen.items():
            for move in moves:
                fill(self.device[name], move.unit)

    def fetch(self, chosen: Moves) -> None:
        """Fetch known host locations and record what came back, in stream order."""
        known = {n: [m for m in moves if m.host_pages in self.model] for n, moves in chosen.items()}
        self.transfers.fetch(known)
        for name, moves in known.items():
            for move in moves:
                pair = (content(self.device[name], move.unit), self.model[move.host_pages])
                self.fetched.append(pair)

    def check(self) -> None:
        """Assert that everything fetched equals what was evicted."""
        assert len(self.fetched) > 10
        for fetched_bytes, evicted_bytes in self.fetched:
            assert torch.equal(fetched_bytes, evicted_bytes)
