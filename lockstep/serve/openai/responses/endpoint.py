"""/v1/responses: items in, items out; answers are kept for a while, for a next one to go on."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import repeat
from typing import Any

from lockstep.errors import CapacityError, ContextLengthError, RequestError, brief
from lockstep.sampling_params import SamplingParams
from lockstep.serve.http.errors import CancelledRequestError, UnknownResponseError, status_and_body
from lockstep.serve.openai.chat_session import Scores, Turn
from lockstep.serve.openai.logprobs import chat_logprobs
from lockstep.serve.openai.protocol import named_as, system_named
from lockstep.serve.openai.responses.background import Recording
from lockstep.serve.openai.responses.builtin_tools import arguments_of
from lockstep.serve.openai.responses.call_items import InputCall, InputCustomCall, InputItem
from lockstep.serve.openai.responses.client_tools import ClientEvents, Toolbox
from lockstep.serve.openai.responses.protocol import (
    NAMES,
    InputMessage,
    InputReasoning,
    ItemReference,
    ReasoningPart,
    ResponsesRequest,
    call_item,
)
from lockstep.serve.openai.responses.store import ResponseStore, Stored, weight
from lockstep.serve.requests.content_blocks import Block, Blocks, Change
from lockstep.serve.requests.response_writer import Answer, Json
from lockstep.serve.requests.service import Piece, Run, Service, Usage

_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_STATUSES = {"stop": "completed", "length": "incomplete", "abort": "cancelled", "error": "failed"}
_ENDS = {"completed": "completed", "incomplete": "incomplete", "cancelled": "incomplete"}
"""status -> the last event's name; a response that failed ends with response.failed."""


class Responses:
    """The responses of a service: those that run, and those that are kept."""

    def __init__(self, service: Service) -> None:
        limits = service.limits
        self.service = service
        self.store = ResponseStore(
            limits.stored_responses, limits.stored_bytes, limits.stored_seconds
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self.running: dict[str, ResponsesAnswer] = {}

    def get(self, response_id: str) -> Json:
        """A response. Raises UnknownResponseError."""
        running = self.running.get(response_id)
        return running.response() if running else self.stored(response_id, "response_id").response

    def stored(self, response_id: str, field: str) -> Stored:
        """A response that is kept. Raises RequestError for one that runs, UnknownResponseError."""
        if response_id in self.running:
            raise RequestError(
                f"{field}={response_id!r} is in progress; allowed: responses that have ended. Wait "
                "for its end, or cancel it.",
                field,
            )
        found = self.store.get(response_id)
        if found is None:
            raise UnknownResponseError(
                f"{field}={response_id[:80]!r} is not known: store was false, its place was taken "
                "by later ones, or it never was. Send the whole conversation as input.",
                field,
            )
        return found

    def referenced(self, items: Sequence[InputItem]) -> dict[str, InputItem]:
        """Return the kept items that references name, by id.

        Raises RequestError for a second reference to an item, UnknownResponseError for an item that
        is not kept.
        """
        named: dict[str, InputItem] = {}
        kept: dict[str, InputItem] = {}
        # The latest response knows the items of all earlier turns, whose responses may be gone.
        for i, item in reversed(list(enumerate(items))):
            if not isinstance(item, ItemReference):
                continue
            # Else a small body could make a prompt of any size.
            if item.id in named:
                raise RequestError(
                    f"input[{i}].id={brief(item.id)} is there twice; allowed: one reference to an "
                    "item. Leave one out.",
                    "input",
                )
            if item.id not in kept:
                response_id = item.id.partition("_")[2].rpartition("_")[0]
                stored = self.store.get(f"resp_{response_id}")
                kept |= stored.named if stored else {}
            if item.id not in kept:
                raise UnknownResponseError(
                    f"input[{i}].id={brief(item.id)} is not known: store was false, its place was "
                    "taken by later responses, or it never was. Send the item itself, as the AI "
                    "SDK does with providerOptions: {openai: {store: false}}.",
                    "input",
                )
            named[item.id] = kept[item.id]
        return named

    def input_items(self, response_id: str) -> Sequence[InputItem]:
        """What a response was made from, earlier turns included. Raises UnknownResponseError."""
        running = self.running.get(response_id)
        return running.items if running else self.stored(response_id, "response_id").inputs

    def cancel(self, response_id: str) -> Json:
        """End a response that runs, and return it; one in the background may have ended.

        Raises RequestError for another one that has ended.
        """
        running = self.running.get(response_id)
        if running is None:
            stored = self.stored(response_id, "response_id")
            if stored.recording is not None:
                return stored.response
            raise RequestError(
                f"response_id={response_id[:80]!r} has ended; allowed: responses in progress. "
                "Leave it be.",
                "response_id",
            )
        running.cancel()
        return running.response()

    def run_in_background(self, answer: "ResponsesAnswer") -> Recording:
        """Make a response that has begun, whoever reads it, and record its events."""
        recording = answer.recording = Recording()
        task = asyncio.create_task(recording.run(answer))
        # The event loop keeps weak references to tasks only.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return recording

    def recording(self, response_id: str) -> Recording:
        """Return the events of a response of the background. Raises RequestError for another."""
        running = self.running.get(response_id)
        if running is not None:
            recording = running.recording
        else:
            recording = self.stored(response_id, "response_id").recording
        if not isinstance(recording, Recording):
            raise RequestError(
                "stream=true is not supported for this response; allowed: responses that were made "
                "with background=true. Leave it out.",
                "stream",
            )
        return recording

    def delete(self, response_id: str) -> Json:
        """Forgets a response that is kept. Raises as stored() does."""
        self.stored(response_id, "response_id")
        self.store.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}


class ResponsesAnswer(Answer):
    """A response while it is made."""

    NAMED = True

    def __init__(self, responses: Responses, body: ResponsesRequest) -> None:
        self.responses = responses
        self.service = responses.service
        self.body = body
        self.turn: Turn
        self.items: list[InputItem] = []
        self._given: list[InputItem] = []
        self._named: dict[str, InputItem] = {}
        self._tools: Toolbox
        self._events: ClientEvents
        self._before = Stored({}, (), (), (0, 0), {})
        self._blocks = Blocks()
        self._output: list[Json] = []
        self._status = "in_progress"
        self._reached = "completed"
        self._heard = False
        self._error: Json | None = None
        self._notes: tuple[str, ...] = ()
        self._number = 0
        self._refusal: ContextLengthError | CapacityError | None = None
        self._params: SamplingParams
        self._seed: int | None = body.seed
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.recording: Recording | None = None

    @property
    def run(self) -> Run:
        """The request in the engine."""
        return self.turn.run

    async def start(self, brief: bool = False) -> None:
        """Begins; raises what is wrong before anything is sent."""
        body = self.body
        if body.previous_response_id is not None:
            place = "previous_response_id"
            self._before = self.responses.stored(body.previous_response_id, place)
        referenced = self.responses.referenced(body.input)
        self._named = {**self._before.named, **referenced}
        self._given = [
            referenced[item.id] if isinstance(item, ItemReference) else item for item in body.input
        ]
        self.items = [*self._before.items, *self._given]
        self._tools = body.toolbox(self.items)
        self._events = ClientEvents(self._tools)
        self.turn = Turn(self.service, body.chat(self.items, self._tools), "resp_")
        roles = [getattr(item, "role", "assistant") for item in body.input]
        try:
            with named_as(NAMES), system_named("input", roles):
                await self.turn.start(brief and not self._before.items)
        except (ContextLengthError, CapacityError) as error:
            # Codex compacts a conversation only where a stream tells it, as OpenAI's does.
            if not body.stream or body.background:
                raise
            self._params = self.turn.body.params(self.service.processor)
            self._refusal = error
            return
        except RequestError as error:
            error.args = (self._tools.sent_path(str(error)),)
            raise
        job = self.turn.job
        self._id = job.id
        self._created = job.created
        self._params = job.params
        self._seed = job.requests[0].seed
        self._status = "queued" if body.background else "in_progress"
        self.responses.running[self._id] = self

    def close(self) -> None:
        """Aborts what still runs."""
        if self._refusal is not None:
            return
        self.responses.running.pop(self.turn.job.id, None)
        self.turn.close()

    def cancel(self) -> None:
        """Ends it early, with what has come."""
        self._status = "cancelled"
        self.turn.run.end(CancelledRequestError("the request was cancelled."))

    async def whole(self) -> Json:
        """The answer as one object."""
        try:
            await self.read()
        except CancelledRequestError as error:
            for _ in self.failure(error):
                continue
        return self.response()

    def begin(self) -> Iterator[Json]:
        """The events before anything has come."""
        yield self._event("response.created", response=self.response())
        name = "queued" if self._status == "queued" else "in_progress"
        yield self._event(f"response.{name}", response=self.response())

    async def stream(self) -> AsyncIterator[list[Json]]:
        """The response as events; one whose prompt does not fit fails at once."""
        if self._refusal is None:
            async for events in super().stream():
                yield events
            return
        created = self._event("response.created", response=self.response())
        yield [created, *self._failed(status_and_body(self._refusal)[1]["error"])]

    def hear(self, piece: Piece) -> Iterator[Json]:
        """The events of a piece, in OpenAI's order."""
        if self._status == "queued":
            self._status = "in_progress"
            yield self._event("response.in_progress", response=self.response())
        update = self.turn.hear_scored(piece) if self.body.wants_logprobs else self.turn.hear(piece)
        self._heard = True
        self._notes = update.errors
        for event, tokens in zip(update.events, update.scores or repeat(()), strict=False):
            scores = self._scores(tokens) if tokens else ()
            for change in self._blocks.push(self._events.read([event])):
                yield from self._changed(change, scores=scores)
        self._reached = _STATUSES[piece.text.finish_reason or "stop"]
        if piece.error:
            self._error = {"code": "server_error", "message": piece.error}

    def end(self) -> Iterator[Json]:
        """The events behind all pieces; the response is kept."""
        status = self._reached
        for change in self._blocks.close():
            yield from self._changed(change, status)
        self._status = status
        response = self.response()
        self._keep(response)
        name = _ENDS.get(status, "failed")
        yield self._event(f"response.{name}", response=response)

    def failure(self, error: Exception) -> Iterator[Json]:
        """The events that tell of an error; a response that was cancelled ends like others."""
        if isinstance(error, CancelledRequestError):
            self._reached = "cancelled"
            yield from self.end()
            return
        told = status_and_body(error)[1]["error"]
        yield self._event("error", **{name: told[name] for name in ("code", "message", "param")})
        yield from self._failed(told)

    def _failed(self, error: Json) -> Iterator[Json]:
        """Yield the last event of a response that an error ended; the background's is kept."""
        self._status = "failed"
        self._error = {"code": error["code"] or "server_error", "message": error["message"]}
        response = self.response()
        if self.recording is not None:
            self._keep(response)
        yield self._event("response.failed", response=response)

    def _scores(self, tokens: Scores) -> list[Json]:
        """Return the log-probabilities of tokens in OpenAI's form."""
        ids = [token_id for token_id, _ in tokens]
        entries = [entry for _, entry in tokens]
        tokenizer = self.service.processor.tokenizer
        logprobs = chat_logprobs(tokenizer, ids, entries, self.body.top_logprobs or 0)
        scores: list[Json] = logprobs["content"]
        return scores

    def response(self) -> Json:
        """The response as it stands."""
        body = self.body
        params = self._params
        reasoning = body.reasoning
        form = body.text.format if body.text else None
        reason = {"incomplete": "max_output_tokens"}.get(self._status)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self.service.model_name,
            "system_fingerprint": self.service.fingerprint,
            "status": self._status,
            "background": body.background,
            "error": self._error,
            "incomplete_details": {"reason": reason} if reason else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "store": body.store,
            "temperature": params.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": [tool.model_dump() for tool in body.offered_tools()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": _usage(self.turn.usage) if self._heard else None,
            "user": body.user,
            "metadata": body.metadata or {},
            "seed": self._seed,
            "tool_call_parse_error": "; ".join(self._notes) or None,
        }

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _changed(
        self, change: Change, status: str = "completed", scores: Sequence[Json] = ()
    ) -> Iterator[Json]:
        """Yield the events of a block's change; scores: log-probabilities of what it grew by."""
        block = change.block
        place = {"output_index": change.index}
        if change.what == "open":
            self._output.append(self._item(change.index, block, "in_progress"))
            yield self._event("response.output_item.added", **place, item=dict(self._output[-1]))
        inside = {**place, "item_id": self._output[-1]["id"]}
        if block.kind == "call":
            yield from self._called(change, inside)
        else:
            yield from self._said(change, {**inside, "content_index": 0}, scores)
        if change.what == "close":
            complete = block.complete if block.kind == "call" else status == "completed"
            ended = "completed" if complete else "incomplete"
            self._output[-1] = self._item(change.index, block, ended)
            yield self._event("response.output_item.done", **place, item=self._output[-1])

    def _called(self, change: Change, inside: Json) -> Iterator[Json]:
        if self._tools.item_tool(change.block.name) is not None:
            return  # Clients read such a call when its item is done.
        custom = self._tools.is_custom(change.block.name)
        kind = "custom_tool_call_input" if custom else "function_call_arguments"
        name = f"response.{kind}"
        if change.what == "grow":
            yield self._event(f"{name}.delta", **inside, delta=change.text)
        elif change.what == "close" and change.block.complete:
            block = change.block
            if custom:
                yield self._event(f"{name}.done", **inside, input=block.text)
                return
            called = self._tools.named(block.name)["name"]
            yield self._event(f"{name}.done", **inside, name=called, arguments=block.text)

    def _said(self, change: Change, inside: Json, scores: Sequence[Json]) -> Iterator[Json]:
        block = change.block
        thought = block.kind == "reasoning"
        name = "response.reasoning_text" if thought else "response.output_text"
        if change.what == "open":
            yield self._event("response.content_part.added", **inside, part=_part(block))
        elif change.what == "grow":
            block.logprobs += scores
            more: Json = {} if thought else {"logprobs": [*scores]}
            yield self._event(f"{name}.delta", **inside, delta=change.text, **more)
        else:
            more = {} if thought else {"logprobs": [*block.logprobs]}
            yield self._event(f"{name}.done", **inside, text=block.text, **more)
            yield self._event("response.content_part.done", **inside, part=_part(block))

    def _item(self, index: int, block: Block, status: str) -> Json:
        """A block as an item of the output."""
        custom = block.kind == "call" and self._tools.is_custom(block.name)
        tool = self._tools.item_tool(block.name) if block.kind == "call" else None
        prefix = tool.prefix if tool else "ctc" if custom else _PREFIXES[block.kind]
        item = {"id": f"{prefix}_{self._id[5:]}_{index}", "status": status}
        opened = status == "in_progress"
        match block.kind:
            case "reasoning":
                content = [] if opened else [_part(block)]
                return {"type": "reasoning", **item, "summary": [], "content": content}
            case "text":
                content = [] if opened else [_part(block)]
                return {"type": "message", **item, "role": "assistant", "content": content}
        call_id = self.turn.call_id(0, block.number, block.id)
        if tool is not None:
            arguments = arguments_of(block.text) if block.complete else {}
            return {**item, "call_id": call_id, **tool.item(arguments)}
        call = {"call_id": call_id, **self._tools.named(block.name)}
        if custom:
            return {"type": "custom_tool_call", **item, **call, "input": block.text}
        return {"type": "function_call", **item, **call, "arguments": block.text}

    def _said_again(self, block: Block) -> InputItem:
        """Return a block as an item of a next input, without the bounds of what clients send."""
        match block.kind:
            case "reasoning":
                return InputReasoning(type="reasoning", content=[ReasoningPart(text=block.text)])
            case "text":
                return InputMessage(role="assistant", content=block.text)
        call_id = self.turn.call_id(0, block.number, block.id)
        call = {"namespace": None, "call_id": call_id, **self._tools.named(block.name)}
        tool = self._tools.item_tool(block.name)
        if tool is not None:
            # An item of the tool's own type, so that a later listing shows it as the answer did.
            item = call_item({"call_id": call_id, **tool.item(arguments_of(block.text))})
            if item is not None:
                return item
        if self._tools.is_custom(block.name):
            return InputCustomCall.model_construct(
                type="custom_tool_call", **call, input=block.text
            )
        return InputCall.model_construct(type="function_call", **call, arguments=block.text)

    def _keep(self, response: Json) -> None:
        """Keeps the response and its conversation, if the client wants it.

        What came before is not weighed again, and nothing is written, so that a long conversation
        holds up nobody else's answer.
        """
        if not self.body.store:
            return
        before = self._before
        # A call that was cut has no result, and arguments that no template can render.
        outputs = tuple(
            self._said_again(one) if one.kind != "call" or one.complete else None
            for one in self._blocks.blocks
        )
        recording = self.recording
        of_response = weight(response) + (recording.size if recording else 0)
        ids = [item["id"] for item in response["output"]]
        new = {one: item for one, item in zip(ids, outputs, strict=True) if item is not None}
        # Items of earlier turns stay known by their ids when the responses of those turns are gone.
        named = {**self._named, **new}
        weighed = (
            of_response + weight(list(named)),
            before.weighed[1] + weight((*self._given, *outputs)),
        )
        stored = Stored(response, tuple(self.items), outputs, weighed, named, recording)
        self.responses.store.put(response["id"], stored)


def _part(block: Block) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": [*block.logprobs],
    }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.written,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.written,
    }
