"""The input items of a response, one page at a time: /v1/responses/{id}/input_items."""

from collections.abc import Sequence
from typing import Any, Literal, cast

from lockstep.errors import RequestError
from lockstep.serve.openai.responses.call_items import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputItem,
)
from lockstep.serve.openai.responses.protocol import InputMessage, InputReasoning, part_texts
from lockstep.serve.openai.responses.schema import ItemList

MAX_ITEMS = 100
"""Maximum items of a page."""
DEFAULT_ITEMS = 20
"""Items of a page where the request sets no limit."""
Order = Literal["asc", "desc"]


def item_page(
    response_id: str, items: Sequence[InputItem], after: str | None, limit: int, order: Order
) -> ItemList:
    """Return up to `limit` items after the one with the id `after`, in OpenAI's form.

    An item's id consists of its response's and its index. Raises RequestError for an unknown id.
    """
    prefix = f"item_{response_id.removeprefix('resp_')}_"
    indices = range(len(items)) if order == "asc" else range(len(items) - 1, -1, -1)
    begin = 0
    if after is not None:
        begin = 1 + indices.index(_item_index(after, prefix, len(items)))
    shown = indices[begin : begin + limit]
    data = [{"id": f"{prefix}{index}", **_item_fields(items[index])} for index in shown]
    page = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + len(shown) < len(items),
    }
    # Items of other types have the fields that their clients sent, which no type describes.
    return cast(ItemList, page)


def _item_index(item_id: str, prefix: str, num_items: int) -> int:
    """Return the index of the item with this id. Raises RequestError."""
    digits = item_id.removeprefix(prefix)
    is_number = item_id.startswith(prefix) and digits.isascii() and digits.isdigit()
    # Only as many digits as an index can have: converting longer ones takes quadratic time.
    index = int(digits) if is_number and len(digits) <= len(str(num_items)) else num_items
    if index >= num_items:
        raise RequestError(
            f"after={item_id[:80]!r} is not known; allowed: the id of one of this response's input "
            "items. Send one, or leave it out.",
            "after",
        )
    return index


def _item_fields(item: InputItem) -> dict[str, Any]:
    """Return an item as a response shows it, without its id."""
    done = {"status": "completed"}
    match item:
        case InputCall():
            return {"type": item.type, **done, **_call_head(item), "arguments": item.arguments}
        case InputCustomCall():
            return {"type": item.type, **done, **_call_head(item), "input": item.input}
        case InputCallOutput():
            output = item.output
            parts = output if isinstance(output, str) else _parts(output, "input_text")
            return {"type": item.type, **done, "call_id": item.call_id, "output": parts}
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


def _call_head(item: InputCall | InputCustomCall) -> dict[str, str]:
    """Return the fields that name a call and its tool."""
    namespace = {"namespace": item.namespace} if item.namespace else {}
    return {"call_id": item.call_id, "name": item.name, **namespace}


def _parts(content: Any, kind: str, **fields: Any) -> list[dict[str, Any]]:
    """Return text, or a list of parts, as parts of this type with these additional fields."""
    texts = [content] if isinstance(content, str) else part_texts(content)
    return [{"type": kind, "text": text, **fields} for text in texts]
