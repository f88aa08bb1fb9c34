"""Transfers of pages and slots between device and host memory, with copies that are as late as
allowed."""

import random
from collections import deque
from collections.abc import Sequence

import pytest
import torch

from lockstep.cache.host_tier import PAGES, SLOTS
from lockstep.worker.transfers import Copy, CopyStream, Mark, Transfers
from tests.worker.transfers_model import PAGE_BYTES, PAGE_SHAPES, Walk, content, fill, tensors


class LateStream(CopyStream):
    """Copy stream that makes copies when they are waited for, or at a random earlier time.

    A mark is the number of copies requested so far.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__("cpu")
        self.rng = rng
        self.num_requested = 0
        self.waiting: deque[Copy] = deque()

    def mark(self) -> Mark:
        """Return the mark of the steps, which run immediately."""
        return 0

    def copy(self, copies: Sequence[Copy], following: Mark) -> Mark:
        """Queue copies, and make some of the queued ones."""
        assert following is not None, "copies that follow no mark"
        self.waiting.extend(copies)
        self.num_requested += len(copies)
        self.wait(self.num_requested - self.rng.randrange(len(self.waiting) + 1))
        return self.num_requested

    def wait(self, mark: Mark) -> None:
        """Make all copies before a mark."""
        while self.waiting and self.num_requested - len(self.waiting) < mark:
            to, source = self.waiting.popleft()
            to.copy_(source)


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("max_copy_bytes", [24, 80, 1 << 20])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_units_are_not_read_before_their_copy_arrives(
    seed: int, late: bool, max_copy_bytes: int
) -> None:
    """max_copy_bytes: buffers for a part of a slot, for a page, and for everything."""
    rng = random.Random(seed)
    walk = Walk(rng, LateStream(rng) if late else CopyStream("cpu"), max_copy_bytes)
    walk.run(60, pause=lambda: None)
    walk.check()


@pytest.mark.parametrize("max_copy_bytes", [24, 1 << 20])
def test_saved_units_are_restored_to_other_units(max_copy_bytes: int) -> None:
    torch.manual_seed(0)
    paged = tensors(PAGE_SHAPES, 9)
    moves = Transfers(paged, [], [], LateStream(random.Random(0)), max_copy_bytes)
    kept = [content(paged, page) for page in (3, 1, 8)]
    saved = moves.save(moves.pages, [3, 1, 8])
    assert sum(line.nbytes for index in saved for line in index) == 3 * PAGE_BYTES
    for page in range(9):
        fill(paged, page)
    rest = [content(paged, page) for page in (0, 1, 2, 3, 8)]
    moves.copy_in(moves.pages, [7, 4, 5], saved)
    for page, expected in zip((7, 4, 5, 0, 1, 2, 3, 8), [*kept, *rest], strict=True):
        assert torch.equal(content(paged, page), expected)


def test_transfers_without_units_copy_nothing() -> None:
    moves = Transfers(tensors(PAGE_SHAPES, 2), [], [], CopyStream("cpu"))
    assert moves.slots.nbytes == 0 and moves.save(moves.slots, []) == []
    moves.evict({PAGES: [], SLOTS: []})
    moves.fetch({})
    assert moves._buffers is None


def test_transfers_use_widest_common_word() -> None:
    wide = Transfers([torch.zeros(3, 64)], [torch.zeros(2, 3)], [], CopyStream("cpu"))
    assert wide.pages.word is wide.slots.word is torch.int32
    assert wide.pages.nbytes == 256 and wide.slots.nbytes == 12
    assert Transfers([torch.zeros(3, 64)], [], [], CopyStream("cpu")).pages.word is torch.int64
