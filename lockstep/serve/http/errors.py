"""What goes wrong while serving, and how it is answered: a status and OpenAI's error object."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from lockstep.errors import (
    CapacityError,
    ComputeError,
    ContextLengthError,
    EngineDeadError,
    LockstepError,
    RequestError,
    brief,
)

log = logging.getLogger("lockstep.serve")

SHOWN = 200
"""Characters of a client's own text that a message repeats."""


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


class UnknownResponseError(RequestError):
    """The request names a response that is not kept."""


class CancelledRequestError(LockstepError, RuntimeError):
    """A client has ended the request by its id."""


class BusyError(LockstepError, RuntimeError):
    """The queue is full; the request was not taken."""


class DeadlineError(LockstepError, TimeoutError):
    """The request's time was up before its answer was complete."""


class UnreadError(LockstepError, RuntimeError):
    """More of the answer waited for its reader than may."""


_STATUSES: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UnknownResponseError, 404, "invalid_request_error", "response_not_found"),
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (CapacityError, 400, "invalid_request_error", "context_length_exceeded"),
    (BusyError, 429, "rate_limit_error", "queue_full"),
    (UnreadError, 400, "invalid_request_error", "answer_not_read"),
    (DeadlineError, 504, "server_error", "timeout"),
    (ComputeError, 500, "server_error", "compute_error"),
    (EngineDeadError, 503, "server_error", "engine_unavailable"),
    (LockstepError, 503, "server_error", None),
)
"""The first class that fits: status, type, code."""
MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
RETRY_AFTER = {429: "1", 503: "5"}
"""Seconds after which a client may try again, by status."""


def error_object(
    message: str, kind: str = "invalid_request_error", param: str | None = None, code: Any = None
) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_and_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the error object of an error. What was not foreseen is logged, not shown."""
    for kind, status, name, code in _STATUSES:
        if isinstance(error, kind):
            param = error.field if isinstance(error, RequestError) else None
            return status, error_object(str(error), name, param, code)
    number = uuid.uuid4().hex[:12]
    log.error("a request failed, error %s", number, exc_info=error)
    message = f"internal error {number}; the server's log says more under this number."
    return 500, error_object(message, "server_error")


def messages_error(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error object as Anthropic's."""
    kind = _MESSAGES_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def route_path(scope: Scope) -> str:
    """Return the path of a request as routes have it, without a proxy's root path."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is for a route of Anthropic's API."""
    path = route_path(scope)
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def response(status: int, body: dict[str, Any], scope: Scope, close: bool = False) -> JSONResponse:
    """Return an error as a response, in the form of the request's API; `close` ends the connection
    too."""
    if speaks_anthropic(scope):
        body = messages_error(status, body)
    headers = {"Retry-After": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    if close:
        headers["Connection"] = "close"
    return JSONResponse(body, status, headers)


def add_handlers(app: FastAPI) -> None:
    """Every error of the application becomes an error object."""

    async def known(request: Request, error: Exception) -> Response:
        return response(*status_and_body(error), request.scope)

    async def invalid(request: Request, error: Exception) -> Response:
        found = _faults(error) if isinstance(error, RequestValidationError) else []
        return response(400, _validation(found), request.scope)

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        where = f"{request.method} {request.url.path}"[:SHOWN]
        message = f"{where}: {getattr(error, 'detail', '')}"
        methods = _methods_of_path(request) if status == 405 else ""
        if methods:
            message = f"{message}; allowed: {methods}."
        if isinstance(error.__cause__, (ValueError, RecursionError)):
            why = str(error.__cause__)[:SHOWN]
            message = f"the body is not JSON: {why}. Send one JSON object, in UTF-8."
        found = response(status, error_object(message), request.scope)
        found.headers.update(getattr(error, "headers", None) or {})
        if methods:
            found.headers["Allow"] = methods
        return found

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (LockstepError, Exception):
        app.add_exception_handler(kind, known)


def _methods_of_path(request: Request) -> str:
    """Return the methods that the path of a request takes; an error of the router names those of
    the first of its routes alone."""
    methods: set[str] = set()
    # Routes are tried in their order, and each names its own methods in a 405.
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _faults(error: RequestValidationError) -> list[dict[str, Any]]:
    """Return what is wrong with a body, the first fault under its path in what the client sent."""
    first, *rest = error.errors()
    return [{**first, "loc": _sent_path(first["loc"], error.body)}, *rest]


def _sent_path(place: Sequence[Any], body: Any) -> list[Any]:
    """Return a path without the types that pydantic adds to it where an object may be of several.

    place: "body", and then the path.
    """
    path = [*place[:1]]
    value = body
    for part in place[1:]:
        # An item of /v1/responses without a type is a message.
        tag = value.get("type", "message") if isinstance(value, dict) else None
        tags = isinstance(value, dict) and part not in value and part == tag
        if tags:
            continue
        path.append(part)
        inside = isinstance(value, dict) or (isinstance(value, list) and isinstance(part, int))
        try:
            value = value[part] if inside else None
        except (KeyError, IndexError):
            value = None
    return path


def _validation(found: Sequence[Any]) -> dict[str, Any]:
    """The first thing that is wrong with a body, in words."""
    if not found:
        return error_object("the body cannot be read; send a JSON object.")
    first = found[0]
    place = first["loc"][1:]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it is not JSON")
        return error_object(
            f"the body is not JSON: {reason} at character {place[0]}. Send one JSON object."
        )
    if not place and first["type"] == "value_error":
        return error_object(f"the body {_reason(first)}.")
    if not place:
        kind = "application/json"
        return error_object(
            f"the body is not a JSON object; send one, with the header Content-Type: {kind}."
        )
    return error_object(told(first, place), param=str(place[0]))


UNKNOWN_FIELD = "extra_forbidden"
"""Pydantic's name of the fault that an object has a field which it may not have."""
_REMEDIES = {
    "audio": "this server reads text only; leave it out",
    "function_call": "it is OpenAI's old form; send tool_calls",
    "prefix": "send continue_final_message=true and add_generation_prompt=false",
    "partial": "send continue_final_message=true and add_generation_prompt=false",
    "defer_loading": "no tools are searched for here; send the tools that may be called",
    "allowed_callers": "tools are called by the model alone; leave it out",
    "input_examples": "write the examples into the description",
    "output_schema": "write into the description what the tool gives",
    "toolset_name": "this server runs no tools; send tools of your own",
    "context": "send the items that count as input",
    "mode": "the model has one mode; leave it out",
    "task_budget": "send max_tokens",
}
"""Fields inside of objects that would change the answer -> what to do."""


_RUNS_NO_TOOLS = "this server runs no tools; send tools of your own"
_RAN_ELSEWHERE = "its program ran on another server; send what it gave as a message"
_SUMMARY = (
    "only the server that wrote this summary can read it. Begin a new session, or send the items "
    "that it stands for"
)
_TEXT_ONLY = "this server reads text only; send text in its place"
TYPE_REMEDIES = {
    # Items of /v1/responses.
    "compaction": _SUMMARY,
    "compaction_summary": _SUMMARY,
    "context_compaction": _SUMMARY,
    "compaction_trigger": "ask for a summary in a message",
    "agent_message": "send it as a message of the user, and say there who wrote it",
    "code_interpreter_call": _RAN_ELSEWHERE,
    "program": _RAN_ELSEWHERE,
    "program_output": _RAN_ELSEWHERE,
    "file_search_call": "send what the search found as a message",
    "computer_call": _TEXT_ONLY,
    "computer_call_output": _TEXT_ONLY,
    "mcp_approval_request": _RUNS_NO_TOOLS,
    "mcp_approval_response": _RUNS_NO_TOOLS,
    # Tools of /v1/responses.
    "image_generation": (
        "this server writes text only; leave it out (Codex: features.image_generation = false)"
    ),
    "web_search_preview": f"{_RUNS_NO_TOOLS}, or leave it out",
    "file_search": f"{_RUNS_NO_TOOLS}, or leave it out",
    "code_interpreter": f"{_RUNS_NO_TOOLS}, or leave it out",
    "mcp": "this server calls no MCP servers; let the client call them, and send their tools",
    "computer": _TEXT_ONLY,
    "computer_use_preview": _TEXT_ONLY,
    "programmatic_tool_calling": f"{_RUNS_NO_TOOLS}, or leave it out",
    # Blocks of /v1/messages.
    "image": _TEXT_ONLY,
    "document": _TEXT_ONLY,
    "search_result": _TEXT_ONLY,
    "container_upload": f"{_RUNS_NO_TOOLS}; leave it out",
}
"""Types of objects that are not supported -> what to do."""


def remedy_of(name: str) -> str:
    """Return what to say of a field inside of an object that is not known there."""
    if name in _REMEDIES:
        return f"is not supported: {_REMEDIES[name]}."
    return "is not known here. Check its name, or leave it out."


def told(fault: Mapping[str, Any], path: Sequence[Any]) -> str:
    """Return what pydantic says is wrong with a field: where, its value if it is short, and why."""
    path = (*path, *fault.get("ctx", {}).get("inside", ()))
    if fault["type"] == UNKNOWN_FIELD:
        return f"{path_of(path)} {remedy_of(str(path[-1]))}"
    sent = fault.get("input")
    shown = f"={brief(sent)}" if isinstance(sent, (str, int, float)) else ""
    return f"{path_of(path)}{shown}: {_reason(fault)}"


def _reason(fault: Mapping[str, Any]) -> str:
    """Return why a value is wrong."""
    if fault["type"] == "union_tag_invalid":
        known = fault["ctx"]
        remedy = TYPE_REMEDIES.get(known["tag"])
        if remedy is not None:
            return f"type={brief(known['tag'])} is not supported: {remedy}."
        allowed = known["expected_tags"]
        return f"type={brief(known['tag'])} is not allowed; allowed: {allowed}. Leave it out."
    return str(fault["msg"]).removeprefix("Value error, ")[:SHOWN]


def path_of(place: Sequence[Any]) -> str:
    """("messages", 3, "content") -> messages[3].content"""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text[:SHOWN]
