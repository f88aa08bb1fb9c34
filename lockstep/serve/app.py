"""FastAPI application of the server: its routes and middleware."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError

from lockstep import __version__
from lockstep.errors import RequestError
from lockstep.serve.anthropic import schema as anthropic_schema
from lockstep.serve.anthropic.messages import MessagesWriter, count_tokens
from lockstep.serve.anthropic.protocol import CountRequest, MessagesRequest
from lockstep.serve.http.access import AccessMiddleware, AccessRules
from lockstep.serve.http.errors import Error, MessagesError, add_error_handlers
from lockstep.serve.http.event_stream import (
    EventStream,
    ignored_fields_header,
    unless_disconnected,
)
from lockstep.serve.http.head_requests import HeadMiddleware
from lockstep.serve.http.json_body import BodyReader, BodyRoute
from lockstep.serve.http.openapi import (
    RouteResponses,
    json_responses,
    one_of,
    openapi_document,
    text_responses,
)
from lockstep.serve.http.request_id import RequestIdMiddleware
from lockstep.serve.openai import schema as openai_schema
from lockstep.serve.openai.chat import ID_PREFIX as CHAT_ID_PREFIX
from lockstep.serve.openai.chat import ChatWriter
from lockstep.serve.openai.completions import ID_PREFIX as COMPLETION_ID_PREFIX
from lockstep.serve.openai.completions import CompletionWriter
from lockstep.serve.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lockstep.serve.openai.render import rendered_prompts
from lockstep.serve.openai.responses import schema as responses_schema
from lockstep.serve.openai.responses.item_list import DEFAULT_ITEMS, MAX_ITEMS, Order, item_page
from lockstep.serve.openai.responses.protocol import ResponsesRequest
from lockstep.serve.openai.responses.registry import ResponseRegistry
from lockstep.serve.openai.responses.writer import RefusedResponse, ResponsesWriter
from lockstep.serve.openai.schema import DetokenizeResponse, ModelObject, TokenizeResponse
from lockstep.serve.playground import add_playground
from lockstep.serve.requests.response_writer import ResponseWriter
from lockstep.serve.requests.resumable_streams import check_certain, event_begin, parse_event_id
from lockstep.serve.requests.service import Service
from lockstep.serve.telemetry.metrics import Metrics

RESPONSE_TYPES: tuple[type, ...] = (
    Error,
    MessagesError,
    *openai_schema.RESPONSE_TYPES,
    *responses_schema.RESPONSE_TYPES,
    *anthropic_schema.RESPONSE_TYPES,
)
"""Types of all responses and events, which /openapi.json describes."""
StartingAfter = Annotated[int | None, Query(ge=0, lt=2**31)]
"""Number of the last event that a client has."""
LastEventId = Annotated[str | None, Header()]
"""SSE id of the last event that a client has."""
SMALL_BODY_BYTES = 1024
"""Maximum size of a body that is parsed in the event loop. That takes 0.1 to 0.4 ms. A thread would
wait for a core, and for the interpreter as long as deltas of other responses arrive."""
CHAT_RESPONSES = json_responses(
    openai_schema.ChatCompletion, events=(openai_schema.ChatChunk, Error)
)
COMPLETION_RESPONSES = json_responses(
    openai_schema.Completion, events=(openai_schema.CompletionChunk, Error)
)


@dataclass(frozen=True)
class CrossOrigin:
    """Permissions of web pages of other origins, as CORSMiddleware names them.

    Without allowed origins there are none.
    """

    allow_origins: tuple[str, ...] = ()
    allow_methods: tuple[str, ...] = ("GET", "POST")
    allow_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


def create_app(
    service: Service,
    rules: AccessRules | None = None,
    docs: bool = True,
    cross_origin: CrossOrigin | None = None,
    metrics: Metrics | None = None,
    playground: bool = True,
    tokenizer_info: bool = False,
    cache_reset: bool = False,
) -> FastAPI:
    """Return the application that serves one model.

    rules: access rules of every route. cross_origin: permissions of other origins' web pages.
    metrics: content of /metrics; by default without roofline times. playground: add the page at /.
    tokenizer_info: add /tokenizer_info, which publishes the tokenizer's settings and the chat
    template. cache_reset: add POST /reset_prefix_cache, which drops all cached prefixes.
    """
    urls = {} if docs else {"openapi_url": None, "docs_url": None, "redoc_url": None}
    app = FastAPI(title="Lockstep", version=__version__, **urls)  # type: ignore[arg-type]
    app.openapi = lambda: openapi_document(app, RESPONSE_TYPES)  # type: ignore[method-assign]
    app.state.body_reader = BodyReader()
    app.router.route_class = BodyRoute
    app.router.redirect_slashes = False  # its locations are absolute; on_http_error has others
    add_error_handlers(app)
    # The busiest routes come first: the router tries routes in this order.
    _add_completions(app, service)
    _add_state(app, service, metrics or Metrics(service.model_name))
    _add_tokenizer(app, service)
    if tokenizer_info:
        _add_tokenizer_info(app, service)
    if cache_reset:
        _add_cache_reset(app, service)
    _add_render(app, service)
    _add_invocations(app, service)
    _add_responses(app, service)
    _add_messages(app, service)
    if playground:
        add_playground(app)
    rules = rules or AccessRules()
    # Outside of Starlette's own layer for errors, so that its responses have an id, too.
    app.build_middleware_stack = lambda: RequestIdMiddleware(  # type: ignore[method-assign]
        FastAPI.build_middleware_stack(app), rules.root_path
    )
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AccessMiddleware, rules=rules)
    if cross_origin and cross_origin.allow_origins:
        app.add_middleware(CORSMiddleware, **asdict(cross_origin))
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=CHAT_RESPONSES)
    async def chat(
        body: ChatRequest, request: Request, last_event_id: LastEventId = None
    ) -> Response:
        if body.stream and last_event_id is not None:
            return await _rest_of_stream(service, ChatWriter.KIND, last_event_id)
        writer = await ChatWriter.start(service, body, await _is_small(request))
        return await _respond(writer, body.stream, request)

    @app.post("/v1/completions", responses=COMPLETION_RESPONSES)
    async def completions(
        body: CompletionRequest, request: Request, last_event_id: LastEventId = None
    ) -> Response:
        if body.stream and last_event_id is not None:
            return await _rest_of_stream(service, CompletionWriter.KIND, last_event_id)
        writer = await CompletionWriter.start(service, body, await _is_small(request))
        return await _respond(writer, body.stream, request)

    service.streams.restorers |= {
        ChatWriter.KIND: partial(ChatWriter.restore, service),
        CompletionWriter.KIND: partial(CompletionWriter.restore, service),
    }
    deleted = json_responses(openai_schema.DeletedAnswer)
    _add_answers(app, service, "/v1/chat/completions", ChatWriter.KIND, CHAT_RESPONSES, deleted)
    _add_answers(
        app, service, "/v1/completions", CompletionWriter.KIND, COMPLETION_RESPONSES, deleted
    )


def _add_answers(
    app: FastAPI,
    service: Service,
    path: str,
    kind: str,
    responses: RouteResponses,
    deleted: RouteResponses,
) -> None:
    """Add the routes that read an answer again, or the rest of it, and that end it."""

    @app.get(f"{path}/{{answer_id}}", responses=responses, operation_id=f"read_{kind}")
    async def read(
        answer_id: str,
        stream: bool = False,
        starting_after: StartingAfter = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        if not stream and starting_after is None and last_event_id is None:
            return JSONResponse(await service.streams.whole(kind, answer_id))
        return await service.streams.resume(kind, answer_id, starting_after, last_event_id)

    @app.delete(f"{path}/{{answer_id}}", responses=deleted, operation_id=f"delete_{kind}")
    async def delete(answer_id: str) -> JSONResponse:
        await service.streams.delete(kind, answer_id)
        return JSONResponse({"id": answer_id, "deleted": True})


async def _rest_of_stream(service: Service, kind: str, last_event_id: str) -> Response:
    """Return the events after the one that a client had last when its connection broke."""
    answer_id, _ = parse_event_id(last_event_id)
    return await service.streams.resume(kind, answer_id, None, last_event_id)


def _add_render(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions/render", responses=json_responses(openai_schema.RenderedPrompt))
    async def render_chat(body: ChatRequest) -> JSONResponse:
        (prompt,) = await rendered_prompts(service, body, CHAT_ID_PREFIX)
        return JSONResponse(prompt, headers=ignored_fields_header(body.ignored_fields()))

    @app.post(
        "/v1/completions/render",
        responses=json_responses(openai_schema.RenderedPrompt, is_list=True),
    )
    async def render_completions(body: CompletionRequest) -> JSONResponse:
        prompts = await rendered_prompts(service, body, COMPLETION_ID_PREFIX)
        return JSONResponse(prompts, headers=ignored_fields_header(body.ignored_fields()))


def _add_invocations(app: FastAPI, service: Service) -> None:
    """Add the path to which SageMaker posts every request."""
    body_schema = {"application/json": {"schema": one_of((ChatRequest, CompletionRequest))}}

    @app.post(
        "/invocations",
        responses=json_responses(
            openai_schema.ChatCompletion,
            openai_schema.Completion,
            events=(openai_schema.ChatChunk, openai_schema.CompletionChunk, Error),
        ),
        openapi_extra={"requestBody": {"content": body_schema}},
    )
    async def invoke(body: dict[str, Any], request: Request) -> Response:
        is_small = await _is_small(request)
        parsed_body = _invocation_body(body)
        writer: ResponseWriter
        if isinstance(parsed_body, ChatRequest):
            writer = await ChatWriter.start(service, parsed_body, is_small)
        else:
            writer = await CompletionWriter.start(service, parsed_body, is_small)
        return await _respond(writer, parsed_body.stream, request)


def _invocation_body(body: Mapping[str, Any]) -> ChatRequest | CompletionRequest:
    """Return a body that has messages as a ChatRequest, one with a prompt as a CompletionRequest.

    Raises RequestError, or RequestValidationError as a route with one type of body does.
    """
    has_messages, has_prompt = (body.get(name) is not None for name in ("messages", "prompt"))
    if has_messages == has_prompt:
        raise RequestError(
            f"the body has {'both' if has_prompt else 'neither'} of messages and prompt; allowed: "
            "one of them. Send messages as to /v1/chat/completions, or a prompt as to "
            "/v1/completions.",
            "messages",
        )
    try:
        if has_messages:
            return ChatRequest.model_validate(body)
        return CompletionRequest.model_validate(body)
    except ValidationError as error:
        faults = [
            {**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)
        ]
        raise RequestValidationError(faults, body=body) from None


def _add_responses(app: FastAPI, service: Service) -> None:
    registry = ResponseRegistry(service)
    one_response = json_responses(responses_schema.ResponseObject)

    @app.post(
        "/v1/responses",
        responses=json_responses(
            responses_schema.ResponseObject, events=responses_schema.EVENTS, named_events=True
        ),
    )
    async def create(body: ResponsesRequest, request: Request) -> Response:
        is_small = not body.background and await _is_small(request)
        writer = await ResponsesWriter.start(registry, body, is_small)
        if isinstance(writer, RefusedResponse):
            return EventStream.from_source(writer)
        raw_body = await request.body()
        if body.background:
            return _respond_in_background(service, writer, raw_body)
        if body.store and not body.stream:
            service.streams.save(writer, raw_body)
        return await _respond(writer, body.stream, request)

    service.streams.restorers[ResponsesWriter.KIND] = partial(ResponsesWriter.restore, registry)

    @app.get("/v1/responses/{response_id}", responses=one_response)
    async def retrieve(
        response_id: str,
        stream: bool = False,
        starting_after: StartingAfter = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        if stream:
            begin = event_begin(response_id, starting_after, last_event_id)
            return await _response_events(registry, response_id, begin)
        if starting_after is not None:
            raise RequestError(
                "starting_after needs stream=true; set it, or leave this out.", "starting_after"
            )
        await registry.load(response_id)
        return JSONResponse(registry.response(response_id))

    _add_stored_responses(app, registry)


def _add_stored_responses(app: FastAPI, registry: ResponseRegistry) -> None:
    """Add the routes that show the input of a response, cancel it and delete it."""

    @app.get(
        "/v1/responses/{response_id}/input_items",
        responses=json_responses(responses_schema.ItemList),
    )
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ITEMS)] = DEFAULT_ITEMS,
        order: Order = "desc",
    ) -> JSONResponse:
        await registry.load(response_id)
        items = registry.input_items(response_id)
        return JSONResponse(item_page(response_id, items, after, limit, order))

    @app.post(
        "/v1/responses/{response_id}/cancel",
        responses=json_responses(responses_schema.ResponseObject),
    )
    async def cancel(response_id: str) -> JSONResponse:
        await registry.load(response_id)
        return JSONResponse(registry.cancel(response_id))

    @app.delete(
        "/v1/responses/{response_id}",
        responses=json_responses(responses_schema.DeletedResponse),
    )
    async def delete(response_id: str) -> JSONResponse:
        await registry.load(response_id)
        return JSONResponse(registry.delete(response_id))


async def _response_events(registry: ResponseRegistry, response_id: str, begin: int) -> EventStream:
    """Return the events of a recorded response from this number on. Raises RequestError."""
    live = await registry.service.streams.find(ResponsesWriter.KIND, response_id)
    event_log = registry.event_log(response_id) if live is None else live.event_log
    await check_certain(event_log, begin)
    if live is not None:
        return live.response(begin)
    return EventStream(event_log.read(begin), named_events=True)


def _add_messages(app: FastAPI, service: Service) -> None:
    answer = json_responses(
        anthropic_schema.MessageObject,
        events=anthropic_schema.EVENTS,
        named_events=True,
        error=MessagesError,
    )

    @app.post("/v1/messages", responses=answer)
    async def messages(
        body: MessagesRequest, request: Request, last_event_id: LastEventId = None
    ) -> Response:
        if body.stream and last_event_id is not None:
            return await _rest_of_stream(service, MessagesWriter.KIND, last_event_id)
        writer = await MessagesWriter.start(service, body, await _is_small(request))
        return await _respond(writer, body.stream, request)

    @app.post(
        "/v1/messages/count_tokens",
        responses=json_responses(anthropic_schema.TokenCount, error=MessagesError),
    )
    async def count(body: CountRequest) -> JSONResponse:
        token_count = await count_tokens(service, body)
        return JSONResponse(token_count, headers=ignored_fields_header(body.ignored_fields()))

    service.streams.restorers[MessagesWriter.KIND] = partial(MessagesWriter.restore, service)
    deleted = json_responses(openai_schema.DeletedAnswer, error=MessagesError)
    _add_answers(app, service, "/v1/messages", MessagesWriter.KIND, answer, deleted)


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/v1/models", responses=json_responses(openai_schema.ModelList))
    async def models() -> JSONResponse:
        data = [_model_object(service, name) for name in service.model_names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", responses=json_responses(ModelObject))
    async def model(name: str) -> JSONResponse:
        service.check_model(name)
        return JSONResponse(_model_object(service, name))

    @app.get("/version", responses=json_responses(openai_schema.Version))
    async def version() -> JSONResponse:
        return JSONResponse({"version": __version__})

    @app.get("/load", responses=json_responses(openai_schema.Load))
    async def load() -> JSONResponse:
        return JSONResponse({"server_load": service.num_active})

    @app.get("/ping", responses=text_responses("ok", 503))
    @app.post("/ping", responses=text_responses("ok", 503))
    @app.get("/health", responses=text_responses("ok", 503))
    async def health() -> Response:
        fault = service.fault
        return PlainTextResponse(fault or "ok", 503 if fault else 200)

    @app.get("/metrics", responses=text_responses("Prometheus' text format"))
    async def show_metrics() -> Response:
        return Response(metrics.render(service.client.stats()), media_type=CONTENT_TYPE_LATEST)


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    processor = service.processor

    @app.post("/tokenize", responses=json_responses(TokenizeResponse))
    async def tokenize(body: TokenizeRequest) -> JSONResponse:
        service.check_model(body.model)
        if body.prompt is not None and body.messages is not None:
            raise RequestError("the body has prompt and messages; send one of them.", "prompt")
        if body.messages is not None:
            messages = [message.sent for message in body.messages]
            tools = [tool.sent for tool in body.tools or ()] or None
            conversation = await asyncio.to_thread(
                processor.conversation, messages, tools, **body.template_kwargs(processor)
            )
            ids = conversation.ids
        elif body.prompt is not None:
            ids = await asyncio.to_thread(processor.encode, body.prompt, body.add_special_tokens)
        else:
            raise RequestError(
                "the body has no prompt and no messages; send one of them.", "prompt"
            )
        response: TokenizeResponse = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": processor.max_model_len,
        }
        if body.return_token_strs:
            response["token_strs"] = await asyncio.to_thread(processor.spell, ids)
        return JSONResponse(response)

    @app.post("/detokenize", responses=json_responses(DetokenizeResponse))
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        service.check_model(body.model)
        text = await asyncio.to_thread(processor.detokenize, body.tokens)
        return JSONResponse({"prompt": text})


def _add_tokenizer_info(app: FastAPI, service: Service) -> None:
    @app.get("/tokenizer_info", responses=json_responses(openai_schema.TokenizerInfo))
    async def tokenizer_info() -> JSONResponse:
        return JSONResponse(service.processor.tokenizer_info())


def _add_cache_reset(app: FastAPI, service: Service) -> None:
    @app.post("/reset_prefix_cache", response_class=Response)
    async def reset_prefix_cache() -> Response:
        service.client.reset_prefix_cache()
        return Response()


def _model_object(service: Service, name: str) -> ModelObject:
    processor = service.processor
    max_tokens = processor.max_new_tokens
    return {
        "id": name,
        "object": "model",
        "created": service.start_time,
        "owned_by": "lockstep",
        "root": service.model_name,
        "max_model_len": processor.max_model_len,
        "default_sampling_params": (
            processor.defaults | ({"max_tokens": max_tokens} if max_tokens else {})
        ),
    }


async def _is_small(request: Request) -> bool:
    """Return whether a body is short enough to be parsed in the event loop."""
    return len(await request.body()) <= SMALL_BODY_BYTES


async def _respond(writer: ResponseWriter, stream: bool, request: Request) -> Response:
    """Return a response as events or as one object."""
    streams = writer.active.service.streams
    if stream and streams.are_kept:
        return streams.respond(writer, await request.body())
    if stream:
        return EventStream.from_source(writer)
    try:
        response = await unless_disconnected(writer.response(), request.receive)
    finally:
        # No client knows the id of a response that it did not get.
        writer.active.drop_record()
        writer.close()
    if response is None:
        # nginx's status for a client that closed the connection; no client reads it.
        return Response(status_code=499)
    return JSONResponse(response, headers=ignored_fields_header(writer.ignored_fields))


def _respond_in_background(service: Service, writer: ResponsesWriter, body: bytes) -> Response:
    """Generate a response whether or not its client waits for it."""
    stream = service.streams.start(writer, body, background=True)
    headers = ignored_fields_header(writer.ignored_fields)
    if writer.body.stream:
        return stream.response(0, headers)
    return JSONResponse(writer.response_object(), headers=headers)
