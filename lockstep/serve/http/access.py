"""Access rules that are checked before any other work: hosts, API keys, body sizes and times."""

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.http.errors import (
    MAX_SHOWN_CHARACTERS,
    error_object,
    error_response,
    route_path,
)
from lockstep.serve.http.request_context import REQUEST_CONTEXT, Header

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
OPEN_PATHS = (
    "/health",
    "/ping",
    "/",
    "/playground/app.css",
    "/playground/app.js",
    "/playground/markdown.js",
)
"""Paths that need no API key: probes send none, and neither does a browser that opens the page."""
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class AccessRules:
    """Rules of AccessMiddleware.

    hosts: allowed values of the Host header; ("*",) allows all.
    keys: valid API keys; an empty tuple turns authentication off.
    max_body_bytes: maximum size of a request body.
    max_body_seconds: maximum time in which a body must arrive.
    root_path: path prefix under which a proxy publishes the server. A proxy may remove it.
    """

    hosts: tuple[str, ...] = ("*",)
    keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * MEBIBYTE
    max_body_seconds: float = 30.0
    root_path: str = ""


class AccessMiddleware:
    """ASGI middleware that enforces AccessRules."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self.app = app
        self.rules = rules
        self._hosts = {host.lower() for host in rules.hosts}
        self._key_digests = [_digest(key) for key in rules.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on with limits on the size and time of its body."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self.app(scope, self._limited(receive), send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """Return the response that refuses the request; None if it is allowed."""
        headers = scope["headers"]
        lengths = _values(headers, b"content-length")

        def refuse(status: int, message: str, code: str | None = None) -> JSONResponse:
            body = error_object(message, code=code)
            return error_response(status, body, scope, close=True)

        # Two lengths that disagree would let a request hide in the body of another one.
        if lengths and _values(headers, b"transfer-encoding"):
            return refuse(
                400, "Content-Length and Transfer-Encoding exclude each other; send one of them."
            )
        if any(not length.isdigit() for length in lengths):
            return refuse(400, "Content-Length is no number.")
        encodings = _values(headers, b"content-encoding")
        if any(encoding.strip().lower() != b"identity" for encoding in encodings):
            return refuse(415, "Content-Encoding is not supported; send the body as it is.")
        # 20 digits hold any real size; converting longer numbers takes quadratic time.
        if any(int(length[:20]) > self.rules.max_body_bytes for length in lengths):
            return refuse(413, self._too_large())
        if not self._is_allowed_host(headers):
            shown = b", ".join(_values(headers, b"host")).decode("latin-1")[:MAX_SHOWN_CHARACTERS]
            return refuse(400, f"Host {shown!r} is not served here; name it with --allowed-hosts.")
        is_open = not self._key_digests or route_path(scope) in OPEN_PATHS
        owner = self._owner(headers) if self._key_digests else ""
        if not is_open and owner is None:
            message = (
                "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key."
            )
            refusal = refuse(401, message, "invalid_api_key")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        context = REQUEST_CONTEXT.get()
        if owner and context is not None:
            REQUEST_CONTEXT.set(replace(context, owner=owner))
        return None

    def _is_allowed_host(self, headers: Iterable[Header]) -> bool:
        # Against DNS rebinding: a web page must not reach a local server under its own name.
        if "*" in self._hosts:
            return True
        hosts = _values(headers, b"host")
        return len(hosts) == 1 and _without_port(hosts[0].decode("latin-1")) in self._hosts

    def _owner(self, headers: Iterable[Header]) -> str | None:
        """Return the digest of the valid key that was sent; None where none was.

        Compares with every key, in a time that does not depend on where they differ.
        """
        authorization = _values(headers, b"authorization")
        value = authorization[0] if len(authorization) == 1 else b""
        scheme, _, key = value.partition(b" ")
        keys = [key.strip()] if scheme.lower() == b"bearer" else []
        api_keys = _values(headers, b"x-api-key")
        keys += api_keys if len(api_keys) == 1 else []
        digests = [_digest(key.decode("latin-1")) for key in keys]
        # A list, not a generator: any() must not stop at the first match.
        matches = [b for a in digests for b in self._key_digests if hmac.compare_digest(a, b)]
        return matches[0].hex() if matches else None

    def _too_large(self) -> str:
        size = self.rules.max_body_bytes / MEBIBYTE
        return f"the body is larger than {size:g} MiB; send less, or start with --max-body-size."

    def _limited(self, receive: Receive) -> Receive:
        """Return a `receive` that raises HTTPException for a body that is too large or late."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.rules.max_body_seconds
        num_bytes = 0
        is_complete = False

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the body did not come within {self.rules.max_body_seconds:g} s."
                raise HTTPException(408, late, {"Connection": "close"}) from None
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self.rules.max_body_bytes:
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            return message

        return receive_limited


def default_hosts(host: str) -> tuple[str, ...]:
    """Return the allowed hosts for a bound address: loopback names on loopback, else all."""
    return (*LOOPBACK, host) if is_loopback(host) else ("*",)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _values(headers: Iterable[Header], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _without_port(host: str) -> str:
    """Remove the port: example.org:80 -> example.org; [::1]:80 -> [::1]"""
    head, colon, port = host.lower().rpartition(":")
    return head if colon and port.isdigit() and not head.endswith(":") else host.lower()


def _digest(key: str) -> bytes:
    # Digests have one length, so comparing them does not reveal the length of a key.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
