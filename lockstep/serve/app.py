"""The FastAPI application: routes, OpenAI's error objects, streams of server-sent events."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from lockstep import __version__
from lockstep.errors import EngineDeadError, LockstepError, RequestError
from lockstep.serve.chat import ChatAnswer
from lockstep.serve.completions import CompletionAnswer
from lockstep.serve.metrics import Metrics
from lockstep.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from lockstep.serve.service import Service, UnknownModelError

log = logging.getLogger("lockstep.serve")


def create_app(service: Service) -> FastAPI:
    """The application that serves one model."""
    app = FastAPI(title="Lockstep", version=__version__)
    _add_errors(app)
    _add_state(app, service)
    _add_tokens(app, service)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(ChatAnswer(service, body), body.stream, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(CompletionAnswer(service, body), body.stream, request)

    return app


def _add_state(app: FastAPI, service: Service) -> None:
    metrics = Metrics(service.model_name)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.model_name:
            raise UnknownModelError(
                f"model={name!r} does not exist; allowed: {service.model_name!r}. "
                "GET /v1/models lists it.",
                "model",
            )
        return _model(service)

    @app.get("/health")
    async def health() -> Response:
        alive = service.client.is_alive
        return PlainTextResponse("ok" if alive else "the engine has stopped", 200 if alive else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(service.client.stats()), media_type=CONTENT_TYPE_LATEST)


def _add_tokens(app: FastAPI, service: Service) -> None:
    processor = service.processor

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        if body.messages is not None:
            kwargs = {"add_generation_prompt": body.add_generation_prompt}
            kwargs |= body.chat_template_kwargs
            ids = await asyncio.to_thread(processor.render, body.messages, body.tools, **kwargs)
        elif body.prompt is not None:
            ids = await asyncio.to_thread(processor.encode, body.prompt, body.add_special_tokens)
        else:
            raise RequestError("prompt and messages are both missing; send one of them.", "prompt")
        return {"tokens": ids, "count": len(ids), "max_model_len": processor.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        if processor.tokenizer is None:
            raise RequestError("tokens cannot become text: skip_tokenizer_init is set.", "tokens")
        return {"prompt": processor.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "lockstep",
        "max_model_len": service.processor.max_model_len,
    }


async def _answer(
    answer: ChatAnswer | CompletionAnswer, stream: bool, request: Request
) -> Response:
    await answer.prepare()
    if stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = _events(answer.stream())
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    whole = await _unless_gone(answer.whole(), request)
    return Response(status_code=499) if whole is None else JSONResponse(whole)


async def _events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncIterator[str]:
    """Chunks as server-sent events; an error becomes the last event but [DONE]."""
    try:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
    except Exception as error:
        yield f"data: {json.dumps(_error_body(error)[1])}\n\n"
    yield "data: [DONE]\n\n"


async def _unless_gone(
    work: Coroutine[Any, Any, dict[str, Any]], request: Request
) -> dict[str, Any] | None:
    """The work's result; None if the client hangs up first, which cancels the work."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and OpenAI's error object of an error."""
    param = error.field if isinstance(error, RequestError) else None
    if isinstance(error, UnknownModelError):
        status, kind, code = 404, "invalid_request_error", "model_not_found"
    elif isinstance(error, RequestError):
        status, kind, code = 400, "invalid_request_error", None
    elif isinstance(error, LockstepError):
        status, kind, code = 503, "server_error", None
    else:
        log.error("a request failed", exc_info=error)
        status, kind, code = 500, "server_error", None
    message = str(error) if isinstance(error, LockstepError) else f"internal error: {error!r}"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _add_errors(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        status, body = _error_body(error)
        return JSONResponse(body, status)

    async def invalid(request: Request, error: Exception) -> Response:
        found = error.errors() if isinstance(error, RequestValidationError) else []
        places = [".".join(map(str, e["loc"][1:])) for e in found]
        told = [f"{p}: {e['msg']}" if p else e["msg"] for p, e in zip(places, found, strict=True)]
        _, body = _error_body(RequestError("; ".join(told[:5]), places[0] if places else None))
        if body["error"]["param"]:
            body["error"]["param"] = body["error"]["param"].split(".")[0]
        return JSONResponse(body, 400)

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        message = f"{request.method} {request.url.path}: {getattr(error, 'detail', error)}"
        kind = {"type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": {"message": message, **kind}}, status)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (RequestError, EngineDeadError, LockstepError, Exception):
        app.add_exception_handler(kind, known)
