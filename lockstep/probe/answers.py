"""Answers of chat completions, read strictly: each deviation from the API's format is listed."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.probe.http import Failure, Reply

MAX_COUNT = 1 << 40
"""Largest token count that is believed: arithmetic with larger ones overflows."""
FINISH_REASONS = ("stop", "length", "tool_calls", "function_call", "content_filter")


@dataclass
class ToolCall:
    """Tool call; arguments is the text that should be a JSON object."""

    name: str = ""
    arguments: str = ""
    call_id: str = ""


@dataclass(frozen=True)
class Position:
    """Log-probabilities at one token: of the chosen one, and of the top ones as sent."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    @property
    def gap(self) -> float | None:
        """Return the difference of the two largest log-probabilities, in nats."""
        values = sorted((logprob for _, logprob in self.top), reverse=True)
        return values[0] - values[1] if len(values) > 1 else None


@dataclass
class Answer:
    """Answer to a chat request.

    failure: reason for which there is no answer. violations: deviations from the API's format.
    times: seconds at which chunks with output arrived. tokens, prompt_tokens: the server's usage.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    positions: list[Position] = field(default_factory=list)
    tokens: int | None = None
    prompt_tokens: int | None = None
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0
    failure: Failure | None = None
    violations: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether there is an answer."""
        return self.failure is None

    @property
    def output(self) -> str:
        """Return all text of the answer: reasoning, content and tool calls."""
        calls = "".join(f"\n{call.name}({call.arguments})" for call in self.tool_calls)
        return self.reasoning + self.text + calls


def read_answer(reply: Reply, streamed: bool) -> Answer:
    """Read a reply of /chat/completions."""
    answer = Answer(seconds=reply.seconds, failure=reply.failure)
    if reply.failure is not None:
        return answer
    reader = _Reader(answer)
    for event, seconds in zip(reply.events, reply.event_times, strict=True):
        reader.read_usage(event.get("usage"))
        has_output = False
        for choice in reader.choices(event, streamed):
            message = choice.get("delta" if streamed else "message")
            has_output |= reader.read_message(message, streamed)
            reader.read_logprobs(choice.get("logprobs"))
            reader.read_finish_reason(choice.get("finish_reason"))
        if has_output:
            answer.times.append(seconds)
    if not reply.aborted and answer.finish_reason is None:
        reader.violate("an answer has no finish_reason")
    answer.violations = list(dict.fromkeys(answer.violations))
    return answer


class _Reader:
    """Reader of the objects of one reply into an Answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._calls: dict[int, ToolCall] = {}

    def violate(self, text: str) -> None:
        """Record a deviation from the API's format."""
        self._answer.violations.append(text)

    def choices(self, event: dict[str, Any], streamed: bool) -> Iterator[dict[str, Any]]:
        """Yield the choices with index 0."""
        choices = event.get("choices")
        if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
            self.violate("choices is not a list of objects")
            return
        if not choices and not streamed:
            self.violate("choices is empty")
        for choice in choices:
            if choice.get("index") != 0:
                self.violate("a choice has another index than 0")
            else:
                yield choice

    def read_message(self, message: Any, streamed: bool) -> bool:
        """Read a message or delta. Return whether it has output."""
        if not isinstance(message, dict):
            self.violate(f"{'delta' if streamed else 'message'} is not an object")
            return False
        content = self._text(message, "content")
        reasoning = self._text(message, "reasoning_content") or self._text(message, "reasoning")
        self._answer.text += content
        self._answer.reasoning += reasoning
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            self.violate("tool_calls is not a list")
            calls = []
        for number, call in enumerate(calls):
            self._read_call(call, number, streamed)
        return bool(content or reasoning or calls)

    def _read_call(self, call: Any, number: int, streamed: bool) -> None:
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            self.violate("a tool call has no function object")
            return
        index = call.get("index") if streamed else number
        if not isinstance(index, int):
            self.violate("a streamed tool call has no index")
            index = number
        # Later chunks of a streamed call have its index only.
        if index not in self._calls:
            self._calls[index] = ToolCall()
            self._answer.tool_calls.append(self._calls[index])
        call_so_far = self._calls[index]
        call_so_far.name += self._text(call["function"], "name")
        call_so_far.arguments += self._text(call["function"], "arguments")
        call_so_far.call_id += self._text(call, "id")

    def read_logprobs(self, logprobs: Any) -> None:
        """Read the log-probabilities of a choice."""
        if logprobs is None:
            return
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        if not isinstance(content, list):
            return
        for entry in content:
            position = _position(entry)
            if position is None:
                self.violate("an entry of logprobs lacks its token, logprob or top_logprobs")
            else:
                self._answer.positions.append(position)

    def read_finish_reason(self, reason: Any) -> None:
        """Read a finish reason; only the last event of a stream has one."""
        if reason is None:
            return
        if reason not in FINISH_REASONS:
            self.violate(f"finish_reason is {str(reason)[:40]!r}")
        self._answer.finish_reason = str(reason)

    def read_usage(self, usage: Any) -> None:
        """Read the token counts."""
        if not isinstance(usage, dict):
            return
        counts = [usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total")]
        known = [count for count in counts if isinstance(count, int) and 0 <= count <= MAX_COUNT]
        if len(known) < len(counts):
            self.violate("usage lacks a count of tokens")
            return
        prompt, completion, total = known
        if prompt + completion != total:
            self.violate("total_tokens is not the sum of prompt_tokens and completion_tokens")
        self._answer.prompt_tokens, self._answer.tokens = prompt, completion

    def _text(self, holder: dict[str, Any], name: str) -> str:
        value = holder.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            self.violate(f"{name} is not a string")
            return ""
        return value


def _position(entry: Any) -> Position | None:
    """Read an entry of logprobs, or return None if it is malformed."""
    if not isinstance(entry, dict):
        return None
    top = entry.get("top_logprobs")
    entries = [entry, *(top if isinstance(top, list) else ())]
    pairs = []
    for candidate in entries:
        token, logprob = (
            (candidate.get("token"), candidate.get("logprob"))
            if isinstance(candidate, dict)
            else (0, 0)
        )
        if not isinstance(token, str) or not isinstance(logprob, int | float):
            return None
        # An integer of hundreds of digits has no float, and is larger than any.
        if not -sys.float_info.max <= logprob <= sys.float_info.max:
            return None
        pairs.append((token, float(logprob)))
    return Position(*pairs[0], tuple(pairs[1:]))
