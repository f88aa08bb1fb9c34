"""Accumulators of output deltas: completions as a whole, and tokens that wait to be sent."""

from dataclasses import dataclass, field

from lockstep.outputs import Logprob
from lockstep.serve.requests.active_request import OutputDelta, PromptLogprobs, TokenOrigin
from lockstep.serve.requests.parsed_request import ParsedRequest


@dataclass
class TokenBuffer:
    """Tokens of a completion: parallel lists of ids, origins and log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append the tokens of a delta."""
        new = delta.update
        self.token_ids += new.token_ids
        self.origins += delta.origins()
        if new.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += new.logprobs

    def clear(self) -> None:
        """Remove all tokens. The lists are replaced, since a response may refer to them."""
        self.token_ids = []
        self.origins = []
        self.logprobs = None


@dataclass
class CompletionAccumulator(TokenBuffer):
    """Tokens, text and end of one completion. texts: the new text of each delta."""

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def add(self, delta: OutputDelta) -> None:
        """Append a delta."""
        super().add(delta)
        new = delta.update
        self.texts.append(new.delta)
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason
        self.error = delta.error

    @property
    def text(self) -> str:
        """Return the text so far."""
        return "".join(self.texts)


class RequestAccumulator:
    """Completions of a request.

    prompt_logprobs: log-probabilities of the prompts, by the prompt's index.
    """

    def __init__(self, parsed: ParsedRequest) -> None:
        self.completions = [CompletionAccumulator() for _ in range(parsed.num_completions)]
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._n = parsed.params.n

    def add(self, delta: OutputDelta) -> None:
        """Append a delta to its completion."""
        self.completions[delta.index].add(delta)
        if delta.prompt_logprobs is not None:
            # Every completion of a prompt reports them; the first report counts.
            self.prompt_logprobs.setdefault(delta.index // self._n, delta.prompt_logprobs)
