"""A fake engine client that answers from a script, with the real client's interface."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lockstep.engine.async_engine import Listener
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import EngineDeadError
from lockstep.outputs import Logprob, TokenSource
from lockstep.scheduling.request import Request, check_ids

VOCABULARY = 1 << 20


class FakeClient:
    """Client that gives each request the tokens of `answer(request)`, `step` at a time; with `hang`
    it never ends.

    A request for more tokens gets the first one repeatedly. nan_after: tokens after which a request
    ends with an error.
    """

    def __init__(self, answer: Callable[[Request], list[int]]) -> None:
        self.answer = answer
        self.step = 3
        self.hang = False
        self.alive = True
        self.requests: list[Request] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.aborted: list[str] = []
        self.resets = 0
        self.counts = Stats(pages=10)
        self.error: Exception | None = None
        self.stalled_for = 0.0
        self.restarting = False
        self.on_end: Callable[[str], None] | None = None
        self.nan_after: int | None = None

    @property
    def is_alive(self) -> bool:
        return self.alive

    def submit(self, requests: Sequence[tuple[Request, Listener]]) -> None:
        if not self.alive:
            raise EngineDeadError("the engine has stopped")
        for request, listener in requests:
            self.requests.append(request)
            self._tasks[request.id] = asyncio.create_task(self._tell(request, listener))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._tasks:
            self._tasks.pop(request_id).cancel()

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def stats(self) -> Stats:
        return self.counts

    async def _tell(self, request: Request, listener: Listener) -> None:
        try:
            async for update in self.updates(request):
                listener(update)
        except Exception as error:
            listener(error)

    async def updates(self, request: Request) -> AsyncIterator[TokenUpdate]:
        check_ids(request, VOCABULARY)
        script = self.answer(request)
        request.metrics.num_cached_tokens = 2
        # The client has these tokens from an earlier run.
        received = script[: request.num_resumed]
        request.append(received, [_scores(token) for token in received])
        first = not received
        while request.finish_reason is None:
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            done = len(request.output_token_ids)
            new = script[done : done + self.step] or (script[:1] if not self.hang else [])
            if self.hang and not new:
                await asyncio.sleep(3600)
            taken = new[: request.append(new, [_scores(t) for t in new])]
            request.metrics.num_draft_tokens += 2
            request.metrics.num_accepted_tokens += len(new) - 1
            prompt = None
            if first and request.params.prompt_logprobs is not None:
                prompt = [None, *(_scores(t) for t in request.prompt_token_ids[1:])]
            first = False
            scores = [_scores(t) for t in taken] if request.params.logprobs is not None else None
            if self.nan_after is not None and len(request.output_token_ids) >= self.nan_after:
                request.finish_reason = "error"
            yield TokenUpdate(
                taken,
                scores,
                request.finish_reason,
                request.stop_reason,
                replace(request.metrics),
                prompt,
                "the model gave NaN" if request.finish_reason == "error" else None,
                _sources(len(new), request.speculate)[: len(taken)],
            )


def _sources(count: int, speculate: bool) -> tuple[TokenSource, ...]:
    """Return the sources of one step's tokens: all but the last are drafts, if the request allows
    drafts."""
    if not speculate:
        return ("plain",) * count
    return (*("draft",) * (count - 1), "bonus") if count else ()


def _scores(token: int) -> dict[int, Logprob]:
    other = (token + 1) % 256
    return {token: Logprob(-0.5, 1), other: Logprob(float("-inf"), 2)}


async def post_and_disconnect(server: SimpleNamespace, path: str, body: Any, requests: int) -> None:
    """Post to the application, and disconnect when its client has this number of requests."""
    gone = asyncio.Event()
    sent = json.dumps(body).encode()
    messages = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def drop(message: Any) -> None:
        return None

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"content-type", b"application/json")],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    task = asyncio.create_task(server.app(scope, receive, drop))
    while len(server.client.requests) < requests:
        await asyncio.sleep(0.001)
    assert server.client.aborted == []
    gone.set()
    await asyncio.wait_for(task, 5)
