"""Transport to an engine in a thread of this process."""

import threading
from collections.abc import Sequence

from lockstep.cache.block_log import BlockEvent
from lockstep.engine.async_engine import SHUT_DOWN, Receiver
from lockstep.engine.engine import Engine
from lockstep.engine.engine_loop import Delivery, EngineLoop
from lockstep.engine.stats import Stats
from lockstep.scheduling.request import Request

STOP_SECONDS = 30.0
"""Seconds that stop() waits for the current step."""
DEAD_THREAD_SECONDS = 0.1
"""Interval at which wait_until_idle() checks that the engine's thread still runs."""


class ThreadTransport:
    """Transport that owns an engine from start() to stop(). See Transport."""

    restarting = False

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine, self._deliver, self._deliver_blocks)
        self._receiver: Receiver | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-engine", daemon=True)

    @property
    def stalled_for(self) -> float:
        """See Transport."""
        return self.loop.stalled_for

    def start(self, receiver: Receiver) -> None:
        """Start the engine's thread."""
        self._receiver = receiver
        self._thread.start()

    def stop(self) -> None:
        """See Transport."""
        self.loop.stop()
        # A garbage collection may run in the engine's own thread and end the owner of this object.
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def wait_until_idle(self) -> None:
        """Wait until all submits and aborts so far took effect, no audit is left and no step is in
        flight.

        Where another request keeps the engine busy, steps may be in flight.
        """
        idle = self.loop.notify_when_idle()
        while self._thread.is_alive() and not idle.wait(DEAD_THREAD_SECONDS):
            continue

    def drop_audits(self) -> None:
        """Drop all audits before the next step."""
        self.loop.drop_audits()

    def submit(self, requests: Sequence[Request]) -> None:
        """See Transport."""
        self.loop.submit(requests)

    def abort(self, request_id: str) -> None:
        """See Transport."""
        self.loop.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """See Transport."""
        self.loop.reset_prefix_cache()

    def stats(self) -> Stats:
        """See Transport."""
        return self.engine.drain_stats()

    def _deliver(self, updates: Sequence[Delivery]) -> None:
        assert self._receiver is not None
        self._receiver.deliver(updates)

    def _deliver_blocks(self, events: Sequence[BlockEvent]) -> None:
        assert self._receiver is not None
        self._receiver.blocks(events)

    def _run(self) -> None:
        assert self._receiver is not None
        fault = self.loop.run()
        self._receiver.ended(fault or SHUT_DOWN, fault is not None)
