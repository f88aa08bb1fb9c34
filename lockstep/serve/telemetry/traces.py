"""OpenTelemetry: a span for every request, sent to a collector beside the work.

Names are those of vLLM and of OpenTelemetry's conventions for generative AI; `lockstep.` stands in
front of what neither has.
"""

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep import __version__
from lockstep.errors import ConfigError, install_extra
from lockstep.serve.telemetry.request_record import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN = "llm_request"
OTLP_PATH = "/v1/traces"
"""Where collectors take traces by HTTP."""
CLOSE_SECONDS = 3.0
"""How long the last spans may take at the end of a server."""
LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "first_token": "gen_ai.latency.time_to_first_token",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "inference": "gen_ai.latency.time_in_model_inference",
    "e2e": "gen_ai.latency.e2e",
}
"""Seconds."""


def otlp_exporter(endpoint: str) -> "SpanExporter":
    """What sends spans to an endpoint by OTLP over HTTP. One without a path gets OTLP_PATH.

    Raises ConfigError where OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry, which is not installed: "
            f"{install_extra('otel')}, or leave --otlp-traces-endpoint out."
        ) from None
    path = urlsplit(endpoint).path.strip("/")
    return OTLPSpanExporter(endpoint if path else endpoint.rstrip("/") + OTLP_PATH)


class Traces:
    """Makes the spans. They wait for the exporter in a queue of 2,048; what finds no room there is
    dropped, so that no request ever waits for a collector."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        named = Resource({"service.name": "lockstep", "service.version": __version__})
        resource = named.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lockstep", __version__)

    def record(self, record: Record) -> None:
        """Makes the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        trace = {} if record.caller is None else dict(record.caller.trace)
        since_start = time.time_ns() - int(time.monotonic() * 1e9)
        span = self._tracer.start_span(
            SPAN,
            context=TraceContextTextMapPropagator().extract(trace),
            kind=SpanKind.SERVER,
            attributes=attributes(record),
            start_time=since_start + int(record.arrived * 1e9),
        )
        if record.error is not None:
            span.set_status(StatusCode.ERROR, record.error)
        span.end(since_start + int(record.ended * 1e9))

    def close(self) -> None:
        """Sends what waits, in CLOSE_SECONDS at most."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def attributes(record: Record) -> dict[str, Any]:
    """What the span of a request says. No text of prompt or answer is among it."""
    params = record.params
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion" if record.id.startswith("cmpl-") else "chat",
        "gen_ai.request.id": record.id,
        "gen_ai.request.model": record.model,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.id": record.id,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.usage.num_sequences": len(record.metrics),
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.completion_tokens,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "lockstep.usage.draft_tokens": record.draft_tokens,
        "lockstep.usage.accepted_tokens": record.accepted_tokens,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if record.caller is not None:
        found["http.request.header.x-request-id"] = record.caller.request_id
    known = record.latencies
    return found | {name: known[key] for key, name in LATENCIES.items() if key in known}
