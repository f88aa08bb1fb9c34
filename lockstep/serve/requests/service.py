"""What the endpoints share: requests into the engine, pieces of text out of it, usage, aborts."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from lockstep.engine.async_engine import ENGINE_RESTARTED, Listener, Update
from lockstep.engine.engine import STEP_FAILED
from lockstep.engine.stats import Stats
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import ComputeError, EngineDeadError, RequestError
from lockstep.outputs import Logprob, RequestMetrics, TokenSource
from lockstep.sampling_params import MAX_LOGPROBS, SamplingParams
from lockstep.scheduling.request import Request
from lockstep.serve.http.errors import (
    SHOWN,
    BusyError,
    DeadlineError,
    UnknownModelError,
    UnreadError,
)
from lockstep.serve.http.output_budget import Held, weight
from lockstep.serve.http.request_context import CALLER, Caller
from lockstep.serve.openai.protocol import MAX_COMPLETIONS, SamplingFields, named_as
from lockstep.serve.telemetry.request_record import Record
from lockstep.text.processor import CompletionText, Processor, Prompt, TextUpdate, name_tokens

log = logging.getLogger("lockstep.serve")

COMPILERS = 2
"""Threads in which requests with grammars are read."""
PromptLogprobs = list[dict[int, Logprob] | None]
Result = TypeVar("Result")


class Client(Protocol):
    """What the server needs of an engine's client.

    on_end: called once from any thread, with the reason, if the engine ends by itself.
    """

    on_end: Callable[[str], None] | None

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        ...

    @property
    def restarting(self) -> bool:
        """Whether requests wait for an engine that is being started again."""
        ...

    @property
    def stalled_for(self) -> float:
        """Seconds since the step that runs now began; 0 between steps."""
        ...

    def submit(self, requests: Sequence[tuple[Request, Listener]]) -> None:
        """Queue requests; a listener is called in the event loop with its request's updates."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, before requests that are submitted later."""
        ...

    def stats(self) -> Stats:
        """The engine's counters."""
        ...


@dataclass(frozen=True)
class Limits:
    """How much the service takes on.

    running: completions that the engine runs at once. queued: completions that may wait behind
    them. seconds: the longest that any request may take, None for no bound. step_seconds: how long
    a step may run before the service counts as unhealthy. logprobs: most of a token.
    stored_responses, stored_bytes: maximum of what /v1/responses keeps; stored_seconds: how long
    after its last use. held_bytes: about what an answer may hold for its reader, who reads slowly
    or wants it as a whole; all_held_bytes: all answers together.
    """

    running: int = 16
    queued: int = 2048
    seconds: float | None = None
    step_seconds: float = 120.0
    logprobs: int = MAX_LOGPROBS
    stored_responses: int = 1000
    stored_bytes: int = 64 << 20
    stored_seconds: float = 86_400.0
    held_bytes: int = 128 << 20
    all_held_bytes: int = 1 << 30


PIECES_OF_A_TURN = 16
"""Of an answer whose reader is behind: as many as it gets before others have their turn."""
Origin = tuple[str, TokenSource]
"""The text that a token settled, and how the token came."""


@dataclass(frozen=True)
class Usage:
    """Tokens read and written so far; a prompt with n completions counts once.

    accepted: drafts that stand in the answer; those behind its end, though verified, are none.
    """

    prompt: int
    written: int = 0
    cached: int = 0
    accepted: int = 0
    drafted: int = 0
    reasoning: int = 0

    def to_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.written,
            "total_tokens": self.prompt + self.written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
            },
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """What one update of one completion brought, and how things stood then: it never changes.

    index: the completion's. metrics: its own, as of this piece. prompt_logprobs come with the first
    piece of a completion. error: why finish_reason is "error". sources: of its tokens. weight:
    about its bytes.
    """

    index: int
    text: TextUpdate
    metrics: RequestMetrics
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    sources: tuple[TokenSource, ...] = ()
    weight: int = 0

    def origins(self) -> list[Origin]:
        """How each of its tokens came."""
        return list(zip(self.text.texts, self.sources, strict=False))


@dataclass(frozen=True)
class Asked:
    """What a body asks for. only_prompt: what is generated is not part of the answer. shown:
    special tokens that are part of its text."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    only_prompt: bool = False
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Job:
    """One call of an endpoint: one or several prompts with `params.n` completions each.

    deadline: loop time at which it ends unfinished, or None. only_prompt, shown: as an Asked's.
    caller: who asked. streamed: the reader hands on each piece before it takes the next.
    """

    id: str
    params: SamplingParams
    prompts: tuple[list[int], ...]
    requests: tuple[Request, ...]
    deadline: float | None = None
    only_prompt: bool = False
    shown: frozenset[int] = frozenset()
    caller: Caller | None = None
    streamed: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def spells(self) -> bool:
        """Whether the answer has log-probabilities: 20 of each of 20,000 tokens take 2 s to
        spell."""
        return (self.params.logprobs, self.params.prompt_logprobs) != (None, None)

    def tells_tokens(self, body: SamplingFields) -> bool:
        """Whether the answer says more of its tokens than their text."""
        return self.spells or body.return_token_ids or body.return_token_sources

    def ending(
        self,
        index: int,
        finish_reason: str | None,
        stop_reason: int | str | None,
        error: str | None,
    ) -> dict[str, Any]:
        """What a choice says of its end, or that it has not come to it."""
        end: dict[str, Any] = {
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "seed": self.requests[index].seed,
        }
        return {**end, "error": error} if error else end


class Meter:
    """What a job has used, as of the last piece of each completion that was counted."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._last: dict[int, Piece] = {}
        self._accepted = 0

    def add(self, piece: Piece) -> None:
        """Counts a piece."""
        self._last[piece.index] = piece
        self._accepted += piece.sources.count("draft")

    def written(self, index: int) -> int:
        """Tokens of one completion."""
        return self._last[index].text.num_tokens if index in self._last else 0

    def usage(self, reasoning: int = 0) -> Usage:
        """All of it; reasoning: tokens that the reader found to be such."""
        job = self._job
        metrics = {index: piece.metrics for index, piece in self._last.items()}
        firsts = range(0, len(job.requests), job.params.n)
        return Usage(
            prompt=sum(map(len, job.prompts)),
            written=sum(map(self.written, metrics)),
            cached=sum(metrics[index].num_cached_tokens for index in firsts if index in metrics),
            accepted=self._accepted,
            drafted=sum(one.num_draft_tokens for one in metrics.values()),
            reasoning=reasoning,
        )


class Run:
    """A job in the engine, from start() to close(). Its pieces wait for whoever reads them."""

    def __init__(self, service: "Service", job: Job) -> None:
        self.service = service
        self.job = job
        self._pieces: deque[Piece] = deque()
        self._meter = Meter(job)
        self._metrics = [request.metrics.copy() for request in job.requests]
        self._finish_reasons = ["abort"] * len(job.requests)
        self._error: Exception | None = None
        self._faults: list[str] = []
        self._open: dict[int, CompletionText] = {}
        self._running = len(job.requests)
        self._reader: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Hands the requests to the engine."""
        if self.job.deadline is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(self.job.deadline, self._expire)
        requests = self.job.requests
        for index, request in enumerate(requests):
            self._open[index] = self.service.processor.completion(request, index, self.job.shown)
        try:
            self.service.client.submit(
                [(request, partial(self._hear, i)) for i, request in enumerate(requests)]
            )
        except Exception as error:
            self._open.clear()  # none was queued: there is nothing to abort
            self._fail(0, error)

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        """The pieces: at once those that wait, but no more than PIECES_OF_A_TURN."""
        while True:
            if not self._pieces:
                if self._error is not None:
                    raise self._error
                if not self._running:
                    return
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
                continue
            some = min(len(self._pieces), PIECES_OF_A_TURN)
            pieces = [self._pieces.popleft() for _ in range(some)]
            yield pieces
            if self.job.streamed:
                self.service.held.take(self, sum(piece.weight for piece in pieces))
            if self._pieces:
                await asyncio.sleep(0)  # others have their turn, however much waits here

    def end(self, error: Exception) -> None:
        """Ends it early, if it has not ended: what has come stays to be read, then the error."""
        if self._running:
            self._break_off(error)

    def end_unread(self) -> None:
        """Ends it early, since it holds too much, and drops what nobody has read."""
        self._pieces.clear()
        self.service.held.forget(self)
        self._break_off(
            UnreadError(
                f"more than {self.service.limits.held_bytes >> 20} MiB of the answer, or "
                f"{self.service.limits.all_held_bytes >> 20} MiB of all, wait to be read. Stream "
                "it and read it as it comes, or ask for fewer tokens, completions or "
                "log-probabilities."
            )
        )

    def record(self) -> Record:
        """What became of it so far."""
        usage = self._meter.usage()
        return Record(
            id=self.job.id,
            caller=self.job.caller,
            model=self.service.model_name,
            params=self.job.params,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.written,
            cached_tokens=usage.cached,
            draft_tokens=usage.drafted,
            accepted_tokens=usage.accepted,
            longest=max(map(self._meter.written, range(len(self._metrics)))),
            metrics=tuple(self._metrics),
            finish_reasons=tuple(self._finish_reasons),
            error=str(self._error) if self._error else next(iter(self._faults), None),
            ended=time.monotonic(),
        )

    def close(self) -> None:
        """Aborts what still runs. May be called again."""
        self._abort()
        self.service.forget(self)
        if self._alarm is not None:
            self._alarm.cancel()

    def _break_off(self, error: Exception) -> None:
        self._error = self._error or error
        self._abort()
        self._wake()

    def _abort(self) -> None:
        for index in list(self._open):
            self._leave(index)

    def _leave(self, index: int) -> None:
        """Nothing more is wanted of a completion."""
        del self._open[index]
        self.service.client.abort(self.job.requests[index].id)

    def _expire(self) -> None:
        self.end(
            DeadlineError(
                f"the request's time was up after {self._meter.usage().written} tokens. Raise "
                "timeout, or ask for fewer tokens."
            )
        )

    def _hear(self, index: int, update: Update) -> None:
        """What the engine tells of a completion, which may be more than is wanted of it."""
        if index not in self._open:
            return
        try:
            self._take(index, update)
        except Exception as error:
            self._fail(index, error)

    def _fail(self, index: int, error: Exception) -> None:
        self._finish_reasons[index] = "error"
        self.end(error)

    def _wake(self) -> None:
        """There is something for the reader, who may be gone."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _take(self, index: int, update: Update) -> None:
        """Makes an update a piece. Raises what ended the completion."""
        if isinstance(update, Exception):
            raise update
        self._metrics[index] = update.metrics
        if update.error is not None:
            if update.error in (STEP_FAILED, ENGINE_RESTARTED):
                log.error("request %s failed: %s", self.job.requests[index].id, update.error)
                raise ComputeError(update.error)
            self._faults.append(update.error)
        piece = self._piece(index, update)
        self._meter.add(piece)
        self._pieces.append(piece)
        reason = piece.text.finish_reason
        if reason is not None:
            self._running -= 1
            self._finish_reasons[index] = reason
            if update.finish_reason is None:
                self._leave(index)
            else:
                del self._open[index]
        over = self.service.held.add(self, piece.weight)
        if over is not None:
            over.end_unread()
        self._wake()

    def _piece(self, index: int, update: TokenUpdate) -> Piece:
        """The update as text."""
        prompt = update.prompt_logprobs
        new = self._open[index].push(
            update.token_ids, update.logprobs, update.finish_reason, update.stop_reason
        )
        if self.job.only_prompt:
            new = TextUpdate(finish_reason="length")
        if prompt is not None:
            name_tokens(self.service.processor.tokenizer, prompt)
        count = len(new.token_ids)
        entries = [*(new.logprobs or ()), *(prompt or ())]
        return Piece(
            index,
            new,
            update.metrics,
            prompt,
            update.error,
            update.token_sources[:count],
            weight(count, sum(map(len, filter(None, entries)))),
        )


class Service:
    """A model that answers over the network. `fingerprint` is returned with every answer.

    on_record: called in the event loop with the record of every request that has ended.
    """

    def __init__(
        self,
        client: Client,
        processor: Processor,
        model_name: str,
        fingerprint: str,
        limits: Limits | None = None,
        aliases: Sequence[str] = (),
        on_record: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        self.on_record = tuple(on_record)
        self.client = client
        self.processor = processor
        self.model_name = model_name
        self.model_names = tuple(dict.fromkeys((model_name, *aliases)))
        self.fingerprint = fingerprint
        self.limits = limits or Limits()
        self.started = int(time.time())
        self.held: Held[Run] = Held(self.limits.held_bytes, self.limits.all_held_bytes)
        self._runs: set[Run] = set()
        self._taken = (
            0  # completions of these runs; counting them anew would cost each request more
        )
        # Grammars that take long are waited for by grammars, and by no other request.
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="lockstep-compile")
        self._closing = False

    def head(self, job: Job, kind: str) -> dict[str, Any]:
        """What every answer of a job begins with; kind: OpenAI's name of the object."""
        return {
            "id": job.id,
            "object": kind,
            "created": job.created,
            "model": self.model_name,
            "system_fingerprint": self.fingerprint,
        }

    @property
    def fault(self) -> str | None:
        """Why requests are not served now; None if they are."""
        if not self.client.is_alive:
            return "the engine has stopped. Restart the server."
        if self.client.restarting:
            return "the engine is restarting. Ask again later."
        stalled = self.client.stalled_for
        if stalled > self.limits.step_seconds:
            return (
                f"a step has been running for {stalled:.0f} s. Restart the server if it stays so."
            )
        return "the server is shutting down. Ask again later." if self._closing else None

    def check(self, body: SamplingFields) -> None:
        """Refuses another model's name, and all while the engine cannot serve."""
        self.check_name(body.model)
        fault = self.fault
        if fault is not None:
            raise EngineDeadError(fault)

    def check_name(self, name: str | None) -> None:
        """Refuses another model's name; None stands for the model."""
        if name is not None and name not in self.model_names:
            allowed = ", ".join(map(repr, self.model_names))
            raise UnknownModelError(
                f"model={name[:SHOWN]!r} does not exist; allowed: {allowed}. "
                "GET /v1/models lists them.",
                "model",
            )

    async def start(
        self, kind: str, body: SamplingFields, count: int, ask: Callable[[], Asked], brief: bool
    ) -> Run:
        """Reads the body by `ask` and tokenises, then hands the engine its requests. Fields without
        effect are logged. kind: what the id begins with; count: how many prompts there are. brief:
        the body is short; all but one completion of a short one is read beside the event loop.

        Raises RequestError, or BusyError where the queue has no room. The caller closes the run.
        """
        began = asyncio.get_running_loop().time()
        self.check(body)
        self._check_room(count, body.n or 1)
        name = f"{kind}{uuid.uuid4().hex}"
        if brief and count * (body.n or 1) == 1 and not body.held:
            asked, requests = self._requests(name, body, ask)
        else:
            asked, requests = await self._in_thread(body, self._requests, name, body, ask)
        self._check_room(count, asked.params.n)
        given = [body.timeout, self.limits.seconds]
        seconds = min((s for s in given if s is not None), default=None)
        job = Job(
            id=body.answer_id(kind, name),
            params=asked.params,
            prompts=tuple(r.prompt_token_ids for r in requests[:: asked.params.n]),
            requests=tuple(requests),
            deadline=None if seconds is None else began + seconds,
            only_prompt=asked.only_prompt,
            shown=asked.shown,
            caller=CALLER.get(),
            streamed=body.stream,
        )
        run = Run(self, job)
        self._runs.add(run)
        self._taken += len(requests)
        run.start()
        if ignored := body.ignored_fields():
            log.warning("fields were ignored: %s", ", ".join(ignored)[:SHOWN])
        return run

    async def render(
        self, kind: str, body: SamplingFields, count: int, ask: Callable[[], Asked]
    ) -> list[dict[str, Any]]:
        """Return each prompt's token ids and what would be generated with; generate nothing.

        The fields are those of vLLM's render endpoints. Arguments and errors are those of start(),
        but for the queue, which is not used.
        """
        self.check_name(body.model)
        _check_count(count, body.n or 1)
        name = f"{kind}{uuid.uuid4().hex}"
        asked, requests = await self._in_thread(body, self._requests, name, body, ask)
        _check_count(count, asked.params.n)
        options = body.stream_options
        return [
            {
                "request_id": body.answer_id(kind, name) if count == 1 else request.id,
                "token_ids": request.prompt_token_ids,
                "features": None,
                "sampling_params": request.params.clone(
                    n=asked.params.n, seed=asked.params.seed
                ).to_json(),
                "model": self.model_name,
                "stream": body.stream,
                "stream_options": options and options.model_dump(),
                "cache_salt": body.cache_salt,
                "priority": body.priority,
                "kv_transfer_params": None,
            }
            for request in requests[:: asked.params.n]
        ]

    async def _in_thread(
        self, body: SamplingFields, work: Callable[..., Result], *values: Any
    ) -> Result:
        """Return work(*values), called in another thread; a compiler's where a grammar binds.

        One hop to a thread and back: with many streams, each costs milliseconds.
        """
        threads = self._compilers if body.held else None
        call = partial(copy_context().run, work, *values)
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def _requests(
        self, name: str, body: SamplingFields, ask: Callable[[], Asked]
    ) -> tuple[Asked, list[Request]]:
        """What a body asks for, and the engine's requests for it."""
        asked = ask()
        with named_as(body.sent_names()):
            self._check_logprobs(asked.params)
        requests: list[Request] = []
        for i, prompt in enumerate(asked.prompts):
            own = name if len(asked.prompts) == 1 else f"{name}-p{i}"
            requests += self.processor.requests(own, prompt, asked.params, body.priority)
        for request in requests:
            request.metrics.arrival_time = time.monotonic()
            request.cache_salt = body.cache_salt or ""
            request.speculate = body.speculate
        return asked, requests

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is not None and asked > self.limits.logprobs:
                raise RequestError(
                    f"{name}={asked} is not allowed; allowed: 0 to {self.limits.logprobs} "
                    "(--max-logprobs). Ask for fewer.",
                    name,
                )

    def _check_room(self, prompts: int, n: int) -> None:
        wanted = prompts * n
        _check_count(prompts, n)
        room = self.limits.running + self.limits.queued
        if self._taken + wanted > room:
            raise BusyError(
                f"the queue is full: {self._taken} completions run or wait, allowed: {room}. "
                "Try again later."
            )

    def forget(self, run: Run) -> None:
        """The run has ended; its record is told once."""
        if run not in self._runs:
            return
        self._runs.remove(run)
        self._taken -= len(run.job.requests)
        self.held.forget(run)
        record = run.record()
        for told in self.on_record:
            told(record)

    @property
    def num_running(self) -> int:
        """Requests that run or wait."""
        return len(self._runs)

    def close_doors(self) -> None:
        """No new requests from here on; those that run go on."""
        self._closing = True

    def end_all(self) -> None:
        """Ends every request with an error that says why."""
        for run in list(self._runs):
            run.end(EngineDeadError("the server is shutting down. Ask again later."))


def _check_count(prompts: int, n: int) -> None:
    """Raise RequestError for more completions than one request may have."""
    if prompts * n > MAX_COMPLETIONS:
        raise RequestError(
            f"{prompts} prompts with n={n} are {prompts * n} completions; allowed: at most "
            f"{MAX_COMPLETIONS} in a request. Send several requests.",
            "n",
        )


@dataclass
class Tokens:
    """Tokens of a completion, and what is known of each: one list beside the other."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None

    def add(self, piece: Piece) -> None:
        """A piece's own."""
        new = piece.text
        self.token_ids += new.token_ids
        self.origins += piece.origins()
        if new.logprobs is not None:
            self.logprobs = (self.logprobs or []) + list(new.logprobs)

    def clear(self) -> None:
        """They were told."""
        self.token_ids = []
        self.origins = []
        self.logprobs = None

    def told(self, body: SamplingFields) -> dict[str, Any]:
        """What a choice says of them where the request asks: their ids, and how each came."""
        found: dict[str, Any] = {}
        if body.return_token_ids:
            found["token_ids"] = self.token_ids
        if body.return_token_sources:
            found["token_sources"] = [
                {"text": text, "source": source} for text, source in self.origins
            ]
        return found


@dataclass
class Whole(Tokens):
    """A completion as a whole."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class Answers:
    """A job's completions as wholes, of the pieces that were added."""

    def __init__(self, job: Job) -> None:
        self.completions = [Whole() for _ in job.requests]
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}  # by the prompt's index
        self._n = job.params.n

    def add(self, piece: Piece) -> None:
        """Appends what the piece says."""
        new = piece.text
        whole = self.completions[piece.index]
        whole.add(piece)
        whole.text += new.delta
        whole.finish_reason = new.finish_reason
        whole.stop_reason = new.stop_reason
        whole.error = piece.error
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs.setdefault(piece.index // self._n, piece.prompt_logprobs)
