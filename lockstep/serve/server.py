"""Running the server: sockets, TLS, signals, and the lines that show how to ask."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from lockstep.engine.engine_loop import keep_from_collection
from lockstep.errors import ConfigError, EngineDeadError
from lockstep.serve.app import Pages, create_app
from lockstep.serve.http.access import Rules
from lockstep.serve.http.connections import MAX_DROPPED_BYTES, BoundedProtocol
from lockstep.serve.requests.service import Client, Limits, Service
from lockstep.serve.telemetry.logs import LogFormat, log_request, write_logs
from lockstep.serve.telemetry.metrics import Metrics, Prefix
from lockstep.serve.telemetry.throughput import Throughput
from lockstep.serve.telemetry.traces import Traces
from lockstep.settings import why_unread
from lockstep.text.processor import Processor
from lockstep.worker.roofline import StepFloors

log = logging.getLogger("lockstep.serve")

BACKLOG = 2048
"""Connections that wait to be taken, as in uvicorn; more of them time out or are reset."""
SPARE_DESCRIPTORS = 64
"""Descriptors that are not for connections: files, the engine, logs."""
TLS_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
END_SECONDS = 5.0
"""How long clients have to read the last event of a stream that was ended."""
TICK_SECONDS = 0.05
"""Time between two looks at what a server that is shutting down waits for."""
STATS_SECONDS = 10.0
"""Time between two lines of throughput."""
KEEP_ALIVE_SECONDS = 75.0
"""Longer than the 60 s for which most proxies keep an idle connection: a server that closes first
lets a proxy send a request into a connection that is gone."""
CLOSE = (b"connection", b"close")


@dataclass(frozen=True)
class Address:
    """Where the server listens: a host and a port, or a Unix socket's path."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None

    def bind(self) -> socket.socket:
        """An open socket; clients that connect wait until serve() takes them. ConfigError."""
        if self.uds is not None:
            return _bound_path(self.uds)
        if not 0 <= self.port <= 65535:
            raise ConfigError(
                f"port={self.port} is not allowed; allowed: 0 to 65535, 0 for any that is free. "
                "Choose another with --port."
            )
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self.host, self.port))
            listener.listen(BACKLOG)
        except (OSError, UnicodeError, TypeError) as error:  # TypeError: halves of surrogate pairs
            listener.close()
            raise ConfigError(
                f"host={self.host!r} port={self.port} cannot be opened: "
                f"{getattr(error, 'strerror', None) or error}. "
                "Choose another host, or another port with --port."
            ) from error
        return listener

    def unused(self) -> list[str]:
        """What was chosen and a Unix socket has no use for."""
        usual = Address()
        chosen = (("host", self.host != usual.host), ("port", self.port != usual.port))
        return [name for name, other in chosen if other and self.uds is not None]

    def url(self, listener: socket.socket, tls: bool) -> str:
        """The address as a client on this machine writes it."""
        if self.uds is not None:
            return "http://localhost"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if tls else 'http'}://{shown}:{listener.getsockname()[1]}"


def _bound_path(path: str) -> socket.socket:
    """A Unix socket at the path, in the place of one that nobody listens on any more."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            _remove_if_dead(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"uds={path!r} cannot be opened: {error.strerror or error}. Choose another path."
        ) from error
    return listener


def _remove_if_dead(path: str) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        if probe.connect_ex(path) == errno.ECONNREFUSED:
            os.unlink(path)


@dataclass(frozen=True)
class Options:
    """How the server runs.

    tls: uvicorn's ssl_* settings. drain_seconds: how long running requests may go on after SIGTERM.
    keep_alive_seconds: how long an idle connection is kept. connections: most connections at once;
    descriptors bound it too. pages: what web pages of other origins may do. metrics: what stands in
    front of their names. logs: the form of the log's lines; log_requests: it has one for every
    request; log_stats: one of throughput every STATS_SECONDS while there is work.
    """

    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)
    docs: bool = True
    playground: bool = True
    tokenizer_info: bool = False
    cache_reset: bool = False
    drain_seconds: float = 30.0
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    connections: int = 4096
    log_level: str = "warning"
    tls: dict[str, Any] = field(default_factory=dict)
    pages: Pages = field(default_factory=Pages)
    metrics: Prefix = "lockstep"
    logs: LogFormat = "text"
    log_requests: bool = False
    log_stats: bool = True


class _Server(uvicorn.Server):
    """uvicorn's server that lets requests end, and ends those that do not."""

    def __init__(
        self, config: uvicorn.Config, service: Service, metrics: Metrics, options: Options
    ) -> None:
        super().__init__(config)
        self.service = service
        self.metrics = metrics
        self.drain_seconds = options.drain_seconds
        self.log_stats = options.log_stats
        self.failure: str | None = None

    def fail(self, why: str) -> None:
        """The engine has ended: so does the server, and the process says so."""
        self.failure = why
        self.should_exit = True

    async def run_on(
        self, listener: socket.socket, client: Client, on_start: Callable[[], None]
    ) -> None:
        """Serves until the end, which may be the engine's. on_start: called once requests are
        taken."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_Overflows())

        def failed(why: str) -> None:
            loop.call_soon_threadsafe(self.fail, why)

        client.on_end = failed
        if not client.is_alive:
            self.fail("it ended while the server started")
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        throughput = asyncio.create_task(self._log_throughput()) if self.log_stats else None
        while not (self.started or serving.done()):
            await asyncio.sleep(0.01)
        if self.started:
            on_start()
        await serving
        if throughput is not None:
            throughput.cancel()

    async def _log_throughput(self) -> None:
        """Write a line of throughput every STATS_SECONDS while there is work."""
        lines = Throughput(self.metrics.read(self.service.client.stats()))
        while True:
            await asyncio.sleep(STATS_SECONDS)
            lines.log(self.metrics.read(self.service.client.stats()), STATS_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals ask for the end; the process then ends by itself, not by the signal."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end in their time, then end them, and close what is left.

        Until they have ended, new connections are accepted: a balancer may still send requests
        here, which get a 503 with Retry-After where a refused connection would be an error.
        """
        self.service.close_doors()
        self._close_after_answers()
        connections: set[Any] = self.server_state.connections
        waited_for = [one.cycle for one in connections if one.is_busy]
        loop = asyncio.get_running_loop()
        alarm = loop.call_later(self.drain_seconds, self.service.end_all)
        end = loop.time() + self.drain_seconds + END_SECONDS
        self._tell_what_runs()
        while not (
            self.force_exit or all(c.response_complete or c.disconnected for c in waited_for)
        ):
            if loop.time() > end:
                break
            await asyncio.sleep(TICK_SECONDS)
        alarm.cancel()
        await asyncio.sleep(TICK_SECONDS)  # what connected meanwhile is accepted and answered
        if self.force_exit:
            await self._abandon()
        await super().shutdown(sockets)

    def _close_after_answers(self) -> None:
        """Announce with every answer from here on that its connection closes."""
        headers = [*self.server_state.default_headers, CLOSE]
        self.server_state.default_headers = headers
        connections: set[Any] = self.server_state.connections
        for one in connections:
            if one.is_busy:
                one.cycle.default_headers = headers
                one.cycle.keep_alive = False

    def _tell_what_runs(self) -> None:
        count = self.service.num_running
        if count:
            log.warning(
                "shutting down: %d request(s) may run for %g s more (--shutdown-timeout); "
                "Ctrl-C ends them now",
                count,
                self.drain_seconds,
            )

    async def _abandon(self) -> None:
        """End all requests and connections at once."""
        log.warning("shutting down without waiting: %d request(s) ended", self.service.num_running)
        self.service.end_all()
        await asyncio.sleep(TICK_SECONDS)  # streams get their last event
        for one in list(self.server_state.connections):
            one.transport.abort()
        # Applications end by themselves then; uvicorn logs a traceback of each it has to cancel.
        deadline = asyncio.get_running_loop().time() + END_SECONDS
        while self.server_state.tasks and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(TICK_SECONDS)


def serve(
    client: Client,
    processor: Processor,
    listener: socket.socket,
    *,
    model_names: Sequence[str],
    fingerprint: str,
    address: Address,
    options: Options,
    floors: StepFloors | None = None,
    cache: Mapping[str, str] | None = None,
    traces: Traces | None = None,
    show: Callable[[str], Any] = print,
) -> None:
    """Serves until interrupted. `client` is started; the caller shuts it down afterwards.
    model_names: that clients may use; answers bear the first. floors: of the engine's steps, shown
    beside their times. cache: its sizes and settings, as /metrics tells them. traces: where a span
    of every request goes.

    Raises EngineDeadError if the engine ended by itself, and ConfigError where TLS cannot be had.
    """
    model_name, *aliases = model_names
    write_logs(options.logs, options.log_requests)
    metrics = Metrics(model_name, options.metrics, floors, cache)
    on_record = [metrics.observe, log_request, *([traces.record] if traces else ())]
    service = Service(
        client, processor, model_name, fingerprint, options.limits, aliases, on_record
    )
    app = create_app(
        service,
        options.rules,
        options.docs,
        options.pages,
        metrics,
        options.playground,
        options.tokenizer_info,
        options.cache_reset,
    )

    server = _Server(_config(app, options), service, metrics, options)

    def announce() -> None:
        url = address.url(listener, bool(options.tls))
        chats = processor.template is not None
        show(how_to_ask(url, model_name, chats, address.uds, bool(options.rules.keys)))
        if options.playground and address.uds is None:
            show(f"  {url}/ is a playground, for a browser")

    keep_from_collection()
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        uvloop.run(server.run_on(listener, client, announce))
    if server.failure is not None:
        raise EngineDeadError(f"the engine has stopped: {server.failure}. Restart the server.")


def _config(app: FastAPI, options: Options) -> uvicorn.Config:
    """uvicorn's settings, loaded."""

    class Protocol(BoundedProtocol):
        # A quarter more may be open for a moment: those that are refused.
        most = max(1, min(options.connections, (raise_descriptors() - SPARE_DESCRIPTORS) * 4 // 5))
        # Whoever sends a body of an allowed size reads the answer that refuses it.
        max_dropped_bytes = max(MAX_DROPPED_BYTES, options.rules.body_bytes)

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level=options.log_level,
        log_config=None,
        backlog=min(BACKLOG, Protocol.most // 2 + 1),  # all of them are taken in one go
        server_header=False,
        timeout_keep_alive=options.keep_alive_seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=int(END_SECONDS),
        **options.tls,
    )
    config.load()
    return config


def check_tls(tls: Mapping[str, Any]) -> None:
    """Raises ConfigError where uvicorn could not use these settings of its own: {} is no TLS."""
    if not tls:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            tls["ssl_certfile"], tls["ssl_keyfile"], tls["ssl_keyfile_password"] or ""
        )
        if "ssl_ca_certs" in tls:
            context.load_verify_locations(tls["ssl_ca_certs"])
        if "ssl_ciphers" in tls:
            context.set_ciphers(tls["ssl_ciphers"])
    except (OSError, ValueError) as error:
        named = ", ".join(f"{name}={tls[name]!r}" for name in TLS_FILES if tls.get(name))
        raise ConfigError(
            f"{named} cannot be used: {_why_unusable(tls, error)}. Name files in PEM form that "
            "belong together."
        ) from None


def _why_unusable(tls: Mapping[str, Any], error: Exception) -> str:
    """Return which TLS file cannot be read, and why; else what OpenSSL says of all of them."""
    for name in TLS_FILES:
        if tls.get(name):
            try:
                Path(tls[name]).open("rb").close()
            except OSError as unread:
                return f"{name}: {why_unread(unread)}"
    return str(error)


def raise_descriptors() -> int:
    """Lets the process have as many descriptors as it may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return most if soft == resource.RLIM_INFINITY else soft


class _Overflows:
    """A loop's exception handler that tells of missing descriptors once a minute."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next:
            self._next = loop.time() + 60
            log.warning("no descriptors are left for new connections; they wait")


def how_to_ask(
    url: str, model_name: str, chats: bool = True, uds: str | None = None, keys: bool = False
) -> str:
    """The model, the URL, and a curl line that works as pasted; `keys`: with KEY replaced."""
    question = "List the first 12 primes."  # the bundled model knows them, and little of the world
    body: dict[str, Any] = {"model": model_name, "temperature": 0}
    if chats:
        address = f"{url}/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": question}]
    else:
        address = f"{url}/v1/completions"
        body["prompt"] = question
    headers = {"Content-Type": "application/json"}
    if keys:
        headers["Authorization"] = "Bearer KEY"
    where = f"the Unix socket {uds}" if uds else f"{url}/v1 (base_url of OpenAI clients)"
    via = f"--unix-socket {uds} " if uds else ""
    shown = " ".join(f"-H '{name}: {value}'" for name, value in headers.items())
    return (
        f"Ready: the model {model_name!r} at {where}\n"
        f"  curl -s {via}{address} {shown} -d '{json.dumps(body)}'"
    )
