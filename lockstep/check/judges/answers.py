"""Answers in a form that is compared bit for bit, and counters of what their runs exercised."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.outputs import Logprob, RequestMetrics

Bits = tuple[tuple[tuple[int, str, int], ...], ...]
"""Of every position the token ids, their log-probabilities bit for bit, and their ranks."""
Mismatch = tuple[int, str]
"""Index of an output position, and what differs there."""
NO_ENDING = (None, None)
"""The ending of an answer that was ended from outside."""
CACHED = "cached tokens"
PREEMPTIONS = "preemptions"
DRAFTED = "draft tokens"
ACCEPTED = "accepted draft tokens"
"""Counters of a report, as users read them."""


@dataclass(frozen=True)
class Answer:
    """One completion. digests: of all bits of the logits in front of each token, where they were
    watched; ending: finish and stop reason; prompt_bits: log-probabilities of the prompt's tokens.
    """

    tokens: tuple[int, ...]
    bits: Bits
    metrics: RequestMetrics
    digests: tuple[int, ...] = ()
    ending: tuple[str | None, int | str | None] = NO_ENDING
    text: str = ""
    prompt_bits: Bits = ()

    def first_difference(self, other: "Answer", begun: bool = False) -> Mismatch | None:
        """The first output position that differs, and what differs there; None if none.

        begun: this one was ended from outside, so that it is the beginning of the other.
        """
        for index, (token, due_token) in enumerate(zip(self.tokens, other.tokens, strict=False)):
            if token != due_token:
                return index, f"token {token} instead of {due_token}"
            found = self.bits[index : index + 1]
            due = other.bits[index : index + 1]
            if found != due:
                return index, f"logprobs {found} instead of {due}"
            if self.digests[index : index + 1] != other.digests[index : index + 1]:
                return index, "the bits of the logits differ"
        if self.prompt_bits and self.prompt_bits != other.prompt_bits:
            return 0, _prompt_difference(self.prompt_bits, other.prompt_bits)
        return self._differs_in_the_end(other, begun)

    def first_logits_difference(self, other: "Answer") -> Mismatch | None:
        """The first output position whose logits differ, or which itself does, and what."""
        for index, (token, digest) in enumerate(zip(other.tokens, other.digests, strict=True)):
            if self.digests[index : index + 1] != (digest,):
                return index, "the bits of the logits differ"
            if self.tokens[index : index + 1] != (token,):
                return index, "the logits are equal, the token differs"
        return None

    def _differs_in_the_end(self, other: "Answer", begun: bool) -> Mismatch | None:
        """What differs where all tokens that both have are equal."""
        count = len(self.tokens)
        due_count = len(other.tokens)
        least = min(count, due_count)
        same = count == due_count and self.ending == other.ending
        if not same and not (begun and count <= due_count):
            return least, (
                f"{count} tokens, {self.ending} instead of {due_count} tokens, {other.ending}"
            )
        if begun:
            return None
        if len(self.prompt_bits) != len(other.prompt_bits):
            return 0, _prompt_difference(self.prompt_bits, other.prompt_bits)
        if self.text != other.text:
            return max(least - 1, 0), f"the text {self.text!r} instead of {other.text!r}"
        return None


def _prompt_difference(found: Bits, due: Bits) -> str:
    """What differs in the log-probabilities of the prompt's tokens."""
    if len(found) != len(due):
        return f"{len(found)} prompt logprobs instead of {len(due)}"
    index = next(i for i, pair in enumerate(zip(found, due, strict=True)) if pair[0] != pair[1])
    return f"prompt logprobs of token {index + 1}: {found[index]} instead of {due[index]}"


def as_bits(logprobs: Sequence[dict[int, Logprob] | None] | None) -> Bits:
    """Log-probabilities as what can be compared; the first prompt token has none."""
    return tuple(
        tuple((token, e.logprob.hex(), e.rank) for token, e in sorted((position or {}).items()))
        for position in logprobs or ()
    )


def took_place(answers: Iterable[Answer]) -> Counter[str]:
    """Sum the metrics of requests: counters of what the check exercised."""
    seen: Counter[str] = Counter()
    for metrics in (answer.metrics for answer in answers):
        seen[CACHED] += metrics.num_cached_tokens
        seen[PREEMPTIONS] += metrics.num_preemptions
        seen[DRAFTED] += metrics.num_draft_tokens
        seen[ACCEPTED] += metrics.num_accepted_tokens
    return seen
