"""The loop that runs an engine: commands in, updates out, a batch for every step."""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from lockstep.engine.engine import Engine
from lockstep.engine.token_update import TokenUpdate, token_update
from lockstep.errors import EngineDeadError
from lockstep.scheduling.request import Request

log = logging.getLogger("lockstep.engine")


def keep_from_collection() -> None:
    """Leaves all objects that stand now out of garbage collections.

    For a process that serves from now on: a collection of the 220,000 objects that a server has
    takes 0.14 s (2 cores of an EPYC), in which it does nothing else.
    """
    gc.collect()
    gc.freeze()


Delivery = tuple[str, TokenUpdate | Exception]
"""A request's id, and what has come of it: an update, or why the engine refused it."""
Deliver = Callable[[Sequence[Delivery]], None]


class EngineLoop:
    """Owns an engine while run() runs, in whose thread `deliver` is called. submit, abort and stop
    may be called from any thread; they take effect between two steps.

    What deliver gets shares nothing with the engine.
    """

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self.engine = engine
        self._deliver = deliver
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sent: dict[str, int] = {}
        self._settling: list[threading.Event] = []
        self._began: float | None = None

    @property
    def stalled_for(self) -> float:
        """Seconds since the step that now runs began; 0 between steps. Waits for no lock."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, which are added between the same two steps.

        The error of a request that the engine refuses is delivered.
        """
        self._commands.put(lambda: self._add(requests))

    def abort(self, request_id: str) -> None:
        """Ends a request. Nothing is delivered of it from then on."""
        self._commands.put(lambda: self._abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes before the next step. Requests submitted later find none."""
        self._commands.put(self.engine.reset_prefix_cache)

    def settle(self) -> threading.Event:
        """Return an event that is set once all commands before this call took effect and no step
        is in flight, or another request keeps the engine busy."""
        settled = threading.Event()
        self._commands.put(lambda: self._settling.append(settled))
        return settled

    def stop(self) -> None:
        """Lets run() return after the present step."""
        self._commands.put(None)

    def run(self) -> str | None:
        """Serves until stop(), or until the engine cannot go on: then why, in plain words.

        A step that raises ends the requests that it worked on, and the loop goes on.
        """
        try:
            self._serve()
        except EngineDeadError as error:
            log.exception("the engine cannot go on")
            return str(error)
        except BaseException:
            log.exception("the engine cannot go on")
            return "it failed outside of a step"
        finally:
            self._tell_settled()
        return None

    def _serve(self) -> None:
        while self._take_commands():
            touched = self._step()
            self._tell([one for one in touched if one.finish_reason is not None])
            self._tell([one for one in touched if one.finish_reason is None])

    def _tell(self, requests: Sequence[Request]) -> None:
        """What a step brought them. Those that it ended are told by themselves, before all others:
        their clients wait for nothing else."""
        if requests:
            self._deliver([self._update_of(request) for request in requests])

    def _take_commands(self) -> bool:
        """Runs what callers asked for; sleeps while there is no work. False: stopped."""
        while True:
            is_idle = not self.engine.has_work()
            if is_idle or self._sent:
                self._tell_settled()
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _tell_settled(self) -> None:
        while self._settling:
            self._settling.pop().set()

    def _add(self, requests: Sequence[Request]) -> None:
        """Add requests to the engine."""
        for request in requests:
            try:
                self.engine.add(request)
            except Exception as error:  # a request that add() refuses has changed nothing
                self._deliver([(request.id, error)])
            else:
                self._sent[request.id] = 0

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)
        self._sent.pop(request_id, None)

    def _step(self) -> list[Request]:
        """One iteration; after one that raised, what it ended with an error."""
        self._began = time.monotonic()
        try:
            return self.engine.step()
        except Exception:
            log.exception("a step failed; the requests that it worked on end with an error")
            ended = self.engine.recover()
            log.error("ended by it: %s", ", ".join(request.id for request in ended) or "none")
            return ended
        finally:
            self._began = None

    def _update_of(self, request: Request) -> Delivery:
        """Return the new tokens of a request since its last update."""
        num_sent = self._sent[request.id]
        update = token_update(request, num_sent)
        if request.finish_reason is None:
            self._sent[request.id] = num_sent + len(update.token_ids)
        else:
            del self._sent[request.id]
        return request.id, update
