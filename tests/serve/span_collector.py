"""A collector of OpenTelemetry spans, and headers of a traced request."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.http_server import QuietHandler, http_server

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PARENT = 0x00F067AA0BA902B7
TRACED = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "X-Request-Id": "mine"}


@contextmanager
def collecting() -> Iterator[SimpleNamespace]:
    """Yield a collector: `url`, the requested `paths`, and the received `spans` with their
    resources."""
    result = SimpleNamespace(spans=[], paths=[])

    class Collect(QuietHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            sent = ExportTraceServiceRequest.FromString(body)
            result.paths.append(self.path)
            for resource in sent.resource_spans:
                for scope in resource.scope_spans:
                    result.spans += [(resource.resource, span) for span in scope.spans]
            self.send_response(200)
            self.end_headers()

    with http_server(Collect) as result.url:
        yield result


def values(attributes: Any) -> dict[str, Any]:
    """Return OTLP attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
