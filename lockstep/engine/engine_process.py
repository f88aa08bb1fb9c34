"""An engine's process: what runs in it, from its first line to its last."""

import contextlib
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from lockstep.engine.compile_limiter import Ahead
from lockstep.engine.engine import Engine
from lockstep.engine.engine_loop import Delivery, EngineLoop, keep_from_collection
from lockstep.engine.messages import (
    Abort,
    Command,
    Ended,
    EngineRequest,
    Failed,
    Progress,
    Pulse,
    Ready,
    Report,
    ResetPrefixCache,
    Submit,
    Updates,
)
from lockstep.engine.stats import Stats
from lockstep.errors import LockstepError
from lockstep.scheduling.grammar import Grammar
from lockstep.scheduling.request import Request

PULSE_SECONDS = 0.25
"""Between two signs of life."""
IGNORED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Those that a terminal or a supervisor sends to all of a group: the server decides what ends."""

STEPS_NICENESS = 5
"""What is added to the niceness of threads whose steps are a CPU's own work."""

MakeGrammar = Callable[[Any], Grammar]
MakeEngine = Callable[[Callable[[str, int, int], None]], tuple[Engine, MakeGrammar]]
"""Given a function that is told of progress: the engine, and what makes grammars of recipes."""


class _Host:
    """The engine's side of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._compiling: dict[str, Future[None]] = {}
        self._compilers = ThreadPoolExecutor(1, thread_name_prefix="lockstep-compile")
        self._ahead: Ahead
        self._engine: Engine
        self._loop: EngineLoop
        self._make_grammar: MakeGrammar
        threading.Thread(target=self._read, name="lockstep-inbox", daemon=True).start()

    def run(self, make: MakeEngine) -> None:
        """Builds the engine and serves until it is told to stop, or cannot go on."""
        try:
            self._engine, self._make_grammar = make(self._tell_progress)
        except Exception as error:
            if not isinstance(error, LockstepError):
                error.add_note(f"in the engine's process:\n{traceback.format_exc()}")
            self._report(Failed(_portable(error)))
            return
        self._ahead = Ahead(self._engine.plan.max_num_seqs)
        self._loop = EngineLoop(self._engine, self._deliver)
        keep_from_collection()
        self._report(Ready(self._engine.facts, self._engine.executor.device_rates()))
        pulses = threading.Thread(target=self._pulse, name="lockstep-pulse", daemon=True)
        pulses.start()
        why = self._loop.run()
        self._ended.set()
        pulses.join()
        if why is not None:
            self._report(Ended(why))

    def _report(self, message: Report) -> None:
        """Sends a message, from the thread that has it: another one would have to wait for a core
        and for the interpreter while the next step runs. Where the pipe is full, it waits for the
        reader; where nobody reads any more, it is dropped."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.send(message)

    def _tell_progress(self, what: str, done: int, of: int) -> None:
        self._report(Progress(what, done, of))

    def _deliver(self, news: Sequence[Delivery]) -> None:
        for request_id, _ in news:
            self._ahead.leave(request_id)
        sent = [(i, _portable(x) if isinstance(x, Exception) else x) for i, x in news]
        self._report(Updates(sent))

    def _pulse(self) -> None:
        """Tells at regular times that the process lives; once more at the end, for the counters."""
        over = False
        while not over:
            over = self._ended.wait(PULSE_SECONDS)
            self._report(Pulse(self._stats(), self._loop.stalled_for))

    def _stats(self) -> Stats:
        """The engine's. What waits for its grammar waits, too."""
        found = self._engine.drain_stats()
        return replace(found, num_waiting=found.num_waiting + len(self._compiling))

    def _read(self) -> None:
        """Takes commands; none comes before the engine stands. Nobody wants an engine whose server
        is gone, whatever it is doing."""
        while True:
            try:
                command = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            self._take(command)

    def _take(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command.requests)
        elif isinstance(command, Abort):
            self._abort(command.id)
        elif isinstance(command, ResetPrefixCache):
            self._loop.reset_prefix_cache()
        else:
            self._loop.stop()

    def _submit(self, messages: Sequence[EngineRequest]) -> None:
        """Queue the requests without a grammar at once, the others once theirs is compiled.

        Grammars are compiled in another thread, so that neither a step nor other requests wait for
        them, and in advance for as many requests as there are rows.
        """
        self._loop.submit([plain.request() for plain in messages if plain.grammar is None])
        for plain in messages:
            if plain.grammar is not None:
                self._submit_compiled(plain.request(), plain.grammar)

    def _submit_compiled(self, request: Request, recipe: object) -> None:
        """Queue a request once its grammar is compiled."""
        compilation = self._compilers.submit(self._compile, request, recipe)
        self._compiling[request.id] = compilation
        compilation.add_done_callback(lambda _: self._compiling.pop(request.id, None))

    def _compile(self, request: Request, recipe: object) -> None:
        self._ahead.enter(request.id)
        try:
            request.grammar = self._make_grammar(recipe)
        except Exception as error:
            self._deliver([(request.id, error)])
            return
        self._loop.submit([request])

    def _abort(self, request_id: str) -> None:
        """Behind the request, wherever that is."""
        made = self._compiling.get(request_id)
        if made is None:
            self._end(request_id)
        elif not made.cancel():
            made.add_done_callback(lambda _: self._end(request_id))

    def _end(self, request_id: str) -> None:
        self._loop.abort(request_id)
        self._ahead.leave(request_id)


def _portable(error: Exception) -> Exception:
    """The error, or what it says where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def give_way(device: str) -> None:
    """Where the model runs on the CPU, lets the server have a core as soon as it wants one: this
    thread, and those that it starts from now on, run behind it. A step takes as long as it takes;
    whoever waits for an answer waits for the server. On a GPU, steps wait for these threads.

    On Linux niceness is a thread's own, and weighs processes of one session or control group.
    """
    if device == "cpu":
        os.nice(STEPS_NICENESS)


def run_engine(connection: Connection, make: MakeEngine) -> None:
    """All that an engine's process does. Its server's end of the pipe being closed ends it."""
    # Imported here: the engine's own modules do without the kernels' packages.
    from lockstep.kernels.compiler_signals import reclaim_signal_handlers

    reclaim_signal_handlers()
    for one in IGNORED_SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    _Host(connection).run(make)
    os._exit(0)  # all is said; taking the interpreter apart takes seconds, and gives nothing back
