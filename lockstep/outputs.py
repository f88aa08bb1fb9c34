"""What a request gives back, shaped like vLLM's outputs."""

from dataclasses import dataclass, field
from typing import Literal

TokenSource = Literal["draft", "bonus", "plain"]
"""How a token came: as a draft that was accepted; as the target's own behind drafts that a step
verified; or as the only token of a step that verified none."""


@dataclass
class Logprob:
    """Log-probability of one token (of the raw logits), its rank from 1, its text if known."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """What one request cost. Times in seconds of time.monotonic.

    scheduled_time: when it first got a row.
    """

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    scheduled_time: float | None = None

    def copy(self) -> "RequestMetrics":
        """As it is now."""
        return RequestMetrics(**vars(self))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted per step: 1 + accepted."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0


@dataclass
class ToolCall:
    """A tool call; `arguments` is JSON text where the call is complete, else the beginning of one.

    id: the model's own, or one made for it. complete: False where the text was cut within the call.
    """

    name: str
    arguments: str = ""
    id: str | None = None
    complete: bool = True


@dataclass
class CompletionOutput:
    """One of a request's `n` completions.

    finish_reason: stop, length, abort, or error, and then `error` says what went wrong.
    cumulative_logprob: sum over the tokens so far, None where no log-probabilities were asked for.
    content, reasoning, tool_calls: what the parsers read in the text of a chat's answer, once it
    has ended; None and empty before that, and for answers that belong to no chat. parser_errors:
    why what looked like a call was none.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    seed: int = 0
    error: str | None = None
    cumulative_logprob: float | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    parser_errors: list[str] = field(default_factory=list)

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request's answer so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that the prefix cache held."""
        return self.metrics.num_cached_tokens
