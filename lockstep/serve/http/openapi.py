"""The part of /openapi.json that describes responses: types, events and errors of a route."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from lockstep.serve.http.errors import Error

ERROR_DESCRIPTIONS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model, response or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; Retry-After says when to come back.",
    500: "The server failed; its log says more.",
    503: "The engine has stopped, hangs, or the server is shutting down.",
    504: "The time limit of the request has passed.",
}
RouteResponses = dict[int | str, dict[str, Any]]
"""FastAPI's `responses` of a route, by status."""


class _ClosedObjects(GenerateJsonSchema):
    """Generator of JSON schemas in which a TypedDict has no other fields, unless it allows them."""

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        """Return the schema of a TypedDict."""
        return {"additionalProperties": False, **super().typed_dict_schema(schema)}


def response_schemas(types: Sequence[type]) -> dict[str, Any]:
    """Return the JSON schemas of response types and of their parts, by name."""
    adapters: list[Any] = [(kind.__name__, "serialization", TypeAdapter(kind)) for kind in types]
    _, definitions = TypeAdapter.json_schemas(
        adapters,
        ref_template="#/components/schemas/{model}",
        schema_generator=_ClosedObjects,
    )
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def schema_path(kind: type) -> dict[str, str]:
    """Return the reference to a type's JSON schema in /openapi.json."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def one_of(kinds: Sequence[type]) -> dict[str, Any]:
    """Return the JSON schema of a value that has one of these types."""
    if len(kinds) == 1:
        return schema_path(kinds[0])
    return {"anyOf": [schema_path(kind) for kind in kinds]}


def _event_schema(kinds: Sequence[type], are_named: bool) -> dict[str, Any]:
    """Return the schema of a server-sent event whose data is JSON of one of these types.

    are_named: the SSE name of an event is its type; otherwise the last event's data is [DONE].
    """
    content = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [schema_path(kind) for kind in kinds]},
    }
    event_id = {
        "type": "string",
        "description": "for Last-Event-ID, where the stream can be resumed",
    }
    if are_named:
        properties = {"event": {"type": "string"}, "id": event_id, "data": content}
        return {"type": "object", "properties": properties, "required": ["event", "data"]}
    names = " or ".join(kind.__name__ for kind in kinds)
    description = f"{names}, as JSON; the last event is [DONE]"
    data = {"anyOf": [content, {"const": "[DONE]"}], "description": description}
    properties = {"id": event_id, "data": data}
    return {"type": "object", "properties": properties, "required": ["data"]}


def json_responses(
    *kinds: type,
    events: Sequence[type] = (),
    named_events: bool = False,
    is_list: bool = False,
    error: type = Error,
) -> RouteResponses:
    """Return the `responses` of a route: its objects, its events if it streams, and all errors.

    kinds: types of the response; one of them is sent. is_list: a list of them is sent.
    """
    schema = one_of(kinds)
    if is_list:
        schema = {"type": "array", "items": schema}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if events:
        content["text/event-stream"] = {"itemSchema": _event_schema(events, named_events)}
    error_content = {"application/json": {"schema": schema_path(error)}}
    errors: RouteResponses = {
        status: {"description": text, "content": error_content}
        for status, text in ERROR_DESCRIPTIONS.items()
    }
    description = "\n\n".join(str(kind.__doc__) for kind in kinds)
    return {200: {"description": description, "content": content}, **errors}


def text_responses(description: str, *error_statuses: int) -> RouteResponses:
    """Return the `responses` of a route that sends plain text."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    responses: RouteResponses = {200: {"description": description, "content": text}}
    for status in error_statuses:
        responses[status] = {"description": ERROR_DESCRIPTIONS[status], "content": text}
    return responses


def openapi_document(app: FastAPI, types: Sequence[type]) -> dict[str, Any]:
    """Return the OpenAPI document of an application with these response types, made once."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        # An invalid body gets status 400 and an error object here, not FastAPI's 422.
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        responses = response_schemas(types)
        if duplicates := schemas.keys() & responses.keys():
            raise ValueError(f"types of requests and of responses have one name: {duplicates}")
        schemas.update(responses)
        app.openapi_schema = document
    return app.openapi_schema
