"""One streamed request to an OpenAI-compatible server, with the time of every piece of its answer.

Standard library only: a thread per request reads server-sent events as they arrive.
"""

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lockstep.errors import ConfigError, choice_error


@dataclass(frozen=True)
class Server:
    """Where a server answers. path: what stands in front of /completions, e.g. /v1."""

    secure: bool
    address: str
    path: str
    key: str | None = None
    timeout: float = 600.0

    @classmethod
    def at(cls, url: str, key: str | None = None, timeout: float = 600.0) -> "Server":
        """From a URL, with or without /v1 at its end. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            allowed = "http://host:port or https://host, with /v1 or without"
            raise choice_error(ConfigError, "url", url, allowed, "Change it.")
        path = parts.path.rstrip("/")
        path = path if path.endswith("/v1") else path + "/v1"
        return cls(parts.scheme == "https", parts.netloc, path, key, timeout)

    def connect(self) -> http.client.HTTPConnection:
        """A fresh connection."""
        if self.secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.address, timeout=self.timeout, context=context)
        return http.client.HTTPConnection(self.address, timeout=self.timeout)

    @property
    def headers(self) -> dict[str, str]:
        """What every request brings."""
        found = {"Content-Type": "application/json"}
        return found | ({"Authorization": f"Bearer {self.key}"} if self.key else {})

    def first_model(self) -> str:
        """The first model that the server names. Raises ConfigError where it does not answer."""
        with closing(self.connect()) as connection:
            try:
                connection.request("GET", f"{self.path}/models", headers=self.headers)
                answer = connection.getresponse()
                text = answer.read()
                return str(json.loads(text)["data"][0]["id"])
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
            except (ValueError, LookupError, TypeError):
                reason = f"status {answer.status}: {text[:200].decode(errors='replace')}"
        raise ConfigError(
            f"url: {self.address}{self.path}/models names no model ({reason}). Start the server, "
            "correct the URL, or name the model."
        )


@dataclass(frozen=True)
class Ask:
    """A request: the end of its path, and its body, which asks for a stream."""

    path: str
    body: dict[str, Any]


@dataclass
class Answer:
    """What came of a request; times in seconds of time.perf_counter.

    due: when it was to be sent. pieces: when each piece with output arrived. tokens and
    prompt_tokens: as the server counts them, or the pieces where it does not. error: why it failed.
    """

    due: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first piece, from when the request was due."""
        return self.pieces[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single one."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between pieces; a piece holds several tokens where drafts were accepted."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


def ask(server: Server, request: Ask, due: float) -> Answer:
    """Sends a request and reads its stream to the end; what fails stands in the answer."""
    answer = Answer(due)
    try:
        with closing(server.connect()) as connection:
            path = server.path + request.path
            connection.request("POST", path, json.dumps(request.body).encode(), server.headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(300).decode(errors="replace")
                answer.error = f"status {response.status}: {text}"
            else:
                _read(response, answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = time.perf_counter()
    answer.tokens = answer.tokens or len(answer.pieces)
    if answer.error is None and not answer.pieces:
        answer.error = "the stream ended without a token"
    return answer


def _read(response: http.client.HTTPResponse, answer: Answer) -> None:
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


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to [DONE]."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def _has_output(choice: dict[str, Any]) -> bool:
    """Whether a piece brings tokens: any but an opening that only names the role, and an empty end.

    The text of a token may be empty, while the bytes of a character are incomplete.
    """
    if "delta" in choice:
        return any(value for key, value in choice["delta"].items() if key != "role")
    return bool(choice.get("text")) or choice.get("finish_reason") is None
