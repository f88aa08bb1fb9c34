"""On a GPU: pages and slots move beside the steps, nobody waits on the host, and nothing is read
that is on its way, however late steps or copies are."""

import random
from collections.abc import Sequence

import pytest
import torch

from lockstep.worker.transfers import Copy, CopyStream, Mark
from tests.worker.moving import Walk

pytestmark = pytest.mark.gpu

LONG = 2_000_000_000
"""Cycles: about a second."""
SHORT = 2_000_000
"""About a millisecond."""


class SlowCopies(CopyStream):
    """Copies in front of which the stream is busy for some time, or for none."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__("cuda")
        self.rng = rng

    def copy(self, copies: Sequence[Copy], behind: Mark) -> Mark:
        """As every stream does it, later."""
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(self.rng.choice((1, 1, SHORT)))
        return super().copy(copies, behind)


@pytest.mark.parametrize("most", [24, 80, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_read_that_is_on_its_way(seed: int, most: int) -> None:
    rng = random.Random(seed)
    walk = Walk(rng, SlowCopies(rng), most, "cuda")
    walk.run(200, pause=lambda: torch.cuda._sleep(rng.choice((1, 1, SHORT))))
    walk.check()


def test_no_move_waits_on_the_host() -> None:
    walk = Walk(random.Random(0), CopyStream("cuda"), 80, "cuda")
    walk.run(20, pause=lambda: None)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    walk.run(20, pause=lambda: None)
    behind = torch.cuda.Event()
    behind.record()
    assert not behind.query(), "the host waited for the device"
    walk.check()


def test_a_step_behind_an_eviction_does_not_wait_for_the_copy() -> None:
    rng = random.Random(0)
    walk = Walk(rng, CopyStream("cuda"), 1 << 20, "cuda")
    walk.run(20, pause=lambda: None)
    torch.cuda.synchronize()
    with torch.cuda.stream(walk.transfers.stream.stream):
        torch.cuda._sleep(LONG)
    walk.out({name: walk.drawn(name) for name in walk.device})
    behind = torch.cuda.Event()
    behind.record()
    behind.synchronize()
    copied = torch.cuda.Event()
    copied.record(walk.transfers.stream.stream)
    assert not copied.query(), "the copies were not beside the steps"
