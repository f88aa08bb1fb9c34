"""The next turn of a conversation, whichever API asks for it: one request in, one event stream out.

Every API of conversations turns its body into a ChatRequest and reads what is heard here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.serve.protocol import ChatRequest
from lockstep.serve.service import Answers, Asked, Job, Meter, Piece, Run, Service, Usage
from lockstep.text.parsers import ReplyParser
from lockstep.text.parsers.events import (
    CallArguments,
    CallEnd,
    CallError,
    CallStart,
    Event,
    Reasoning,
    Reply,
    Told,
    call_id,
    merged,
)
from lockstep.text.processor import Rendered


class Heard(NamedTuple):
    """What one update of one completion said: the piece, and its text as events.

    calls: the completion's complete calls so far. errors: its parse errors so far.
    """

    piece: Piece
    events: Sequence[Told]
    calls: int
    errors: tuple[str, ...]


@dataclass
class Replies:
    """A turn's completions as a whole; replies: their texts as they were parsed."""

    answers: Answers
    replies: list[Reply]


@dataclass
class _Reading:
    """How far one completion was read."""

    parser: ReplyParser
    calls: int = 0
    errors: tuple[str, ...] = ()


class Turn:
    """One turn: start() first, then hear() or replies(), and close() at the end.

    kind: what the request's id begins with.
    """

    def __init__(self, service: Service, body: ChatRequest, kind: str) -> None:
        self.service = service
        self.body = body
        self.kind = kind
        self.run: Run
        self._readings: list[_Reading] = []
        self._reasoning = 0
        self._meter: Meter

    @property
    def job(self) -> Job:
        """The request in the engine."""
        return self.run.job

    def call_id(self, index: int, number: int, own: str | None) -> str:
        """The id of a completion's tool call: the model's own, or one made of its place."""
        return call_id(self.job.id, index, number, own)

    async def start(self, brief: bool) -> None:
        """Renders, tokenises and begins; raises what is wrong before anything is sent."""
        self.run = await self.service.start(self.kind, self.body, 1, self._ask, brief)
        self._meter = Meter(self.job)

    def _ask(self) -> Asked:
        """What the body asks for; makes what reads the answer, too. Raises RequestError."""
        body = self.body
        processor = self.service.processor
        params = body.params(processor)
        tools = body.callable_tools(processor)
        prompt = self.render()
        wanted = params.structured_outputs
        self._readings = [
            _Reading(processor.reply_parser(prompt.text, tools, wanted)) for _ in range(params.n)
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

    @property
    def usage(self) -> Usage:
        """Tokens of what was heard so far, those of reasoning among them."""
        return self._meter.usage(self._reasoning)

    def hear(self, piece: Piece) -> Heard:
        """A piece's text as events. They depend on the pieces before."""
        self._meter.add(piece)
        reading = self._readings[piece.index]
        parser = reading.parser
        new = piece.text
        found: list[Event] = []
        if parser.may_reason:  # its tokens are counted
            for number, text in enumerate(new.texts):
                found += parser.feed(text)
                self._reasoning += parser.reasons and number < len(new.token_ids)
        else:
            found += parser.feed(new.delta)
        if new.finish_reason is not None:
            processor = self.service.processor
            found += parser.finish(
                processor.text_end(new.finish_reason, new.stop_reason, self.job.params)
            )
        told: list[Told] = []
        for event in found:
            if isinstance(event, CallError):
                reading.errors += (event.why,)
            elif self._asked_for(event):
                told.append(event)
                reading.calls += isinstance(event, CallEnd)
        return Heard(piece, merged(told), reading.calls, reading.errors)

    async def replies(self) -> Replies:
        """The turn as a whole."""
        answers = Answers(self.job)
        replies = [Reply() for _ in self._readings]
        events: list[list[Told]] = [[] for _ in self._readings]
        async for pieces in self.run:
            for piece in pieces:
                events[piece.index] += self.hear(piece).events
                answers.add(piece)
        for reply, own, reading in zip(replies, events, self._readings, strict=True):
            reply.add(own)
            reply.errors += reading.errors
        return Replies(answers, replies)

    def _asked_for(self, event: Told) -> bool:
        """All but reasoning that nobody wants, and calls behind the first, where one is wanted."""
        match event:
            case Reasoning():
                return self.body.include_reasoning
            case CallStart() | CallArguments() | CallEnd():
                return self.body.parallel_tool_calls or event.index == 0
        return True
