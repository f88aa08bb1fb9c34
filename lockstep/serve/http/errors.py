"""Errors of the server, and the status and error object that answer them."""

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope
from typing_extensions import TypedDict

from lockstep.errors import (
    CapacityError,
    ComputeError,
    ContextLengthError,
    EngineDeadError,
    LockstepError,
    NumericsError,
    RequestError,
    brief,
)

log = logging.getLogger("lockstep.serve")

LOGGED_ERROR = "lockstep.logged_error"
"""Key of the scope: the unexpected error that was logged. No outer layer logs it again."""
MAX_SHOWN_CHARACTERS = 200
"""Maximum characters of a client's own text that a message repeats."""


class ErrorDetail(TypedDict):
    """Message, field at fault, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """OpenAI's error object. In a stream it is the last event before [DONE]."""

    error: ErrorDetail


class MessageError(TypedDict):
    """Message of an error, with Anthropic's type."""

    type: str
    message: str


class MessagesError(TypedDict):
    """Anthropic's error object. In a stream it is the last event."""

    type: Literal["error"]
    error: MessageError


class UnknownModelError(RequestError):
    """The request names a model that is not served."""


class UnknownResponseError(RequestError):
    """The request names a response that is not stored."""


class UnknownStreamError(RequestError):
    """The request names an answer that the server does not have."""


class CancelledRequestError(LockstepError, RuntimeError):
    """A client has cancelled the request by its id."""


class BusyError(LockstepError, RuntimeError):
    """The queue is full; the request was not accepted."""


class DeadlineError(LockstepError, TimeoutError):
    """The request's time limit passed before the response was complete."""


class UnreadError(LockstepError, RuntimeError):
    """Output that waits for its reader exceeds the memory limit."""


_STATUSES: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UnknownResponseError, 404, "invalid_request_error", "response_not_found"),
    (UnknownStreamError, 404, "invalid_request_error", "answer_not_found"),
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (CapacityError, 400, "invalid_request_error", "context_length_exceeded"),
    (BusyError, 429, "rate_limit_error", "queue_full"),
    (UnreadError, 400, "invalid_request_error", "answer_not_read"),
    (DeadlineError, 504, "server_error", "timeout"),
    (ComputeError, 500, "server_error", "compute_error"),
    (NumericsError, 503, "server_error", "numerics_unavailable"),
    (EngineDeadError, 503, "server_error", "engine_unavailable"),
    (LockstepError, 503, "server_error", None),
)
"""Error class -> status, type and code. The first class that matches counts."""
MESSAGES_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status -> Anthropic's type of error."""
RETRY_AFTER = {429: "1", 503: "5"}
"""Status -> seconds after which a client may try again."""


def error_object(
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Error:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_and_body(error: Exception) -> tuple[int, Error]:
    """Return the status and the error object of an error.

    An unexpected error is logged under a number; the client gets only that number.
    """
    for error_type, status, kind, code in _STATUSES:
        if isinstance(error, error_type):
            param = error.field if isinstance(error, RequestError) else None
            return status, error_object(str(error), kind, param, code)
    number = uuid.uuid4().hex[:12]
    log.error("a request failed, error %s", number, exc_info=error)
    # The message of an unexpected error may contain data of other clients.
    message = f"internal error {number}; the server's log says more under this number."
    return 500, error_object(message, "server_error")


def messages_error(status: int, body: Error) -> MessagesError:
    """Convert an error object to Anthropic's form."""
    default = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def route_path(scope: Scope) -> str:
    """Return the path of a request without a proxy's root path, as routes define it."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def is_anthropic(scope: Scope) -> bool:
    """Return whether a request is for a route of Anthropic's API."""
    path = route_path(scope)
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


def error_response(status: int, body: Error, scope: Scope, close: bool = False) -> JSONResponse:
    """Return an error as a response, in the form of the request's API.

    close: ask the client to close the connection.
    """
    content = messages_error(status, body) if is_anthropic(scope) else body
    headers = {"Retry-After": RETRY_AFTER[status]} if status in RETRY_AFTER else {}
    if close:
        headers["Connection"] = "close"
    return JSONResponse(content, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of the application with an error object."""

    async def on_error(request: Request, error: Exception) -> Response:
        is_unexpected = not isinstance(error, LockstepError)
        if is_unexpected:
            request.scope[LOGGED_ERROR] = error
        # No request may follow on the connection: the state of this one is unknown.
        return error_response(*status_and_body(error), request.scope, close=is_unexpected)

    async def on_invalid_body(request: Request, error: Exception) -> Response:
        faults = _faults(error) if isinstance(error, RequestValidationError) else []
        return error_response(400, _validation_error(faults), request.scope)

    async def on_http_error(request: Request, error: Exception) -> Response:
        if isinstance(error.__cause__, RequestError):  # of the parser of bodies
            return await on_error(request, error.__cause__)
        status = error.status_code if isinstance(error, HTTPException) else 500
        location = _without_slash(request) if status == 404 else None
        if location is not None:
            return Response(status_code=307, headers={"Location": location})
        route = f"{request.method} {request.url.path}"[:MAX_SHOWN_CHARACTERS]
        message = f"{route}: {getattr(error, 'detail', '')}"
        methods = _methods_of_path(request) if status == 405 else ""
        if methods:
            message = f"{message}; allowed: {methods}."
        if isinstance(error.__cause__, (ValueError, RecursionError)):
            reason = str(error.__cause__)[:MAX_SHOWN_CHARACTERS]
            message = f"the body is not JSON: {reason}. Send one JSON object, in UTF-8."
        response = error_response(status, error_object(message), request.scope)
        response.headers.update(getattr(error, "headers", None) or {})
        if methods:
            response.headers["Allow"] = methods
        return response

    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    for error_type in (LockstepError, Exception):
        app.add_exception_handler(error_type, on_error)


def _without_slash(request: Request) -> str | None:
    """Return the location of a path without a slash at its end; None if there is no such route.

    It is relative, since a proxy may have another scheme, host and root path than this server.
    """
    path = request.scope["path"].removesuffix("/")
    name = path.rpartition("/")[2]
    scope = {**request.scope, "path": path}
    is_route = any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes)
    if not (name and is_route and request.scope["path"].endswith("/")):
        return None
    query = request.url.query
    return f"../{quote(name)}?{query}" if query else f"../{quote(name)}"


def _methods_of_path(request: Request) -> str:
    """Return all methods that the path of a request supports."""
    methods: set[str] = set()
    # Starlette's own 405 names the methods of the first route with this path only.
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _faults(error: RequestValidationError) -> list[dict[str, Any]]:
    """Return the faults of a body, the first one with its path in what the client sent."""
    first, *rest = error.errors()
    location = _sent_path(first["loc"], error.body)
    if first["type"] == "missing" and location[-1:] != [first["loc"][-1]]:
        location.append(first["loc"][-1])  # the missing field has the name of its object's type
    return [{**first, "loc": location}, *rest]


def _sent_path(location: Sequence[Any], body: Any) -> list[Any]:
    """Return pydantic's path of a fault without the tags of unions, which no client sends.

    location: "body", and then the path.
    """
    path = [*location[:1]]
    value = body
    for part in location[1:]:
        # An item of /v1/responses without a type is a message.
        tag = value.get("type", "message") if isinstance(value, dict) else None
        if isinstance(value, dict) and part not in value and part == tag:
            continue
        path.append(part)
        has_parts = isinstance(value, dict) or (isinstance(value, list) and isinstance(part, int))
        try:
            value = value[part] if has_parts else None
        except (KeyError, IndexError):
            value = None
    return path


def _validation_error(faults: Sequence[Any]) -> Error:
    """Return the error object of a body's first fault."""
    if not faults:
        return error_object("the body cannot be read; send a JSON object.")
    first = faults[0]
    path = (*first["loc"][1:], *first.get("ctx", {}).get("inside", ()))
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "it is not JSON")
        return error_object(
            f"the body is not JSON: {reason} at character {path[0]}. Send one JSON object."
        )
    if not path and first["type"] == "value_error":
        return error_object(f"the body {_reason(first)}.")
    if not path:
        kind = "application/json"
        return error_object(
            f"the body is not a JSON object; send one, with the header Content-Type: {kind}."
        )
    return error_object(fault_message(first, first["loc"][1:]), param=str(path[0]))


UNKNOWN_FIELD = "extra_forbidden"
"""Pydantic's name of the fault that an object has an unknown field."""
_FIELD_REMEDIES = {
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
"""Field of a nested object that would change the answer -> remedy."""


_RUNS_NO_TOOLS = "this server runs no tools; send tools of your own"
_RAN_ELSEWHERE = "its program ran on another server; send what it gave as a message"
_SUMMARY = (
    "only the server that wrote this summary can read it. Begin a new session, or send the items "
    "that it stands for"
)
_CALLS_NO_MCP = "this server calls no MCP servers; let the client call them, and send their tools"
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
    "mcp": _CALLS_NO_MCP,
    "computer": _TEXT_ONLY,
    "computer_use_preview": _TEXT_ONLY,
    "programmatic_tool_calling": f"{_RUNS_NO_TOOLS}, or leave it out",
    # Blocks of /v1/messages.
    "image": _TEXT_ONLY,
    "document": _TEXT_ONLY,
    "search_result": _TEXT_ONLY,
    "container_upload": f"{_RUNS_NO_TOOLS}; leave it out",
    "mcp_tool_reference": _CALLS_NO_MCP,
    "mcp_toolset_reference": _CALLS_NO_MCP,
}
"""Unsupported type of an object -> remedy."""


def field_remedy(name: str) -> str:
    """Return the end of the message about an unknown field of a nested object."""
    if name in _FIELD_REMEDIES:
        return f"is not supported: {_FIELD_REMEDIES[name]}."
    return "is not known here. Check its name, or leave it out."


def fault_message(fault: Mapping[str, Any], path: Sequence[Any]) -> str:
    """Return the message of a fault that pydantic found: path, value if it is short, reason."""
    path = (*path, *fault.get("ctx", {}).get("inside", ()))
    if fault["type"] == UNKNOWN_FIELD:
        return f"{path_text(path)} {field_remedy(str(path[-1]))}"
    value = fault.get("input")
    shown = f"={brief(value)}" if isinstance(value, (str, int, float)) else ""
    return f"{path_text(path)}{shown}: {_reason(fault)}"


def _reason(fault: Mapping[str, Any]) -> str:
    """Return why a value is wrong."""
    if fault["type"] == "union_tag_invalid":
        context = fault["ctx"]
        remedy = TYPE_REMEDIES.get(context["tag"])
        if remedy is not None:
            return f"type={brief(context['tag'])} is not supported: {remedy}."
        allowed = context["expected_tags"]
        return f"type={brief(context['tag'])} is not allowed; allowed: {allowed}. Leave it out."
    return str(fault["msg"]).removeprefix("Value error, ")[:MAX_SHOWN_CHARACTERS]


def path_text(path: Sequence[Any]) -> str:
    """Return a path as text: ("messages", 3, "content") -> messages[3].content"""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text[:MAX_SHOWN_CHARACTERS]
