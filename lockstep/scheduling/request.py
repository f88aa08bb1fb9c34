"""Request: scheduler's state of one completion."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lockstep.errors import RequestError
from lockstep.outputs import ForcedMismatch, Logprob, RequestMetrics, TokenSource
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.grammar import Grammar

NO_TOKEN = (
    "the model has no next token: its logits contain a NaN or an infinity, or all tokens are "
    "banned. The tokens before it are valid, and other requests are not affected. Check the "
    "checkpoint and its dtype, or ban fewer tokens."
)
FORCED_TOKEN_DIFFERS = (
    "forced_token_ids[{index}] is {forced}, but the model chooses {chosen} there: the tokens come "
    "from other weights, numerics, sampling parameters, seed or prompt. The tokens before it are "
    'equal. Send forced_mismatch="report" to go on with the forced tokens.'
)
SUSPECT_FAILURES = 2
"""Failures of the engine during a request's run, without a new token of it between, after which the
request runs alone.
"""
MAX_REQUEST_FAILURES = 4
"""Failures that end the request. The last two came while it ran alone: one of them may have come
from outside.
"""
MAX_FAILED_REQUESTS = 8
"""Requests that may end by their failures in a row, while nothing else succeeds: more look like an
engine that cannot work.
"""
KEEPS_FAILING = (
    "the engine stopped {count} times while it ran request {id!r}, without a new token of it. So "
    "this request ends; others go on. The log names the cause. Change the request before you send "
    "it again."
)


@dataclass(frozen=True)
class ScoredTokens:
    """End of a prompt that the engine computes as an answer's first, forced tokens.

    num_logprobs: likeliest tokens that the client wants at positions after them, None for no
    log-probabilities.
    """

    token_ids: list[int]
    num_logprobs: int | None


@dataclass(eq=False)
class Request:
    """State of a request with n=1; the client splits a call with n > 1 into n requests.

    priority: lower runs sooner, under the policy "priority". arrival: seconds of time.monotonic().
    seed: always set, even where the user gave none. cache_salt: prefixes are shared among requests
    of the same salt only. adapter: name of the LoRA adapter that answers, "" for the base model.
    grammar: constraint of the answer. speculate: whether to verify drafts; the tokens are the same
    either way. scored: last tokens of the client's prompt, which are forced tokens here; the engine
    does not read it. max_len: maximum tokens of prompt and answer together; set by the scheduler.
    num_resumed: tokens of the answer that the client has from an earlier run; they are forced.
    failures: failures of the engine while it ran this request, since its latest new token.
    is_audit: it repeats an ended request to compare the answers. It neither reads nor fills the
    prefix cache, no drafter learns from it, and no statistic of requests counts it.
    token_sources: one per token of the answer. finish_reason: stop, length, abort or error once the
    request has ended. stop_reason: the id in stop_token_ids that ended it. error: message for the
    client where finish_reason is "error".
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    cache_salt: str = ""
    adapter: str = ""
    grammar: Grammar | None = None
    speculate: bool = True
    scored: ScoredTokens | None = None
    max_len: int = 2**31 - 1
    num_resumed: int = 0
    failures: int = 0
    is_audit: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    token_sources: list[TokenSource] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.metrics.arrival_time = self.arrival

    @property
    def is_suspect(self) -> bool:
        """Return whether this request may be the cause of the engine's failures."""
        return self.failures >= SUSPECT_FAILURES

    @property
    def failure(self) -> str | None:
        """Return the error with which the request ends for its failures; None below the limit."""
        if self.failures < MAX_REQUEST_FAILURES:
            return None
        return KEEPS_FAILING.format(count=self.failures, id=self.id)

    @property
    def is_replaying(self) -> bool:
        """Return whether the next token is one that the client has already."""
        return len(self.output_token_ids) < self.num_resumed

    @property
    def grammar_fault(self) -> str | None:
        """Return why the grammar allows no token any more; None as long as it does."""
        return None if self.grammar is None else self.grammar.fault

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar may forbid a token of the answer from here on."""
        return self.grammar is not None and not self.grammar.is_free

    @property
    def forced_token_ids(self) -> Sequence[int]:
        """Return the tokens with which the answer begins."""
        return self.params.forced_token_ids or ()

    @property
    def forced_end(self) -> int:
        """Return the tokens of prompt and forced tokens together."""
        return len(self.prompt_token_ids) + len(self.forced_token_ids)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Return the tokens of prompt and answer at which the request ends with "length"."""
        max_tokens = self.params.max_tokens
        if max_tokens is None:
            return self.max_len
        return min(self.max_len, len(self.prompt_token_ids) + max_tokens)

    def append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[dict[int, Logprob]] | None = None,
        mismatch: ForcedMismatch | None = None,
    ) -> int:
        """Append tokens up to the one that ends the request; return how many were appended.

        A stop token ends it once `min_tokens` tokens came before, and is appended. -1, which is no
        token, ends it with an error. So does a forced token that the target would not have chosen,
        unless the request wants a report only. mismatch: such a token among these.
        """
        if mismatch is not None and self.metrics.forced_mismatch is None:
            self.metrics.forced_mismatch = mismatch
        for index, token in enumerate(tokens):
            if self.finish_reason is not None:
                return index
            if self._ends_by_mismatch():
                return index
            if token < 0:  # the target had no token: non-finite logits, or everything masked
                self.finish_reason = "error"
                self.error = self.grammar_fault or NO_TOKEN
                return index
            self.output_token_ids.append(token)
            if logprobs is not None:
                self.logprobs.append(logprobs[index])
            self._set_finish_reason(token)
        return len(tokens)

    def restart(self) -> None:
        """Begin again after a failure of the engine: the tokens so far are forced."""
        self.params = continue_from(self.params, self.output_token_ids)
        self.num_resumed = max(self.num_resumed, len(self.output_token_ids))
        # New lists: the cache's record of the failed run refers to the old ones.
        self.output_token_ids = []
        self.token_sources = []
        self.logprobs = []
        self.prompt_logprobs = []
        if self.grammar is not None:
            self.grammar = self.grammar.fresh()

    def audit(self) -> "Request":
        """Return a request that repeats this one, which has ended, without drafts and cached pages.

        Tokens that were forced since an engine was lost are generated again.
        """
        params = self.params
        # Forced tokens that the model would not have chosen end an answer with an error.
        is_own_answer = params.forced_mismatch == "error" and self.finish_reason != "error"
        if self.num_resumed and is_own_answer:
            params = params.clone(forced_token_ids=None)
        return replace(
            self,
            id=f"audit-{self.id}",
            params=params,
            arrival=time.monotonic(),
            grammar=None if self.grammar is None else self.grammar.fresh(),
            speculate=False,
            num_resumed=0,
            failures=0,
            is_audit=True,
            output_token_ids=[],
            token_sources=[],
            logprobs=[],
            prompt_logprobs=[],
            finish_reason=None,
            stop_reason=None,
            error=None,
            metrics=RequestMetrics(),
        )

    def _ends_by_mismatch(self) -> bool:
        """Return whether the next token is a forced one at which the request ends with an error."""
        mismatch = self.metrics.forced_mismatch
        if mismatch is None or self.params.forced_mismatch == "report":
            return False
        if mismatch.index != len(self.output_token_ids):
            return False
        self.finish_reason = "error"
        self.error = FORCED_TOKEN_DIFFERS.format(**vars(mismatch))
        return True

    def _set_finish_reason(self, token: int) -> None:
        """Set finish_reason where the latest token ends the request."""
        if self.ends_at(len(self.output_token_ids) - 1, token):
            self.finish_reason = "stop"
            self.stop_reason = token if token in (self.params.stop_token_ids or ()) else None
        elif self.num_tokens >= self.max_total_tokens:
            self.finish_reason = "length"

    def ends_at(self, index: int, token: int) -> bool:
        """Return whether a token at this index of the answer is a stop token that ends it."""
        if index < self.params.min_tokens:
            return False
        if token in (self.params.stop_token_ids or ()):
            return True
        return token in self.eos_token_ids and not self.params.ignore_eos


def continue_from(params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
    """Return parameters that force the first tokens of an answer; forced tokens of the user that
    go further stay."""
    forced = params.forced_token_ids or ()
    if len(token_ids) <= len(forced):
        return params
    # Without forced tokens, the user's forced_mismatch has no effect, and a grammar may refuse it.
    mismatch = params.forced_mismatch if forced else "error"
    return params.clone(forced_token_ids=list(token_ids), forced_mismatch=mismatch)


def check_ids(request: Request, vocab: int) -> None:
    """Check that all token ids are in the vocabulary and a token is left to emit.

    Raises RequestError.
    """
    p = request.params
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("allowed_token_ids", p.allowed_token_ids or ()),
        ("logit_bias", p.logit_bias or ()),
        ("bad_words", [t for word in p.bad_words_ids or () for t in word]),
        ("stop_token_ids", p.stop_token_ids or ()),
        ("forced_token_ids", p.forced_token_ids or ()),
        # The processor has replaced a text by its token ids.
        ("prediction", () if isinstance(p.prediction, str) else p.prediction or ()),
    ):
        wrong = [i for i in ids if not 0 <= int(i) < vocab]
        if wrong:
            # Scored tokens are part of the client's prompt.
            is_scored = name == "forced_token_ids" and p.scored_from is not None
            field = "prompt" if is_scored else name
            raise RequestError(
                f"{field} has token id {wrong[0]}; allowed: 0 to {vocab - 1}. Leave it out.", field
            )
    banned = {word[0] for word in p.bad_words_ids or () if len(word) == 1}
    if p.min_tokens:
        banned |= request.eos_token_ids | set(p.stop_token_ids or ())
    if p.allowed_token_ids is not None and banned.issuperset(p.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids leaves no token to emit: all are bad words, or would end the answer "
            "before min_tokens. Allow another token.",
            "allowed_token_ids",
        )


def check_forced(request: Request) -> None:
    """Check that no forced token ends the answer before the last one, and that a mismatch leaves
    the request's grammar defined. Raises RequestError.
    """
    forced = request.forced_token_ids
    for index, token in enumerate(forced[:-1]):
        if request.ends_at(index, token):
            raise RequestError(
                f"forced_token_ids[{index}] is {token}, a stop token that ends the answer; "
                "allowed: stop tokens at the end only. Remove the tokens after it, or send "
                "ignore_eos.",
                "forced_token_ids",
            )
    if forced and request.grammar is not None and request.params.forced_mismatch == "report":
        raise RequestError(
            'forced_mismatch="report" is not allowed with a grammar, which has no state after a '
            "token that it forbids. Leave it out, or send no structured output.",
            "forced_mismatch",
        )
