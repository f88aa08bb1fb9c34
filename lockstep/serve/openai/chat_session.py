"""The next turn of a conversation, whichever API asks for it: one request in, one event stream out.

Every API of conversations turns its body into a ChatRequest and reads what is heard here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.outputs import Logprob
from lockstep.serve.openai.protocol import ChatRequest
from lockstep.serve.requests.service import Answers, Asked, Job, Meter, Piece, Run, Service, Usage
from lockstep.text.parsers import ReplyParser
from lockstep.text.parsers.events import (
    AnswerEvent,
    CallArguments,
    CallEnd,
    CallError,
    CallStart,
    Content,
    Event,
    Reasoning,
    Reply,
    TextEnd,
    call_id,
    merged,
)
from lockstep.text.processor import Rendered, TextUpdate

Scores = tuple[tuple[int, dict[int, Logprob]], ...]
"""Ids of tokens, each with the log-probabilities at its position."""


class Heard(NamedTuple):
    """What one update of one completion said: the piece, and its text as events.

    calls: the completion's complete calls so far. errors: its parse errors so far. scores: of each
    event, the tokens of its content, where log-probabilities are asked for.
    """

    piece: Piece
    events: Sequence[AnswerEvent]
    calls: int
    errors: tuple[str, ...]
    scores: Sequence[Scores] = ()


@dataclass
class Replies:
    """A turn's completions as a whole; replies: their texts as they were parsed."""

    answers: Answers
    replies: list[Reply]


@dataclass
class _Reading:
    """How far one completion was read."""

    parser: ReplyParser
    waiting: list[tuple[int, dict[int, Logprob]]] = field(default_factory=list)
    """Tokens with log-probabilities, whose text the parser has not passed on yet."""
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
        return call_id(self.job.requests[0].id, index, number, own)

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

    async def rendered(self) -> dict[str, Any]:
        """Return the prompt's token ids and what would be generated with. Raises RequestError."""
        (prompt,) = await self.service.render(self.kind, self.body, 1, self._ask)
        return prompt

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
        parsed: list[Event] = []
        if parser.may_reason:  # its tokens are counted
            for number, text in enumerate(new.texts):
                parsed += parser.feed(text)
                self._reasoning += parser.reasons and number < len(new.token_ids)
        else:
            parsed += parser.feed(new.delta)
        if new.finish_reason is not None:
            parsed += parser.finish(self._end_of(new))
        return Heard(
            piece, merged(self._answer_events(parsed, reading)), reading.calls, reading.errors
        )

    def _answer_events(self, parsed: Sequence[Event], reading: _Reading) -> list[AnswerEvent]:
        """Return the events that are parts of the answer; count the calls, keep the errors."""
        events: list[AnswerEvent] = []
        for event in parsed:
            if isinstance(event, CallError):
                reading.errors += (event.why,)
            elif self._asked_for(event):
                events.append(event)
                reading.calls += isinstance(event, CallEnd)
        return events

    def hear_scored(self, piece: Piece) -> Heard:
        """Return a piece's events with the tokens of each content, for log-probabilities.

        Content has the tokens since the last event. Tokens of reasoning and calls belong to none.
        """
        self._meter.add(piece)
        reading = self._readings[piece.index]
        new = piece.text
        parser = reading.parser
        events: list[AnswerEvent] = []
        scores: list[Scores] = []
        entries = new.logprobs or ()
        for number, text in enumerate(new.texts):
            inside = parser.reasons
            parsed = parser.feed(text)
            inside |= parser.reasons
            self._reasoning += parser.reasons and number < len(new.token_ids)
            if inside:
                reading.waiting.clear()
            elif number < len(entries):
                reading.waiting.append((new.token_ids[number], entries[number]))
            self._share(parsed, reading, events, scores)
        if new.finish_reason is not None:
            self._share(parser.finish(self._end_of(new)), reading, events, scores)
        return Heard(piece, events, reading.calls, reading.errors, scores)

    def _share(
        self,
        parsed: Sequence[Event],
        reading: _Reading,
        events: list[AnswerEvent],
        scores: list[Scores],
    ) -> None:
        """Append the events, and to the scores the waiting tokens of each content."""
        for event in self._answer_events(parsed, reading):
            events.append(event)
            scores.append(tuple(reading.waiting) if isinstance(event, Content) else ())
            reading.waiting.clear()

    def _end_of(self, new: TextUpdate) -> TextEnd:
        """Return why a completion's text ended, as its parser needs it."""
        return self.service.processor.text_end(new.finish_reason, new.stop_reason, self.job.params)

    async def replies(self) -> Replies:
        """The turn as a whole."""
        answers = Answers(self.job)
        replies = [Reply() for _ in self._readings]
        events: list[list[AnswerEvent]] = [[] for _ in self._readings]
        async for pieces in self.run:
            for piece in pieces:
                events[piece.index] += self.hear(piece).events
                answers.add(piece)
        for reply, own, reading in zip(replies, events, self._readings, strict=True):
            reply.add(own)
            reply.errors += reading.errors
        return Replies(answers, replies)

    def _asked_for(self, event: AnswerEvent) -> bool:
        """All but reasoning that nobody wants, and calls behind the first, where one is wanted."""
        match event:
            case Reasoning():
                return self.body.include_reasoning
            case CallStart() | CallArguments() | CallEnd():
                return self.body.parallel_tool_calls or event.index == 0
        return True
