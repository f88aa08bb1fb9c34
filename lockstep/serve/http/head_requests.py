"""HEAD requests, which clients and load balancers send to learn whether a server is there."""

from starlette.types import ASGIApp, Receive, Scope, Send

ONLY_HEAD = "lockstep.only_head"
"""Key of the scope, which is True for HEAD: a stream then ends before its first event."""


class HeadMiddleware:
    """ASGI middleware that answers HEAD wherever GET is answered.

    The HTTP protocol below sends the head of the response only, with the length of its body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # A copy: the protocol reads the method of its own scope.
            scope = {**scope, "method": "GET", ONLY_HEAD: True}
        await self.app(scope, receive, send)
