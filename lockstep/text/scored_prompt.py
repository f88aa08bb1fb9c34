"""Prompts that end with scored tokens: the engine's updates become those that the client expects.

The engine computes the scored tokens as the first, forced tokens of the answer. The client sent
them as a part of its prompt.
"""

from lockstep.engine.token_update import TokenUpdate
from lockstep.outputs import Logprob
from lockstep.scheduling.request import Request


class ScoredPrompt:
    """Scored tokens of one request, and their log-probabilities as they arrive."""

    def __init__(self, request: Request) -> None:
        assert request.scored is not None
        self._token_ids = request.scored.token_ids
        self._num_logprobs = request.scored.num_logprobs
        self._num_prompt_logprobs = request.params.prompt_logprobs or 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []
        self._num_left = len(self._token_ids)

    def convert(self, update: TokenUpdate) -> TokenUpdate | None:
        """Move scored tokens of an update from the answer to the prompt; None where nothing is
        left for the client yet."""
        num_scored = min(self._num_left, len(update.token_ids))
        self._num_left -= num_scored
        token_ids = update.token_ids[num_scored:]
        entries = update.logprobs or []
        for token, entry in zip(update.token_ids[:num_scored], entries, strict=False):
            self._prompt_logprobs.append(_likeliest(entry, token, self._num_prompt_logprobs))
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = [*update.prompt_logprobs, *self._prompt_logprobs]
        if not token_ids and update.finish_reason is None:
            return None
        prompt_logprobs = None
        if not self._num_left and self._prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs
            self._prompt_logprobs = []
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = [
                _likeliest(entry, token, self._num_logprobs)
                for token, entry in zip(token_ids, entries[num_scored:], strict=True)
            ]
        metrics = update.metrics.copy()
        # A prompt is not compared with what the model would have written.
        metrics.forced_mismatch = None
        return update._replace(
            token_ids=token_ids,
            logprobs=logprobs,
            metrics=metrics,
            prompt_logprobs=prompt_logprobs,
            token_sources=update.token_sources[num_scored:],
        )


def _likeliest(entry: dict[int, Logprob], token: int, count: int) -> dict[int, Logprob]:
    """Return the entry of a token with the `count` likeliest tokens."""
    return {
        token_id: logprob
        for token_id, logprob in entry.items()
        if token_id == token or logprob.rank <= count
    }


def scored_prompt(request: Request) -> ScoredPrompt | None:
    """Return the converter of a request's updates, None where no token of its prompt is scored."""
    return None if request.scored is None else ScoredPrompt(request)
