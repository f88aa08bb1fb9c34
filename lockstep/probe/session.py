"""Session of a probe with one server: chat requests, and the failures that they meet."""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, cast

from lockstep.errors import ConfigError
from lockstep.probe.answers import Answer, read_answer
from lockstep.probe.http import (
    FAULTS,
    OVERLOADED,
    REFUSED,
    SERVER_ERROR,
    BudgetSpentError,
    Failure,
    Server,
)
from lockstep.probe.report import Section

Messages = list[dict[str, Any]]
Keep = Callable[[int], bool]


class Session:
    """Server under test, its model, and where findings about the protocol go.

    nonce: text that is new in every run, so that no earlier run's prompts are cached. minutes:
    duration of the section Drift, 0 for none. max_context: tokens of the longest prompt that the
    user allows, None for no limit. max_model_len: context length in tokens, if the server names it.
    has_logprobs: whether answers may be asked for with log-probabilities. greedy_answers: by
    prompt, for a comparison of two servers. stopped: part of the budget that ended a list of
    requests early.
    """

    def __init__(self, server: Server, model: str | None, seed: int, minutes: float) -> None:
        self.server = server
        self.protocol = Section("protocol", "Protocol")
        self.rng = random.Random(seed)
        self.nonce = f"{random.SystemRandom().getrandbits(48):012x}"
        self.minutes = minutes
        self.max_context: int | None = None
        self.max_model_len: int | None = None
        self.has_logprobs = False
        self.greedy_answers: dict[str, str] = {}
        self.stopped: str | None = None
        self._limit_name = "max_tokens"
        self._lock = threading.Lock()
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        """Return the first model that the server lists, and learn its context length."""
        reply = self.server.get("/models")
        entries = reply.events[0].get("data") if reply.failure is None else None
        first = entries[0] if isinstance(entries, list) and entries else None
        if not isinstance(first, dict) or not isinstance(first.get("id"), str):
            why = reply.failure.detail if reply.failure else "its list of models is empty"
            raise ConfigError(
                f"url={self.server.url!r} names no model: {why}. Start the server, correct --url "
                "or --api-key, or pass --model."
            )
        length = first.get("max_model_len", first.get("context_length"))
        if isinstance(length, int) and length > 0:
            self.max_model_len = length
        return first["id"]

    def learn_limits(self) -> None:
        """Find out which name the limit of output tokens has, and whether chat works at all.

        Raises ConfigError if the server answers no chat completion.
        """
        answer = self.ask("Say hello.", max_tokens=8)
        if answer.failure and "max_completion_tokens" in answer.failure.detail:
            self._limit_name = "max_completion_tokens"
            answer = self.ask("Say hello.", max_tokens=8)
        if answer.failure and answer.failure.kind in (REFUSED, "connection"):
            raise ConfigError(
                f"url={self.server.url!r} answers no chat completion of model {self.model[:60]!r}: "
                f"{answer.failure.detail}. Correct --url, --model or --api-key, or start the "
                "server with a chat template."
            )

    def ask(self, prompt: str | Messages, stream: bool = False, **params: Any) -> Answer:
        """Send a chat request, greedy unless params say otherwise.

        params: fields of the body; `keep` is passed to the client. A failure other than a refusal,
        and every deviation from the format, is a finding of the section Protocol.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        keep: Keep | None = params.pop("keep", None)
        body = {"model": self.model, "messages": messages, "temperature": 0, **params}
        body[self._limit_name] = body.pop("max_tokens", 64)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = read_answer(self.server.post("/chat/completions", body, keep), stream)
        with self._lock:
            self._record(answer, body[self._limit_name])
        return answer

    def _record(self, answer: Answer, max_tokens: int) -> None:
        failure = answer.failure
        if failure is not None:
            if failure.kind in FAULTS:
                self.protocol.fault(FAULTS[failure.kind], failure.detail)
            elif failure.kind == OVERLOADED:
                self.protocol.warn("the server stays overloaded after retries", failure.detail)
            return
        for violation in answer.violations:
            self.protocol.fault(violation, f"model {self.model}")
        # A wrong limit that the server ignores is the protocol section's warning.
        if answer.tokens is not None and answer.tokens > max_tokens > 0:
            self.protocol.fault(
                "an answer is longer than max_tokens", f"{answer.tokens} tokens > {max_tokens}"
            )

    def ask_all(self, requests: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
        """Send requests at the same time; each is the keyword arguments of `ask`.

        Answers keep the order. If the budget ends, the answers up to the first missing one are
        returned, and `stopped` says why. Raises BudgetSpentError if there is none.
        """
        answers: list[Answer | None] = [None] * len(requests)
        errors: list[Exception] = []
        indices = deque(range(len(requests)))

        def work() -> None:
            while not errors:
                try:
                    index = indices.popleft()
                except IndexError:
                    return
                try:
                    answers[index] = self.ask(**requests[index])
                except Exception as error:
                    errors.append(error)

        # Daemons: after Ctrl-C the process must not wait for replies of a silent server.
        threads = [
            threading.Thread(target=work, daemon=True)
            for _ in range(min(concurrency, len(requests)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            indices.clear()
            raise
        unexpected = [error for error in errors if not isinstance(error, BudgetSpentError)]
        if unexpected:
            raise unexpected[0]
        if errors:
            self.stopped = str(errors[0])
        in_order = list(takewhile(lambda answer: answer is not None, answers))
        if errors and not in_order:
            raise errors[0]
        return cast(list[Answer], in_order)


def refusal(answers: Sequence[Answer]) -> Failure | None:
    """Return the refusal of a feature: that of the first answer, if none was given."""
    if not answers or any(answer.ok for answer in answers):
        return None
    failure = answers[0].failure
    # Some servers answer 500 to a field that they do not know.
    unsupported = failure is not None and failure.kind in (REFUSED, SERVER_ERROR)
    return failure if unsupported else None
