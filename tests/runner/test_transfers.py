"""Pages and slots between device and host memory, by a stream that is as late as it may be."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lockstep.cache.host import PAGES, SLOTS, Move
from lockstep.runner.transfers import Copy, CopyStream, Mark, Transfers

PAGE_SHAPES = (((4, 2), torch.bfloat16), ((4, 3), torch.float32), ((4, 1), torch.uint8))
SLOT_SHAPES = (((5, 3), torch.float32), ((7,), torch.bfloat16), ((2, 2, 2), torch.float32))
PAGE_BYTES = 16 + 48 + 4
SLOT_BYTES = 60 + 14 + 32
SLOT_PLACE = -(-SLOT_BYTES // PAGE_BYTES)


class LateStream(CopyStream):
    """Copies that are made when they are waited for, or at some time before. A mark is how many
    have been asked for."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__("cpu")
        self.rng = rng
        self.asked = 0
        self.waiting: deque[Copy] = deque()

    def mark(self) -> Mark:
        """What the steps do is done at once."""
        return 0

    def copy(self, copies: Sequence[Copy], behind: Mark) -> Mark:
        """Asks for copies, and makes some of those that were asked for before."""
        assert behind is not None, "copies that are behind nothing"
        self.waiting.extend(copies)
        self.asked += len(copies)
        self.wait(self.asked - self.rng.randrange(len(self.waiting) + 1))
        return self.asked

    def wait(self, mark: Mark) -> None:
        """Makes all copies in front of a mark."""
        while self.waiting and self.asked - len(self.waiting) < mark:
            to, source = self.waiting.popleft()
            to.copy_(source)


def tensors(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], units: int) -> list[Tensor]:
    """Tensors of so many units, of random bytes."""
    found = []
    for shape, dtype in shapes:
        size = torch.Size(shape).numel() * dtype.itemsize
        found.append(torch.randint(256, (units, size), dtype=torch.uint8).view(dtype))
    return [t.view(units, *shape) for t, (shape, _) in zip(found, shapes, strict=True)]


def content(parts: Sequence[Tensor], unit: int) -> bytes:
    """The bytes of a unit, part after part."""
    return b"".join(bytes(part[unit].flatten().view(torch.uint8).tolist()) for part in parts)


def fill(parts: Sequence[Tensor], unit: int) -> None:
    """Other bytes in a unit: the step that has been given it."""
    for part in parts:
        whole = part[unit].flatten().view(torch.uint8)
        whole.copy_(torch.randint(256, whole.shape, dtype=torch.uint8))


@pytest.mark.parametrize("most", [24, 80, 1 << 20])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_read_that_is_on_its_way(seed: int, late: bool, most: int) -> None:
    """A walk beside a dict: what was put into host memory is what comes back. most: buffers that
    hold a part of a slot, a page, and all."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    paged = tensors(PAGE_SHAPES, 9)
    state = tensors(SLOT_SHAPES, 5)
    host = torch.empty(6 + 3 * SLOT_PLACE, PAGE_BYTES, dtype=torch.uint8)
    stream = LateStream(rng) if late else CopyStream("cpu")
    moves = Transfers(paged, state, host, stream, most)
    places = {PAGES: [(p,) for p in range(6)], SLOTS: []}
    for first in range(6, len(host), SLOT_PLACE):
        places[SLOTS].append(tuple(range(first, first + SLOT_PLACE))[::-1])
    device = {PAGES: paged, SLOTS: state}
    model: dict[tuple[int, ...], bytes] = {}
    for _ in range(60):
        chosen = {}
        for name, parts in device.items():
            count = rng.randrange(min(len(places[name]), len(parts[0])) + 1)
            units = rng.sample(range(len(parts[0])), count)
            kept = rng.sample(places[name], count)
            chosen[name] = [Move(u, place) for u, place in zip(units, kept, strict=True)]
        if rng.random() < 0.5:
            for name, some in chosen.items():
                model |= {move.place: content(device[name], move.unit) for move in some}
            moves.evict(chosen)
            for name, some in chosen.items():
                for move in some:
                    fill(device[name], move.unit)
        else:
            known = {n: [m for m in some if m.place in model] for n, some in chosen.items()}
            moves.fetch(known)
            for name, some in known.items():
                for move in some:
                    assert content(device[name], move.unit) == model[move.place]


@pytest.mark.parametrize("most", [24, 1 << 20])
def test_units_are_saved_and_come_back_elsewhere(most: int) -> None:
    torch.manual_seed(0)
    paged = tensors(PAGE_SHAPES, 9)
    host = torch.empty(0, PAGE_BYTES, dtype=torch.uint8)
    moves = Transfers(paged, [], host, LateStream(random.Random(0)), most)
    kept = [content(paged, page) for page in (3, 1, 8)]
    saved = moves.save(moves.pages, [3, 1, 8])
    assert sum(line.nbytes for place in saved for line in place) == 3 * PAGE_BYTES
    for page in range(9):
        fill(paged, page)
    others = [content(paged, page) for page in (0, 1, 2, 3, 8)]
    moves.back(moves.pages, [7, 4, 5], saved)
    assert [content(paged, page) for page in (7, 4, 5)] == kept
    assert [content(paged, page) for page in (0, 1, 2, 3, 8)] == others


def test_what_keeps_nothing_moves_nothing() -> None:
    host = torch.empty(0, PAGE_BYTES, dtype=torch.uint8)
    moves = Transfers(tensors(PAGE_SHAPES, 2), [], host, CopyStream("cpu"))
    assert moves.slots.nbytes == 0 and moves.save(moves.slots, []) == []
    moves.evict({PAGES: [], SLOTS: []})
    moves.fetch({})
    assert moves._turn is None


def test_bytes_move_as_the_widest_words_that_all_parts_are_made_of() -> None:
    host = torch.empty(0, 64, dtype=torch.uint8)
    wide = Transfers([torch.zeros(3, 64)], [torch.zeros(2, 3)], host, CopyStream("cpu"))
    assert wide.pages.word is wide.slots.word is torch.int32
    assert wide.pages.nbytes == 256 and wide.slots.nbytes == 12
    assert Transfers([torch.zeros(3, 64)], [], host, CopyStream("cpu")).pages.word is torch.int64
