"""A collector of spans, and a request that bears a trace."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PARENT = 0x00F067AA0BA902B7
TRACED = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "X-Request-Id": "mine"}


@contextmanager
def collecting() -> Iterator[SimpleNamespace]:
    """A collector: `url`, `paths` that were asked for, and `spans` that came, each with what it is
    of."""
    found = SimpleNamespace(spans=[], paths=[])

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            found.paths.append(self.path)
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    found.spans += [(resource.resource, span) for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Collect)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    found.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield found
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
