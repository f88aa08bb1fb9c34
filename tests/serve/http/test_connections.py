"""Connections over real sockets: slow heads, too many connections, conflicting lengths, slow
bodies."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import h11
import pytest
import uvicorn

from lockstep.serve.app import create_app
from lockstep.serve.http import connections
from lockstep.serve.http.access import AccessRules
from lockstep.serve.http.connections import MAX_CHUNKS, BoundedProtocol, _BoundedConnection
from lockstep.serve.http.event_stream import EventStream
from lockstep.serve.requests.service import Limits, Service
from lockstep.serve.server import Options, _config
from lockstep.serve.telemetry.logs import LineFilter
from tests.waiting import wait_until

PATIENCE = 20.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def serving(
    server,
    processor,
    *,
    most=100,
    head=0.4,
    keep_alive=1,
    write=PATIENCE,
    drop=PATIENCE,
    dropped=connections.MAX_DROPPED_BYTES,
    gone=None,
    rules=None,
    limits=None,
) -> Iterator[tuple[str, int]]:
    """Serve the application on a socket.

    gone: event set when a connection has ended. drop: seconds of silence after which the rest of a
    body is not awaited; dropped: bytes of it that are read.
    """

    class Protocol(BoundedProtocol):
        head_seconds = head
        write_seconds = write
        drop_idle_seconds = drop
        max_dropped_bytes = dropped

        def connection_lost(self, exc):
            super().connection_lost(exc)
            if gone is not None:
                gone.set()

    Protocol.max_connections = most
    service = Service(server.client, processor, "tiny", "ls-test", limits)
    app = create_app(service, rules or AccessRules(max_body_seconds=0.3))
    config = uvicorn.Config(
        app, http=Protocol, log_level="critical", lifespan="off", timeout_keep_alive=keep_alive
    )
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Accepted sockets inherit it: what a client does not read soon waits in the server.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + PATIENCE
            while not running.started and time.monotonic() < deadline:
                time.sleep(0.01)
            yield listener.getsockname()[:2]
        finally:
            running.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive()


def connect(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, timeout=PATIENCE)


def is_healthy(client: socket.socket) -> bool:
    """Request /health and read the response, head and body."""
    client.sendall(HEALTH)
    result = b""
    while not result.endswith(b"ok"):
        part = client.recv(65536)
        if not part:
            return False
        result += part
    return b"200 OK" in result


def read_until_closed(client: socket.socket) -> bytes:
    """Return all data that the server sends until it closes the connection."""
    result = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            result += part
    return result


@pytest.mark.parametrize("message", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_incomplete_head_times_out(server, processor, message):
    with serving(server, processor) as address, connect(address) as client:
        client.sendall(message)
        begun = time.monotonic()
        assert read_until_closed(client).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - begun < PATIENCE / 2


def test_slow_head_times_out(server, processor):
    """The limit is on the whole head, not on each byte."""
    with serving(server, processor) as address, connect(address) as client:
        with contextlib.suppress(OSError):
            for byte in HEALTH * 3:
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        assert read_until_closed(client).startswith(b"HTTP/1.1 408") or not read_until_closed(
            client
        )


def test_keep_alive_connection_is_reused(server, processor):
    with serving(server, processor, head=0.3, keep_alive=2) as address, connect(address) as client:
        for _ in range(3):
            assert is_healthy(client)
            time.sleep(0.2)


def test_head_is_answered_wherever_get_is(server, processor):
    """Claude Code asks for HEAD / first, and load balancers for HEAD /health.

    https://github.com/headroomlabs-ai/headroom/issues/2032
    """
    paths = {"/": 200, "/health": 200, "/v1/models/nope": 404, "/v1/messages": 405}
    requests = [f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for path in paths]
    with serving(server, processor) as address, connect(address) as client:
        for request, status in zip(requests, paths.values(), strict=True):
            client.sendall(request)
            response = b""
            while b"\r\n\r\n" not in response:
                response += client.recv(65536)
            assert response.startswith(f"HTTP/1.1 {status} ".encode())
            assert b"content-length: 0" not in response.lower()
            assert response.endswith(b"\r\n\r\n"), "there is no body"
        assert is_healthy(client)


@pytest.mark.parametrize("stream", [False, True])
def test_unexpected_error_is_logged_once(server, processor, caplog, monkeypatch, stream):
    """With its traceback and the request's id, also where the response has begun."""

    def fail(*arguments):
        raise ZeroDivisionError("not foreseen")

    if stream:
        monkeypatch.setattr(EventStream, "_encode", fail)
    else:
        server.client.error = ZeroDivisionError("not foreseen")
    body = b'{"prompt": "x", "stream": true}' if stream else b'{"prompt": "x"}'
    with serving(server, processor) as address, connect(address) as client:
        uvicorn_log = logging.getLogger("uvicorn.error")
        monkeypatch.setattr(uvicorn_log, "handlers", [caplog.handler])
        uvicorn_log.setLevel(logging.ERROR)
        monkeypatch.setattr(caplog.handler, "filters", [LineFilter()])
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        result = read_until_closed(client)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info[0] is ZeroDivisionError and record.request_id == "mine"
    number = record.getMessage().rpartition(" ")[2]
    if stream:
        assert result.startswith(b"HTTP/1.1 200 ") and not result.endswith(b"0\r\n\r\n")
    else:
        assert result.startswith(b"HTTP/1.1 500 ") and number.encode() in result


ABSOLUTE = [
    (b"GET http://localhost:8000/v1/models HTTP/1.1", b"Host: localhost:8000", b"200"),
    (b"GET HTTPS://localhost/v1/models/tiny?x=1 HTTP/1.1", b"Host: localhost", b"200"),
    (b"GET http://localhost/v1/models HTTP/1.0", b"Accept: */*", b"200"),
    (b"GET http://localhost HTTP/1.1", b"Host: localhost", b"200"),
    (b"GET http://localhost?x=/v1/ HTTP/1.1", b"Host: localhost", b"200"),
    (b"GET http://localhost/nope HTTP/1.1", b"Host: localhost", b"404"),
    (b"GET http://[::1]:8000/v1/models HTTP/1.1", b"Host: evil.org", b"200"),
    (b"GET http://evil.org/v1/models HTTP/1.1", b"Host: localhost", b"400"),
    (b"GET http://localhost@evil.org/v1/models HTTP/1.1", b"Host: localhost", b"400"),
    (b"GET http://evil.org@localhost/v1/models HTTP/1.1", b"Host: localhost", b"400"),
    (b"GET http:///v1/models HTTP/1.1", b"Host: localhost", b"400"),
    (b"GET http://:8000/v1/models HTTP/1.1", b"Host: localhost", b"400"),
    (b"GET http://localhost/v1/models HTTP/1.1", b"Accept: */*", b"400"),
]


@pytest.mark.parametrize(("line", "header", "status"), ABSOLUTE)
def test_absolute_target_names_the_host(server, processor, line, header, status):
    """Some proxies and health checks send it; its host replaces the header (RFC 9112, 3.2.2)."""
    rules = AccessRules(hosts=("localhost", "[::1]"))
    with serving(server, processor, rules=rules) as address, connect(address) as client:
        client.sendall(line + b"\r\n" + header + b"\r\nConnection: close\r\n\r\n")
        result = read_until_closed(client)
    assert result.startswith(b"HTTP/1.1 " + status + b" "), result
    assert status != b"400" or b'"invalid_request_error"' in result


def test_absolute_target_of_a_body(server, processor):
    """The API key is asked for, the body is read, and the connection stays open."""
    rules = AccessRules(keys=("key",))
    with serving(server, processor, rules=rules) as address, connect(address) as client:
        body = b'{"prompt": "x"}'
        for key, status in ((b"key", b"200"), (b"other", b"401")):
            client.sendall(
                b"POST http://localhost/v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (key, len(body), body)
            )
            assert client.recv(65536).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("header", "status"),
    [(b"Transfer-Encoding: chunked\r\n\r\nnone", b"400"), (b"X-Long: " + b"x" * 20_000, b"431")],
)
def test_invalid_head_request_gets_no_body(server, processor, caplog, header, status):
    """The body of the error was more data than h11 allows: a traceback, and no response."""
    with serving(server, processor) as address, connect(address) as client:
        client.sendall(b"HEAD /health HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n")
        head, _, body = read_until_closed(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status) and body == b""
    assert not [record for record in caplog.records if record.exc_info]


def test_head_timeout_does_not_end_a_running_request(server, processor):
    """A request in progress is not idle, however long it takes."""
    server.client.hang = True
    server.client.answer = lambda request: [5]
    with serving(server, processor, head=0.2) as address, connect(address) as client:
        body = b'{"prompt": "x", "max_tokens": 9, "timeout": 0.5}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        assert b"504" in client.recv(65536)


def test_half_closed_connection_counts_as_disconnected(server, processor):
    """As with uvicorn and nginx: a client that went away sends nothing else than this."""
    server.client.hang = True
    server.client.answer = lambda request: [5]
    with serving(server, processor) as address, connect(address) as client:
        body = b'{"prompt": "x", "max_tokens": 9}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        deadline = time.monotonic() + PATIENCE
        while not server.client.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not server.client.aborted
        client.shutdown(socket.SHUT_WR)
        assert read_until_closed(client) == b""
        while not server.client.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.client.aborted == [server.client.requests[0].id]


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
"""Headers of every first request of Java's HttpClient: an offer of HTTP/2, which is ignored."""


def post_body(body: bytes, headers: bytes = b"") -> bytes:
    """Return a request with a body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return b"%b%bContent-Length: %d\r\n\r\n%b" % (head, headers, len(body), body)


def test_offer_of_http2_is_ignored(server, processor, caplog):
    """https://github.com/vllm-project/vllm/issues/57203"""
    with serving(server, processor) as address, connect(address) as client:
        uvicorn_log = logging.getLogger("uvicorn.error")
        uvicorn_log.setLevel(logging.WARNING)
        uvicorn_log.addHandler(caplog.handler)
        try:
            for _ in range(2):
                client.sendall(post_body(b'{"prompt": "x"}', UPGRADE))
                assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert is_healthy(client)
        finally:
            uvicorn_log.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if "pgrade" in record.getMessage()]


def test_client_that_offered_http2_and_left_is_noticed(server, processor):
    """h11 pauses reading after such an offer, and then no end of the connection is seen."""
    server.client.hang = True
    server.client.answer = lambda request: [5]
    with serving(server, processor) as address:
        with connect(address) as client:
            client.sendall(post_body(b'{"prompt": "x", "max_tokens": 9}', UPGRADE))
            wait_until(lambda: server.client.requests)
            time.sleep(0.1)
        wait_until(lambda: server.client.aborted)


def test_slow_body_times_out(server, processor):
    with serving(server, processor) as address, connect(address) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        client.sendall(head + b"Content-Type: application/json\r\n\r\n{")
        assert b" 408 " in read_until_closed(client)


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("headers", [[], [(b"content-length", b"13")]])
def test_response_bytes_equal_h11(method, version, headers):
    """Chunks take a faster path with the same bytes."""
    result = []
    for connection in (h11.Connection(h11.SERVER), _BoundedConnection()):
        connection.receive_data(b"%b / HTTP/%b\r\nHost: x\r\n\r\n" % (method, version))
        connection.next_event()
        connection.next_event()
        datas = [] if method == b"HEAD" else [b"one", b"", b"two\r\nthree"]
        events = [h11.Response(status_code=200, headers=headers)]
        events += [h11.Data(data=data) for data in datas]
        events += [h11.EndOfMessage()]
        result.append([connection.send(event) for event in events])
        with pytest.raises(h11.LocalProtocolError):
            connection.send(h11.Data(data=b"behind the end"))
    mine, other = result
    assert mine == other


def test_failed_connection_refuses_data():
    connection = _BoundedConnection()
    connection.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    connection.next_event()
    connection.send(h11.Response(status_code=200, headers=[]))
    assert connection.send(h11.Data(data=b"one")) == b"3\r\none\r\n"
    connection.send_failed()
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"two"))


@pytest.mark.parametrize("version", [b"9.9", b"0.9", b"2.0"])
def test_unsupported_http_version_is_505(server, processor, version):
    with serving(server, processor) as address, connect(address) as client:
        client.sendall(b"GET /health HTTP/%b\r\nHost: localhost\r\n\r\n" % version)
        result = read_until_closed(client)
        assert result.startswith(b"HTTP/1.1 505 ") and b"allowed: 1.0 and 1.1" in result


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100_000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Many: x\r\n" * 10_000 + b"X: x",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 600_000,
    ],
    ids=["one header", "many headers", "target", "several reads"],
)
def test_too_large_head_is_431(server, processor, head):
    """Also if all of it arrives in one read."""
    with serving(server, processor) as address, connect(address) as client:
        with contextlib.suppress(OSError):
            client.sendall(head + b"\r\n\r\n")
        result = read_until_closed(client)
        assert result.startswith(b"HTTP/1.1 431 ") and b"connection: close" in result
        assert b"a head of more than 16384 bytes; send fewer or shorter headers" in result


def test_large_head_within_limit_is_accepted(server, processor):
    with serving(server, processor) as address, connect(address) as client:
        client.sendall(HEALTH[:-2] + b"X-Long: " + b"x" * 15_000 + b"\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


LARGE_BODY_BYTES = 10 << 20


def send_large(
    client: socket.socket,
    *headers: bytes,
    path: bytes = b"/v1/completions",
    body: bytes = b" " * LARGE_BODY_BYTES,
) -> bytes:
    """Send a whole body of 10 MiB, then return the response."""
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json"]
    head = b"\r\n".join([*lines, b"Content-Length: %d" % LARGE_BODY_BYTES, *headers])
    client.sendall(head + b"\r\n\r\n")
    client.sendall(body)
    return read_until_closed(client)


@pytest.mark.parametrize(
    ("rules", "status"),
    [
        (AccessRules(), b"413"),
        (AccessRules(hosts=("localhost",)), b"413"),
        (AccessRules(max_body_bytes=2 * LARGE_BODY_BYTES, keys=("key",)), b"401"),
        (AccessRules(max_body_bytes=2 * LARGE_BODY_BYTES, hosts=("localhost",)), b"400"),
    ],
)
def test_refused_large_body_gets_its_response(server, processor, rules, status):
    """The client sends all of it before it reads, so a reset would lose the response."""
    with serving(server, processor, rules=rules) as address, connect(address) as client:
        result = send_large(client)
        assert result.startswith(b"HTTP/1.1 " + status) and result.endswith(b"}")


ROOMY = AccessRules(max_body_bytes=2 * LARGE_BODY_BYTES, max_body_seconds=PATIENCE)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages", b"/invocations"])
@pytest.mark.parametrize(("status", "kind"), [(b"429", "full"), (b"503", "dead"), (b"400", "")])
def test_allowed_large_body_gets_its_refusal(server, processor, path, status, kind):
    """A full queue and a dead engine are detected after the body was read."""
    start = b'{"max_tokens": 3, "messages": [{"role": "user", "content": "a"}]'
    if path.endswith(b"completions"):
        start = b'{"prompt": "a"'
    body = start + b" " * (LARGE_BODY_BYTES - len(start) - 1) + (b"}" if kind else b"]")
    server.client.alive = kind != "dead"
    limits = Limits(max_running=0, max_queued=0) if kind == "full" else None
    with serving(server, processor, rules=ROOMY, limits=limits) as address:
        with connect(address) as client:
            result = send_large(client, b"Connection: close", path=path, body=body)
            assert result.startswith(b"HTTP/1.1 " + status) and result.endswith(b"}")
            assert (b"retry-after: " in result.lower()) == bool(kind)


def test_drop_limit_follows_body_limit(server, processor):
    """At least the default is read and dropped."""
    rules = AccessRules(max_body_bytes=2 * LARGE_BODY_BYTES, keys=("key",))
    with serving(server, processor, rules=rules, dropped=LARGE_BODY_BYTES) as address:
        with connect(address) as client:
            assert send_large(client).startswith(b"HTTP/1.1 401")
    options = Options(rules=AccessRules(max_body_bytes=1 << 30))
    assert _config(server.app, options).http_protocol_class.max_dropped_bytes == 1 << 30
    small = Options(rules=AccessRules(max_body_bytes=1 << 20))
    kept = _config(server.app, small).http_protocol_class.max_dropped_bytes
    assert kept == connections.MAX_DROPPED_BYTES


def test_large_chunked_body_is_413(server, processor):
    with serving(server, processor) as address, connect(address) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(10):
            client.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
        client.sendall(b"0\r\n\r\n")
        assert b" 413 " in read_until_closed(client)


def test_body_for_unknown_route_keeps_the_connection(server, processor):
    rules = AccessRules(max_body_bytes=2 * LARGE_BODY_BYTES)
    with serving(server, processor, rules=rules) as address, connect(address) as client:
        head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGE_BODY_BYTES
        client.sendall(head + b" " * LARGE_BODY_BYTES)
        assert client.recv(65536).startswith(b"HTTP/1.1 404 ")
        assert is_healthy(client)


def test_endless_body_is_dropped_up_to_the_limit(server, processor):
    gone = threading.Event()
    with (
        serving(server, processor, gone=gone, dropped=1 << 20) as address,
        connect(address) as client,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n"
        client.sendall(head)
        with pytest.raises(OSError):
            for _ in range(2000):
                client.sendall(b" " * (1 << 20))
        assert gone.wait(PATIENCE)


@pytest.mark.parametrize("path", [b"/nothing", b"/v1/completions"])
def test_missing_body_rest_is_not_awaited(server, processor, path):
    gone = threading.Event()
    bounds = {"drop": 0.2, "head": 0.2, "keep_alive": 0.1, "gone": gone}
    with serving(server, processor, **bounds) as address, connect(address) as client:
        lines = b"Host: x\r\nExpect: 100-continue\r\nContent-Length: 999999999\r\n\r\n"
        client.sendall(b"POST " + path + b" HTTP/1.1\r\n" + lines)
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert gone.wait(PATIENCE)


@pytest.mark.parametrize(
    "rest",
    [b"zz\r\nabc\r\n", b"-1\r\n", b"ffffffffffffffffffffffff\r\n", b"3\r\nabcdef\r\n0\r\n\r\n"],
)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/nothing"])
def test_invalid_chunk_sizes(server, processor, rest, path, caplog):
    """Before the response they are a 400; after it they end the connection."""
    with serving(server, processor) as address, connect(address) as client:
        head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + rest)
        client.shutdown(socket.SHUT_WR)
        result = read_until_closed(client)
        assert result.count(b"HTTP/1.1 ") == 1 and (b" 400 " in result or b" 404 " in result)
        with connect(address) as other:
            assert is_healthy(other)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("lengths", [b"4, 5", b"4\r\nContent-Length: 5", b"-4", b"4x", b"+4"])
def test_invalid_content_lengths_are_refused(server, processor, lengths):
    with serving(server, processor) as address, connect(address) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
        client.sendall(head + lengths + b"\r\n\r\n{}   ")
        assert read_until_closed(client).startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_are_answered_in_order(server, processor):
    with serving(server, processor) as address, connect(address) as client:
        last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        client.sendall(HEALTH * 50 + last + HEALTH * 500)
        result = read_until_closed(client)
        assert result.count(b"HTTP/1.1 200") == 51 and result.endswith(b"}")


def test_head_timeout_applies_to_kept_connections(server, processor):
    """The keep-alive timeout is for silence; from its first byte a head has its own timeout."""
    with serving(server, processor, head=0.2, keep_alive=60) as address, connect(address) as client:
        assert is_healthy(client)
        client.sendall(b"GET /health HT")
        begun = time.monotonic()
        assert read_until_closed(client).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - begun < PATIENCE / 2


def test_content_length_with_transfer_encoding_is_refused(server, processor):
    with serving(server, processor) as address, connect(address) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert b" 400 " in read_until_closed(client)


@pytest.mark.parametrize(("chunks", "status"), [(1000, b" 200 "), (MAX_CHUNKS + 10, b" 400 ")])
def test_number_of_body_chunks_is_limited(server, processor, chunks, status):
    """Each chunk costs time, however short it is."""
    with serving(server, processor) as address, connect(address) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        body = b'{"prompt": "x"' + b" " * (chunks - 15) + b"}"
        with contextlib.suppress(OSError):
            client.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert status in read_until_closed(client)


def test_idle_connections_are_closed_for_new_ones(server, processor):
    """Idle connections do not keep an active client out."""
    with serving(server, processor, most=8, head=PATIENCE) as address:
        idle = [connect(address) for _ in range(20)]
        for _ in range(5):
            with connect(address) as client:
                assert is_healthy(client)
        for client in idle:
            client.close()


def test_closed_idle_connection_gets_503_or_close(server, processor):
    """A connection without any request yet gets a 503; one between requests is closed. Data in
    flight causes no reset."""
    with serving(server, processor, most=1, head=PATIENCE, keep_alive=PATIENCE) as address:
        with connect(address) as silent, connect(address) as resting:
            assert is_healthy(resting)
            silent.sendall(HEALTH)
            assert silent.recv(65536).startswith(b"HTTP/1.1 503 ")
            with connect(address) as last:
                assert is_healthy(last)
                assert resting.recv(65536) == b""


def test_refused_connections_are_reset(server, processor):
    """If clients do not close refused connections, all but a quarter of the limit are reset."""
    with contextlib.ExitStack() as stack, serving(server, processor, most=8, head=30) as address:
        clients = [stack.enter_context(connect(address)) for _ in range(40)]
        with connect(address) as last:
            assert is_healthy(last)
        open_ones = 0
        for client in clients:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(b"x")  # the answer to it shows whether the server has closed
                client.sendall(b"x")
                open_ones += 1
        assert open_ones <= 8 + 3


def test_connection_beyond_busy_limit_is_refused(server, processor):
    """The refused connection gets a 503; busy ones continue."""
    server.client.hang = True
    server.client.answer = lambda request: [5]
    with serving(server, processor, most=3) as address:
        body = b'{"prompt": "x", "max_tokens": 9, "timeout": 0.8}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        busy = [connect(address) for _ in range(3)]
        for client in busy:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        deadline = time.monotonic() + PATIENCE
        while len(server.client.requests) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        with connect(address) as late:
            late.sendall(HEALTH)
            answer = read_until_closed(late)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 5\r\n" in answer
        assert b"more than 3 connections are open (--limit-concurrency)" in answer
        for client in busy:
            assert b"504" in client.recv(65536)
            client.close()


@pytest.mark.parametrize("ends", [True, False], ids=["last answer sent", "answers to come"])
def test_unread_output_is_limited(server, processor, ends):
    """Unread output is limited in size and in time, also after the end of the response."""
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    gone = threading.Event()
    with serving(server, processor, write=0.3, gone=gone) as address, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(address)
        if ends:
            client.sendall(ask + b"Connection: close\r\n\r\n")
        else:
            client.sendall((ask + b"\r\n") * 200)
        assert gone.wait(PATIENCE)
        with connect(address) as other:
            assert is_healthy(other)
