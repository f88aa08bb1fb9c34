"""The served model: admission of requests, and the requests that are active."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from lockstep.errors import EngineDeadError, RequestError
from lockstep.sampling_params import MAX_LOGPROBS, SamplingParams
from lockstep.scheduling.request import Request
from lockstep.serve.http.errors import MAX_SHOWN_CHARACTERS, BusyError, UnknownModelError
from lockstep.serve.http.output_budget import OutputBudget
from lockstep.serve.journal.journal import Journal
from lockstep.serve.journal.saved_answer import SavedAnswer, SavedRequest
from lockstep.serve.requests.active_request import ActiveRequest
from lockstep.serve.requests.body_models import renamed_fields
from lockstep.serve.requests.engine_client import EngineClient
from lockstep.serve.requests.parsed_request import GenerationBody, ParsedRequest
from lockstep.serve.requests.resumable_streams import ResumableStreams
from lockstep.serve.telemetry.request_record import RequestRecord
from lockstep.text.processor import Processor

log = logging.getLogger("lockstep.serve")

NUM_COMPILERS = 2
"""Number of threads that parse requests with grammars."""
MAX_COMPLETIONS = 1024
"""Maximum completions of one request: prompts times n."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Limits of the service.

    max_running: completions that the engine runs at once.
    max_queued: completions that may wait for them.
    max_seconds: time limit of any request; None sets no limit.
    max_step_seconds: time of one step after which the service counts as unhealthy.
    max_logprobs: log-probabilities per token that a request may ask for.
    max_stored_responses, max_stored_bytes, stored_seconds: number, bytes and age since the last
        use of the responses that /v1/responses keeps.
    max_output_bytes, max_total_output_bytes: approximate bytes of output that waits for its
        reader, per request and over all requests.
    resume_seconds: time for which a stream goes on without a reader, and for which a complete one
        is kept in memory; 0 ends it with its connection.
    """

    max_running: int = 16
    max_queued: int = 2048
    max_seconds: float | None = None
    max_step_seconds: float = 120.0
    max_logprobs: int = MAX_LOGPROBS
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 << 20
    stored_seconds: float = 86_400.0
    max_output_bytes: int = 128 << 20
    max_total_output_bytes: int = 1 << 30
    resume_seconds: float = 0.0


class Service:
    """A model that answers requests of any API.

    fingerprint: numerics of the answers, part of every response.
    aliases: further names of the model. adapters: names of its LoRA adapters, each a model of its
    own to clients.
    drafts_predictions: the engine's drafts are the tokens of predicted texts.
    on_record: called in the event loop with the record of every request that has ended.
    journal: started journal of the answers; None for none.
    """

    def __init__(
        self,
        client: EngineClient,
        processor: Processor,
        model_name: str,
        fingerprint: str,
        limits: Limits | None = None,
        aliases: Sequence[str] = (),
        on_record: Sequence[Callable[[RequestRecord], None]] = (),
        adapters: Collection[str] = (),
        drafts_predictions: bool = False,
        journal: Journal | None = None,
    ) -> None:
        self.client = client
        self.processor = processor
        self.model_name = model_name
        self.adapters = frozenset(adapters)
        self.model_names = tuple(dict.fromkeys((model_name, *aliases, *adapters)))
        self.fingerprint = fingerprint
        self.drafts_predictions = drafts_predictions
        self.limits = limits or Limits()
        self.on_record = tuple(on_record)
        self.start_time = int(time.time())
        self.output_budget: OutputBudget[ActiveRequest] = OutputBudget(
            self.limits.max_output_bytes, self.limits.max_total_output_bytes
        )
        self.streams = ResumableStreams(self, journal)
        self._active: set[ActiveRequest] = set()
        # Counted incrementally: a sum over all requests at every admission would cost more.
        self._num_completions = 0
        # Slow grammars delay only other requests with grammars.
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, thread_name_prefix="lockstep-compile")
        self._closing = False

    @property
    def num_active(self) -> int:
        """Number of requests that run or wait."""
        return len(self._active)

    @property
    def fault(self) -> str | None:
        """Reason why requests are not served now; None if they are."""
        if not self.client.is_alive:
            return "the engine has stopped. Restart the server."
        if self.client.restarting:
            return "the engine is restarting. Requests wait for it."
        stalled = self.client.stalled_for
        if stalled > self.limits.max_step_seconds:
            return (
                f"a step has been running for {stalled:.0f} s. Restart the server if it stays so."
            )
        return "the server is shutting down. Ask again later." if self._closing else None

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError for another model's name. None means the served model."""
        if name is not None and name not in self.model_names:
            allowed = ", ".join(map(repr, self.model_names))
            raise UnknownModelError(
                f"model={name[:MAX_SHOWN_CHARACTERS]!r} does not exist; allowed: {allowed}. "
                "GET /v1/models lists them.",
                "model",
            )

    def adapter_of(self, name: str | None) -> str:
        """Return the adapter of a model name that was checked; "" for the base model."""
        return name if name is not None and name in self.adapters else ""

    async def submit(
        self, body: GenerationBody, id_prefix: str, is_small: bool = False
    ) -> ActiveRequest:
        """Parse a body and submit its requests to the engine. The caller closes the result.

        id_prefix: beginning of the response's id. is_small: the body is short, so parsing it in
        the event loop is faster than waiting for a thread.

        Raises RequestError, BusyError where the queue is full, EngineDeadError while the engine
        cannot serve. While it is restarted, requests wait.
        """
        start_time = time.time()
        num_prompts = body.num_prompts
        self.check_model(body.model)
        fault = self.fault
        # During a restart requests wait for the engine, as those do that it worked on.
        if fault is not None and not self.client.restarting:
            raise EngineDeadError(fault)
        self._check_queue(num_prompts, body.n or 1)
        if is_small and num_prompts * (body.n or 1) == 1 and not body.needs_grammar:
            parsed, requests = self._parse(body, id_prefix)
        else:
            parsed, requests = await self._in_thread(body, self._parse, body, id_prefix)
        # The queue may have filled up during parsing, and n may have a default of the model.
        self._check_queue(num_prompts, parsed.params.n)
        limits = (parsed.timeout, self.limits.max_seconds)
        seconds = min((limit for limit in limits if limit is not None), default=None)
        deadline = None if seconds is None else start_time + seconds
        active = ActiveRequest(self, parsed, requests, deadline)
        await self._start(active)
        if ignored := body.ignored_fields():
            log.warning("fields were ignored: %s", ", ".join(ignored)[:MAX_SHOWN_CHARACTERS])
        return active

    async def resume(
        self, body: GenerationBody, id_prefix: str, saved: SavedAnswer
    ) -> ActiveRequest:
        """Go on with an answer of an earlier process. The caller closes the result.

        Raises RequestError where this server would not accept the request.
        """
        self.check_model(body.model)
        parsed, requests = await self._in_thread(
            body, self._parse_saved, body, id_prefix, saved.request
        )
        active = ActiveRequest(self, parsed, requests, saved.request.deadline, saved)
        await self._start(active)
        return active

    async def _start(self, active: ActiveRequest) -> None:
        self._active.add(active)
        self._num_completions += len(active.requests)
        try:
            await active.start()
        except BaseException:  # the task was cancelled
            active.close()
            raise

    async def parse(
        self, body: GenerationBody, id_prefix: str
    ) -> tuple[ParsedRequest, list[Request]]:
        """Parse a body without submitting it: return the request and the engine's requests.

        Raises RequestError.
        """
        num_prompts = body.num_prompts
        self.check_model(body.model)
        _check_count(num_prompts, body.n or 1)
        parsed, requests = await self._in_thread(body, self._parse, body, id_prefix)
        _check_count(num_prompts, parsed.params.n)
        return parsed, requests

    def _parse(self, body: GenerationBody, id_prefix: str) -> tuple[ParsedRequest, list[Request]]:
        parsed = body.parse(id_prefix, self.processor)
        parsed = replace(parsed, adapter=self.adapter_of(body.model))
        with renamed_fields(body.sent_names()):
            self._check_logprobs(parsed.params)
        return parsed, parsed.engine_requests(self.processor)

    def _parse_saved(
        self, body: GenerationBody, id_prefix: str, saved: SavedRequest
    ) -> tuple[ParsedRequest, list[Request]]:
        """Parse a body again, with the ids, the tokens and the seeds that it had."""
        parsed = body.parse(id_prefix, self.processor)
        conversation = parsed.conversation
        if conversation is not None:
            conversation = replace(conversation, ids=saved.prompts[0])
        parsed = replace(
            parsed,
            id=saved.id,
            engine_id=saved.engine_id,
            adapter=self.adapter_of(body.model),
            prompts=tuple(saved.prompts),
            conversation=conversation,
        )
        requests = parsed.engine_requests(self.processor)
        for request, seed, count in zip(requests, saved.seeds, saved.max_tokens, strict=True):
            request.seed = seed
            request.params = replace(request.params, seed=seed, max_tokens=count)
            request.arrival = request.metrics.arrival_time = saved.arrival
        return parsed, requests

    async def _in_thread(
        self, body: GenerationBody, function: Callable[..., Result], *args: object
    ) -> Result:
        """Return function(*args), called in a compiler's thread where a grammar is needed.

        All of the work is one call: with many streams, each change of thread costs milliseconds.
        """
        pool = self._compilers if body.needs_grammar else None
        call = partial(copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.limits.max_logprobs:
                raise RequestError(
                    f"{name}={count} is not allowed; allowed: 0 to {self.limits.max_logprobs} "
                    "(--max-logprobs). Ask for fewer.",
                    name,
                )

    def _check_queue(self, num_prompts: int, n: int) -> None:
        _check_count(num_prompts, n)
        capacity = self.limits.max_running + self.limits.max_queued
        if self._num_completions + num_prompts * n > capacity:
            raise BusyError(
                f"the queue is full: {self._num_completions} completions run or wait, allowed: "
                f"{capacity}. Try again later."
            )

    def forget(self, active: ActiveRequest) -> None:
        """Remove a request that has ended, and publish its record once."""
        if active not in self._active:
            return
        self._active.remove(active)
        self._num_completions -= len(active.requests)
        self.output_budget.forget(active)
        if active.is_history:
            return
        record = active.record()
        for publish in self.on_record:
            publish(record)

    def stop_admission(self) -> None:
        """Refuse new requests from now on; active ones continue."""
        self._closing = True

    def end_all(self) -> None:
        """End every active request with an error that names the shutdown."""
        for active in list(self._active):
            active.end(EngineDeadError("the server is shutting down. Ask again later."))


def _check_count(num_prompts: int, n: int) -> None:
    """Raise RequestError for more completions than one request may have."""
    if num_prompts * n > MAX_COMPLETIONS:
        raise RequestError(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} completions; allowed: at most "
            f"{MAX_COMPLETIONS} in a request. Send several requests.",
            "n",
        )
