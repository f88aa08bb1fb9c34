"""Outputs in a form that is compared bit for bit, and event counters of their runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.outputs import Logprob, RequestMetrics

Bits = tuple[tuple[tuple[int, str, int], ...], ...]
"""Per position: token ids, their log-probabilities as hexadecimal text, and their ranks."""
Mismatch = tuple[int, str]
"""Index of an output position, and a description of the difference."""
NO_ENDING = (None, None)
"""Ending of an aborted output."""
CACHED = "cached tokens"
PREEMPTIONS = "preemptions"
DRAFTED = "draft tokens"
ACCEPTED = "accepted draft tokens"
"""Names of counters in a report."""


@dataclass(frozen=True)
class Answer:
    """Output of one completion.

    digests: digest of the logits of each token, if observed. ending: finish and stop reason.
    prompt_bits: log-probabilities of the prompt tokens.
    """

    tokens: tuple[int, ...]
    bits: Bits
    metrics: RequestMetrics
    digests: tuple[int, ...] = ()
    ending: tuple[str | None, int | str | None] = NO_ENDING
    text: str = ""
    prompt_bits: Bits = ()

    def first_difference(self, other: "Answer", begun: bool = False) -> Mismatch | None:
        """Return the first output position that differs and the difference, or None.

        begun: this output was aborted, so it must be a prefix of the other.
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
        """Return the first position whose logits or tokens differ, and the difference, or None."""
        for index, (token, digest) in enumerate(zip(other.tokens, other.digests, strict=True)):
            if self.digests[index : index + 1] != (digest,):
                return index, "the bits of the logits differ"
            if self.tokens[index : index + 1] != (token,):
                return index, "the logits are equal, the token differs"
        return None

    def _differs_in_the_end(self, other: "Answer", begun: bool) -> Mismatch | None:
        """Compare lengths, endings and texts of two outputs whose common tokens are equal."""
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
    """Describe the first difference of prompt log-probabilities."""
    if len(found) != len(due):
        return f"{len(found)} prompt logprobs instead of {len(due)}"
    index = next(i for i, pair in enumerate(zip(found, due, strict=True)) if pair[0] != pair[1])
    return f"prompt logprobs of token {index + 1}: {found[index]} instead of {due[index]}"


def as_bits(logprobs: Sequence[dict[int, Logprob] | None] | None) -> Bits:
    """Convert log-probabilities to comparable values; the first prompt token has none."""
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
