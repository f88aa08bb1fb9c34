"""The outermost layer of the application: every request has a name, and every answer bears it."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.serve.caller import CALLER, Caller, Header
from lockstep.serve.problems import MESSAGES_PATH

BODY = "lockstep.body"
"""What sends an answer's body on from here, in the scope: no layer further in changes bodies, and
each would cost time with every piece of a stream."""


class Named:
    """ASGI: every request has a caller, and every answer bears the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller = Caller.of(scope["headers"])
        CALLER.set(caller)
        scope[BODY] = send
        own = _headers(caller, scope["path"])

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        await self.app(scope, receive, named)


def _headers(caller: Caller, path: str) -> list[Header]:
    """As OpenAI names the header and, at its own paths, Anthropic."""
    value = caller.request_id.encode("ascii")
    headers = [(b"x-request-id", value)]
    return [*headers, (b"request-id", value)] if MESSAGES_PATH in path else headers
