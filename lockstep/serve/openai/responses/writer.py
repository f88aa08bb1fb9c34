"""Writer of a response of /v1/responses: items and events."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar, Literal, Self, cast

from lockstep.errors import CapacityError, ContextLengthError, EngineDeadError, RequestError
from lockstep.sampling_params import SamplingParams
from lockstep.serve.http.errors import CancelledRequestError, Error, status_and_body
from lockstep.serve.http.event_stream import Event
from lockstep.serve.journal.saved_answer import SavedAnswer
from lockstep.serve.openai.logprobs import chat_logprobs
from lockstep.serve.openai.protocol import ChatRequest
from lockstep.serve.openai.responses.builtin_tools import call_arguments
from lockstep.serve.openai.responses.call_items import InputCall, InputCustomCall, InputItem
from lockstep.serve.openai.responses.client_tools import ClientToolEvents, Toolbox
from lockstep.serve.openai.responses.protocol import (
    SENT_NAMES,
    InputMessage,
    InputReasoning,
    ItemReference,
    ReasoningPart,
    ResponsesRequest,
    call_item,
    read_item,
)
from lockstep.serve.openai.responses.registry import ResponseRegistry
from lockstep.serve.openai.responses.schema import (
    ArgumentsDelta,
    ArgumentsDone,
    ErrorEvent,
    InputDelta,
    InputDone,
    ItemEvent,
    ItemPosition,
    OutputItem,
    OutputText,
    PartEvent,
    PartPosition,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    ResponseEvent,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
    Status,
    TextDelta,
    TextDone,
)
from lockstep.serve.openai.responses.store import StoredResponse, json_bytes
from lockstep.serve.openai.schema import ChosenTokenLogprob
from lockstep.serve.requests.active_request import ActiveRequest, OutputDelta, Usage
from lockstep.serve.requests.body_models import renamed_fields
from lockstep.serve.requests.content_blocks import BlockChange, ContentBlock, ContentBlocks
from lockstep.serve.requests.response_writer import ResponseWriter
from lockstep.serve.requests.service import Service
from lockstep.serve.requests.update_parser import TokenLogprobs, UpdateParser

ID_PREFIX = "resp_"
_ITEM_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_FINAL_STATUSES: dict[str, "FinalStatus"] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
    "error": "failed",
}
"""finish_reason -> status."""
FinalStatus = Literal["completed", "incomplete", "cancelled", "failed"]
ResponsesEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | ErrorEvent
)


@dataclass
class ResponseState:
    """Fields of a response that do not come from the request's body.

    created: Unix time in seconds. usage: None before the first delta.
    """

    id: str
    created: int
    params: SamplingParams
    seed: int | None
    status: Literal["queued", "in_progress"] | FinalStatus = "in_progress"
    error: ResponseFault | None = None
    output: list[OutputItem] = field(default_factory=list)
    usage: Usage | None = None
    parse_errors: tuple[str, ...] = ()

    def to_object(self, service: Service, body: ResponsesRequest) -> ResponseObject:
        """Return the response as it is now."""
        reasoning = body.reasoning
        form = body.text.format if body.text else None
        is_incomplete = self.status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": service.adapter_of(body.model) or service.model_name,
            "system_fingerprint": service.fingerprint,
            "status": self.status,
            "background": body.background,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "output": list(self.output),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "store": body.store,
            "temperature": self.params.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": [tool.model_dump() for tool in body.offered_tools()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "usage": None if self.usage is None else _usage_object(self.usage),
            "user": body.user,
            "metadata": body.metadata or {},
            "seed": self.seed,
            "tool_call_parse_error": "; ".join(self.parse_errors) or None,
        }

    def fail(self, error: Error) -> None:
        """Set the status and the error of a response that failed."""
        detail = error["error"]
        self.status = "failed"
        self.error = {"code": detail["code"] or "server_error", "message": detail["message"]}


@dataclass(frozen=True)
class InputHistory:
    """Input of a response with the conversation that it continues.

    previous: the response of the previous turn; empty for a first turn.
    new_items: items of this request, with references replaced by their items.
    items_by_id: items of earlier responses by the ids that clients know.
    """

    previous: StoredResponse
    new_items: tuple[InputItem, ...]
    items_by_id: dict[str, InputItem]

    @classmethod
    def read(cls, registry: ResponseRegistry, body: ResponsesRequest) -> "InputHistory":
        """Look up the previous response and the referenced items. Raises RequestError."""
        previous = StoredResponse()
        if body.previous_response_id is not None:
            previous = registry.stored(body.previous_response_id, "previous_response_id")
        referenced = registry.referenced_items(body.input)
        new_items = tuple(
            referenced[item.id] if isinstance(item, ItemReference) else item for item in body.input
        )
        return cls(previous, new_items, {**previous.items_by_id, **referenced})

    def to_json(self) -> Any:
        """Return what the request's body does not have, for the journal; None where that is
        nothing.
        """
        if not (self.previous.items or self.items_by_id):
            return None
        # Items occur several times, and are written once.
        numbers: dict[int, int] = {}
        items: list[Any] = []

        def number(item: InputItem) -> int:
            if id(item) not in numbers:
                numbers[id(item)] = len(items)
                plain = item.model_dump(mode="json", exclude_unset=True)
                items.append({**plain, "type": getattr(item, "type", "message")})
            return numbers[id(item)]

        previous = [number(item) for item in self.previous.items]
        new_items = [number(item) for item in self.new_items]
        by_id = {item_id: number(item) for item_id, item in self.items_by_id.items()}
        return {"items": items, "previous": previous, "new_items": new_items, "by_id": by_id}

    @classmethod
    def from_json(cls, saved: Any, body: ResponsesRequest) -> "InputHistory":
        """Return the history of to_json(). Raises ValueError."""
        if saved is None:
            return cls(StoredResponse(), tuple(body.input), {})
        items = [read_item(plain) for plain in saved["items"]]
        inputs = tuple(items[number] for number in saved["previous"])
        by_id = {item_id: items[number] for item_id, number in saved["by_id"].items()}
        previous = StoredResponse(
            inputs=inputs, conversation_bytes=json_bytes(inputs), items_by_id=by_id
        )
        return cls(previous, tuple(items[number] for number in saved["new_items"]), by_id)

    @property
    def items(self) -> tuple[InputItem, ...]:
        """Items of the conversation, those of earlier turns first."""
        return (*self.previous.items, *self.new_items)


class RefusedResponse:
    """Stream of a response whose prompt does not fit: it is created, then it fails.

    Codex compacts a conversation only where a stream reports this error, as OpenAI's does.
    """

    NAMED_EVENTS: ClassVar[bool] = True

    def __init__(
        self, service: Service, body: ResponsesRequest, chat: ChatRequest, error: Exception
    ) -> None:
        self.ignored_fields: Sequence[str] = body.ignored_fields()
        params = chat.params(service.processor)
        response_id = f"{ID_PREFIX}{uuid.uuid4().hex}"
        state = ResponseState(response_id, int(time.time()), params, body.seed)
        created: ResponseEvent = {
            "type": "response.created",
            "sequence_number": 0,
            "response": state.to_object(service, body),
        }
        state.fail(status_and_body(error)[1])
        failed: ResponseEvent = {
            "type": "response.failed",
            "sequence_number": 1,
            "response": state.to_object(service, body),
        }
        self._events = [created, failed]

    async def stream(self) -> AsyncIterator[list[Event]]:
        """Yield both events."""
        yield [*self._events]

    def close(self) -> None:
        """Do nothing: the engine has no request."""


class ResponsesWriter(ResponseWriter):
    """Writer of a response. owner: see ResumableStreams.owner()."""

    NAMED_EVENTS = True
    KIND = ResponseRegistry.KIND

    def __init__(
        self,
        registry: ResponseRegistry,
        active: ActiveRequest,
        body: ResponsesRequest,
        chat: ChatRequest,
        history: InputHistory,
        tools: Toolbox,
    ) -> None:
        super().__init__(active, body.ignored_fields())
        self.body = body
        self.items = history.items
        self.owner = registry.service.streams.owner()
        self._registry = registry
        self._history = history
        self._tools = tools
        self._tool_events = ClientToolEvents(tools)
        self._parser = UpdateParser(active, chat.include_reasoning, chat.parallel_tool_calls)
        self._blocks = ContentBlocks()
        self._final_status: FinalStatus = "completed"
        self._num_events = 0
        parsed = active.parsed
        self._state = ResponseState(
            parsed.id, active.created, parsed.params, active.requests[0].seed
        )
        if body.background:
            self._state.status = "queued"
        registry.running[parsed.id] = self

    @classmethod
    async def start(
        cls, registry: ResponseRegistry, body: ResponsesRequest, is_small: bool = False
    ) -> "ResponsesWriter | RefusedResponse":
        """Submit a request and return its writer. Raises as Service.submit does."""
        await registry.load_references(body.previous_response_id, body.input)
        history = InputHistory.read(registry, body)
        tools = body.toolbox(history.items)
        chat = body.chat(history.items, tools)
        is_small = is_small and not history.previous.items
        try:
            with renamed_fields(SENT_NAMES):
                active = await registry.service.submit(chat, ID_PREFIX, is_small)
        except (ContextLengthError, CapacityError) as error:
            if not body.stream or body.background:
                raise
            return RefusedResponse(registry.service, body, chat, error)
        except RequestError as error:
            error.args = (tools.sent_path(str(error)),)
            raise
        return cls(registry, active, body, chat, history, tools)

    @classmethod
    async def restore(cls, registry: ResponseRegistry, saved: SavedAnswer) -> Self:
        """Return the writer of a response of an earlier process. Raises RequestError."""
        body = ResponsesRequest.model_validate(saved.request.json())
        history = InputHistory.from_json(saved.request.conversation, body)
        tools = body.toolbox(history.items)
        chat = body.chat(history.items, tools)
        active = await registry.service.resume(chat, ID_PREFIX, saved)
        writer = cls(registry, active, body, chat, history, tools)
        writer.owner = saved.request.owner
        return writer

    def saved_conversation(self) -> Any:
        """See ResponseWriter; None without earlier turns."""
        return self._history.to_json()

    def suspended_event(self, error: EngineDeadError, last_number: int) -> ResponsesEvent:
        """Return the last event of a response that the next process goes on with.

        It has the number of the event before it, so that a reader goes on after that one.
        """
        return self._error_event(status_and_body(error)[1], last_number)

    def close(self) -> None:
        """Abort the request if it is still running."""
        self._registry.running.pop(self.active.parsed.id, None)
        super().close()

    def cancel(self) -> None:
        """End the response early, with the output so far."""
        self._state.status = "cancelled"
        self.active.end(CancelledRequestError("the request was cancelled."))

    async def response(self) -> ResponseObject:
        """Return the response when it has ended."""
        try:
            await self.read_all()
        except CancelledRequestError as error:
            for _ in self.error_events(error):
                continue
        return self.response_object()

    def response_object(self) -> ResponseObject:
        """Return the response as it is now."""
        return self._state.to_object(self.active.service, self.body)

    def start_events(self) -> Iterator[ResponsesEvent]:
        """Yield the response before its first delta."""
        yield self._response_event("response.created")
        is_queued = self._state.status == "queued"
        yield self._response_event("response.queued" if is_queued else "response.in_progress")

    def delta_events(self, delta: OutputDelta) -> Iterator[ResponsesEvent]:
        """Yield the events of a delta, in OpenAI's order."""
        if self._state.status == "queued":
            self._state.status = "in_progress"
            yield self._response_event("response.in_progress")
        parser = self._parser
        with_logprobs = self.body.wants_logprobs
        parsed = parser.parse_with_logprobs(delta) if with_logprobs else parser.parse(delta)
        self._state.usage = parser.usage
        self._state.parse_errors = parsed.errors
        # One event at a time: a change of a block belongs to the tokens of its event.
        for event, tokens in zip(parsed.events, parsed.logprobs or repeat(()), strict=False):
            logprobs = self._logprobs(tokens) if tokens else ()
            for change in self._blocks.push(self._tool_events.convert([event])):
                yield from self._change_events(change, logprobs=logprobs)
        self._final_status = _FINAL_STATUSES[delta.update.finish_reason or "stop"]
        if delta.error:
            self._state.error = {"code": "server_error", "message": delta.error}

    def end_events(self) -> Iterator[ResponsesEvent]:
        """Yield the end of the open item and of the response, and store the response."""
        status = self._final_status
        for change in self._blocks.close():
            yield from self._change_events(change, status)
        self._state.status = status
        response = self.response_object()
        self._store(response)
        match status:
            case "completed":
                yield self._response_event("response.completed", response)
            case "incomplete" | "cancelled":
                yield self._response_event("response.incomplete", response)
            case "failed":
                yield self._response_event("response.failed", response)

    def error_events(self, error: Exception) -> Iterator[ResponsesEvent]:
        """Yield the events of an error. A cancelled response ends like others."""
        if isinstance(error, CancelledRequestError):
            self._final_status = "cancelled"
            yield from self.end_events()
            return
        _, body = status_and_body(error)
        yield self._error_event(body, self._next_number())
        self._state.fail(body)
        response = self.response_object()
        if self.event_log is not None:
            self._store(response)
        yield self._response_event("response.failed", response)

    def _error_event(self, body: Error, number: int) -> ErrorEvent:
        detail = body["error"]
        return {
            "type": "error",
            "sequence_number": number,
            "code": detail["code"],
            "message": detail["message"],
            "param": detail["param"],
        }

    def _logprobs(self, tokens: TokenLogprobs) -> list[ChosenTokenLogprob]:
        """Return the log-probabilities of tokens in OpenAI's form."""
        token_ids = [token_id for token_id, _ in tokens]
        entries = [entry for _, entry in tokens]
        tokenizer = self.active.service.processor.tokenizer
        return chat_logprobs(tokenizer, token_ids, entries, self.body.top_logprobs or 0)["content"]

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _response_event(
        self,
        kind: Literal[
            "response.created",
            "response.queued",
            "response.in_progress",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ],
        response: ResponseObject | None = None,
    ) -> ResponseEvent:
        return {
            "type": kind,
            "sequence_number": self._next_number(),
            "response": response or self.response_object(),
        }

    def _change_events(
        self,
        change: BlockChange,
        status: FinalStatus = "completed",
        logprobs: Sequence[ChosenTokenLogprob] = (),
    ) -> Iterator[ResponsesEvent]:
        """Yield the events of a block's change.

        status: of the response. logprobs: log-probabilities of the text that the block gets.
        """
        block = change.block
        output = self._state.output
        if change.action == "open":
            output.append(self._item(change.index, block, "in_progress"))
            added: ItemEvent = {
                "type": "response.output_item.added",
                "sequence_number": self._next_number(),
                "output_index": change.index,
                # A copy, since a background response keeps its events.
                "item": cast(OutputItem, dict(output[-1])),
            }
            yield added
        position: ItemPosition = {"output_index": change.index, "item_id": output[-1]["id"]}
        if block.kind == "call":
            yield from self._call_events(change, position)
        elif block.kind == "reasoning":
            yield from self._reasoning_events(change, {**position, "content_index": 0})
        else:
            yield from self._text_events(change, {**position, "content_index": 0}, logprobs)
        if change.action == "close":
            is_complete = block.is_complete if block.kind == "call" else status == "completed"
            output[-1] = self._item(
                change.index, block, "completed" if is_complete else "incomplete"
            )
            done: ItemEvent = {
                "type": "response.output_item.done",
                "sequence_number": self._next_number(),
                "output_index": change.index,
                "item": output[-1],
            }
            yield done

    def _call_events(
        self, change: BlockChange, position: ItemPosition
    ) -> Iterator[ArgumentsDelta | ArgumentsDone | InputDelta | InputDone]:
        """Yield the events of a call; clients read calls of built-in tools as complete items."""
        block = change.block
        if self._tools.builtin_tool(block.name) is not None:
            return
        is_custom = self._tools.is_custom(block.name)
        if change.action == "grow" and is_custom:
            yield {
                "type": "response.custom_tool_call_input.delta",
                "sequence_number": self._next_number(),
                **position,
                "delta": change.text,
            }
        elif change.action == "grow":
            yield {
                "type": "response.function_call_arguments.delta",
                "sequence_number": self._next_number(),
                **position,
                "delta": change.text,
            }
        elif change.action == "close" and block.is_complete and is_custom:
            yield {
                "type": "response.custom_tool_call_input.done",
                "sequence_number": self._next_number(),
                **position,
                "input": block.text,
            }
        elif change.action == "close" and block.is_complete:
            yield {
                "type": "response.function_call_arguments.done",
                "sequence_number": self._next_number(),
                **position,
                "name": self._tools.client_name(block.name)["name"],
                "arguments": block.text,
            }

    def _reasoning_events(
        self, change: BlockChange, position: PartPosition
    ) -> Iterator[ReasoningDelta | ReasoningDone | PartEvent]:
        part: ReasoningText = {"type": "reasoning_text", "text": change.block.text}
        if change.action == "open":
            yield self._part_event("response.content_part.added", position, part)
        elif change.action == "grow":
            yield {
                "type": "response.reasoning_text.delta",
                "sequence_number": self._next_number(),
                **position,
                "delta": change.text,
            }
        else:
            yield {
                "type": "response.reasoning_text.done",
                "sequence_number": self._next_number(),
                **position,
                "text": change.block.text,
            }
            yield self._part_event("response.content_part.done", position, part)

    def _text_events(
        self, change: BlockChange, position: PartPosition, logprobs: Sequence[ChosenTokenLogprob]
    ) -> Iterator[TextDelta | TextDone | PartEvent]:
        block = change.block
        if change.action == "open":
            yield self._part_event("response.content_part.added", position, _text_part(block))
        elif change.action == "grow":
            block.logprobs += logprobs
            yield {
                "type": "response.output_text.delta",
                "sequence_number": self._next_number(),
                **position,
                "delta": change.text,
                "logprobs": [*logprobs],
            }
        else:
            yield {
                "type": "response.output_text.done",
                "sequence_number": self._next_number(),
                **position,
                "text": block.text,
                "logprobs": [*block.logprobs],
            }
            yield self._part_event("response.content_part.done", position, _text_part(block))

    def _part_event(
        self,
        kind: Literal["response.content_part.added", "response.content_part.done"],
        position: PartPosition,
        part: OutputText | ReasoningText,
    ) -> PartEvent:
        return {
            "type": kind,
            "sequence_number": self._next_number(),
            **position,
            "part": part,
        }

    def _item(self, index: int, block: ContentBlock, status: Status) -> OutputItem:
        """Return a block as an item of the output."""
        is_open = status == "in_progress"
        item_id = f"{self._item_prefix(block)}_{self._state.id[len(ID_PREFIX) :]}_{index}"
        match block.kind:
            case "reasoning":
                return {
                    "type": "reasoning",
                    "id": item_id,
                    "status": status,
                    "summary": [],
                    "content": [] if is_open else [{"type": "reasoning_text", "text": block.text}],
                }
            case "text":
                return {
                    "type": "message",
                    "id": item_id,
                    "status": status,
                    "role": "assistant",
                    "content": [] if is_open else [_text_part(block)],
                }
        call_id = self._parser.call_id(0, block.number, block.id)
        tool = self._tools.builtin_tool(block.name)
        if tool is not None:
            arguments = call_arguments(block.text) if block.is_complete else {}
            head = {"id": item_id, "status": status, "call_id": call_id}
            # The grammar of the tool constrains its arguments to the item's fields.
            return cast(OutputItem, {**head, **tool.item(arguments)})
        name = self._tools.client_name(block.name)
        if self._tools.is_custom(block.name):
            return {
                "type": "custom_tool_call",
                "id": item_id,
                "status": status,
                "call_id": call_id,
                **name,
                "input": block.text,
            }
        return {
            "type": "function_call",
            "id": item_id,
            "status": status,
            "call_id": call_id,
            **name,
            "arguments": block.text,
        }

    def _item_prefix(self, block: ContentBlock) -> str:
        """Return the beginning of an item's id, as OpenAI has it for each type."""
        if block.kind == "call":
            tool = self._tools.builtin_tool(block.name)
            if tool is not None:
                return tool.prefix
            if self._tools.is_custom(block.name):
                return "ctc"
        return _ITEM_PREFIXES[block.kind]

    def _input_item(self, block: ContentBlock) -> InputItem:
        """Return a block as an item of a later input, without the limits of what clients send."""
        match block.kind:
            case "reasoning":
                return InputReasoning(type="reasoning", content=[ReasoningPart(text=block.text)])
            case "text":
                return InputMessage(role="assistant", content=block.text)
        call_id = self._parser.call_id(0, block.number, block.id)
        tool = self._tools.builtin_tool(block.name)
        if tool is not None:
            # An item of the tool's type, so that a later listing shows it as the response did.
            item = call_item({"call_id": call_id, **tool.item(call_arguments(block.text))})
            if item is not None:
                return item
        fields: dict[str, Any] = {
            "namespace": None,
            "call_id": call_id,
            **self._tools.client_name(block.name),
        }
        if self._tools.is_custom(block.name):
            return InputCustomCall.model_construct(
                type="custom_tool_call", **fields, input=block.text
            )
        return InputCall.model_construct(type="function_call", **fields, arguments=block.text)

    def _store(self, response: ResponseObject) -> None:
        """Store the response and its conversation, if the client wants it.

        Earlier turns are neither measured again nor serialized, so that a long conversation does
        not delay other requests.
        """
        if not self.body.store:
            return
        # An incomplete call has no result, and no template can render its arguments.
        outputs = tuple(
            self._input_item(block) if block.kind != "call" or block.is_complete else None
            for block in self._blocks.blocks
        )
        item_ids = [item["id"] for item in response["output"]]
        new_items = {
            item_id: item
            for item_id, item in zip(item_ids, outputs, strict=True)
            if item is not None
        }
        # Items of earlier turns can be referenced after the responses of those turns were evicted.
        items_by_id = {**self._history.items_by_id, **new_items}
        event_log = self.event_log
        response_bytes = json_bytes(response) + (event_log.size if event_log else 0)
        new_bytes = json_bytes((*self._history.new_items, *outputs))
        stored = StoredResponse(
            response,
            self.items,
            outputs,
            response_bytes + json_bytes(list(items_by_id)),
            self._history.previous.conversation_bytes + new_bytes,
            items_by_id,
            event_log,
            self.owner,
        )
        self._registry.store.put(response["id"], stored)


def _text_part(block: ContentBlock) -> OutputText:
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": [*block.logprobs],
    }


def _usage_object(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
