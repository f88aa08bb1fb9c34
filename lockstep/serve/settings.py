"""Settings of the server: one declaration per option of lockstep serve that is not the engine's."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lockstep.sampling_params import MAX_LOGPROBS
from lockstep.serve.telemetry.logs import LogFormat
from lockstep.settings import LIST_TO_TUPLE, Settings, setting, size_in

# Limits that catch typing errors: a day, a GiB, and more than any machine can serve.
MAX_SECONDS = 86_400.0
MAX_MEBIBYTES = 1024.0
MAX_JOURNAL_MEBIBYTES = float(1 << 20)
RESUME_SECONDS = 60.0
"""Default time that a stream has without its client, with a journal."""
MAX_QUEUED = 1_000_000
MAX_CONNECTIONS = 65_536
MAX_REPLICAS = 1024

Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
Seconds = Annotated[float, Field(ge=0.001, le=MAX_SECONDS)]
_none_is_empty = BeforeValidator(lambda names: () if names is None else names)
Names = Annotated[tuple[str, ...], LIST_TO_TUPLE, _none_is_empty]
Collector = Annotated[str, Field(max_length=2000, pattern=r"^https?://[^\s/]+(/\S*)?$")]


@dataclass(frozen=True)
class ServerSettings(Settings):
    """Address, access rules and limits of the server."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: Annotated[int, Field(ge=0, le=65_535)] = setting(
        8000,
        "port to listen on",
        allowed="0 to 65535, 0 for any that is free",
        remedy="Choose another with --port.",
    )
    uds: str | None = setting(None, "Unix socket to listen on, instead of a port")
    headless: bool = setting(
        False, "start no HTTP server, as every node but --node-rank 0 does anyway"
    )
    root_path: Annotated[str, Field(pattern=r"^(/[^?#\s]*[^?#\s/])?$")] = setting(
        "",
        "path prefix under which a proxy publishes the server, e.g. /llm",
        allowed="a path that begins with / and does not end with one",
        remedy="Set --root-path to a path such as /llm.",
    )
    served_model_name: Names = setting(
        (),
        "name of the model for clients; may be repeated. Responses contain the first one. The name "
        "of the folder or hub id by default",
        allowed="names",
    )
    max_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = setting(
        MAX_LOGPROBS,
        "maximum log-probabilities per token that a request may ask for",
        remedy="Set --max-logprobs to an allowed value.",
    )
    api_key: Names = setting(
        (), "API key that clients must send; may be repeated", allowed="keys of printable text"
    )
    api_key_file: str | None = setting(
        None, "file with one API key per line, so that no key is in the process list"
    )
    allowed_hosts: str | None = setting(
        None,
        "allowed values of the Host header, separated by commas; * for any. On loopback only its "
        "names by default",
    )
    allowed_origins: Names = setting(
        (),
        "origin whose web pages may send requests, * for any; may be repeated",
        allowed="origins",
    )
    allowed_methods: Names = setting(
        (),
        "HTTP method that these web pages may use; may be repeated. GET and POST by default",
        allowed="HTTP methods",
    )
    allowed_headers: Names = setting(
        (),
        "header that these web pages may send; may be repeated. Any by default",
        allowed="names of headers",
    )
    allow_credentials: bool = setting(
        False, "these web pages may send cookies and other credentials"
    )
    no_docs: bool = setting(False, "disable /docs, /redoc and /openapi.json")
    no_playground: bool = setting(False, "disable the playground at /")
    enable_tokenizer_info_endpoint: bool = setting(
        False, "enable /tokenizer_info, which returns tokenizer_config.json and the chat template"
    )
    enable_reset_prefix_cache: bool = setting(
        False, "enable POST /reset_prefix_cache, which drops all cached prefixes"
    )
    max_queued_requests: Annotated[int, Field(ge=0, le=MAX_QUEUED)] = setting(
        2048,
        "maximum completions that wait; more get status 429",
        remedy="Set --max-queued-requests to an allowed value.",
    )
    request_timeout: Seconds | None = setting(
        None,
        "time limit of any request, in seconds; no limit by default",
        remedy="Set --request-timeout to an allowed value.",
    )
    step_timeout: Seconds = setting(
        120.0,
        "time limit of a step, in seconds; then /health returns 503 and the engine is restarted",
        remedy="Set --step-timeout to an allowed value.",
    )
    replicas: Replicas = setting(
        1,
        "number of engines behind this server; more than one needs Ray, and each has its own GPUs",
        remedy="Set --replicas to an allowed value.",
    )
    min_replicas: Replicas | None = setting(
        None,
        "fewest replicas with autoscaling; that of --replicas by default",
        remedy="Set --min-replicas to an allowed value.",
    )
    max_replicas: Replicas | None = setting(
        None,
        "most replicas with autoscaling, which adds and removes them by the number of requests; "
        "that of --replicas by default",
        remedy="Set --max-replicas to an allowed value.",
    )
    target_ongoing_requests: Annotated[float, Field(ge=0.1, le=MAX_QUEUED)] | None = setting(
        None,
        "running and waiting requests per replica that autoscaling aims at; that of "
        "--max-num-seqs by default",
        remedy="Set --target-ongoing-requests to an allowed value.",
    )
    downscale_delay: Annotated[float, Field(ge=1, le=MAX_SECONDS)] = setting(
        60.0,
        "time of fewer requests than that after which autoscaling removes a replica, in seconds",
        remedy="Set --downscale-delay to an allowed value.",
    )
    ray_address: Annotated[str, Field(pattern=r"^(auto|[^/\s]+:\d+)$")] | None = setting(
        None,
        "Ray cluster to run the replicas on: auto for the one of this machine, or HOST:PORT; Ray "
        "is started on this machine by default",
        allowed="auto, or the HOST:PORT that `ray start` printed",
        remedy="Start the server on a machine of the cluster, with --ray-address auto.",
    )
    allow_other_numerics: bool = setting(
        False,
        "let requests go to replicas with other numerics than the server's, also in the middle of "
        "an answer; then equal requests may get different answers",
    )
    journal: str | None = setting(
        None,
        "file in which open answers outlive the server's process, and complete ones while there is "
        "space; it has prompts and answers, for its owner only",
    )
    journal_size: Annotated[float, Field(ge=1.0, le=MAX_JOURNAL_MEBIBYTES), size_in(1 << 20)] = (
        setting(
            256.0,
            "size of the journal, in MiB, or a size such as 2G",
            allowed=f"numbers from 1 to {MAX_JOURNAL_MEBIBYTES:g}, in MiB, or sizes with their "
            "unit, such as 512M or 2G",
            remedy="Set --journal-size to an allowed value.",
            is_size=True,
        )
    )
    resume_timeout: Annotated[float, Field(ge=0.0, le=MAX_SECONDS)] | None = setting(
        None,
        "seconds for which a stream goes on without its client, which may get the rest; 60 with "
        "--journal, otherwise 0 by default",
        remedy="Set --resume-timeout to an allowed value.",
    )
    disable_frontend_multiprocessing: bool = setting(
        False, "run the engine in a thread of the server's process"
    )
    shutdown_timeout: Annotated[float, Field(ge=0.0, le=MAX_SECONDS)] = setting(
        30.0,
        "time that running requests have to end after SIGTERM, in seconds",
        remedy="Set --shutdown-timeout to an allowed value.",
    )
    timeout_keep_alive: Annotated[float, Field(ge=0.0, le=MAX_SECONDS)] = setting(
        75.0,
        "time for which an idle connection is kept, in seconds (keep-alive)",
        remedy="Set --timeout-keep-alive to an allowed value.",
    )
    max_body_size: Annotated[float, Field(ge=0.001, le=MAX_MEBIBYTES), size_in(1 << 20)] = setting(
        8.0,
        "maximum size of a request body, in MiB, or a size such as 512k",
        allowed=f"numbers from 0.001 to {MAX_MEBIBYTES:g}, in MiB, or sizes with their unit, such "
        "as 512k or 16MB",
        remedy="Set --max-body-size to an allowed value.",
        is_size=True,
    )
    limit_concurrency: Annotated[int, Field(ge=1, le=MAX_CONNECTIONS)] = setting(
        4096,
        "maximum number of open connections",
        remedy="Set --limit-concurrency to an allowed value.",
    )
    metrics_names: Literal["lockstep", "vllm"] = setting(
        "lockstep", "prefix of the names in /metrics: lockstep or vllm"
    )
    log_format: LogFormat = setting(
        "text", "format of log lines on stderr: text or json", remedy="Choose one of them."
    )
    enable_log_requests: bool = setting(
        False, "log a line for every request that has ended, without its text"
    )
    disable_log_stats: bool = setting(False, "do not log the throughput every 10 s")
    otlp_traces_endpoint: Collector | None = setting(
        None,
        "OpenTelemetry collector that gets a span for every request, by OTLP over HTTP, e.g. "
        "http://localhost:4318/v1/traces",
        allowed="http://HOST:PORT or https, with a path or without (for HTTP the port is 4318)",
        remedy="Set --otlp-traces-endpoint to the URL of the collector.",
    )
    ssl_keyfile: str | None = setting(None, "private key, PEM")
    ssl_certfile: str | None = setting(None, "certificate, PEM")
    ssl_keyfile_password: str | None = setting(None, "password of the private key")
    ssl_ca_certs: str | None = setting(
        None, "certificates of the authorities that sign clients' certificates, PEM"
    )
    ssl_ciphers: str | None = setting(None, "ciphers for TLS 1.2 and older, in OpenSSL's format")
    ssl_cert_reqs: Annotated[int, Field(ge=0, le=2)] = setting(
        0,
        "clients' certificates: 0 none, 1 optional, 2 required",
        remedy="Set --ssl-cert-reqs to an allowed value.",
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = setting(
        "warning", "debug, info, warning or error", remedy="Choose one of them."
    )
