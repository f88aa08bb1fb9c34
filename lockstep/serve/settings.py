"""Settings of the server beside the engine's: one declaration per option of lockstep serve."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lockstep.sampling_params import MAX_LOGPROBS
from lockstep.serve.telemetry.logs import LogFormat
from lockstep.settings import TUPLE_OF_LIST, Settings, setting, size_in

MOST_SECONDS = 86_400.0
MOST_MEBIBYTES = 1024.0
MOST_QUEUED = 1_000_000
MOST_CONNECTIONS = 65_536

Seconds = Annotated[float, Field(ge=0.001, le=MOST_SECONDS)]
_none_is_empty = BeforeValidator(lambda names: () if names is None else names)
Names = Annotated[tuple[str, ...], TUPLE_OF_LIST, _none_is_empty]
Collector = Annotated[str, Field(max_length=2000, pattern=r"^https?://[^\s/]+(/\S*)?$")]


@dataclass(frozen=True)
class ServerSettings(Settings):
    """Where the server listens, who may ask, and what is bounded."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: Annotated[int, Field(ge=0, le=65_535)] = setting(
        8000,
        "port to listen on",
        allowed="0 to 65535, 0 for any that is free",
        remedy="Choose another with --port.",
    )
    uds: str | None = setting(None, "Unix socket to listen on, not a port")
    root_path: Annotated[str, Field(pattern=r"^(/[^?#\s]*[^?#\s/])?$")] = setting(
        "",
        "the path under which a proxy shows the server, e.g. /llm",
        allowed="a path that begins with / and does not end with one",
        remedy="Change --root-path.",
    )
    served_model_name: Names = setting(
        (),
        "a name that clients may use, the first in answers; may be given again. The folder's or "
        "id's if left out",
        allowed="names",
    )
    max_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = setting(
        MAX_LOGPROBS,
        "most log-probabilities of a token that a request may ask for",
        remedy="Change --max-logprobs.",
    )
    api_key: Names = setting(
        (), "a key that clients must send; may be given again", allowed="keys of printable text"
    )
    api_key_file: str | None = setting(
        None, "file with a key a line; a process list shows no key then"
    )
    allowed_hosts: str | None = setting(
        None, "names in Host, with commas; * for any. On loopback: its names only"
    )
    allowed_origins: Names = setting(
        (), "an origin whose web pages may ask, * for any; may be given again", allowed="origins"
    )
    allowed_methods: Names = setting(
        (), "a method that they may use; GET and POST if left out", allowed="HTTP methods"
    )
    allowed_headers: Names = setting(
        (), "a header that they may send; any if left out", allowed="names of headers"
    )
    allow_credentials: bool = setting(False, "they may send cookies and other credentials")
    no_docs: bool = setting(False, "no /docs, /redoc and /openapi.json")
    no_playground: bool = setting(False, "no page at /")
    enable_tokenizer_info_endpoint: bool = setting(
        False, "/tokenizer_info tells tokenizer_config.json and the chat template"
    )
    enable_reset_prefix_cache: bool = setting(
        False, "POST /reset_prefix_cache drops all cached prefixes"
    )
    max_queued_requests: Annotated[int, Field(ge=0, le=MOST_QUEUED)] = setting(
        2048,
        "completions that may wait; more get a 429",
        remedy="Change --max-queued-requests.",
    )
    request_timeout: Seconds | None = setting(
        None,
        "most seconds for any request; none if left out",
        remedy="Change --request-timeout.",
    )
    step_timeout: Seconds = setting(
        120.0,
        "seconds that a step may run before /health is 503, and the engine is started again",
        remedy="Change --step-timeout.",
    )
    disable_frontend_multiprocessing: bool = setting(
        False, "the engine runs in the server's own process, in a thread"
    )
    shutdown_timeout: Annotated[float, Field(ge=0.0, le=MOST_SECONDS)] = setting(
        30.0,
        "seconds that running requests may go on after SIGTERM",
        remedy="Change --shutdown-timeout.",
    )
    timeout_keep_alive: Annotated[float, Field(ge=0.0, le=MOST_SECONDS)] = setting(
        75.0,
        "seconds that an idle connection is kept (keep-alive)",
        remedy="Change --timeout-keep-alive.",
    )
    max_body_size: Annotated[float, Field(ge=0.001, le=MOST_MEBIBYTES), size_in(1 << 20)] = setting(
        8.0,
        "largest request body, in MiB, or a size such as 512k",
        allowed=f"numbers from 0.001 to {MOST_MEBIBYTES:g}, in MiB, or sizes with their unit, such "
        "as 512k or 16MB",
        remedy="Change --max-body-size.",
        is_size=True,
    )
    limit_concurrency: Annotated[int, Field(ge=1, le=MOST_CONNECTIONS)] = setting(
        4096, "most connections at once", remedy="Change --limit-concurrency."
    )
    metrics_names: Literal["lockstep", "vllm"] = setting(
        "lockstep", "what stands in front of the names of /metrics: lockstep or vllm"
    )
    log_format: LogFormat = setting(
        "text", "form of the log's lines on stderr: text or json", remedy="Choose one of them."
    )
    enable_log_requests: bool = setting(
        False, "a line in the log for every request that has ended; no text of it"
    )
    disable_log_stats: bool = setting(False, "no line of throughput every 10 s in the log")
    otlp_traces_endpoint: Collector | None = setting(
        None,
        "a collector of OpenTelemetry that gets a span of every request, by OTLP over HTTP, e.g. "
        "http://localhost:4318/v1/traces",
        allowed="http://HOST:PORT or https, with a path or without (for HTTP the port is 4318)",
        remedy="Change --otlp-traces-endpoint.",
    )
    ssl_keyfile: str | None = setting(None, "private key, PEM")
    ssl_certfile: str | None = setting(None, "certificate, PEM")
    ssl_keyfile_password: str | None = setting(None, "the key's password")
    ssl_ca_certs: str | None = setting(
        None, "certificates that clients' ones are checked against, PEM"
    )
    ssl_ciphers: str | None = setting(None, "ciphers before TLS 1.3, in OpenSSL's words")
    ssl_cert_reqs: Annotated[int, Field(ge=0, le=2)] = setting(
        0,
        "clients' certificates: 0 not asked for, 1 optional, 2 required",
        remedy="Change --ssl-cert-reqs.",
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = setting(
        "warning", "debug, info, warning or error", remedy="Choose one of them."
    )
