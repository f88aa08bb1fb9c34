"""What the endpoints share: requests into the engine, texts out of it, usage, aborts."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.engine.client import TokenUpdate
from lockstep.engine.request import Request
from lockstep.engine.stats import Stats
from lockstep.errors import EngineDeadError, RequestError
from lockstep.outputs import Logprob, RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.serve.protocol import SamplingFields
from lockstep.text.processor import CompletionText, Processor, Prompt, name_tokens

log = logging.getLogger("lockstep.serve")


class Client(Protocol):
    """What the server needs of an engine's client."""

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        ...

    def submit(self, request: Request) -> AsyncIterable[TokenUpdate]:
        """Queues a request; its updates come through the stream."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request."""
        ...

    def stats(self) -> Stats:
        """The engine's counters."""
        ...


@dataclass
class Piece:
    """What one update of one completion brought: text, and the tokens behind it."""

    text: CompletionText
    delta: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class Job:
    """One call of an endpoint: one or several prompts with `n` completions each."""

    id: str
    prompts: list[list[int]]
    params: SamplingParams
    texts: list[CompletionText] = field(default_factory=list)
    metrics: dict[str, RequestMetrics] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> dict[str, Any]:
        """Tokens read and written so far; a prompt with n completions counts once."""
        prompt = sum(map(len, self.prompts))
        written = sum(len(text.output.token_ids) for text in self.texts)
        n = self.params.n
        first = [self.metrics.get(text.request.id) for text in self.texts[::n]]
        every = self.metrics.values()
        accepted = sum(m.num_accepted_tokens for m in every)
        drafted = sum(m.num_draft_tokens for m in every)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {
                "cached_tokens": sum(m.num_cached_tokens for m in first if m)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }


class Service:
    """A model that answers over the network. `fingerprint` is returned with every answer."""

    def __init__(
        self, client: Client, processor: Processor, model_name: str, fingerprint: str
    ) -> None:
        self.client, self.processor = client, processor
        self.model_name, self.fingerprint = model_name, fingerprint
        self.started = int(time.time())

    def check(self, body: SamplingFields) -> None:
        """Refuses another model's name; fields nobody knows are only logged."""
        if body.model is not None and body.model != self.model_name:
            raise UnknownModelError(
                f"model={body.model!r} does not exist; allowed: {self.model_name!r}. "
                "GET /v1/models lists it.",
                "model",
            )
        if body.model_extra:
            log.warning("fields were ignored: %s", ", ".join(sorted(body.model_extra)))
        if not self.client.is_alive:
            raise EngineDeadError("the engine has stopped. Restart the server.")

    async def job(
        self, kind: str, prompts: Sequence[Prompt], params: SamplingParams, priority: int
    ) -> Job:
        """Makes the engine's requests; tokenising runs beside the event loop."""
        job = Job(f"{kind}-{uuid.uuid4().hex}", [], params)
        for i, prompt in enumerate(prompts):
            name = job.id if len(prompts) == 1 else f"{job.id}-p{i}"
            requests = await asyncio.to_thread(
                self.processor.requests, name, prompt, params, priority
            )
            job.prompts.append(requests[0].prompt_token_ids)
            for request in requests:
                request.metrics.arrival_time = time.monotonic()
                job.texts.append(self.processor.completion(request, len(job.texts)))
        return job

    async def run(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The job's pieces as they come. Leaving early aborts what still runs."""
        pieces: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(job, text, pieces)) for text in job.texts]
        try:
            running = len(tasks)
            while running:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                if piece is None:
                    running -= 1
                else:
                    yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self, job: Job) -> Job:
        """Runs the job to its end."""
        async with contextlib.aclosing(self.run(job)) as pieces:
            async for _ in pieces:
                continue
        return job

    async def _follow(
        self, job: Job, text: CompletionText, pieces: "asyncio.Queue[Piece | BaseException | None]"
    ) -> None:
        ended = False
        request = text.request
        try:
            async for update in self.client.submit(request):
                job.metrics[request.id] = update.metrics
                if update.prompt_logprobs is not None:
                    name_tokens(self.processor.tokenizer, update.prompt_logprobs)
                    prompt_index = text.output.index // job.params.n
                    job.prompt_logprobs.setdefault(prompt_index, update.prompt_logprobs)
                ended = update.finish_reason is not None
                before = len(text.output.token_ids)
                delta = text.push(
                    update.token_ids, update.logprobs, update.finish_reason, update.stop_reason
                )
                new = text.output.token_ids[before:]
                scores = update.logprobs[: len(new)] if update.logprobs is not None else None
                pieces.put_nowait(Piece(text, delta, new, scores))
                if text.finished:
                    break
            pieces.put_nowait(None)
        except Exception as error:
            pieces.put_nowait(error)
        finally:
            if not ended:
                self.client.abort(request.id)


class UnknownModelError(RequestError):
    """The request names a model that is not served."""
