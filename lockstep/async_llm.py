"""AsyncLLM: engine for programs with an event loop, in a separate process as the server's."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable, MutableMapping
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from lockstep.child_processes import on_end
from lockstep.config import EngineConfig
from lockstep.engine.async_engine import AsyncEngine, Update
from lockstep.engine.kv_publisher import BlockFormat, KVEventPublisher, open_publisher
from lockstep.engine.process_transport import ProcessTransport
from lockstep.engine.stats import Stats
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.engine.token_update import TokenUpdate
from lockstep.engine_args import EngineArgs
from lockstep.engine_builder import build_engine
from lockstep.errors import EngineDeadError, RequestError, brief
from lockstep.keywords import CALL, check_keywords
from lockstep.llm import build_remote_engine, processor_of
from lockstep.outputs import RequestOutput, ScoreOutput
from lockstep.progress import Progress, ignore_progress
from lockstep.request_group import RequestGroup
from lockstep.sampling_params import RequestOutputKind, SamplingParams
from lockstep.text.model_tokenizer import ModelTokenizer
from lockstep.text.processor import Prompt, TextUpdate
from lockstep.text.scores import (
    GREEDY,
    Answer,
    answer_ids,
    naming_answers,
    score_output,
    score_params,
)
from lockstep.text.settings import TextSettings
from lockstep.worker.executor import Facts

STEP_SECONDS = 120.0
"""Time limit of a step, after which the engine's process is restarted."""
MAX_ID = 256
"""Maximum characters of a request's id."""
REMEDY = "Make a new AsyncLLM."
GENERATE = ("prompt", "sampling_params", "request_id", "priority", "lora_request")


class AsyncLLM:
    """A model and its tokenizer, for many coroutines of one event loop.

        async with AsyncLLM() as llm:
            async for output in llm.generate("def main(", SamplingParams(), "request-1"):
                print(output.outputs[0].text)

    Keywords are LLM's. The engine runs in a separate process, which is started again where it is
    lost, as the server's is; disable_frontend_multiprocessing: in a thread of this process.
    `progress(what, done, total)` is called while loading. shutdown() ends the engine.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        disable_frontend_multiprocessing: bool = False,
        progress: Progress = ignore_progress,
        **settings: Any,
    ) -> None:
        config, text = EngineArgs(model, **settings).read()
        transport: ThreadTransport | ProcessTransport
        publisher = open_publisher(config.kv_events_config)
        try:
            if disable_frontend_multiprocessing:
                transport = ThreadTransport(build_engine(config, progress))
                facts = transport.engine.facts
            else:
                make = partial(build_remote_engine, config, text)
                transport = ProcessTransport(make, STEP_SECONDS, progress)
                facts = transport.facts
            self._read_text(transport, facts, text)
        except BaseException:
            if publisher is not None:
                publisher.close()
            raise
        self._start(transport, facts, publisher)

    def _read_text(
        self, transport: ThreadTransport | ProcessTransport, facts: Facts, text: TextSettings
    ) -> None:
        """Read the text side; stop the engine where that fails."""
        try:
            self.processor = processor_of(facts, text)
        except BaseException:
            transport.stop()
            raise

    def _start(
        self,
        transport: ThreadTransport | ProcessTransport,
        facts: Facts,
        publisher: KVEventPublisher | None,
    ) -> None:
        """Start serving."""
        self._facts = facts
        if publisher is not None:
            publisher.start(BlockFormat.of(facts.plan))
        self._client = AsyncEngine(transport, remedy=REMEDY, publisher=publisher)
        self._client.start()
        # A stream without a reader is dropped with its group, which frees its id.
        self._groups: MutableMapping[str, RequestGroup] = WeakValueDictionary()
        # Where this object goes without shutdown(), the engine ends with it.
        self._stop = on_end(self, self._client.shutdown)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **keywords: Any) -> "AsyncLLM":
        """Return the AsyncLLM of EngineArgs. keywords: replace or add settings."""
        if not isinstance(engine_args, EngineArgs):
            raise RequestError(
                f"engine_args={brief(engine_args)} is not allowed; allowed: EngineArgs(...). "
                "Make one of the keywords."
            )
        return cls(engine_args.model, **{**engine_args.settings, **keywords})

    @property
    def config(self) -> EngineConfig:
        """Return the settings of the engine."""
        return self._facts.config

    @property
    def fingerprint(self) -> str:
        """Return the hash of the numerics, as the server's system_fingerprint."""
        return self._facts.fingerprint

    @property
    def is_running(self) -> bool:
        """Return whether requests are served."""
        return self._client.is_alive and not self._client.restarting

    @property
    def errored(self) -> bool:
        """Return whether the engine has ended."""
        return not self._client.is_alive

    async def check_health(self) -> None:
        """Raise EngineDeadError where the engine has ended."""
        if self.errored:
            raise EngineDeadError(f"the engine has stopped. {REMEDY}")

    async def get_tokenizer(self) -> ModelTokenizer:
        """Return the tokenizer, with the chat template.

        Raises RequestError where skip_tokenizer_init is set.
        """
        return ModelTokenizer(self.processor)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return what LLM.get_default_sampling_params() returns."""
        return self.processor.bounded_params({"max_tokens": SamplingParams.max_tokens, **changes})

    def stats(self) -> Stats:
        """Return a copy of the engine's counters; histogram lists start anew."""
        return self._client.stats()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: str | None = None,
        **unknown: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answer as it grows; the last output is `finished`.

        sampling_params.output_kind decides whether an output contains everything so far, only what
        is new (completions without new tokens are left out), or, once, the whole answer. Updates
        that arrive while the caller is busy are merged. A caller that stops iterating aborts the
        request. lora_request: name of a LoRA adapter of lora_modules.

        Raises RequestError where the request is wrong or its id is in use, ComputeError where the
        engine fails again and again while it runs the request, EngineDeadError where the engine has
        ended.
        """
        outputs = await self.add_request(
            uuid.uuid4().hex if request_id is None else request_id,
            prompt,
            sampling_params,
            priority=priority,
            lora_request=lora_request,
            **unknown,
        )
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()

    async def score(
        self,
        prompt: Prompt,
        answer: Answer,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        logprobs: int = 0,
        priority: int = 0,
        lora_request: str | None = None,
    ) -> ScoreOutput:
        """Return the log-probabilities of a given answer: see LLM.score().

        Raises what generate() does.
        """
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise _not_sampling_params(sampling_params)
        params = score_params(
            GREEDY if sampling_params is None else sampling_params,
            await asyncio.to_thread(answer_ids, self.processor, answer),
            logprobs,
        )
        params.output_kind = RequestOutputKind.FINAL_ONLY
        outputs = self.generate(
            prompt, params, request_id, priority=priority, lora_request=lora_request
        )
        with naming_answers():
            return score_output([output async for output in outputs][-1])

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: str | None = None,
        **unknown: Any,
    ) -> "OutputStream":
        """Queue a request and return the stream of its outputs, which generate() reads.

        Raises RequestError where the request is wrong or its id is taken.
        """
        check_keywords(unknown, GENERATE, CALL)
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_ID:
            raise RequestError(
                f"request_id={brief(request_id)} is not allowed; allowed: a text of 1 to {MAX_ID} "
                "characters. Pass a text of that length.",
                "request_id",
            )
        if params is not None and not isinstance(params, SamplingParams):
            raise _not_sampling_params(params)
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise RequestError(
                f"priority={brief(priority)} is not allowed; allowed: a whole number. Send one.",
                "priority",
            )
        if lora_request is not None and not isinstance(lora_request, str):
            raise RequestError(
                f"lora_request={brief(lora_request)} is not allowed; allowed: a name in "
                "lora_modules. Send one.",
                "lora_request",
            )
        chosen = self.get_default_sampling_params() if params is None else params.clone()
        # Tokenizing a long prompt or compiling a grammar would hold up the event loop.
        group = await asyncio.to_thread(
            RequestGroup,
            self.processor,
            request_id,
            prompt,
            chosen,
            priority,
            adapter=lora_request or "",
            # Updates of an aborted request may arrive after its id was used again.
            engine_id=f"{request_id}-{uuid.uuid4().hex}",
        )
        if request_id in self._groups:
            raise RequestError(
                f"request_id={request_id!r} is not allowed; allowed: ids of no running request. "
                "Choose another.",
                "request_id",
            )
        return OutputStream(self._client, group, chosen.output_kind, self._groups)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; the last output then has finish_reason "abort". Unknown ids pass."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            group = self._groups.get(name)
            for request in group.requests if group is not None else ():
                self._client.abort(request.id)

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; requests added later find none. Running ones go on -> True."""
        self._client.reset_prefix_cache()
        return True

    def shutdown(self) -> None:
        """End the engine after its current step; open requests end with EngineDeadError."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()


def _not_sampling_params(value: object) -> RequestError:
    return RequestError(
        f"sampling_params={brief(value)} is not allowed; allowed: SamplingParams. Make one.",
        "sampling_params",
    )


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""


class OutputStream:
    """Outputs of one request, for one reader. The finished output is the last.

    groups: open requests by id.
    """

    def __init__(
        self,
        client: AsyncEngine,
        group: RequestGroup,
        kind: RequestOutputKind,
        groups: MutableMapping[str, RequestGroup],
    ) -> None:
        self._client = client
        self._group = group
        self._kind = kind
        self._groups = groups
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._open = dict.fromkeys(range(len(group.requests)))
        groups[group.id] = group
        try:
            client.submit(
                [(request, partial(self._put, i)) for i, request in enumerate(group.requests)]
            )
        except BaseException:
            self._open.clear()  # none was queued: there is nothing to abort
            self._close()
            raise

    def _put(self, index: int, update: Update) -> None:
        self._updates.put_nowait((index, update))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next output, merged from all waiting updates."""
        while self._open:
            updates: dict[int, list[TextUpdate]] = {}
            self._push(*await self._updates.get(), updates)
            while not self._updates.empty():
                self._push(*self._updates.get_nowait(), updates)
            output = self._output(updates)
            if output is not None:
                return output
        self._close()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort the request if it has not ended."""
        self._close()

    def _push(self, index: int, update: Update, updates: dict[int, list[TextUpdate]]) -> None:
        """Take an update. Raises the error that ended the request."""
        try:
            text_update = self._group.push(index, update)
        except Exception:
            self._close()
            raise
        if text_update is None:
            return
        updates.setdefault(index, []).append(text_update)
        if text_update.finish_reason is not None and index in self._open:
            del self._open[index]
            if isinstance(update, TokenUpdate) and update.finish_reason is None:
                self._client.abort(self._group.requests[index].id)  # a stop string ended it
        if not self._open:
            self._forget_group()

    def _output(self, updates: dict[int, list[TextUpdate]]) -> RequestOutput | None:
        """Return the output after these updates; None where the reader wants none yet."""
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._group.output if self._group.finished else None
        if not updates:
            return None
        if self._kind is RequestOutputKind.CUMULATIVE:
            return self._group.snapshot()
        return self._group.delta(updates)

    def _close(self) -> None:
        """Abort unfinished completions and drop the request."""
        self._forget_group()
        for index in self._open:
            self._client.abort(self._group.requests[index].id)
        self._open.clear()

    def _forget_group(self) -> None:
        """Free the request's id, unless a later request has it already."""
        if self._groups.get(self._group.id) is self._group:
            del self._groups[self._group.id]
