"""Client for streamed requests to an OpenAI-compatible server, with the time of every chunk.

Each request has a thread that reads server-sent events; all share one httpx client.
"""

import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.errors import ConfigError, choice_error, install_extra

if TYPE_CHECKING:
    import httpx


def need_httpx() -> None:
    """Raise ConfigError if httpx is not installed."""
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"bench serving needs httpx, which is not installed: {install_extra('bench')}."
        ) from None


@dataclass(frozen=True)
class Server:
    """Address of a server, and the HTTP client for it, which all threads share.

    url: base URL ending in /v1. The client keeps no connection alive, so every request opens one.
    """

    url: str
    client: "httpx.Client"

    @classmethod
    def at(cls, url: str, key: str | None = None, timeout: float = 600.0) -> "Server":
        """Create a server from a URL with or without /v1. timeout: seconds without a byte.

        Raises ConfigError if the URL or key is invalid, or httpx is not installed.
        """
        need_httpx()
        import httpx

        parts = urlsplit(url)
        allowed = "http://host:port or https://host, with /v1 or without"
        url_error = choice_error(ConfigError, "url", url, allowed, "Pass the server's address.")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise url_error
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        base = f"{parts.scheme}://{parts.netloc}{path}"
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "api_key has characters that a header cannot contain; allowed: printable ASCII. "
                "Pass the server's key."
            )
        # A compressed stream would arrive in other chunks than the server sent.
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            client = httpx.Client(
                base_url=base,
                headers=headers,
                timeout=timeout,
                # The load decides the number of connections.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=ssl.create_default_context(),
                # A proxy from the environment would be measured too.
                trust_env=False,
            )
        except httpx.InvalidURL:
            raise url_error from None
        return cls(base, client)

    def first_model(self) -> str:
        """Return the first model that the server lists.

        Raises ConfigError if it does not answer.
        """
        import httpx

        try:
            response = self.client.get("/models")
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError):
            reason = f"status {response.status_code}: {response.text[:200]}"
        raise ConfigError(
            f"url: {self.url}/models names no model ({reason}). Start the server, "
            "correct the URL, or name the model."
        )


@dataclass(frozen=True)
class StreamRequest:
    """Streaming request: path below the base URL, and JSON body."""

    path: str
    body: dict[str, Any]


@dataclass
class StreamResult:
    """Result of a request; times in seconds of time.perf_counter.

    due_time: scheduled time of sending. chunk_times: arrival times of chunks with output. tokens,
    prompt_tokens: counts from the server's usage; tokens is the number of chunks without it. error:
    reason of a failure.
    """

    due_time: float
    chunk_times: list[float] = field(default_factory=list)
    end_time: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Return the seconds from the due time to the first chunk."""
        return self.chunk_times[0] - self.due_time

    @property
    def tpot(self) -> float | None:
        """Return the seconds per token after the first, or None for a single token."""
        return (
            (self.chunk_times[-1] - self.chunk_times[0]) / (self.tokens - 1)
            if self.tokens > 1
            else None
        )

    @property
    def itl(self) -> list[float]:
        """Return the seconds between chunks; a chunk has several tokens if drafts were accepted."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


def send(server: Server, request: StreamRequest, due_time: float) -> StreamResult:
    """Send a request and read its stream; a failure is stored in the result."""
    import httpx

    result = StreamResult(due_time)
    try:
        with server.client.stream("POST", request.path, json=request.body) as response:
            if response.status_code != 200:
                message = response.read()[:300].decode(errors="replace")
                result.error = f"status {response.status_code}: {message}"
            else:
                _read(response, result)
    except (httpx.HTTPError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.end_time = time.perf_counter()
    result.tokens = result.tokens or len(result.chunk_times)
    if result.error is None and not result.chunk_times:
        result.error = "the stream ended without a token"
    return result


def _read(response: "httpx.Response", result: StreamResult) -> None:
    for event in _events(response):
        if "error" in event:
            result.error = f"in the stream: {json.dumps(event['error'])}"
            return
        if any(_has_output(choice) for choice in event.get("choices") or ()):
            result.chunk_times.append(time.perf_counter())
        usage = event.get("usage")
        if usage:
            result.tokens = usage.get("completion_tokens") or 0
            result.prompt_tokens = usage.get("prompt_tokens") or 0


def _events(response: "httpx.Response") -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in _lines(response.iter_bytes()):
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield complete lines of a stream, and the rest at its end.

    httpx's own line iterator also splits at U+2028, which JSON strings may contain.
    """
    incomplete = b""
    for chunk in chunks:
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        yield from lines
    yield incomplete


def _has_output(choice: dict[str, Any]) -> bool:
    """Return whether a chunk has tokens, unlike one with only the role, or an empty last one.

    The text of a token may be empty while a character's bytes are incomplete.
    """
    if "delta" in choice:
        return any(value for key, value in choice["delta"].items() if key != "role")
    return bool(choice.get("text")) or choice.get("finish_reason") is None
