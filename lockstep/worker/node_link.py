"""Connection between the head (node 0) and another node: one TCP connection that carries frames.

A frame is a message of multiprocessing.connection: a length, then bytes, of which the first is its
kind. The first frame of each side is JSON, so that releases that differ understand each other.
"""

import contextlib
import json
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from typing import Any

from lockstep import __version__
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.worker.plain_data import check_memo, decode_plain
from lockstep.worker.rank_process import Failed, Joined, Report

MESSAGE = b"M"
"""Kind of a frame to a node: a pickled message for its ranks."""
REPORT = b"R"
"""Kind of a frame to the head: the number of a rank, and its pickled report."""
BEAT = b"B"
"""Kind of a frame in both directions: the process lives."""
END = b"E"
"""Kind of a frame to a node: the head has ended; text says why if it failed."""
LOCALHOST = "127.0.0.1"
LOOPBACK = ("localhost", LOCALHOST)
"""Values of master_addr for which only processes of the head's host can join."""
RANK = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30
"""Limit of a message to ranks: masks of 1,024 rows with 8 drafts take 300 MB."""
MAX_REPORT_BYTES = 1 << 20
MAX_HELLO_BYTES = 1 << 14
MAX_TEXT = 8000
"""Characters of an error that are sent."""
STALL_SECONDS = 10.0
"""Seconds after which a frame that is not read, or ends in its middle, is an error."""
JOIN_SECONDS = 0.5
"""Interval between two attempts to reach the head."""
HELLO_SECONDS = 5.0
"""Seconds that a new connection has for its first frame, however slowly the bytes arrive."""


@dataclass(frozen=True)
class Hello:
    """First frame of a node."""

    release: str
    nnodes: int
    node_rank: int
    tensor_parallel_size: int

    @classmethod
    def of(cls, config: EngineConfig) -> "Hello":
        """Return the frame of this node."""
        return cls(__version__, config.nnodes, config.node_rank, config.tensor_parallel_size)

    @classmethod
    def read(cls, value: Any) -> "Hello":
        """Read the value of a first frame. Raises ValueError for anything else."""
        if not isinstance(value, dict):
            raise ValueError("it is no node of Lockstep")
        values: dict[str, Any] = {field.name: value.get(field.name) for field in fields(cls)}
        if any(type(values[field.name]) is not field.type for field in fields(cls)):
            raise ValueError("it is no node of Lockstep")
        return cls(**values)


@dataclass(frozen=True)
class Welcome:
    """First frame of the head. port: of the ranks' store. error: why the node is refused."""

    port: int = 0
    error: str = ""


class Link:
    """End of a connection. Any thread may send; one thread receives.

    max_bytes: limit of a frame that is received.
    """

    def __init__(self, connected: socket.socket, max_bytes: int) -> None:
        self._socket = connected
        self._max_bytes = max_bytes
        self._sending = threading.Lock()
        connected.setblocking(True)
        # A schedule must not wait until the answer to the frame before it has arrived.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's limits: Connection has none itself, and no thread may wait forever.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(STALL_SECONDS))
        self.limit_receive(HELLO_SECONDS)
        # A separate descriptor: shutdown() of the socket still ends both.
        self.connection = Connection(socket.dup(connected.fileno()))

    @property
    def address(self) -> str:
        """Address of this host on the connection."""
        return _address(self._socket.getsockname())

    @property
    def peer(self) -> str:
        """Address of the other host."""
        return _address(self._socket.getpeername())

    def limit_receive(self, seconds: float) -> None:
        """Limit the time that receive() waits for the next bytes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send a frame. Raises OSError where the other side does not read."""
        with self._sending:
            self.connection.send_bytes(kind + data)

    def beat(self) -> None:
        """Send a heartbeat, unless another thread sends a frame. Raises OSError."""
        if self._sending.acquire(blocking=False):
            try:
                self.connection.send_bytes(BEAT)
            finally:
                self._sending.release()

    def receive(self) -> tuple[bytes, bytes]:
        """Return (kind, data) of the next frame. Raises OSError or EOFError."""
        frame = self.connection.recv_bytes(self._max_bytes)
        return frame[:1], frame[1:]

    def receive_first(self) -> Any:
        """Return the value of the first frame. Raises OSError, EOFError or ValueError."""
        deadline = threading.Timer(HELLO_SECONDS, self.shutdown)
        deadline.daemon = True
        deadline.start()
        try:
            return json.loads(self.connection.recv_bytes(MAX_HELLO_BYTES))
        except RecursionError:
            raise ValueError("its first frame is nested too deeply") from None
        finally:
            deadline.cancel()

    def shutdown(self) -> None:
        """End the connection; a thread that waits for it gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and free it."""
        self.shutdown()
        self._socket.close()
        self.connection.close()


def _address(name: tuple[Any, ...]) -> str:
    """Return the address of a socket's name, in IPv4's form if it is one."""
    return str(name[0]).removeprefix("::ffff:")


def _timeval(seconds: float) -> bytes:
    """Return a time in the form of socket options."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


class RemoteNode:
    """Node other than the head, as the head sees it. See RankHost."""

    def __init__(self, link: Link, config: EngineConfig, node_rank: int) -> None:
        self.link = link
        size = len(config.node_ranks)
        self.ranks = range(node_rank * size, (node_rank + 1) * size)
        self.node_name = f" on node {node_rank} ({link.peer})"
        self.connections = [link.connection]
        self._last_frame = time.monotonic()

    @property
    def silent_for(self) -> float:
        """See RankHost."""
        return time.monotonic() - self._last_frame

    def read(self, connection: Connection) -> Sequence[tuple[int, Report]]:
        """See RankHost."""
        try:
            kind, data = self.link.receive()
            self._last_frame = time.monotonic()
            if kind != REPORT:
                return []
            rank = RANK.unpack_from(data)[0]
            check_memo(data[RANK.size :])
            report = decode_plain(data[RANK.size :])
            if rank not in self.ranks or not isinstance(report, Report):
                raise ValueError(f"rank {rank}: {type(report).__name__}")
            check_texts(report)
            return [(rank, report)]
        except (OSError, EOFError) as error:
            reason = str(error) or "the connection was closed"
            why = f"its node has ended, or the network between the nodes: {reason}"
        except Exception as error:
            why = f"its node sent a report that cannot be read: {error!r}"
        return [(self.ranks[0], Failed(why, ""))]

    def send(self, data: bytes, check: Callable[[], None]) -> None:
        """See RankHost."""
        try:
            self.link.send(MESSAGE, data)
        except OSError:
            self.link.shutdown()  # read() then names the node: half of a frame cannot be mended
            raise

    def beat(self) -> None:
        """See RankHost."""
        with contextlib.suppress(OSError):  # read() reports it
            self.link.beat()

    def end(self, why: str) -> None:
        """Announce the end of the head. why: the error for which it ends; "" without one."""
        with contextlib.suppress(OSError):
            self.link.send(END, why[:MAX_TEXT].encode())

    def kill(self) -> None:
        """See RankHost: the node ends its ranks where the connection ends."""
        self.link.shutdown()

    def close(self) -> None:
        """See RankHost."""
        self.link.close()


def check_texts(report: Report) -> None:
    """Raise ValueError where an object replaces a text of a report: it may be printed at any
    length, as a list of lists that are one list.
    """
    texts: list[object] = []
    if isinstance(report, Joined):
        texts += [*report.identity, *report.identity.values()]
    elif isinstance(report, Failed):
        texts += [report.error, report.details, report.kind]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{type(report).__name__} with something else than text")


def encode_report(rank: int, report: Report) -> bytes:
    """Return the data of a frame with a report."""
    if isinstance(report, Failed):
        report = Failed(report.error[:MAX_TEXT], report.details[:MAX_TEXT], report.kind)
    return RANK.pack(rank) + pickle.dumps(report, pickle.HIGHEST_PROTOCOL)


class NodeListener:
    """The head's port, on which the other nodes join. port: of the ranks' store."""

    def __init__(self, config: EngineConfig, port: int) -> None:
        self.config = config
        self.port = port
        self.missing = set(range(1, config.nnodes))
        try:
            self._socket = self._listen()
        except OSError as error:
            raise ConfigError(
                f"master_port={config.master_port} cannot be opened: {error.strerror or error}. "
                "Choose another with --master-port, the same on all nodes."
            ) from None

    def _listen(self) -> socket.socket:
        """Open the port: on loopback for nodes of this host, else on every address.

        A host's own name may resolve to a loopback address on the host itself.
        """
        port = self.config.master_port
        backlog = self.config.nnodes
        if self.config.master_addr in LOOPBACK:
            return socket.create_server((LOCALHOST, port), backlog=backlog)
        if not socket.has_dualstack_ipv6():
            return socket.create_server(("", port), backlog=backlog)
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=True)

    def close(self) -> None:
        """Close the port."""
        self._socket.close()

    def accept(self, seconds: float) -> RemoteNode | None:
        """Wait for a node -> it has joined; None where none has.

        Raises ConfigError for a node of another release or size.
        """
        self._socket.settimeout(seconds)
        try:
            connected, _ = self._socket.accept()
        except TimeoutError:
            return None
        link = Link(connected, MAX_REPORT_BYTES)
        try:
            hello = Hello.read(link.receive_first())
            error = self._refusal(hello, link.peer)
            link.connection.send_bytes(json.dumps(asdict(Welcome(self.port, error))).encode())
        except (OSError, EOFError, ValueError):  # no node, or one that has ended
            link.close()
            return None
        if error:
            link.close()
            raise ConfigError(error)
        link.limit_receive(STALL_SECONDS)
        self.missing.remove(hello.node_rank)
        return RemoteNode(link, self.config, hello.node_rank)

    def timeout_error(self) -> ConfigError:
        """Return the error of nodes that have not joined in time."""
        config = self.config
        missing = ", ".join(map(str, sorted(self.missing)))
        reach = f"let it reach port {config.master_port} of this host"
        if config.master_addr in LOOPBACK:
            reach += f"; master_addr={config.master_addr!r} lets nodes of this host alone join"
        return ConfigError(
            f"node {missing} of {config.nnodes} (nnodes) has not joined within "
            f"{config.distributed_timeout_seconds} s (distributed_timeout_seconds). Start it with "
            f"the same command line and its --node-rank, and {reach}."
        )

    def _refusal(self, hello: Hello, address: str) -> str:
        """Return why a node cannot take part; "" where it can."""
        mine = Hello.of(self.config)
        for name in ("release", "nnodes", "tensor_parallel_size"):
            theirs, ours = getattr(hello, name), getattr(mine, name)
            if theirs != ours:
                return (
                    f"{name} of node {hello.node_rank} ({address}) is {theirs}, and of node 0 "
                    f"{ours}; all nodes need the same. Start every node with the same release and "
                    "command line."
                )
        if hello.node_rank not in self.missing:
            missing = ", ".join(map(str, sorted(self.missing)))
            return (
                f"node_rank={hello.node_rank} ({address}) is not allowed; allowed: {missing}, "
                "which have not joined yet. Start it with another --node-rank."
            )
        return ""


def join_head(config: EngineConfig, seconds: float) -> tuple[Link, Welcome]:
    """Connect to the head, which may start later, and return its answer.

    Raises:
        ConfigError: the head does not answer for `seconds`, or refuses this node.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return _try_to_join(config)
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError) as error:
            if time.monotonic() > end:
                reason = getattr(error, "strerror", None) or str(error) or "the connection closed"
                raise ConfigError(
                    f"master_addr={config.master_addr!r} master_port={config.master_port}: the "
                    f"head (--node-rank 0) has not answered for {seconds:g} s ({reason}). Start "
                    "it, or correct the address and the port."
                ) from None
        time.sleep(JOIN_SECONDS)


def _try_to_join(config: EngineConfig) -> tuple[Link, Welcome]:
    """Connect to the head once. Raises OSError, EOFError or ValueError, or ConfigError."""
    address = (config.master_addr, config.master_port)
    connected = socket.create_connection(address, HELLO_SECONDS)
    link = Link(connected, MAX_MESSAGE_BYTES)
    try:
        # On one host, an ephemeral port may connect to itself while no process listens.
        if connected.getsockname() == connected.getpeername():
            raise OSError("nobody listens")
        link.connection.send_bytes(json.dumps(asdict(Hello.of(config))).encode())
        value = link.receive_first()
        welcome = Welcome(int(value["port"]), str(value["error"]))
        if welcome.error:
            raise ConfigError(f"the head refuses this node: {welcome.error}")
    except BaseException as error:
        link.close()
        if isinstance(error, (KeyError, TypeError)):
            raise ValueError("it is no head of Lockstep") from None
        raise
    link.limit_receive(STALL_SECONDS)
    return link, welcome
