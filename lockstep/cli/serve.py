"""lockstep serve: the OpenAI-compatible server."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.interrupt import end_at_next_interrupt, sigterm_interrupts
from lockstep.cli.options import engine_options, server_options, text_options
from lockstep.cli.replicas import has_replicas, load_replicas, replica_range
from lockstep.cli.show import load, note, show_start
from lockstep.errors import ConfigError, brief, choice_error
from lockstep.progress import progress_bar
from lockstep.serve.settings import RESUME_SECONDS, ServerSettings
from lockstep.settings import path_fault, read_text_file

if TYPE_CHECKING:
    from lockstep.cache.events_config import KVEventsConfig
    from lockstep.engine.async_engine import Transport
    from lockstep.engine.kv_publisher import KVEventPublisher
    from lockstep.serve.app import CrossOrigin
    from lockstep.serve.http.access import AccessRules
    from lockstep.serve.journal.journal import Journal
    from lockstep.serve.server import Address, Options
    from lockstep.serve.telemetry.traces import SpanRecorder
    from lockstep.text.processor import Processor
    from lockstep.worker.device_rates import Rates
    from lockstep.worker.executor import Facts

    LoadedEngine = tuple[Transport, Processor, Facts, Rates | None]

ANY_NUMERICS = "+any"
"""End of the system_fingerprint of a server whose replicas may have other numerics."""
MAX_KEYS = 1000
"""Maximum number of API keys."""


@engine_options
@text_options
@server_options
def serve(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    *,
    server: ServerSettings,
    text: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve the APIs of OpenAI and Anthropic until interrupted."""
    from lockstep.serve.http.access import default_hosts
    from lockstep.serve.requests.service import Limits
    from lockstep.serve.server import Address, Options

    if settings["node_rank"] or server.headless:
        _run_node(settings | text, server.headless)
        return
    names = server.allowed_hosts
    hosts = tuple(name.strip() for name in names.split(",")) if names else None
    options = Options(
        rules=_access_rules(
            hosts or default_hosts(server.host),
            server.api_key,
            server.api_key_file,
            server.max_body_size,
            server.root_path,
        ),
        limits=Limits(
            max_queued=server.max_queued_requests,
            max_seconds=server.request_timeout,
            max_step_seconds=server.step_timeout,
            max_logprobs=server.max_logprobs,
            resume_seconds=_resume_seconds(server),
        ),
        docs=not server.no_docs,
        playground=not server.no_playground,
        tokenizer_info=server.enable_tokenizer_info_endpoint,
        cache_reset=server.enable_reset_prefix_cache,
        drain_seconds=server.shutdown_timeout,
        keep_alive_seconds=server.timeout_keep_alive,
        max_connections=server.limit_concurrency,
        log_level=server.uvicorn_log_level,
        tls=_tls_settings(server),
        cross_origin=_cross_origin(server),
        metrics_prefix=server.metrics_names,
        log_format=server.log_format,
        log_requests=server.enable_log_requests,
        log_stats=not server.disable_log_stats,
    )
    model_names = server.served_model_name or (settings["model"] or "lockstep",)
    check_adapter_names(settings["lora_modules"] or (), model_names)
    address = Address(server.host, server.port, server.uds)
    with (
        _span_recorder(server.otlp_traces_endpoint) as traces,
        _journal(server.journal, server.journal_size) as journal,
    ):
        _run(settings | text, address, options, model_names, server, traces, journal)


def _resume_seconds(server: ServerSettings) -> float:
    """Return the time that a stream has without its client."""
    if server.resume_timeout is not None:
        return server.resume_timeout
    return RESUME_SECONDS if server.journal is not None else 0.0


@contextlib.contextmanager
def _journal(path: str | None, mebibytes: float) -> "Iterator[Journal | None]":
    """Yield the journal of a file; None without one. Raises ConfigError."""
    if path is None:
        yield None
        return
    from lockstep.serve.journal.journal import Journal

    # The file is opened before the model is loaded, since loading takes long.
    with contextlib.closing(Journal(path, int(mebibytes * (1 << 20)))) as journal:
        yield journal


def check_adapter_names(adapters: Iterable[str], model_names: tuple[str, ...]) -> None:
    """Raise ConfigError where an adapter has a name of the model."""
    for name in adapters:
        if name in model_names:
            allowed = f"names other than those of the model: {', '.join(model_names)}"
            remedy = "Rename the adapter, or the model by --served-model-name."
            raise choice_error(ConfigError, "lora_modules name", name, allowed, remedy)


@contextlib.contextmanager
def _span_recorder(endpoint: str | None) -> "Iterator[SpanRecorder | None]":
    """Yield the recorder of spans for a collector; None without one. Raises ConfigError."""
    if endpoint is None:
        yield None
        return
    from lockstep.serve.telemetry.traces import SpanRecorder, otlp_exporter

    with contextlib.closing(SpanRecorder(otlp_exporter(endpoint))) as traces:
        yield traces


def _note_address(address: "Address", options: "Options") -> None:
    """Print notes on options of the address that have no effect, or that open it to everybody."""
    from lockstep.serve.http.access import is_loopback

    for name in address.unused_options():
        note(f"--{name} has no effect with --uds.", "yellow")
    if not (options.rules.keys or address.uds or is_loopback(address.host)):
        note(f"host={address.host} is open to the network, without a key: set --api-key.", "yellow")


def note_events(config: "KVEventsConfig | None") -> None:
    """Print where KV events are published, or that the settings publish none."""
    from lockstep.engine.kv_publisher import is_bound

    if config is None or config.publisher == "null":
        return
    if not config.enable_kv_cache_events:
        note("kv_events_config publishes nothing without enable_kv_cache_events: true.", "yellow")
    elif is_bound(config.endpoint):
        note(f"KV events are published at {config.endpoint}.")
    else:
        note(f"KV events are sent to {config.endpoint}, which a subscriber has to bind.")


def _run(
    settings: dict[str, Any],
    address: "Address",
    options: "Options",
    model_names: tuple[str, ...],
    server: ServerSettings,
    traces: "SpanRecorder | None",
    journal: "Journal | None",
) -> None:
    """Load the model and serve it. Addresses are bound first, since loading takes long."""
    from lockstep.cache.events_config import read_kv_events
    from lockstep.engine.async_engine import AsyncEngine
    from lockstep.engine.kv_publisher import BlockFormat, open_publishers
    from lockstep.replicas.transport import ReplicaTransport
    from lockstep.serve.server import serve as run
    from lockstep.serve.telemetry.metrics import cache_config
    from lockstep.worker.roofline import StepFloors

    replicated = has_replicas(server)
    listener = address.bind()
    _note_address(address, options)
    max_replicas = replica_range(server)[1]
    publishers: list[KVEventPublisher] = []
    try:
        events = read_kv_events(settings["kv_events_config"])
        note_events(events)
        publishers = open_publishers(events, max_replicas)
        if replicated:
            loaded: LoadedEngine = load_replicas(settings, server, publishers)
        elif server.disable_frontend_multiprocessing:
            loaded = _load_in_thread(settings)
        else:
            loaded = _load_in_process(settings, options)
    except BaseException:
        # Also after Ctrl-C: nothing else would close the sockets.
        listener.close()
        for publisher in publishers:
            publisher.close()
        raise
    transport, processor, facts, rates = loaded
    limits = replace(options.limits, max_running=facts.plan.max_num_seqs * max_replicas)
    options = replace(options, limits=limits, replacements=facts.replacements, journal=journal)
    for publisher in publishers:
        publisher.start(BlockFormat.of(facts.plan))
    # The transport to replicas publishes the events of each.
    client = AsyncEngine(transport, publisher=None if replicated else next(iter(publishers), None))
    client.start()
    try:
        if journal is not None:
            journal.start(_identity(facts, settings))
        run(
            client,
            processor,
            listener,
            model_names=model_names,
            adapters=tuple(facts.plan.adapters),
            drafts_predictions=facts.plan.has_predictions,
            fingerprint=facts.fingerprint + (ANY_NUMERICS if server.allow_other_numerics else ""),
            address=address,
            options=options,
            floors=StepFloors(facts.costs, rates) if rates else None,
            cache=cache_config(facts.config, facts.plan),
            traces=traces,
            replicas=transport if isinstance(transport, ReplicaTransport) else None,
        )
    finally:
        client.shutdown()
        # The server has stopped: another Ctrl-C must not show a traceback of the exit.
        end_at_next_interrupt()


def _identity(facts: "Facts", settings: dict[str, Any]) -> dict[str, str]:
    """Return what the answers of this server depend on, for its journal."""
    from lockstep.engine_args import EngineArgs
    from lockstep.serve.journal.identity import identity

    _, text = EngineArgs(**settings).read()
    return identity(facts, text)


def _run_node(settings: dict[str, Any], headless: bool) -> None:
    """Run the ranks of a node that is not the head, until the head ends. Raises ConfigError."""
    from lockstep.engine_args import EngineArgs
    from lockstep.worker.node import run_node

    config, _ = EngineArgs(**settings).read()
    if headless and config.node_rank == 0:
        raise ConfigError(
            "headless=True is not allowed with node_rank=0, whose server takes the requests; "
            "allowed: on the other nodes. Leave it out, or set --node-rank."
        )
    with contextlib.suppress(KeyboardInterrupt), sigterm_interrupts():
        run_node(config, note)


def _load_in_thread(settings: dict[str, Any]) -> "LoadedEngine":
    """Load an engine that runs in a thread of this process."""
    from lockstep.engine.thread_transport import ThreadTransport
    from lockstep.worker.device_rates import rates_of

    llm = load(settings)
    rates = rates_of(llm.engine.plan.device)
    return ThreadTransport(llm.engine), llm.processor, llm.engine.facts, rates


def _load_in_process(settings: dict[str, Any], options: "Options") -> "LoadedEngine":
    """Start a process with an engine, and load its tokenizer here."""
    from lockstep.engine.process_transport import ProcessTransport
    from lockstep.engine_args import EngineArgs
    from lockstep.llm import processor_of
    from lockstep.serve.engine_factory import engine_factory

    config, text = EngineArgs(**settings).read()
    make_engine = partial(engine_factory, config, text, options.log_format)
    with progress_bar() as show:
        transport = ProcessTransport(make_engine, options.limits.max_step_seconds, show)
    show_start(transport.facts)
    try:
        processor = processor_of(transport.facts, text)
    except BaseException:
        # Or the engine process would outlive this one.
        transport.stop()
        raise
    return transport, processor, transport.facts, transport.rates


def _access_rules(
    hosts: tuple[str, ...],
    keys: Sequence[str] | None,
    key_file: str | None,
    mebibytes: float,
    root_path: str = "",
) -> "AccessRules":
    """Return the rules of access. Raises ConfigError for an invalid key."""
    from lockstep.serve.http.access import MEBIBYTE, AccessRules

    all_keys = [*(keys or ()), *(read_keys(key_file) if key_file is not None else ())]
    is_invalid = any(not key.strip() or not key.isprintable() for key in all_keys)
    if is_invalid or len(all_keys) > MAX_KEYS:
        raise ConfigError(
            f"api_key is not allowed to be empty or to contain control characters; allowed: up to "
            f"{MAX_KEYS} keys of printable characters. Correct --api-key, or leave it out."
        )
    return AccessRules(
        hosts=hosts,
        keys=tuple(key.strip() for key in all_keys),
        max_body_bytes=int(mebibytes * MEBIBYTE),
        root_path=root_path,
    )


def read_keys(path: str) -> list[str]:
    """Return the keys of a file with one key per line. Raises ConfigError."""
    try:
        lines = read_text_file(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"api_key_file={brief(path)} cannot be read: {path_fault(error)}. Name a text file "
            "with one key per line."
        ) from None
    keys = [line for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file={brief(path)} has no key; write one per line.")
    return keys


def _cross_origin(server: ServerSettings) -> "CrossOrigin":
    """Return the permissions of web pages of other origins.

    Raises ConfigError for credentials with any origin.
    """
    from lockstep.serve.app import CrossOrigin

    if server.allow_credentials and "*" in server.allowed_origins:
        raise ConfigError(
            "allow_credentials=True is not allowed with allowed_origins='*': any web page could "
            "send requests as its reader. Name the origins, or leave one of them out."
        )
    permissions = CrossOrigin(server.allowed_origins, allow_credentials=server.allow_credentials)
    changes: dict[str, Any] = {
        "allow_methods": server.allowed_methods,
        "allow_headers": server.allowed_headers,
    }
    return replace(permissions, **{name: value for name, value in changes.items() if value})


def _tls_settings(server: ServerSettings) -> dict[str, Any]:
    """Return uvicorn's settings of TLS; {} without TLS. Raises ConfigError."""
    from lockstep.serve.server import check_tls

    if server.ssl_certfile is None:
        if server.ssl_keyfile or server.ssl_ca_certs or server.ssl_cert_reqs:
            raise ConfigError("ssl_certfile is missing; TLS needs --ssl-certfile.")
        return {}
    required = {
        "ssl_certfile": server.ssl_certfile,
        "ssl_keyfile": server.ssl_keyfile,
        "ssl_keyfile_password": server.ssl_keyfile_password,
        "ssl_cert_reqs": server.ssl_cert_reqs,
    }
    optional = {"ssl_ca_certs": server.ssl_ca_certs, "ssl_ciphers": server.ssl_ciphers}
    settings = required | {name: value for name, value in optional.items() if value}
    check_tls(settings)
    return settings
