"""The door in front of the application: hosts, keys, sizes and times, checked before any work."""

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.http.errors import SHOWN, error_object, response, route_path

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = (
    "/health",
    "/ping",
    "/",
    "/playground/app.css",
    "/playground/app.js",
    "/playground/markdown.js",
)
"""What answers without a key: probes have none, nor has a browser that opens the playground."""
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Rules:
    """What the door asks for.

    hosts: names that the Host header may hold, ("*",) for any. keys: allowed API keys, none: no key
    is needed. body_bytes: the largest body. body_seconds: how long a body may take to arrive.
    root_path: the path under which a proxy shows the server, which it may take off or not.
    """

    hosts: tuple[str, ...] = ("*",)
    keys: tuple[str, ...] = ()
    body_bytes: int = 8 * MEBIBYTE
    body_seconds: float = 30.0
    root_path: str = ""


class Guard:
    """ASGI middleware that holds the rules."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app = app
        self.rules = rules
        self._hosts = {host.lower() for host in rules.hosts}
        self._keys = [_digest(key) for key in rules.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses the request, or passes it on with bounds around its body and its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self.app(scope, self._bounded(receive), send)

    def _refusal(self, scope: Scope) -> Any:
        """The response that ends the request at the door; None if it may come in."""
        headers = scope["headers"]
        lengths = _values(headers, b"content-length")

        def refuse(status: int, message: str, code: str | None = None) -> Any:
            body = error_object(message, code=code)
            return response(status, body, scope, close=True)

        if lengths and _values(headers, b"transfer-encoding"):
            return refuse(
                400, "Content-Length and Transfer-Encoding exclude each other; send one of them."
            )
        if any(not length.isdigit() for length in lengths):
            return refuse(400, "Content-Length is no number.")
        if any(one.strip().lower() != b"identity" for one in _values(headers, b"content-encoding")):
            return refuse(415, "Content-Encoding is not supported; send the body as it is.")
        if any(int(length[:20]) > self.rules.body_bytes for length in lengths):
            return refuse(413, self._too_large())
        if not self._known_host(headers):
            shown = b", ".join(_values(headers, b"host")).decode("latin-1")[:SHOWN]
            return refuse(400, f"Host {shown!r} is not served here; name it with --allowed-hosts.")
        if self._keys and route_path(scope) not in OPEN_PATHS and not self._knows_key(headers):
            told = "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key."
            refusal = refuse(401, told, "invalid_api_key")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        return None

    def _known_host(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        if "*" in self._hosts:
            return True
        hosts = _values(headers, b"host")
        return len(hosts) == 1 and _without_port(hosts[0].decode("latin-1")) in self._hosts

    def _knows_key(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Compares with every key, in a time that does not depend on where they differ."""
        sent = _values(headers, b"authorization")
        scheme, _, key = (sent[0] if len(sent) == 1 else b"").partition(b" ")
        bare = _values(headers, b"x-api-key")
        given = [key.strip()] if scheme.lower() == b"bearer" else []
        given += bare if len(bare) == 1 else []
        digests = [_digest(one.decode("latin-1")) for one in given]
        same = [hmac.compare_digest(one, known) for one in digests for known in self._keys]
        return any(same)

    def _too_large(self) -> str:
        most = self.rules.body_bytes / MEBIBYTE
        return f"the body is larger than {most:g} MiB; send less, or start with --max-body-size."

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` for a body of bounded size that has to come within its time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.rules.body_seconds
        got = 0
        done = False

        async def bounded() -> Message:
            nonlocal got, done
            if done:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not come within {self.rules.body_seconds:g} s."
                raise HTTPException(408, late, {"Connection": "close"}) from None
            got += len(message.get("body", b""))
            done = not message.get("more_body", False)
            if got > self.rules.body_bytes:
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            return message

        return bounded


def default_hosts(host: str) -> tuple[str, ...]:
    """Who may be asked for, by the address that is bound: on loopback its names, else any."""
    return (*LOOPBACK, host) if is_loopback(host) else ("*",)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _without_port(host: str) -> str:
    """example.org:80 -> example.org; [::1]:80 -> [::1]"""
    head, colon, port = host.lower().rpartition(":")
    return head if colon and port.isdigit() and not head.endswith(":") else host.lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
