"""A request in the engine: its updates become text deltas, which wait for one reader."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lockstep.engine.async_engine import Update
from lockstep.engine.received_answer import ReceivedAnswer
from lockstep.engine.token_update import TokenUpdate
from lockstep.errors import (
    CapacityError,
    ComputeError,
    ContextLengthError,
    EngineDeadError,
    RequestError,
)
from lockstep.outputs import ForcedMismatch, Logprob, RequestMetrics, TokenSource
from lockstep.scheduling.request import Request
from lockstep.serve.http.errors import CancelledRequestError, DeadlineError, UnreadError
from lockstep.serve.http.output_budget import delta_bytes
from lockstep.serve.http.request_context import REQUEST_CONTEXT
from lockstep.serve.journal.journal import Recorder
from lockstep.serve.journal.saved_answer import SavedAnswer
from lockstep.serve.requests.parsed_request import ParsedRequest
from lockstep.serve.telemetry.request_record import RequestRecord
from lockstep.text.processor import CompletionText, TextUpdate, name_tokens
from lockstep.text.scored_prompt import ScoredPrompt, scored_prompt

if TYPE_CHECKING:
    from lockstep.serve.requests.service import Service

log = logging.getLogger("lockstep.serve")

SAVED_ERRORS = {
    error.__name__: error
    for error in (
        CapacityError,
        ComputeError,
        ContextLengthError,
        RequestError,
        CancelledRequestError,
        DeadlineError,
        UnreadError,
    )
}
"""Errors that end an answer in the journal, by name. Messages of others are not for clients."""

MAX_BATCH_DELTAS = 16
"""Maximum deltas of a saved answer, or of a slow reader, before other requests run."""
PromptLogprobs = list[dict[int, Logprob] | None]
TokenOrigin = tuple[str, TokenSource]
"""Text that one token completed, and the source of the token."""


class Usage(NamedTuple):
    """Token counts of a request so far. A prompt with n completions counts once.

    accepted: accepted drafts that are part of the response; drafts after its end do not count.
    reasoning: completion tokens inside of reasoning, counted by the parser of the text.
    """

    prompt: int
    completion: int = 0
    cached: int = 0
    accepted: int = 0
    drafted: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New text and tokens of one completion. It is immutable, however late it is read.

    index: number of the completion.
    usage: token counts of the whole request after this delta; `reasoning` is not counted yet.
    prompt_logprobs: log-probabilities of the prompt, with the first delta of a completion.
    error: message of the fault where finish_reason is "error".
    sources: origin of each new token.
    size: approximate bytes of memory.
    """

    index: int
    update: TextUpdate
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None
    sources: tuple[TokenSource, ...] = ()
    size: int = 0

    def origins(self) -> list[TokenOrigin]:
        """Return the text and the source of each new token."""
        return list(zip(self.update.texts, self.sources, strict=False))


class UsageCounter:
    """Token counts of a request, kept up to date as deltas arrive.

    num_tokens: tokens of each completion.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self.num_tokens = [0] * parsed.num_completions
        self.usage = Usage(parsed.num_prompt_tokens)
        self._n = parsed.params.n
        self._cached = [0] * parsed.num_completions
        self._drafted = [0] * parsed.num_completions

    def add(
        self, index: int, num_tokens: int, metrics: RequestMetrics, sources: tuple[TokenSource, ...]
    ) -> Usage:
        """Count an update of one completion and return the counts of the whole request.

        num_tokens: tokens of the completion so far. sources: origins of the new tokens.
        """
        usage = self.usage
        cached = usage.cached
        # The n completions of a prompt share its tokens: the first one reports the prefix hit.
        if index % self._n == 0:
            cached += metrics.num_cached_tokens - self._cached[index]
        self.usage = Usage(
            usage.prompt,
            usage.completion + num_tokens - self.num_tokens[index],
            cached,
            usage.accepted + sources.count("draft"),
            usage.drafted + metrics.num_draft_tokens - self._drafted[index],
        )
        self.num_tokens[index] = num_tokens
        self._cached[index] = metrics.num_cached_tokens
        self._drafted[index] = metrics.num_draft_tokens
        return self.usage


class ActiveRequest:
    """A request in the engine, from start() to close().

    The engine's updates become OutputDeltas, which wait in a queue; iterating yields them in
    batches. requests: the engine's requests, one per completion. created: Unix time in seconds.
    deadline: Unix time at which the request ends incomplete, None for none. saved: part of the
    answer that an earlier process had.
    keeps_output: readers get output again and again, so it counts for the memory limit until the
    end. is_suspended: the request has ended here, and the next process goes on with it.
    """

    def __init__(
        self,
        service: "Service",
        parsed: ParsedRequest,
        requests: list[Request],
        deadline: float | None,
        saved: SavedAnswer | None = None,
    ) -> None:
        self.service = service
        self.parsed = parsed
        self.requests = requests
        self.created = int(time.time()) if saved is None else saved.request.created
        self.deadline = deadline
        self.keeps_output = False
        self.is_suspended = False
        self._saved = saved
        self._num_saved_deltas = 0
        self._recorder: Recorder | None = None
        # The record is written when the request ends, maybe in a task without this context.
        self._context = REQUEST_CONTEXT.get()
        self._deltas: deque[OutputDelta] = deque()
        self._counter = UsageCounter(parsed)
        self._metrics = [request.metrics.copy() for request in requests]
        self._finish_reasons = ["abort"] * len(requests)
        self._error: Exception | None = None
        self._faults: list[str] = []
        self._open: dict[int, CompletionText] = {}
        self._scored_prompts: list[ScoredPrompt | None] = list(map(scored_prompt, requests))
        self._num_running = len(requests)
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Submit the requests to the engine: with a saved answer, those that had not ended.

        Other tasks run only while a saved answer is handled, and not after the requests were
        submitted.
        """
        processor = self.service.processor
        visible = self.parsed.visible_token_ids
        for index, request in enumerate(self.requests):
            self._open[index] = processor.completion(request, index, visible)
        rest = list(enumerate(self.requests)) if self._saved is None else await self._read_saved()
        if not rest:
            return
        if self.deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.deadline - time.time(), self._expire)
        try:
            self.service.client.submit(
                [(request, partial(self._on_update, index)) for index, request in rest]
            )
        except Exception as error:
            self._open.clear()  # none was queued: there is nothing to abort
            self._fail(0, error)

    async def _read_saved(self) -> list[tuple[int, Request]]:
        """Handle the updates of a saved answer; return the requests that go on, by index."""
        assert self._saved is not None
        answers = [ReceivedAnswer(request) for request in self.requests]
        for number, (index, update) in enumerate(self._saved.updates, 1):
            answers[index].add(update)
            self._on_update(index, update)
            if number % MAX_BATCH_DELTAS == 0:
                await asyncio.sleep(0)
        self._num_saved_deltas = len(self._deltas)
        if self._saved.end is None and self._error is None:
            return [(index, answers[index].rest()) for index in self._open]
        self._open.clear()
        self._num_running = 0
        if self._saved.end is not None:
            # The server may have ended the request meanwhile, before all of its deltas.
            self._error = self._error or saved_error(self._saved.end.error)
        return []

    @property
    def reads_saved(self) -> bool:
        """True while the reader has not got all deltas of a saved answer."""
        return self._num_saved_deltas > 0

    @property
    def is_history(self) -> bool:
        """True where the answer was complete in an earlier process, and is only read again."""
        return self._saved is not None and self._saved.end is not None

    def attach(self, recorder: Recorder | None) -> None:
        """Write the updates to the journal from now on.

        Call it in the iteration of the event loop in which the request is started: no update has
        been handled then.
        """
        self._recorder = recorder
        if self._error is not None or not self._num_running:
            self._record_end(self._error)

    def drop_record(self) -> None:
        """Remove the answer from the journal."""
        if self._recorder is not None:
            self._recorder.drop()
        self._recorder = None

    def _record_end(self, error: Exception | None) -> None:
        """Write the end to the journal; leave the answer open where the next process goes on."""
        if self._recorder is None:
            return
        if isinstance(error, EngineDeadError):
            self.is_suspended = True
        elif error is None or type(error).__name__ in SAVED_ERRORS:
            self._recorder.end(error)
        else:
            self._recorder.drop()
        self._recorder = None

    async def __aiter__(self) -> AsyncIterator[list[OutputDelta]]:
        """Yield all waiting deltas, at most MAX_BATCH_DELTAS at once."""
        while True:
            if not self._deltas:
                if self._error is not None:
                    raise self._error
                if not self._num_running:
                    return
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
                continue
            # A batch has saved deltas or new ones.
            count = min(self._num_saved_deltas or len(self._deltas), MAX_BATCH_DELTAS)
            self._num_saved_deltas = max(0, self._num_saved_deltas - count)
            batch = [self._deltas.popleft() for _ in range(count)]
            yield batch
            # A response that is sent as a whole keeps its deltas in memory until it is complete.
            if self.parsed.stream and not self.keeps_output:
                self.service.output_budget.release(self, sum(delta.size for delta in batch))
            if self._deltas:
                await asyncio.sleep(0)  # yield to other requests, however long the queue is

    def end(self, error: Exception) -> None:
        """End the request early if it is running.

        Its reader gets the waiting deltas, then the error.
        """
        if self._num_running:
            self._stop(error)

    def end_unread(self) -> None:
        """End a request whose waiting output exceeds its memory limit, and drop that output."""
        self._deltas.clear()
        self._num_saved_deltas = 0
        self.service.output_budget.forget(self)
        self._stop(
            UnreadError(
                f"more than {self.service.limits.max_output_bytes >> 20} MiB of the answer, or "
                f"{self.service.limits.max_total_output_bytes >> 20} MiB of all, wait to be read. "
                "Stream it and read it as it comes, or ask for fewer tokens, completions or "
                "log-probabilities."
            )
        )

    @property
    def model_name(self) -> str:
        """Name of the model that answers, for the response: an adapter's own."""
        return self.parsed.adapter or self.service.model_name

    def forced_mismatch(self, index: int) -> ForcedMismatch | None:
        """Return the first forced token of a completion that the model would not have chosen.

        Tokens after the completion's end do not count.
        """
        mismatch = self._metrics[index].forced_mismatch
        if mismatch is None or self._finish_reasons[index] == "error":
            return mismatch
        return mismatch if mismatch.index < self._counter.num_tokens[index] else None

    def record(self) -> RequestRecord:
        """Return the record of the request, for the log, the metrics and the traces."""
        usage = self._counter.usage
        return RequestRecord(
            id=self.parsed.id,
            context=self._context,
            model=self.model_name,
            params=self.parsed.params,
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            cached_tokens=usage.cached,
            draft_tokens=usage.drafted,
            accepted_tokens=usage.accepted,
            max_completion_tokens=max(self._counter.num_tokens),
            metrics=tuple(self._metrics),
            finish_reasons=tuple(self._finish_reasons),
            error=str(self._error) if self._error else next(iter(self._faults), None),
            end_time=time.monotonic(),
        )

    def close(self) -> None:
        """Abort running completions and release the request's resources. May be repeated."""
        self._abort_all()
        self.service.forget(self)
        if self._timer is not None:
            self._timer.cancel()

    def _stop(self, error: Exception) -> None:
        self._error = self._error or error
        self._record_end(self._error)
        self._abort_all()
        self._wake_reader()

    def _abort_all(self) -> None:
        for index in list(self._open):
            self._abort(index)

    def _abort(self, index: int) -> None:
        del self._open[index]
        self.service.client.abort(self.requests[index].id)

    def _expire(self) -> None:
        self.end(
            DeadlineError(
                f"the request's time was up after {self._counter.usage.completion} tokens. Raise "
                "timeout, or ask for fewer tokens."
            )
        )

    def _on_update(self, index: int, update: Update) -> None:
        """Handle an update of the engine; updates after the end of a completion are ignored."""
        if index not in self._open:
            return
        try:
            if self._recorder is not None and not isinstance(update, Exception):
                # Before the client can have any of it.
                self._recorder.add(index, update)
            self._queue_delta(index, update)
        except Exception as error:
            self._fail(index, error)

    def _fail(self, index: int, error: Exception) -> None:
        self._finish_reasons[index] = "error"
        self.end(error)

    def _wake_reader(self) -> None:
        # The reader may have gone away, which has cancelled its future.
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _queue_delta(self, index: int, update: Update) -> None:
        """Queue the delta of an update. Raises the error that ended the completion."""
        if isinstance(update, Exception):
            if isinstance(update, ComputeError):
                log.error("request %s failed: %s", self.requests[index].id, update)
            raise update
        self._metrics[index] = update.metrics
        if update.error is not None:
            # A fault of one row, such as NaN: the completion ends, the others continue.
            self._faults.append(update.error)
        scored = self._scored_prompts[index]
        if scored is not None:
            converted = scored.convert(update)
            if converted is None:
                return
            update = converted
            self._metrics[index] = update.metrics
        delta = self._delta(index, update)
        self._deltas.append(delta)
        reason = delta.update.finish_reason
        if reason is not None:
            self._num_running -= 1
            self._finish_reasons[index] = reason
            # A stop string ended it. The engine knows none and still generates this completion.
            if update.finish_reason is None:
                self._abort(index)
            else:
                del self._open[index]
        if not self._num_running:
            self._record_end(None)
        exceeding = self.service.output_budget.add(self, delta.size)
        if exceeding is not None:
            exceeding.end_unread()
        self._wake_reader()

    def _delta(self, index: int, update: TokenUpdate) -> OutputDelta:
        """Detokenize an update."""
        prompt_logprobs = update.prompt_logprobs
        new = self._open[index].push(
            update.token_ids, update.logprobs, update.finish_reason, update.stop_reason
        )
        if self.parsed.only_prompt:
            new = TextUpdate(finish_reason="length")
        if prompt_logprobs is not None:
            name_tokens(self.service.processor.tokenizer, prompt_logprobs)
        count = len(new.token_ids)
        sources = update.token_sources[:count]
        entries = [*(new.logprobs or ()), *(prompt_logprobs or ())]
        return OutputDelta(
            index,
            new,
            self._counter.add(index, new.num_tokens, update.metrics, sources),
            prompt_logprobs,
            update.error,
            sources,
            delta_bytes(count, sum(map(len, filter(None, entries)))),
        )


def saved_error(error: tuple[str, str] | None) -> Exception | None:
    """Return the error that ended a saved answer; None where no error did."""
    return None if error is None else SAVED_ERRORS[error[0]](error[1])
