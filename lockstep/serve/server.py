"""The server process: sockets, TLS, signals, shutdown, and the startup message."""

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from lockstep.engine.engine_loop import keep_from_collection
from lockstep.errors import ConfigError, EngineDeadError
from lockstep.kernels.selection import Replacement
from lockstep.serve.app import CrossOrigin, create_app
from lockstep.serve.http.access import AccessRules
from lockstep.serve.http.connections import MAX_DROPPED_BYTES, BoundedProtocol
from lockstep.serve.journal.journal import Journal
from lockstep.serve.requests.engine_client import EngineClient
from lockstep.serve.requests.service import Limits, Service
from lockstep.serve.telemetry.logs import LogFormat, configure_logs, log_request
from lockstep.serve.telemetry.metrics import Metrics, Prefix
from lockstep.serve.telemetry.replica_metrics import ReplicaCollector, ReplicaSource
from lockstep.serve.telemetry.throughput import ThroughputLogger
from lockstep.serve.telemetry.traces import SpanRecorder
from lockstep.settings import path_fault
from lockstep.text.processor import Processor
from lockstep.worker.roofline import StepFloors

log = logging.getLogger("lockstep.serve")

BACKLOG = 2048
"""Maximum connections that wait to be accepted, as in uvicorn. More time out or are reset."""
SPARE_DESCRIPTORS = 64
"""File descriptors that are reserved for files, the engine and logs."""
TLS_FILES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
FLUSH_SECONDS = 5.0
"""Time that clients have to read the last event of a stream that the server ended."""
POLL_SECONDS = 0.05
"""Polling interval of a server that is shutting down."""
STATS_SECONDS = 10.0
"""Interval of log lines of throughput."""
KEEP_ALIVE_SECONDS = 75.0
"""Default seconds for which an idle connection is kept.

Longer than the 60 s of most proxies: if the server closed first, a proxy could send a request into
a closed connection.
"""
CLOSE_HEADER = (b"connection", b"close")


@dataclass(frozen=True)
class Address:
    """Address that the server listens on: a host and a port, or the path of a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None

    def bind(self) -> socket.socket:
        """Return a listening socket. Clients that connect wait until serve() accepts them.

        Raises ConfigError.
        """
        if self.uds is not None:
            return _bind_path(self.uds)
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

    def unused_options(self) -> list[str]:
        """Return the names of options that were set and have no effect on a Unix socket."""
        default = Address()
        is_set = (("host", self.host != default.host), ("port", self.port != default.port))
        return [name for name, differs in is_set if differs and self.uds is not None]

    def url(self, listener: socket.socket, tls: bool) -> str:
        """Return the URL for a client on this machine."""
        if self.uds is not None:
            return "http://localhost"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if tls else 'http'}://{shown}:{listener.getsockname()[1]}"


def _bind_path(path: str) -> socket.socket:
    """Return a Unix socket at the path; it replaces a socket that no process listens on."""
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
    """Options of the server.

    rules: access rules. limits: limits of requests. docs, playground: whether these pages exist.
    tokenizer_info, cache_reset: whether these endpoints exist.
    log_level: of uvicorn.
    drain_seconds: time that running requests have to end after SIGTERM.
    keep_alive_seconds: time for which an idle connection is kept.
    max_connections: limit of open connections; file descriptors limit it, too.
    tls: uvicorn's ssl_* settings.
    cross_origin: permissions of web pages of other origins.
    metrics_prefix: beginning of the names in /metrics.
    log_requests: log a line for every request.
    log_stats: log a line of throughput every STATS_SECONDS while there is work.
    replacements: of sick kernel backends, for /metrics.
    journal: started journal of the answers; the caller closes it.
    """

    rules: AccessRules = field(default_factory=AccessRules)
    limits: Limits = field(default_factory=Limits)
    docs: bool = True
    playground: bool = True
    tokenizer_info: bool = False
    cache_reset: bool = False
    drain_seconds: float = 30.0
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS
    max_connections: int = 4096
    log_level: str = "warning"
    tls: dict[str, Any] = field(default_factory=dict)
    cross_origin: CrossOrigin = field(default_factory=CrossOrigin)
    metrics_prefix: Prefix = "lockstep"
    log_format: LogFormat = "text"
    log_requests: bool = False
    log_stats: bool = True
    replacements: tuple[Replacement, ...] = ()
    journal: Journal | None = None


class _Server(uvicorn.Server):
    """uvicorn's server with a shutdown that waits for requests, and then ends the rest."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        metrics: Metrics,
        options: Options,
        replicas: ReplicaSource | None,
    ) -> None:
        super().__init__(config)
        self.replicas = replicas
        self.service = service
        self.metrics = metrics
        self.drain_seconds = options.drain_seconds
        self.log_stats = options.log_stats
        self.failure: str | None = None

    def fail(self, reason: str) -> None:
        """End the server because the engine has ended."""
        self.failure = reason
        self.should_exit = True

    async def run_on(
        self, listener: socket.socket, client: EngineClient, on_start: Callable[[], None]
    ) -> None:
        """Serve until a signal, or until the engine ends.

        on_start: called when the server accepts requests.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_DescriptorErrorHandler())

        def on_engine_end(reason: str) -> None:
            loop.call_soon_threadsafe(self.fail, reason)

        client.on_end = on_engine_end
        if self.replicas is not None:
            restart = self.replicas.restart_replicas
            # Deploying blocks for a while, and streams must not wait for it.
            loop.add_signal_handler(signal.SIGHUP, loop.run_in_executor, None, restart)
        # The engine may have ended before on_end was set.
        if not client.is_alive:
            self.fail("it ended while the server started")
        # Begins before any request, so that clients that come back wait for it.
        restoring = asyncio.create_task(self.service.streams.restore())
        expiring = asyncio.create_task(self.service.streams.drop_expired())
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        throughput = asyncio.create_task(self._log_throughput()) if self.log_stats else None
        while not (self.started or serving.done()):
            await asyncio.sleep(0.01)
        if self.started:
            on_start()
        await serving
        restoring.cancel()
        expiring.cancel()
        if throughput is not None:
            throughput.cancel()

    async def _log_throughput(self) -> None:
        """Write a line of throughput every STATS_SECONDS while there is work."""
        throughput = ThroughputLogger(self.metrics.read(self.service.client.stats()))
        while True:
            await asyncio.sleep(STATS_SECONDS)
            throughput.log(self.metrics.read(self.service.client.stats()), STATS_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as requests to shut down, without raising them again afterwards."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests up to drain_seconds, then end them and close all connections.

        Meanwhile, new connections are accepted: a load balancer may still send requests, and a 503
        with Retry-After is better for it than a refused connection.
        """
        self.service.stop_admission()
        self._close_after_answers()
        connections: set[Any] = self.server_state.connections
        busy_cycles = [connection.cycle for connection in connections if connection.is_busy]
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.drain_seconds, self.service.end_all)
        end = loop.time() + self.drain_seconds + FLUSH_SECONDS
        self._log_running_requests()
        while not (
            self.force_exit
            or all(cycle.response_complete or cycle.disconnected for cycle in busy_cycles)
        ):
            if loop.time() > end:
                break
            await asyncio.sleep(POLL_SECONDS)
        timer.cancel()
        await asyncio.sleep(POLL_SECONDS)  # new connections are accepted and answered
        if self.force_exit:
            await self._abandon()
        await super().shutdown(sockets)

    def _close_after_answers(self) -> None:
        """Announce in every response from now on that its connection closes."""
        headers = [*self.server_state.default_headers, CLOSE_HEADER]
        self.server_state.default_headers = headers
        connections: set[Any] = self.server_state.connections
        for connection in connections:
            if connection.is_busy:
                connection.cycle.default_headers = headers
                connection.cycle.keep_alive = False

    def _log_running_requests(self) -> None:
        count = self.service.num_active
        if count:
            log.warning(
                "shutting down: %d request(s) may run for %g s more (--shutdown-timeout); "
                "Ctrl-C ends them now",
                count,
                self.drain_seconds,
            )

    async def _abandon(self) -> None:
        """End all requests and connections at once."""
        log.warning("shutting down without waiting: %d request(s) ended", self.service.num_active)
        self.service.end_all()
        await asyncio.sleep(POLL_SECONDS)  # streams get their last event
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        # Applications end without their connection; uvicorn would cancel them with a traceback.
        deadline = asyncio.get_running_loop().time() + FLUSH_SECONDS
        while self.server_state.tasks and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_SECONDS)


def serve(
    client: EngineClient,
    processor: Processor,
    listener: socket.socket,
    *,
    model_names: Sequence[str],
    adapters: Collection[str] = (),
    drafts_predictions: bool = False,
    fingerprint: str,
    address: Address,
    options: Options,
    floors: StepFloors | None = None,
    cache: Mapping[str, str] | None = None,
    traces: SpanRecorder | None = None,
    replicas: ReplicaSource | None = None,
) -> None:
    """Serve until interrupted.

    client: already started; the caller shuts it down afterwards.
    model_names: names that clients may use; responses have the first one.
    adapters: names of LoRA adapters, which clients use as models.
    drafts_predictions: the engine's drafts are the tokens of predicted texts.
    floors: roofline times of the engine's steps, for /metrics.
    cache: sizes and settings of the cache, for /metrics.
    traces: recorder of a span for every request.
    replicas: engines of the client, for /metrics; SIGHUP restarts them one after the other.

    Raises EngineDeadError if the engine ended unexpectedly, and ConfigError if TLS fails.
    """
    model_name, *aliases = model_names
    configure_logs(options.log_format, options.log_requests)
    metrics = Metrics(model_name, options.metrics_prefix, floors, cache, adapters)
    metrics.add_replacements(options.replacements)
    if replicas is not None:
        collector = ReplicaCollector(model_name, options.metrics_prefix, replicas)
        metrics.registry.register(collector)
    on_record = [metrics.observe, log_request, *([traces.record] if traces else ())]
    service = Service(
        client,
        processor,
        model_name,
        fingerprint,
        options.limits,
        aliases,
        on_record,
        adapters,
        drafts_predictions,
        options.journal,
    )
    app = create_app(
        service,
        options.rules,
        options.docs,
        options.cross_origin,
        metrics,
        options.playground,
        options.tokenizer_info,
        options.cache_reset,
    )

    server = _Server(_config(app, options), service, metrics, options, replicas)

    def announce() -> None:
        url = address.url(listener, bool(options.tls))
        has_template = processor.template is not None
        has_keys = bool(options.rules.keys)
        print(startup_message(url, model_name, has_template, address.uds, has_keys))
        if options.playground and address.uds is None:
            print(f"  Playground for a browser: {url}/")

    # Objects that live as long as the server need not be scanned by every garbage collection.
    keep_from_collection()
    with contextlib.closing(listener), contextlib.suppress(KeyboardInterrupt):
        uvloop.run(server.run_on(listener, client, announce))
    if server.failure is not None:
        raise EngineDeadError(f"the engine has stopped: {server.failure}. Restart the server.")


def _config(app: FastAPI, options: Options) -> uvicorn.Config:
    """Return uvicorn's settings, loaded."""

    class Protocol(BoundedProtocol):
        # For a moment, a quarter more can be open: connections that are being refused.
        max_connections = max(
            1, min(options.max_connections, (raise_descriptors() - SPARE_DESCRIPTORS) * 4 // 5)
        )
        # A client that sends a body of an allowed size can read the response that refuses it.
        max_dropped_bytes = max(MAX_DROPPED_BYTES, options.rules.max_body_bytes)

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_level=options.log_level,
        log_config=None,
        backlog=min(
            BACKLOG, Protocol.max_connections // 2 + 1
        ),  # uvicorn accepts all of them at once
        server_header=False,
        timeout_keep_alive=options.keep_alive_seconds,  # type: ignore[arg-type]
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
        **options.tls,
    )
    config.load()
    return config


def check_tls(tls: Mapping[str, Any]) -> None:
    """Raise ConfigError for ssl_* settings that uvicorn could not use. tls: {} for no TLS."""
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
    """Return which TLS file cannot be read, and why; otherwise the error of OpenSSL."""
    for name in TLS_FILES:
        if tls.get(name):
            try:
                Path(tls[name]).open("rb").close()
            except OSError as unread:
                return f"{name}: {path_fault(unread)}"
    return str(error)


def raise_descriptors() -> int:
    """Raise the limit of file descriptors as far as allowed, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return limit if soft == resource.RLIM_INFINITY else soft


class _DescriptorErrorHandler:
    """Exception handler of an event loop that logs missing file descriptors once a minute."""

    def __init__(self) -> None:
        self._next_log = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._next_log:
            self._next_log = loop.time() + 60
            log.warning("no descriptors are left for new connections; they wait")


def startup_message(
    url: str,
    model_name: str,
    has_template: bool = True,
    uds: str | None = None,
    has_keys: bool = False,
) -> str:
    """Return the model, the URL and a curl command.

    has_template: the model has a chat template. has_keys: the user must replace KEY.
    """
    question = "List the first 12 primes."  # a task that the small bundled model can do
    body: dict[str, Any] = {"model": model_name, "temperature": 0}
    if has_template:
        address = f"{url}/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": question}]
    else:
        address = f"{url}/v1/completions"
        body["prompt"] = question
    headers = {"Content-Type": "application/json"}
    if has_keys:
        headers["Authorization"] = "Bearer KEY"
    location = f"the Unix socket {uds}" if uds else f"{url}/v1 (base_url of OpenAI clients)"
    via = f"--unix-socket {uds} " if uds else ""
    shown = " ".join(f"-H '{name}: {value}'" for name, value in headers.items())
    return (
        f"Ready: the model {model_name!r} at {location}\n"
        f"  curl -s {via}{address} {shown} -d '{json.dumps(body)}'"
    )
