"""Outputs of a request, shaped like vLLM's."""

from dataclasses import dataclass, field
from typing import Literal

TokenSource = Literal["draft", "bonus", "plain", "forced"]
"""Source of a token: an accepted draft; the target's bonus token after verified drafts; the only
token of a step without drafts; or the request's forced_token_ids.
"""


@dataclass(frozen=True)
class ForcedMismatch:
    """Forced token that the model would not have chosen.

    index: its index in the answer. chosen: the model's token there, -1 for none.
    """

    index: int
    forced: int
    chosen: int


@dataclass
class Logprob:
    """Log-probability of one token (of the raw logits), its rank from 1, its text if known."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """Metrics of one request. Times are seconds of time.monotonic().

    num_cached_tokens: prompt tokens that the prefix cache had. num_draft_tokens,
    num_accepted_tokens: drafts that were verified, and those that were accepted. num_steps: decode
    steps of the request. num_preemptions: times that its row moved to host memory.
    scheduled_time: when it first got a row. forced_mismatch: the first forced token that the model
    would not have chosen.
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
    forced_mismatch: ForcedMismatch | None = None

    def copy(self) -> "RequestMetrics":
        """Return a copy."""
        return RequestMetrics(**vars(self))

    @property
    def acceptance_length(self) -> float:
        """Return the mean tokens emitted per step: 1 + accepted drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0


@dataclass
class ToolCall:
    """Tool call. `arguments` is JSON text, or the beginning of it where the call is incomplete.

    id: the model's own, or a generated one. complete: False where the text ended inside the call.
    """

    name: str
    arguments: str = ""
    id: str | None = None
    complete: bool = True


@dataclass
class CompletionOutput:
    """Completion of a request, one of `n`.

    finish_reason: stop, length, abort or error; error: then the message. cumulative_logprob: sum
    over the tokens so far, None without log-probabilities. content, reasoning, tool_calls: results
    of the parsers once a chat answer has ended; None and empty before, and outside of chats.
    parser_errors: why text that looked like a tool call is none.
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
    """Answer of a request so far.

    outputs: one completion per `n`. prompt_logprobs: by prompt token, None without them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_cached_tokens(self) -> int:
        """Return the prompt tokens that the prefix cache had."""
        return self.metrics.num_cached_tokens


@dataclass
class ScoreOutput:
    """Log-probabilities of a given answer: bit for bit those of the request that generates it.

    token_ids: tokens of the answer. logprobs: one entry per token, with the token itself and the
    likeliest ones. cumulative_logprob: sum over the tokens. forced_mismatch: the first token that
    the sampling parameters would not have chosen; None where they generate this answer.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    cumulative_logprob: float
    forced_mismatch: ForcedMismatch | None
    metrics: RequestMetrics

    @property
    def token_logprobs(self) -> list[float]:
        """Return the log-probability of each token."""
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return [entry[token_id].logprob for token_id, entry in pairs]
