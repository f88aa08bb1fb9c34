"""Process of a node that is not the head: it runs the node's ranks for the head's engine."""

import contextlib
import pickle
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError, EngineDeadError
from lockstep.worker.hooks import NO_HOOKS
from lockstep.worker.local_ranks import LocalRanks, check_devices
from lockstep.worker.node_link import END, MESSAGE, REPORT, Link, encode_report, join_head
from lockstep.worker.plain_data import decode_plain
from lockstep.worker.rank_process import Failed, RankSettings, Ready, Stop
from lockstep.worker.ranks import SILENT_SECONDS, STARTING_SILENT_SECONDS, WATCH_SECONDS

REJOIN_SECONDS = 30.0
"""Seconds that a node tries to reach a head that has gone: a server starts a lost engine again."""

Show = Callable[[str], None]


def run_node(config: EngineConfig, show: Show) -> None:
    """Run this node's ranks for the head's engine and its successors, until the head ends.

    show: prints a line about what happens.

    Raises:
        ConfigError: the head refuses this node, or does not answer.
        EngineDeadError: the head has ended by an error, or without a word.
    """
    check_devices(config)
    name = f"node {config.node_rank} of {config.nnodes}"
    ranks = ", ".join(map(str, config.node_ranks))
    show(f"{name}: waiting for the head at {config.master_addr}:{config.master_port}")
    link, welcome = join_head(config, config.distributed_timeout_seconds)
    while True:
        show(f"{name}: joined the head at {link.peer}; its ranks here: {ranks}")
        last_words = _Session(config, link, lambda: show(f"{name}: ready")).run(welcome.port)
        if last_words:
            raise EngineDeadError(f"the head has ended: {last_words}")
        if last_words is not None:
            show(f"{name}: the head has ended")
            return
        show(f"{name}: the head is gone; waiting {REJOIN_SECONDS:g} s for another engine")
        try:
            link, welcome = join_head(config, REJOIN_SECONDS)
        except ConfigError as error:
            raise EngineDeadError(f"the head has ended or cannot be reached: {error}") from None


class _Session:
    """Ranks of this node for one engine, from its first message to its last.

    The calling thread takes messages from the head, and another one sends reports to it. on_ready:
    called when all ranks of this node are ready.
    """

    def __init__(self, config: EngineConfig, link: Link, on_ready: Callable[[], None]) -> None:
        self._config = config
        self._link = link
        self._on_ready = on_ready
        self._ranks = LocalRanks(config.node_ranks)
        self._rank_ended = threading.Event()
        self._closing = threading.Event()
        self._is_ready = False

    def run(self, port: int) -> str | None:
        """Serve the head -> its last words, "" where it ended in order; None where it is lost.

        port: of the ranks' store on the head.
        """
        link = self._link
        reporting = threading.Thread(target=self._report, name="lockstep-reports", daemon=True)
        try:
            settings = RankSettings(link.peer, port, link.address, decode_plain)
            self._ranks.start(settings, self._config, NO_HOOKS)
            reporting.start()
            return self._take_messages()
        except (OSError, EOFError):
            return None
        except BaseException as error:  # an interrupt too
            why = str(error) or f"its node was ended ({type(error).__name__})"
            with contextlib.suppress(OSError):
                link.send(REPORT, encode_report(self._config.node_ranks[0], Failed(why, "")))
            raise
        finally:
            self._closing.set()
            link.shutdown()
            # At once: torch writes a stack trace where the store of the head ends before a rank.
            self._ranks.kill()
            if reporting.is_alive():
                reporting.join()
            self._ranks.close()
            link.close()

    def _take_messages(self) -> str:
        """Give messages to the ranks until the head ends -> its last words.

        Raises OSError or EOFError where the head is lost.
        """
        link = self._link
        last_frame = time.monotonic()
        while True:
            # A head that is stopped, or a network that drops packets, closes no connection.
            if not link.connection.poll(WATCH_SECONDS):
                limit = SILENT_SECONDS if self._is_ready else STARTING_SILENT_SECONDS
                if time.monotonic() - last_frame > limit:
                    raise TimeoutError(f"the head has not answered for {limit:g} s")
                continue
            kind, data = link.receive()
            last_frame = time.monotonic()
            if kind == MESSAGE:
                self._ranks.send(data, self._check)
            elif kind == END:
                last_words = data.decode(errors="replace")
                if not last_words:
                    with contextlib.suppress(OSError):
                        self._ranks.send(pickle.dumps(Stop()), self._check)
                        self._ranks.wait()
                return last_words

    def _check(self) -> None:
        """Raise OSError once a rank has ended: it reads no messages."""
        if self._rank_ended.is_set():
            raise ConnectionError("a rank of this node has ended")

    def _report(self) -> None:
        """Send the ranks' reports and heartbeats to the head, until a rank or the head ends."""
        ready: set[int] = set()
        try:
            while not self._closing.is_set():
                for connection in wait(self._ranks.connections, WATCH_SECONDS):
                    assert isinstance(connection, Connection)
                    for rank, report in self._ranks.read(connection):
                        self._link.send(REPORT, encode_report(rank, report))
                        if isinstance(report, Failed):
                            # The head ends the connection now, and this node its other ranks.
                            self._rank_ended.set()
                            return
                        if isinstance(report, Ready):
                            ready.add(rank)
                self._link.beat()
                # From here on no rank maps the memory any more, and silence counts as an end.
                if len(ready) == len(self._ranks.ranks) and not self._is_ready:
                    self._is_ready = True
                    self._ranks.unname()
                    self._on_ready()
        except (OSError, ValueError):
            self._link.shutdown()
