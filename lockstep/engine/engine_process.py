"""Main program of an engine's process."""

import contextlib
import logging
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from lockstep.cache.block_log import BlockEvent
from lockstep.child_processes import ignore_signals
from lockstep.engine.compile_limiter import CompileLimiter
from lockstep.engine.engine import Engine
from lockstep.engine.engine_loop import Delivery, EngineLoop, keep_from_collection
from lockstep.engine.messages import (
    Abort,
    Began,
    ChangedBlocks,
    Command,
    Compiled,
    Ended,
    EngineRequest,
    Failed,
    Heartbeat,
    Idle,
    Progress,
    Ready,
    Report,
    ResetPrefixCache,
    StopAudits,
    Submit,
    Updates,
)
from lockstep.engine.stats import Stats
from lockstep.errors import LockstepError
from lockstep.scheduling.grammar import Grammar
from lockstep.scheduling.request import Request

log = logging.getLogger("lockstep.engine")

HEARTBEAT_SECONDS = 0.25
"""Interval between two heartbeats."""

STEPS_NICENESS = 5
"""Niceness added to threads whose steps run on the CPU."""

MakeGrammar = Callable[[Any], Grammar]
MakeEngine = Callable[[Callable[[str, int, int], None]], tuple[Engine, MakeGrammar]]
"""Function that builds the engine and its grammar factory. Its argument reports progress."""


class _Host:
    """Engine side of the pipe to the server."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._compiling: dict[str, Future[None]] = {}
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="lockstep-compile")
        self._compile_limiter: CompileLimiter
        self._engine: Engine
        self._loop: EngineLoop
        self._make_grammar: MakeGrammar
        threading.Thread(target=self._read, name="lockstep-inbox", daemon=True).start()

    def run(self, make: MakeEngine) -> None:
        """Build the engine and serve until a Stop command, or until the engine cannot go on."""
        try:
            self._engine, self._make_grammar = make(self._report_progress)
        except Exception as error:
            if not isinstance(error, LockstepError):
                error.add_note(f"in the engine's process:\n{traceback.format_exc()}")
            self._report(Failed(_picklable(error)))
            return
        self._compile_limiter = CompileLimiter(self._engine.plan.max_num_seqs)
        self._engine.on_begin = self._report_begun
        self._loop = EngineLoop(
            self._engine, self._deliver, self._deliver_blocks, lambda: self._report(Idle())
        )
        keep_from_collection()
        self._report(Ready(self._engine.facts, self._engine.executor.device_rates()))
        heartbeats = threading.Thread(
            target=self._send_heartbeats, name="lockstep-heartbeat", daemon=True
        )
        heartbeats.start()
        why = self._loop.run()
        self._ended.set()
        heartbeats.join()
        if why is None:
            self._engine.executor.close()
        else:
            self._report(Ended(why))

    def _report(self, message: Report) -> None:
        """Send a message from the calling thread.

        A sender thread would have to wait for a core and for the interpreter while the next step
        runs. Blocks while the pipe is full; drops the message once the pipe is closed.
        """
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(message)

    def _report_progress(self, what: str, done: int, total: int) -> None:
        self._report(Progress(what, done, total))

    def _report_begun(self, ids: Sequence[str]) -> None:
        self._report(Began(ids))

    def _deliver(self, updates: Sequence[Delivery]) -> None:
        for request_id, _ in updates:
            self._compile_limiter.leave(request_id)
        sent = [(i, _picklable(x) if isinstance(x, Exception) else x) for i, x in updates]
        self._report(Updates(sent))

    def _deliver_blocks(self, events: Sequence[BlockEvent]) -> None:
        self._report(ChangedBlocks(events))

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and a last one at the end for the counters."""
        is_last = False
        while not is_last:
            is_last = self._ended.wait(HEARTBEAT_SECONDS)
            self._report(Heartbeat(self._stats(), self._loop.stalled_for))

    def _stats(self) -> Stats:
        """Return the engine's counters; requests whose grammar compiles count as waiting."""
        stats = self._engine.drain_stats()
        return replace(stats, num_waiting=stats.num_waiting + len(self._compiling))

    def _read(self) -> None:
        """Execute commands; the server sends none before Ready.

        Ends the process at once when the server is gone, or a command cannot be executed: an engine
        that takes no commands would serve no request.
        """
        while True:
            try:
                self._execute(self._receive())
            except Exception:
                log.exception("a command of the server failed")
                os._exit(1)

    def _receive(self) -> Command:
        """Return the next command. Ends the process when the server is gone."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            os._exit(0)

    def _execute(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command.requests)
        elif isinstance(command, Abort):
            self._abort(command.id)
        elif isinstance(command, ResetPrefixCache):
            self._loop.reset_prefix_cache()
        elif isinstance(command, StopAudits):
            self._loop.stop_audits()
        else:
            self._loop.stop()

    def _submit(self, messages: Sequence[EngineRequest]) -> None:
        """Queue the requests without a grammar at once, the others once theirs is compiled.

        Grammars are compiled in another thread, so that neither a step nor other requests wait for
        them. At most max_num_seqs requests have a compiled grammar and no tokens yet.
        """
        self._loop.submit([message.request() for message in messages if message.grammar is None])
        for message in messages:
            if message.grammar is not None:
                self._submit_compiled(message.request(), message.grammar)

    def _submit_compiled(self, request: Request, recipe: object) -> None:
        """Queue a request once its grammar is compiled."""
        compilation = self._compilers.submit(self._compile, request, recipe)
        self._compiling[request.id] = compilation
        compilation.add_done_callback(lambda _: self._compiling.pop(request.id, None))

    def _compile(self, request: Request, recipe: object) -> None:
        self._compile_limiter.enter(request.id)
        self._report_begun([request.id])
        try:
            request.grammar = self._make_grammar(recipe)
        except Exception as error:
            # Wakes an idle loop, which then reports Idle again. After the error it could abort a
            # new request with the same id.
            self._loop.abort(request.id)
            self._deliver([(request.id, error)])
            return
        self._report(Compiled([request.id]))
        self._loop.submit([request])

    def _abort(self, request_id: str) -> None:
        """Abort the request; if its grammar is still compiling, abort right after compilation."""
        compilation = self._compiling.get(request_id)
        if compilation is None:
            self._end(request_id)
        elif not compilation.cancel():
            compilation.add_done_callback(lambda _: self._end(request_id))

    def _end(self, request_id: str) -> None:
        self._loop.abort(request_id)
        self._compile_limiter.leave(request_id)


def _picklable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError of its text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def lower_priority(device: str) -> None:
    """Lower the priority of this thread and its later threads where the model runs on the CPU.

    The server then gets a core as soon as it wants one. On a GPU the steps wait for these threads,
    so they keep their priority. On Linux, niceness belongs to a thread and applies within a session
    or control group.
    """
    if device == "cpu":
        os.nice(STEPS_NICENESS)


def run_engine(connection: Connection, make: MakeEngine) -> None:
    """Run an engine's process. It ends when the server's end of the pipe is closed."""
    # Imported here: the engine's own modules do without the kernels' packages.
    from lockstep.kernels.compiler_signals import reclaim_signal_handlers

    reclaim_signal_handlers()
    ignore_signals()
    _Host(connection).run(make)
    os._exit(0)  # shutting the interpreter down takes seconds and frees nothing that matters
