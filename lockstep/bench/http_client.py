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
    """Address of a server. url: everything before /completions, ending in /v1.

    The client may serve many threads. It keeps no connection alive, so every request opens one.
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
        wrong = choice_error(ConfigError, "url", url, allowed, "Pass the server's address.")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise wrong
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        base = f"{parts.scheme}://{parts.netloc}{path}"
        if key and not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "api_key holds characters that no header can; allowed: printable ASCII. Pass the "
                "server's key."
            )
        headers = {"Accept-Encoding": "identity"}  # a compressed stream arrives in other pieces
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            client = httpx.Client(
                base_url=base,
                headers=headers,
                timeout=timeout,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                verify=ssl.create_default_context(),
                trust_env=False,
            )
        except httpx.InvalidURL:
            raise wrong from None
        return cls(base, client)

    def first_model(self) -> str:
        """Return the first model that the server lists.

        Raises ConfigError if it does not answer.
        """
        import httpx

        try:
            answer = self.client.get("/models")
            return str(answer.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
        except (ValueError, LookupError, TypeError):
            reason = f"status {answer.status_code}: {answer.text[:200]}"
        raise ConfigError(
            f"url: {self.url}/models names no model ({reason}). Start the server, "
            "correct the URL, or name the model."
        )


@dataclass(frozen=True)
class Ask:
    """Request: the last part of its path, and its body, which requests a stream."""

    path: str
    body: dict[str, Any]


@dataclass
class Answer:
    """Result of a request; times in seconds of time.perf_counter.

    due: when it was to be sent. pieces: arrival times of chunks with output. tokens, prompt_tokens:
    counts of the server, or the number of chunks. error: reason of a failure.
    """

    due: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Return the seconds from the due time to the first chunk."""
        return self.pieces[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Return the seconds per token after the first, or None for a single token."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Return the seconds between chunks; a chunk has several tokens if drafts were accepted."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


def ask(server: Server, request: Ask, due: float) -> Answer:
    """Send a request and read its stream; a failure is stored in the answer."""
    import httpx

    answer = Answer(due)
    try:
        with server.client.stream("POST", request.path, json=request.body) as response:
            if response.status_code != 200:
                text = response.read()[:300].decode(errors="replace")
                answer.error = f"status {response.status_code}: {text}"
            else:
                _read(response, answer)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    answer.tokens = answer.tokens or len(answer.pieces)
    if answer.error is None and not answer.pieces:
        answer.error = "the stream ended without a token"
    return answer


def _read(response: "httpx.Response", answer: Answer) -> None:
    for event in _events(response):
        if "error" in event:
            answer.error = f"in the stream: {json.dumps(event['error'])}"
            return
        if any(_has_output(choice) for choice in event.get("choices") or ()):
            answer.pieces.append(time.perf_counter())
        usage = event.get("usage")
        if usage:
            answer.tokens = usage.get("completion_tokens") or 0
            answer.prompt_tokens = usage.get("prompt_tokens") or 0


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
    begun = b""
    for chunk in chunks:
        *lines, begun = (begun + chunk).split(b"\n")
        yield from lines
    yield begun


def _has_output(choice: dict[str, Any]) -> bool:
    """Return whether a chunk has tokens, unlike one with only the role, or an empty last one.

    The text of a token may be empty while a character's bytes are incomplete.
    """
    if "delta" in choice:
        return any(value for key, value in choice["delta"].items() if key != "role")
    return bool(choice.get("text")) or choice.get("finish_reason") is None
