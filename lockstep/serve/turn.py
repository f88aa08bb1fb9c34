"""The next turn of a conversation, whichever API asks for it: one request in, one event stream out.

Every API of conversations turns its body into a ChatRequest and reads what is heard here.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from hashlib import blake2b

from lockstep.serve.protocol import ChatRequest
from lockstep.serve.service import Answers, Asked, Job, Piece, Run, Service, gather
from lockstep.text.parsers import ReplyParser
from lockstep.text.parsers.events import (
    CallArguments,
    CallError,
    CallStart,
    Event,
    Reasoning,
    Reply,
    Told,
    merged,
)
from lockstep.text.processor import Rendered


@dataclass(frozen=True)
class Heard:
    """What one update of one completion said: the piece, and its text as events.

    The piece's usage counts tokens of reasoning too. calls, errors: the completion's so far.
    """

    piece: Piece
    events: tuple[Told, ...]
    calls: int
    errors: tuple[str, ...]


@dataclass
class Replies:
    """A turn's completions as a whole; replies: their texts as they were parsed."""

    answers: Answers
    replies: list[Reply]


class Turn:
    """One turn: start() first, then heard() or replies(), and close() at the end.

    kind: what the request's id begins with.
    """

    def __init__(self, service: Service, body: ChatRequest, kind: str) -> None:
        self.service = service
        self.body = body
        self.kind = kind
        self.run: Run
        self._parsers: list[ReplyParser] = []

    @property
    def job(self) -> Job:
        """The request in the engine."""
        return self.run.job

    def call_id(self, index: int, number: int, own: str | None) -> str:
        """The id of a completion's tool call: the model's own, or one made of its place."""
        if own is not None:
            return own
        place = f"{self.job.id}/{index}/{number}".encode()
        return f"call_{blake2b(place, digest_size=12).hexdigest()}"

    async def start(self) -> None:
        """Renders, tokenises and begins; raises what is wrong before anything is sent."""
        self.run = await self.service.start(self.kind, self.body, 1, self._ask)

    def _ask(self) -> Asked:
        """What the body asks for; makes what reads the answer, too. Raises RequestError."""
        body = self.body
        processor = self.service.processor
        params = body.params(processor)
        tools = body.callable_tools(processor)
        prompt = self.render()
        wanted = params.structured_outputs
        self._parsers = [
            processor.reply_parser(prompt.text, tools, wanted) for _ in range(params.n)
        ]
        return Asked([prompt], params, shown=processor.marker_ids(tools))

    def render(self) -> Rendered:
        """The prompt; for a thread beside the event loop. Raises RequestError."""
        body = self.body
        processor = self.service.processor
        return processor.conversation(
            body.shown_messages(), body.shown_tools(), **body.template_kwargs(processor)
        )

    def close(self) -> None:
        """Aborts what still runs."""
        self.run.close()

    async def heard(self) -> AsyncIterator[Heard]:
        """The events as they come. They depend on the pieces before, not on when they are read."""
        reasoning = 0
        calls = [0] * len(self._parsers)
        errors: list[tuple[str, ...]] = [()] * len(self._parsers)
        async for piece in self.run:
            index = piece.index
            parser = self._parsers[index]
            found: list[Event] = []
            for number, text in enumerate(piece.text.texts):
                found += parser.feed(text)
                reasoning += parser.reasons and number < len(piece.text.token_ids)
            if piece.text.finish_reason is not None:
                found += parser.finish()
            errors[index] += tuple(e.why for e in found if isinstance(e, CallError))
            told = [event for event in found if not isinstance(event, CallError)]
            events = tuple(event for event in merged(told) if self._asked_for(event))
            calls[index] += sum(isinstance(event, CallStart) for event in events)
            if reasoning:
                piece = replace(piece, usage=replace(piece.usage, reasoning=reasoning))
            yield Heard(piece, events, calls[index], errors[index])

    async def replies(self) -> Replies:
        """The turn as a whole."""
        events: list[list[Event]] = [[] for _ in self._parsers]
        errors: dict[int, tuple[str, ...]] = {}

        async def pieces() -> AsyncIterator[Piece]:
            async for heard in self.heard():
                events[heard.piece.index] += heard.events
                errors[heard.piece.index] = heard.errors
                yield heard.piece

        answers = await gather(self.job, pieces())
        replies = [Reply(errors=[*errors.get(i, ())]).add(own) for i, own in enumerate(events)]
        return Replies(answers, replies)

    def _asked_for(self, event: Told) -> bool:
        """All but reasoning that nobody wants, and calls behind the first, where one is wanted."""
        match event:
            case Reasoning():
                return self.body.include_reasoning
            case CallStart() | CallArguments():
                return self.body.parallel_tool_calls or event.index == 0
        return True
