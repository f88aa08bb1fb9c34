"""Pages and slots between device and host memory, by a stream that is as late as it may be."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from lockstep.cache.host_tier import PAGES, SLOTS
from lockstep.worker.transfers import Copy, CopyStream, Mark, Transfers
from tests.worker.moving import PAGE_BYTES, PAGE_SHAPES, Walk, content, fill, tensors


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


@pytest.mark.parametrize("most", [24, 80, 1 << 20])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_read_that_is_on_its_way(seed: int, late: bool, most: int) -> None:
    """most: buffers that hold a part of a slot, a page, and all."""
    rng = random.Random(seed)
    walk = Walk(rng, LateStream(rng) if late else CopyStream("cpu"), most)
    walk.run(60, pause=lambda: None)
    walk.check()


@pytest.mark.parametrize("most", [24, 1 << 20])
def test_units_are_saved_and_come_back_elsewhere(most: int) -> None:
    torch.manual_seed(0)
    paged = tensors(PAGE_SHAPES, 9)
    moves = Transfers(paged, [], [], LateStream(random.Random(0)), most)
    kept = [content(paged, page) for page in (3, 1, 8)]
    saved = moves.save(moves.pages, [3, 1, 8])
    assert sum(line.nbytes for place in saved for line in place) == 3 * PAGE_BYTES
    for page in range(9):
        fill(paged, page)
    others = [content(paged, page) for page in (0, 1, 2, 3, 8)]
    moves.back(moves.pages, [7, 4, 5], saved)
    for page, wanted in zip((7, 4, 5, 0, 1, 2, 3, 8), [*kept, *others], strict=True):
        assert torch.equal(content(paged, page), wanted)


def test_what_keeps_nothing_moves_nothing() -> None:
    moves = Transfers(tensors(PAGE_SHAPES, 2), [], [], CopyStream("cpu"))
    assert moves.slots.nbytes == 0 and moves.save(moves.slots, []) == []
    moves.evict({PAGES: [], SLOTS: []})
    moves.fetch({})
    assert moves._buffers is None


def test_bytes_move_as_the_widest_words_that_all_parts_are_made_of() -> None:
    wide = Transfers([torch.zeros(3, 64)], [torch.zeros(2, 3)], [], CopyStream("cpu"))
    assert wide.pages.word is wide.slots.word is torch.int32
    assert wide.pages.nbytes == 256 and wide.slots.nbytes == 12
    assert Transfers([torch.zeros(3, 64)], [], [], CopyStream("cpu")).pages.word is torch.int64
