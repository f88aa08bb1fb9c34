"""Parsing of a conversation's output: reasoning, content and tool calls instead of plain text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.outputs import Logprob
from lockstep.serve.requests.active_request import ActiveRequest, OutputDelta, Usage
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
    TextEnd,
    call_id,
    merge_adjacent,
)
from lockstep.text.processor import TextUpdate

TokenLogprobs = tuple[tuple[int, dict[int, Logprob]], ...]
"""Token ids, each with the log-probabilities at its position."""


class ParsedUpdate(NamedTuple):
    """A delta of one completion with its text as events.

    num_calls: complete tool calls of the completion so far.
    errors: parse errors of the completion so far.
    logprobs: for each event, the tokens of its content; empty where the request has no logprobs.
    """

    delta: OutputDelta
    events: Sequence[AnswerEvent]
    num_calls: int
    errors: tuple[str, ...]
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass
class _CompletionState:
    """Parser of one completion and its results so far.

    pending: tokens with log-probabilities whose text is still inside of the parser.
    """

    parser: ReplyParser
    pending: list[tuple[int, dict[int, Logprob]]] = field(default_factory=list)
    num_calls: int = 0
    errors: tuple[str, ...] = ()


class UpdateParser:
    """Parser of a conversation's deltas, in the order in which they arrived.

    include_reasoning: False drops reasoning. parallel_tool_calls: False keeps only the first call.
    call_prefix: beginning of the ids of tool calls. usage: token counts of the parsed deltas, with
    reasoning tokens.
    """

    def __init__(
        self,
        active: ActiveRequest,
        include_reasoning: bool,
        parallel_tool_calls: bool,
        call_prefix: str = "call_",
    ) -> None:
        self.usage = Usage(active.parsed.num_prompt_tokens)
        self._active = active
        self._include_reasoning = include_reasoning
        self._parallel_tool_calls = parallel_tool_calls
        self._call_prefix = call_prefix
        self._states = [_CompletionState(parser) for parser in active.parsed.reply_parsers]
        self._num_reasoning_tokens = 0

    def call_id(self, index: int, number: int, model_id: str | None) -> str:
        """Return the id of a tool call: the model's, or one that is derived from its position.

        index: number of the completion. number: number of the call in it.
        """
        request_id = self._active.requests[0].id
        return call_id(request_id, index, number, model_id, self._call_prefix)

    def errors(self, index: int) -> tuple[str, ...]:
        """Return the parse errors of a completion so far."""
        return self._states[index].errors

    def parse(self, delta: OutputDelta) -> ParsedUpdate:
        """Parse the text of the next delta."""
        state = self._states[delta.index]
        parser = state.parser
        new = delta.update
        parsed: list[Event] = []
        if parser.may_reason:
            # Token by token, so that tokens inside of reasoning can be counted.
            for i, text in enumerate(new.texts):
                parsed += parser.feed(text)
                self._num_reasoning_tokens += parser.reasons and i < len(new.token_ids)
        else:
            parsed += parser.feed(new.delta)
        if new.finish_reason is not None:
            parsed += parser.finish(self._text_end(new))
        self._count(delta)
        events = merge_adjacent(self._response_events(parsed, state))
        return ParsedUpdate(delta, events, state.num_calls, state.errors)

    def parse_with_logprobs(self, delta: OutputDelta) -> ParsedUpdate:
        """Parse the text of the next delta, with the tokens that each content event consists of.

        A content event has the tokens since the last event. Tokens of reasoning and of tool calls
        belong to no event.
        """
        state = self._states[delta.index]
        parser = state.parser
        new = delta.update
        events: list[AnswerEvent] = []
        logprobs: list[TokenLogprobs] = []
        entries = new.logprobs or ()
        for i, text in enumerate(new.texts):
            # A token that opens or closes reasoning is part of it.
            in_reasoning = parser.reasons
            parsed = parser.feed(text)
            in_reasoning |= parser.reasons
            self._num_reasoning_tokens += parser.reasons and i < len(new.token_ids)
            if in_reasoning:
                state.pending.clear()
            elif i < len(entries):
                state.pending.append((new.token_ids[i], entries[i]))
            self._assign_logprobs(parsed, state, events, logprobs)
        if new.finish_reason is not None:
            parsed = parser.finish(self._text_end(new))
            self._assign_logprobs(parsed, state, events, logprobs)
        self._count(delta)
        return ParsedUpdate(delta, events, state.num_calls, state.errors, logprobs)

    def _assign_logprobs(
        self,
        parsed: Sequence[Event],
        state: _CompletionState,
        events: list[AnswerEvent],
        logprobs: list[TokenLogprobs],
    ) -> None:
        """Append the events to `events`, and the pending tokens of each content to `logprobs`."""
        for event in self._response_events(parsed, state):
            events.append(event)
            logprobs.append(tuple(state.pending) if isinstance(event, Content) else ())
            state.pending.clear()

    def _response_events(
        self, parsed: Sequence[Event], state: _CompletionState
    ) -> list[AnswerEvent]:
        """Return the events that are part of the response; count calls and collect errors."""
        events: list[AnswerEvent] = []
        for event in parsed:
            if isinstance(event, CallError):
                state.errors += (event.why,)
            elif self._is_included(event):
                events.append(event)
                state.num_calls += isinstance(event, CallEnd)
        return events

    def _is_included(self, event: AnswerEvent) -> bool:
        """Return whether the request wants the event."""
        match event:
            case Reasoning():
                return self._include_reasoning
            case CallStart() | CallArguments() | CallEnd():
                return self._parallel_tool_calls or event.index == 0
        return True

    def _count(self, delta: OutputDelta) -> None:
        self.usage = delta.usage._replace(reasoning=self._num_reasoning_tokens)

    def _text_end(self, new: TextUpdate) -> TextEnd:
        """Return why a completion's text ended, as its parser needs it."""
        processor = self._active.service.processor
        params = self._active.parsed.params
        return processor.text_end(new.finish_reason, new.stop_reason, params)
