"""How many requests may be ahead of their rows."""

import threading

from lockstep.engine.compile_limiter import CompileLimiter
from tests.engine_factories import PATIENCE


def test_the_next_waits_for_room() -> None:
    ahead = CompileLimiter(2)
    ahead.enter("a")
    ahead.enter("b")
    inside = threading.Event()

    def third() -> None:
        ahead.enter("c")
        inside.set()

    thread = threading.Thread(target=third, daemon=True)
    thread.start()
    assert not inside.wait(0.05)
    ahead.leave("unknown")
    assert not inside.wait(0.05)
    ahead.leave("a")
    assert inside.wait(PATIENCE)
    thread.join()


def test_who_left_leaves_once() -> None:
    ahead = CompileLimiter(1)
    for name in "abc":
        ahead.enter(name)
        ahead.leave(name)
        ahead.leave(name)
    ahead.enter("d")
