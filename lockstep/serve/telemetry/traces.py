"""OpenTelemetry spans of requests, sent to a collector in the background.

Names are those of vLLM and of OpenTelemetry's conventions for generative AI. Names that neither has
begin with `lockstep.`
"""

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep import __version__
from lockstep.errors import ConfigError, install_extra
from lockstep.serve.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
OTLP_PATH = "/v1/traces"
"""Default path of collectors for traces by HTTP."""
CLOSE_SECONDS = 3.0
"""Time limit for sending the last spans when the server ends."""
LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "first_token": "gen_ai.latency.time_to_first_token",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
    "inference": "gen_ai.latency.time_in_model_inference",
    "e2e": "gen_ai.latency.e2e",
}
"""Latency of a RequestRecord -> attribute of the span, in seconds."""


def otlp_exporter(endpoint: str) -> "SpanExporter":
    """Return the exporter of spans by OTLP over HTTP. An endpoint without a path gets OTLP_PATH.

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


class SpanRecorder:
    """Recorder of spans. They wait for the exporter in a queue of 2,048.

    A full queue drops spans, so that no request ever waits for a collector.
    """

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        server = Resource({"service.name": "lockstep", "service.version": __version__})
        resource = server.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lockstep", __version__)

    def record(self, record: RequestRecord) -> None:
        """Record the span of a request that has ended."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        trace = {} if record.context is None else dict(record.context.trace)
        # Spans have times since 1970, records have times since the machine started.
        clock_offset = time.time_ns() - int(time.monotonic() * 1e9)
        span = self._tracer.start_span(
            SPAN_NAME,
            context=TraceContextTextMapPropagator().extract(trace),
            kind=SpanKind.SERVER,
            attributes=span_attributes(record),
            start_time=clock_offset + int(record.arrival_time * 1e9),
        )
        if record.error is not None:
            span.set_status(StatusCode.ERROR, record.error)
        span.end(clock_offset + int(record.end_time * 1e9))

    def close(self) -> None:
        """Send the queued spans, in at most CLOSE_SECONDS."""
        # A collector that hangs must not keep the server from ending.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def span_attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of a request's span. They have no text of prompt or answer."""
    params = record.params
    attributes: dict[str, Any] = {
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
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if record.context is not None:
        attributes["http.request.header.x-request-id"] = record.context.request_id
    latencies = record.latencies
    return attributes | {
        name: latencies[key] for key, name in LATENCIES.items() if key in latencies
    }
