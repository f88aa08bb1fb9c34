"""lockstep serve: the OpenAI-compatible server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.options import engine_options
from lockstep.cli.show import load, note
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.serve.run import Address, Options

MOST_SECONDS = 86_400.0
MOST_MEBIBYTES = 1024.0
MOST_QUEUED = 1_000_000
MOST_CONNECTIONS = 65_536
MOST_KEYS = 1000


@engine_options
def serve(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
    uds: Annotated[str | None, typer.Option(help="Unix socket to listen on, not a port")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="the name that clients use; the folder's or id's if left out")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="a key that clients must send; may be given again")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="file with a key a line; a process list shows no key then")
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(help="names in Host, with commas; * for any. On loopback: its names only"),
    ] = None,
    no_docs: Annotated[
        bool, typer.Option("--no-docs", help="no /docs, /redoc and /openapi.json")
    ] = False,
    max_queued_requests: Annotated[
        int, typer.Option(help="completions that may wait; more are told to come back (429)")
    ] = 2048,
    request_timeout: Annotated[
        float | None, typer.Option(help="most seconds for any request; none if left out")
    ] = None,
    step_timeout: Annotated[
        float, typer.Option(help="seconds that a step may run before /health is 503")
    ] = 120.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="seconds that running requests may go on after SIGTERM")
    ] = 30.0,
    max_body_size: Annotated[float, typer.Option(help="largest request body, MiB")] = 8.0,
    limit_concurrency: Annotated[int, typer.Option(help="most connections at once")] = 4096,
    ssl_keyfile: Annotated[str | None, typer.Option(help="private key, PEM")] = None,
    ssl_certfile: Annotated[str | None, typer.Option(help="certificate, PEM")] = None,
    ssl_keyfile_password: Annotated[str | None, typer.Option(help="the key's password")] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="certificates that clients' ones are checked against, PEM")
    ] = None,
    ssl_cert_reqs: Annotated[
        int, typer.Option(help="clients' certificates: 0 not asked for, 1 optional, 2 required")
    ] = 0,
    uvicorn_log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error")
    ] = "warning",
    *,
    settings: dict[str, Any],
) -> None:
    """Serve the OpenAI API until interrupted."""
    from lockstep.serve.guard import default_hosts
    from lockstep.serve.run import Address, Options
    from lockstep.serve.service import Limits

    _check_range("max_queued_requests", max_queued_requests, 0, MOST_QUEUED)
    _check_range("request_timeout", request_timeout, 0.001, MOST_SECONDS)
    _check_range("step_timeout", step_timeout, 0.001, MOST_SECONDS)
    _check_range("shutdown_timeout", shutdown_timeout, 0.0, MOST_SECONDS)
    _check_range("max_body_size", max_body_size, 0.001, MOST_MEBIBYTES)
    _check_range("limit_concurrency", limit_concurrency, 1, MOST_CONNECTIONS)
    _check_range("ssl_cert_reqs", ssl_cert_reqs, 0, 2)
    levels = ("critical", "error", "warning", "info", "debug", "trace")
    if uvicorn_log_level not in levels:
        raise ConfigError(
            f"uvicorn_log_level={uvicorn_log_level!r} is not allowed; allowed: "
            f"{', '.join(levels)}. Choose one of them."
        )
    hosts = tuple(h.strip() for h in allowed_hosts.split(",")) if allowed_hosts else None
    options = Options(
        rules=_rules(hosts or default_hosts(host), api_key, api_key_file, max_body_size),
        limits=Limits(settings["max_num_seqs"], max_queued_requests, request_timeout, step_timeout),
        docs=not no_docs,
        drain_seconds=shutdown_timeout,
        connections=limit_concurrency,
        log_level=uvicorn_log_level,
        tls=_tls(ssl_keyfile, ssl_certfile, ssl_keyfile_password, ssl_ca_certs, ssl_cert_reqs),
    )
    name = served_model_name or settings["model"] or "lockstep"
    _run(settings, Address(host, port, uds), options, name)


def _run(settings: dict[str, Any], address: "Address", options: "Options", name: str) -> None:
    """Binds first, so that nobody loads a model in vain."""
    from lockstep.engine.async_engine import AsyncEngine
    from lockstep.serve.guard import is_loopback
    from lockstep.serve.run import serve as run

    listener = address.bind()
    if not (options.rules.keys or address.uds or is_loopback(address.host)):
        note(f"host={address.host} is open to the network, without a key: set --api-key.", "yellow")
    try:
        llm = load(settings)
    except BaseException:
        listener.close()
        raise
    client = AsyncEngine(llm.engine)
    client.start()
    try:
        run(
            client,
            llm.processor,
            listener,
            model_name=name,
            fingerprint=llm.engine.fingerprint,
            address=address,
            options=options,
        )
    finally:
        client.shutdown()


def _rules(
    hosts: tuple[str, ...], keys: list[str] | None, key_file: str | None, mebibytes: float
) -> Any:
    from lockstep.serve.guard import MEBIBYTE, Rules

    found = [*(keys or ()), *(_read_keys(key_file) if key_file is not None else ())]
    if any(not key.strip() or not key.isprintable() for key in found) or len(found) > MOST_KEYS:
        raise ConfigError(
            f"api_key is not allowed to be empty or to hold control characters; allowed: up to "
            f"{MOST_KEYS} keys of printable characters. Mend it or leave it out."
        )
    return Rules(
        hosts=hosts,
        keys=tuple(key.strip() for key in found),
        body_bytes=int(mebibytes * MEBIBYTE),
    )


def _read_keys(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"api_key_file={path!r} cannot be read: {error}. Name a text file with a key a line."
        ) from None
    keys = [line for line in lines if line.strip()]
    if not keys:
        raise ConfigError(f"api_key_file={path!r} holds no key; write one a line.")
    return keys


def _tls(
    key: str | None, cert: str | None, password: str | None, ca_certs: str | None, reqs: int
) -> dict[str, Any]:
    """uvicorn's settings; {} without TLS."""
    if cert is None:
        if key or ca_certs or reqs:
            raise ConfigError("ssl_certfile is missing; TLS needs --ssl-certfile.")
        return {}
    found = {
        "ssl_certfile": cert,
        "ssl_keyfile": key,
        "ssl_keyfile_password": password,
        "ssl_cert_reqs": reqs,
    }
    return found | ({"ssl_ca_certs": ca_certs} if ca_certs else {})


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"{name}={value} is not allowed; allowed: {low} to {high}. Change {flag}."
        )
