"""The items that a response was made from, a page at a time: /v1/responses/{id}/input_items."""

from collections.abc import Sequence
from typing import Any, Literal

from lockstep.errors import RequestError
from lockstep.serve.openai.responses.call_items import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputItem,
)
from lockstep.serve.openai.responses.protocol import InputMessage, InputReasoning, plain_parts
from lockstep.serve.requests.response_writer import Json

MOST_ITEMS = 100
"""Items of a page."""
USUAL_ITEMS = 20
"""Where nobody says how many."""
Order = Literal["asc", "desc"]


def page_of(
    response_id: str, items: Sequence[InputItem], after: str | None, limit: int, order: Order
) -> Json:
    """Return up to `limit` items after the one with the id `after`, in OpenAI's form.

    An item's id is made of its response's and its index. Raises RequestError for an unknown id.
    """
    prefix = f"item_{response_id.removeprefix('resp_')}_"
    places = range(len(items)) if order == "asc" else range(len(items) - 1, -1, -1)
    begin = 0
    if after is not None:
        begin = 1 + places.index(_place(after, prefix, len(items)))
    shown = places[begin : begin + limit]
    data = [{"id": f"{prefix}{place}", **_told(items[place])} for place in shown]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + len(shown) < len(items),
    }


def _place(item_id: str, prefix: str, count: int) -> int:
    """The place of the item with this id."""
    number = item_id.removeprefix(prefix)
    known = item_id.startswith(prefix) and number.isascii() and number.isdigit()
    place = int(number) if known and len(number) <= len(str(count)) else count
    if place >= count:
        raise RequestError(
            f"after={item_id[:80]!r} is not known; allowed: the id of one of this response's input "
            "items. Send one, or leave it out.",
            "after",
        )
    return place


def _told(item: Any) -> Json:
    """Return an item as an answer shows it, without its id."""
    done = {"status": "completed"}
    match item:
        case InputCall():
            return {"type": item.type, **done, **_named(item), "arguments": item.arguments}
        case InputCustomCall():
            return {"type": item.type, **done, **_named(item), "input": item.input}
        case InputCallOutput():
            output = item.output
            told = output if isinstance(output, str) else _parts(output, "input_text")
            call_id = {"call_id": item.call_id}
            return {"type": item.type, **done, **call_id, "output": told}
        case InputReasoning():
            content = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            return {"type": "reasoning", **done, "summary": summary, "content": content}
    if not isinstance(item, InputMessage):
        return {**done, **item.model_dump(exclude_none=True)}
    if item.role == "assistant":
        content = _parts(item.content, "output_text", annotations=[])
    else:
        content = _parts(item.content, "input_text")
    return {"type": "message", **done, "role": item.role, "content": content}


def _named(item: InputCall | InputCustomCall) -> Json:
    """Return the fields that say which tool was called."""
    namespace = {"namespace": item.namespace} if item.namespace else {}
    return {"call_id": item.call_id, "name": item.name, **namespace}


def _parts(content: Any, kind: str, **more: Any) -> list[Json]:
    """Text, or parts of it, as parts of this type, with these fields besides."""
    texts = [content] if isinstance(content, str) else plain_parts(content)
    return [{"type": kind, "text": text, **more} for text in texts]
