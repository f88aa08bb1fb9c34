"""The responses of /v1/responses: running ones, and those that are stored for later requests."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.errors import RequestError, brief
from lockstep.serve.http.errors import UnknownResponseError
from lockstep.serve.openai.responses.call_items import InputItem
from lockstep.serve.openai.responses.protocol import ItemReference
from lockstep.serve.openai.responses.schema import DeletedResponse, ResponseObject
from lockstep.serve.openai.responses.store import ResponseStore, StoredResponse
from lockstep.serve.requests.event_log import EventLog
from lockstep.serve.requests.service import Service

if TYPE_CHECKING:
    from lockstep.serve.openai.responses.writer import ResponsesWriter

MAX_SHOWN_ID = 80
"""Characters of an unknown id that a message repeats."""


class ResponseRegistry:
    """Running and stored responses of a service. A client sees only those of its API key.

    running: writers of responses that are in progress, by id.
    """

    KIND = "responses"

    def __init__(self, service: Service) -> None:
        limits = service.limits
        self.service = service
        self.store = ResponseStore(
            limits.max_stored_responses, limits.max_stored_bytes, limits.stored_seconds
        )
        self.running: dict[str, ResponsesWriter] = {}

    def response(self, response_id: str) -> ResponseObject:
        """Return a running or stored response. Raises UnknownResponseError."""
        running = self._running(response_id)
        return running.response_object() if running else self._stored_object(response_id)

    async def load(self, *response_ids: str) -> None:
        """Read responses of an earlier process from the journal, where they are not here."""
        for response_id in response_ids:
            if response_id not in self.running and self.store.get(response_id) is None:
                await self.service.streams.find(self.KIND, response_id)
            writer = self.running.get(response_id)
            if writer is not None and writer.active.is_history and writer.event_log is not None:
                await writer.event_log.wait()

    async def load_references(self, previous_id: str | None, items: Sequence[InputItem]) -> None:
        """Read the responses that an input refers to from the journal, where they are not here."""
        named = [_response_of(item.id) for item in items if isinstance(item, ItemReference)]
        await self.load(*dict.fromkeys([*([previous_id] if previous_id else []), *named]))

    def stored(self, response_id: str, field: str) -> StoredResponse:
        """Return a stored response.

        field: name of the id in the request. Raises RequestError for a running response and
        UnknownResponseError for one that is not stored.
        """
        if self._running(response_id):
            raise RequestError(
                f"{field}={response_id!r} is in progress; allowed: responses that have ended. Wait "
                "for its end, or cancel it.",
                field,
            )
        stored = self._visible(response_id)
        if stored is None:
            raise UnknownResponseError(
                f"{field}={response_id[:MAX_SHOWN_ID]!r} is not known: store was false, its place "
                "was taken by later ones, another API key made it, or it never was. Send the whole "
                "conversation as input.",
                field,
            )
        return stored

    def referenced_items(self, items: Sequence[InputItem]) -> dict[str, InputItem]:
        """Return the stored items that references name, by id.

        Raises RequestError for a second reference to an item, UnknownResponseError for an item that
        is not stored.
        """
        referenced: dict[str, InputItem] = {}
        stored_items: dict[str, InputItem] = {}
        # The latest response knows the items of all earlier turns, whose responses may be gone.
        for i, item in reversed(list(enumerate(items))):
            if not isinstance(item, ItemReference):
                continue
            # Repeated references could turn a small body into a prompt of any size.
            if item.id in referenced:
                raise RequestError(
                    f"input[{i}].id={brief(item.id)} is there twice; allowed: one reference to an "
                    "item. Leave one out.",
                    "input",
                )
            if item.id not in stored_items:
                stored = self._visible(_response_of(item.id))
                stored_items |= stored.items_by_id if stored else {}
            if item.id not in stored_items:
                raise UnknownResponseError(
                    f"input[{i}].id={brief(item.id)} is not known: store was false, its place was "
                    "taken by later responses, or it never was. Send the item itself, as the AI "
                    "SDK does with providerOptions: {openai: {store: false}}.",
                    "input",
                )
            referenced[item.id] = stored_items[item.id]
        return referenced

    def input_items(self, response_id: str) -> Sequence[InputItem]:
        """Return the input of a response, with earlier turns. Raises UnknownResponseError."""
        running = self._running(response_id)
        return running.items if running else self.stored(response_id, "response_id").inputs

    def cancel(self, response_id: str) -> ResponseObject:
        """Cancel a running response and return it. A background response may have ended.

        Raises RequestError for any other response that has ended.
        """
        running = self._running(response_id)
        if running is None:
            if self.stored(response_id, "response_id").event_log is not None:
                return self._stored_object(response_id)
            raise RequestError(
                f"response_id={response_id[:MAX_SHOWN_ID]!r} has ended; allowed: responses in "
                "progress. Leave it be.",
                "response_id",
            )
        running.cancel()
        return running.response_object()

    def event_log(self, response_id: str) -> EventLog:
        """Return the events of a recorded response. Raises RequestError for any other."""
        running = self._running(response_id)
        if running is not None:
            event_log = running.event_log
        else:
            event_log = self.stored(response_id, "response_id").event_log
        if event_log is None:
            raise RequestError(
                "stream=true is not supported for this response; allowed: responses that were made "
                "with background=true. Leave it out.",
                "stream",
            )
        return event_log

    def delete(self, response_id: str) -> DeletedResponse:
        """Remove a stored response. Raises as stored() does."""
        # Raises where the response cannot be deleted.
        self.stored(response_id, "response_id")
        self.store.remove(response_id)
        self.service.streams.erase(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _running(self, response_id: str) -> "ResponsesWriter | None":
        """Return a running response of the present client; None for none."""
        writer = self.running.get(response_id)
        return writer if writer and writer.owner == self.service.streams.owner() else None

    def _visible(self, response_id: str) -> StoredResponse | None:
        """Return a stored response of the present client; None for none."""
        stored = self.store.get(response_id)
        return stored if stored and stored.owner == self.service.streams.owner() else None

    def _stored_object(self, response_id: str) -> ResponseObject:
        response = self.stored(response_id, "response_id").response
        assert response is not None  # only the empty history of a first turn has none
        return response


def _response_of(item_id: str) -> str:
    """Return the id of the response that an item is part of."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"
