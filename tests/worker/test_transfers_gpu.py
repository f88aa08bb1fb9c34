"""On a GPU, pages and slots move concurrently with steps, without host waits, and no unit is read
before its copy arrives."""

import random
from collections.abc import Sequence

import pytest
import torch

from lockstep.worker.transfers import Copy, CopyStream, Mark
from tests.worker.transfers_model import Walk

pytestmark = pytest.mark.gpu

LONG = 2_000_000_000
"""Clock cycles of about a second."""
SHORT = 2_000_000
"""Clock cycles of about a millisecond."""


class SlowCopies(CopyStream):
    """Copy stream with random delays before copies."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__("cuda")
        self.rng = rng

    def copy(self, copies: Sequence[Copy], marker: Mark) -> Mark:
        """Copy as every stream does, after a random delay."""
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self.rng.choice((1, 1, SHORT)))
        return super().copy(copies, marker)


@pytest.mark.parametrize("max_copy_bytes", [24, 80, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_units_are_not_read_before_their_copy_arrives(seed: int, max_copy_bytes: int) -> None:
    rng = random.Random(seed)
    walk = Walk(rng, SlowCopies(rng), max_copy_bytes, "cuda")
    walk.run(200, pause=lambda: torch.cuda._sleep(rng.choice((1, 1, SHORT))))
    walk.check()


def test_moves_do_not_block_the_host() -> None:
    walk = Walk(random.Random(0), CopyStream("cuda"), 80, "cuda")
    walk.run(20, pause=lambda: None)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    walk.run(20, pause=lambda: None)
    marker = torch.cuda.Event()
    marker.record()
    assert not marker.query(), "the host waited for the device"
    walk.check()


def test_step_after_eviction_does_not_wait_for_copies() -> None:
    rng = random.Random(0)
    walk = Walk(rng, CopyStream("cuda"), 1 << 20, "cuda")
    walk.run(20, pause=lambda: None)
    torch.cuda.synchronize()
    with torch.cuda.stream(walk.transfers.stream.stream):
        torch.cuda._sleep(LONG)
    walk.evict({name: walk.random_moves(name) for name in walk.device})
    marker = torch.cuda.Event()
    marker.record()
    marker.synchronize()
    copies_done = torch.cuda.Event()
    copies_done.record(walk.transfers.stream.stream)
    assert not copies_done.query(), "the copies were not concurrent with the steps"
