"""The FastAPI application: routes, streams of server-sent events, and what the schema says."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from lockstep import __version__
from lockstep.errors import RequestError
from lockstep.serve.anthropic import schema as messages_schema
from lockstep.serve.anthropic.messages import MessagesAnswer, count_tokens
from lockstep.serve.anthropic.protocol import CountRequest, MessagesRequest
from lockstep.serve.http import errors
from lockstep.serve.http.access import Guard, Rules
from lockstep.serve.http.json_body import BodyReader, BodyRoute
from lockstep.serve.http.request_id import BODY, Named
from lockstep.serve.openai import schema
from lockstep.serve.openai.chat import ChatAnswer
from lockstep.serve.openai.completions import CompletionAnswer
from lockstep.serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lockstep.serve.openai.responses import schema as responses_schema
from lockstep.serve.openai.responses.endpoint import Responses, ResponsesAnswer
from lockstep.serve.openai.responses.item_list import MOST_ITEMS, USUAL_ITEMS, Order, page_of
from lockstep.serve.openai.responses.protocol import ResponsesRequest
from lockstep.serve.playground import add_playground
from lockstep.serve.requests.response_writer import Answer
from lockstep.serve.requests.service import Service
from lockstep.serve.telemetry.metrics import Metrics

NAMED: tuple[type[schema.Said], ...] = (
    schema.Error,
    messages_schema.MessagesError,
    schema.ChatChunk,
    schema.CompletionChunk,
    *responses_schema.EVENTS,
    *messages_schema.EVENTS,
)
"""Errors and events: routes refer to their schemas, and FastAPI looks at answers only."""
IGNORED = "X-Lockstep-Ignored-Fields"
"""The header of an answer that names the request's fields without effect."""
BRIEF_BYTES = 1024
"""Of a body that is read in the event loop: it takes 0.1 to 0.4 ms, and a thread would have to wait
for a core, and for the interpreter as long as pieces of answers come."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
T = TypeVar("T")


@dataclass(frozen=True)
class Pages:
    """What web pages of other origins may do, in CORSMiddleware's words; nothing without one."""

    allow_origins: tuple[str, ...] = ()
    allow_methods: tuple[str, ...] = ("GET", "POST")
    allow_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


def create_app(
    service: Service,
    rules: Rules | None = None,
    docs: bool = True,
    pages: Pages | None = None,
    metrics: Metrics | None = None,
    playground: bool = True,
    tokenizer_info: bool = False,
    cache_reset: bool = False,
) -> FastAPI:
    """The application that serves one model, behind a door with these rules.

    pages: what web pages of other origins may do. metrics: what /metrics shows; by default, without
    floors. playground: whether there is a page at /. tokenizer_info: whether /tokenizer_info tells
    the tokenizer's settings and the chat template. cache_reset: whether POST /reset_prefix_cache
    drops all cached prefixes.
    """
    shown = {} if docs else {"openapi_url": None, "docs_url": None, "redoc_url": None}
    app = FastAPI(title="Lockstep", version=__version__, **shown)  # type: ignore[arg-type]
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    app.state.body_reader = BodyReader()
    app.router.route_class = BodyRoute
    errors.add_handlers(app)
    _add_answers(app, service)  # first: routes are tried in their order
    _add_state(app, service, metrics or Metrics(service.model_name))
    _add_tokens(app, service)
    if tokenizer_info:
        _add_tokenizer_info(app, service)
    if cache_reset:
        _add_cache_reset(app, service)
    _add_rendered(app, service)
    _add_invocations(app, service)
    _add_responses(app, service)
    _add_messages(app, service)
    if playground:
        add_playground(app)
    rules = rules or Rules()
    app.build_middleware_stack = lambda: Named(  # type: ignore[method-assign]
        FastAPI.build_middleware_stack(app), rules.root_path
    )
    app.add_middleware(Guard, rules=rules)
    if pages and pages.allow_origins:
        app.add_middleware(CORSMiddleware, **asdict(pages))
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        responses=schema.openapi_responses(schema.ChatCompletion, schema.ChatChunk, schema.Error),
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(ChatAnswer(service, body), body.stream, request)

    @app.post(
        "/v1/completions",
        responses=schema.openapi_responses(schema.Completion, schema.CompletionChunk, schema.Error),
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(CompletionAnswer(service, body), body.stream, request)


def _add_rendered(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions/render", responses=schema.openapi_responses(schema.RenderedPrompt)
    )
    async def render_chat(body: ChatRequest) -> JSONResponse:
        answer = ChatAnswer(service, body)
        return JSONResponse(await answer.turn.rendered(), headers=_ignored(body))

    @app.post("/v1/completions/render", responses=schema.openapi_responses(schema.RenderedPrompts))
    async def render_completions(body: CompletionRequest) -> JSONResponse:
        answer = CompletionAnswer(service, body)
        return JSONResponse(await answer.rendered(), headers=_ignored(body))


def _add_invocations(app: FastAPI, service: Service) -> None:
    """Add the path to which SageMaker posts every request."""
    bodies = [schema.schema_path(kind) for kind in (ChatRequest, CompletionRequest)]
    body_schema = {"content": {"application/json": {"schema": {"anyOf": bodies}}}}

    @app.post(
        "/invocations",
        responses=schema.openapi_responses(
            schema.Invocation, schema.ChatChunk, schema.CompletionChunk, schema.Error
        ),
        openapi_extra={"requestBody": body_schema},
    )
    async def invoke(body: dict[str, Any], request: Request) -> Response:
        answer = _invoked(service, body)
        return await _answer(answer, answer.body.stream, request)


def _invoked(service: Service, body: Mapping[str, Any]) -> ChatAnswer | CompletionAnswer:
    """Return the answer that a body asks for by having messages or a prompt.

    Raises RequestError, or RequestValidationError as a route with one kind of body does.
    """
    has_messages, has_prompt = (body.get(name) is not None for name in ("messages", "prompt"))
    if has_messages == has_prompt:
        raise RequestError(
            f"messages and prompt are {'both' if has_prompt else 'neither'} there; allowed: one of "
            "them. Send messages as to /v1/chat/completions, or a prompt as to /v1/completions.",
            "messages",
        )
    try:
        if has_messages:
            return ChatAnswer(service, ChatRequest.model_validate(body))
        return CompletionAnswer(service, CompletionRequest.model_validate(body))
    except ValidationError as error:
        faults = [
            {**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)
        ]
        raise RequestValidationError(faults, body=body) from None


def _add_responses(app: FastAPI, service: Service) -> None:
    responses = Responses(service)
    one = schema.openapi_responses(responses_schema.ResponseObject)

    @app.post(
        "/v1/responses",
        responses=schema.openapi_responses(
            responses_schema.ResponseObject, *responses_schema.EVENTS, named=True
        ),
    )
    async def create(body: ResponsesRequest, request: Request) -> Response:
        if body.background:
            return await _background(responses, body)
        return await _answer(ResponsesAnswer(responses, body), body.stream, request)

    @app.get("/v1/responses/{response_id}", responses=one)
    async def retrieve(
        response_id: str,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    ) -> Response:
        if stream:
            begin = 0 if starting_after is None else starting_after + 1
            return EventStream(responses.recording(response_id).read(begin), named=True)
        if starting_after is not None:
            raise RequestError(
                "starting_after needs stream=true; set it, or leave this out.", "starting_after"
            )
        return JSONResponse(responses.get(response_id))

    @app.get(
        "/v1/responses/{response_id}/input_items",
        responses=schema.openapi_responses(responses_schema.ItemList),
    )
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_ITEMS)] = USUAL_ITEMS,
        order: Order = "desc",
    ) -> JSONResponse:
        items = responses.input_items(response_id)
        return JSONResponse(page_of(response_id, items, after, limit, order))

    @app.post("/v1/responses/{response_id}/cancel", responses=one)
    async def cancel(response_id: str) -> JSONResponse:
        return JSONResponse(responses.cancel(response_id))

    @app.delete(
        "/v1/responses/{response_id}",
        responses=schema.openapi_responses(responses_schema.DeletedResponse),
    )
    async def delete(response_id: str) -> JSONResponse:
        return JSONResponse(responses.delete(response_id))


def _add_messages(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/messages",
        responses=schema.openapi_responses(
            messages_schema.MessageObject,
            *messages_schema.EVENTS,
            named=True,
            error=messages_schema.MessagesError,
        ),
    )
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await _answer(MessagesAnswer(service, body), body.stream, request)

    @app.post(
        "/v1/messages/count_tokens",
        responses=schema.openapi_responses(
            messages_schema.TokenCount, error=messages_schema.MessagesError
        ),
    )
    async def count(body: CountRequest) -> JSONResponse:
        return JSONResponse(await count_tokens(service, body), headers=_ignored(body))


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/v1/models", responses=schema.openapi_responses(schema.ModelList))
    async def models() -> JSONResponse:
        data = [_model(service, name) for name in service.model_names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", responses=schema.openapi_responses(schema.Model))
    async def model(name: str) -> JSONResponse:
        service.check_name(name)
        return JSONResponse(_model(service, name))

    @app.get("/version", responses=schema.openapi_responses(schema.Version))
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/load", responses=schema.openapi_responses(schema.Load))
    async def load() -> JSONResponse:
        return JSONResponse({"server_load": service.num_running})

    @app.get("/ping", responses=schema.plain("ok", 503))
    @app.post("/ping", responses=schema.plain("ok", 503))
    @app.get("/health", responses=schema.plain("ok", 503))
    async def health() -> Response:
        fault = service.fault
        return PlainTextResponse(fault or "ok", 503 if fault else 200)

    @app.get("/metrics", responses=schema.plain("Prometheus' text form"))
    async def show_metrics() -> Response:
        return Response(metrics.render(service.client.stats()), media_type=CONTENT_TYPE_LATEST)


def _add_tokens(app: FastAPI, service: Service) -> None:
    processor = service.processor

    @app.post("/tokenize", responses=schema.openapi_responses(schema.Tokenized))
    async def tokenize(body: TokenizeRequest) -> JSONResponse:
        service.check_name(body.model)
        if body.prompt is not None and body.messages is not None:
            raise RequestError("prompt and messages are both there; send one of them.", "prompt")
        if body.messages is not None:
            messages = [message.sent for message in body.messages]
            tools = [tool.sent for tool in body.tools or ()] or None
            rendered = await asyncio.to_thread(
                processor.conversation, messages, tools, **body.template_kwargs(processor)
            )
            ids = rendered.ids
        elif body.prompt is not None:
            ids = await asyncio.to_thread(processor.encode, body.prompt, body.add_special_tokens)
        else:
            raise RequestError("prompt and messages are both missing; send one of them.", "prompt")
        found = {"tokens": ids, "count": len(ids), "max_model_len": processor.max_model_len}
        if body.return_token_strs:
            found["token_strs"] = await asyncio.to_thread(processor.spell, ids)
        return JSONResponse(found)

    @app.post("/detokenize", responses=schema.openapi_responses(schema.Detokenized))
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        service.check_name(body.model)
        text = await asyncio.to_thread(processor.detokenize, body.tokens)
        return JSONResponse({"prompt": text})


def _add_tokenizer_info(app: FastAPI, service: Service) -> None:
    @app.get("/tokenizer_info", responses=schema.openapi_responses(schema.TokenizerInfo))
    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(service.processor.tokenizer_info())


def _add_cache_reset(app: FastAPI, service: Service) -> None:
    @app.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache() -> Response:
        service.client.reset_prefix_cache()
        return Response()


def _model(service: Service, name: str) -> dict[str, Any]:
    processor = service.processor
    most = processor.max_new_tokens
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "lockstep",
        "root": service.model_name,
        "max_model_len": processor.max_model_len,
        "default_sampling_params": processor.defaults | ({"max_tokens": most} if most else {}),
    }


async def _answer(answer: Answer, stream: bool, request: Request) -> Response:
    await answer.start(len(await request.body()) <= BRIEF_BYTES)
    if stream:
        return EventStream.of(answer)
    try:
        whole = await _unless_gone(answer.whole(), request.receive)
    finally:
        answer.close()
    if whole is None:
        return Response(status_code=499)
    return JSONResponse(whole, headers=_ignored(answer.body))


async def _background(responses: Responses, body: ResponsesRequest) -> Response:
    """Begin a response that is made whether or not its client waits for it."""
    answer = ResponsesAnswer(responses, body)
    await answer.start()
    recording = responses.run_in_background(answer)
    if body.stream:
        return EventStream(recording.read(0), named=True, headers=_ignored(body))
    return JSONResponse(answer.response(), headers=_ignored(body))


def _ignored(body: Any) -> dict[str, str]:
    """The header that names fields without effect; names that a header cannot hold are left out."""
    named = ", ".join(name for name in body.ignored_fields() if _NAME.fullmatch(name))
    return {IGNORED: named[: errors.SHOWN]} if named else {}


class EventStream(StreamingResponse):
    """Events as server-sent events. close: called at the end, however it comes.

    named: whether events bear their type as their name; others end with [DONE].
    """

    def __init__(
        self,
        events: AsyncIterator[list[dict[str, Any]]],
        named: bool,
        close: Callable[[], None] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__((), media_type="text/event-stream", headers={**fixed, **(headers or {})})
        self._events = events
        self._named = named
        self._close = close

    @classmethod
    def of(cls, answer: Answer) -> "EventStream":
        """Return the stream of an answer, which is closed at the stream's end."""
        return cls(answer.stream(), answer.NAMED, answer.close, _ignored(answer.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await _unless_gone(self._send(send, scope.get(BODY, send)), receive)
        finally:
            self._close()

    async def _send(self, send: Send, send_body: Send) -> None:
        """The head, then the events, together what comes at once."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        message = {"type": "http.response.body", "more_body": True}
        async for events in self._events:
            if events:
                body = b"".join([_event(event, self._named) for event in events])
                await send_body({**message, "body": body})
        done = b"" if self._named else b"data: [DONE]\n\n"
        await send_body({**message, "body": done, "more_body": False})


def _event(event: dict[str, Any], named: bool) -> bytes:
    data = b"data: %b\n\n" % to_json(event, inf_nan_mode="null")
    return b"event: %b\n%b" % (event["type"].encode(), data) if named else data


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    """The work's result; None if the client hangs up first, which cancels the work."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _schema(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema: bad bodies get 400 with an error object here, never FastAPI's 422."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        kept = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            kept.pop(name, None)
        for name, part in schema.schemas(NAMED).items():
            kept.setdefault(name, part)
        app.openapi_schema = document
    return app.openapi_schema
