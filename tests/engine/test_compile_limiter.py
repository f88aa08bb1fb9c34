"""CompileLimiter bounds the requests whose grammars compile before they get rows."""

import threading

from lockstep.engine.compile_limiter import CompileLimiter
from tests.engine_factories import PATIENCE


def test_enter_blocks_at_the_limit() -> None:
    limiter = CompileLimiter(2)
    limiter.enter("a")
    limiter.enter("b")
    inside = threading.Event()

    def third() -> None:
        limiter.enter("c")
        inside.set()

    thread = threading.Thread(target=third, daemon=True)
    thread.start()
    assert not inside.wait(0.05)
    limiter.leave("unknown")
    assert not inside.wait(0.05)
    limiter.leave("a")
    assert inside.wait(PATIENCE)
    thread.join()


def test_leave_counts_once() -> None:
    limiter = CompileLimiter(1)
    for name in "abc":
        limiter.enter(name)
        limiter.leave(name)
        limiter.leave(name)
    limiter.enter("d")
