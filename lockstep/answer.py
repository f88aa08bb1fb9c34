"""Answer of a completion in a form that is compared bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.outputs import Logprob, RequestMetrics

ExactLogprobs = tuple[tuple[tuple[int, str, int], ...], ...]
"""Per position: token ids, their log-probabilities as hexadecimal text, and their ranks."""
Mismatch = tuple[int, str]
"""(index of an output position, description of the difference there)."""
NO_ENDING = (None, None)
"""Ending of an aborted output."""


@dataclass(frozen=True)
class Answer:
    """Output of one completion.

    digests: digest of the logits of each token, empty if they were not observed. ending: finish and
    stop reason. prompt_logprobs: log-probabilities of the prompt tokens.
    """

    tokens: tuple[int, ...]
    logprobs: ExactLogprobs
    metrics: RequestMetrics
    digests: tuple[int, ...] = ()
    ending: tuple[str | None, int | str | None] = NO_ENDING
    text: str = ""
    prompt_logprobs: ExactLogprobs = ()

    def first_difference(self, other: "Answer", aborted: bool = False) -> Mismatch | None:
        """Return the first output position that differs and the difference, or None.

        aborted: this output was aborted, so it must be a prefix of the other.
        """
        for index, (token, expected_token) in enumerate(
            zip(self.tokens, other.tokens, strict=False)
        ):
            if token != expected_token:
                return index, f"token {token} instead of {expected_token}"
            logprobs = self.logprobs[index : index + 1]
            expected = other.logprobs[index : index + 1]
            if logprobs != expected:
                return index, f"logprobs {logprobs} instead of {expected}"
            # Two logit rows may differ where sampling is still equal; digests see that too.
            if self.digests[index : index + 1] != other.digests[index : index + 1]:
                return index, "the bits of the logits differ"
        if self.prompt_logprobs and self.prompt_logprobs != other.prompt_logprobs:
            return 0, _prompt_difference(self.prompt_logprobs, other.prompt_logprobs)
        return self._ending_difference(other, aborted)

    def first_logits_difference(self, other: "Answer") -> Mismatch | None:
        """Return the first position whose logits or tokens differ, and the difference, or None."""
        for index, (token, digest) in enumerate(zip(other.tokens, other.digests, strict=True)):
            if self.digests[index : index + 1] != (digest,):
                return index, "the bits of the logits differ"
            if self.tokens[index : index + 1] != (token,):
                return index, "the logits are equal, the token differs"
        return None

    def _ending_difference(self, other: "Answer", aborted: bool) -> Mismatch | None:
        """Compare lengths, endings and texts of two outputs whose common tokens are equal."""
        count = len(self.tokens)
        expected_count = len(other.tokens)
        common_length = min(count, expected_count)
        same = count == expected_count and self.ending == other.ending
        if not same and not (aborted and count <= expected_count):
            return common_length, (
                f"{count} tokens, {self.ending} instead of {expected_count} tokens, {other.ending}"
            )
        if aborted:
            if other.text.startswith(self.text):
                return None
            return (
                common_length,
                f"the text {self.text!r}, which {other.text!r} does not begin with",
            )
        if len(self.prompt_logprobs) != len(other.prompt_logprobs):
            return 0, _prompt_difference(self.prompt_logprobs, other.prompt_logprobs)
        if self.text != other.text:
            return max(common_length - 1, 0), f"the text {self.text!r} instead of {other.text!r}"
        return None


def _prompt_difference(actual: ExactLogprobs, expected: ExactLogprobs) -> str:
    """Describe the first difference of prompt log-probabilities."""
    if len(actual) != len(expected):
        return f"{len(actual)} prompt logprobs instead of {len(expected)}"
    index = next(
        i for i, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]
    )
    return f"prompt logprobs of token {index + 1}: {actual[index]} instead of {expected[index]}"


def exact_logprobs(logprobs: Sequence[dict[int, Logprob] | None] | None) -> ExactLogprobs:
    """Convert log-probabilities to comparable values; the first prompt token has none."""
    # float.hex is exact: decimal text with rounding would hide a difference of one bit.
    return tuple(
        tuple(
            (token, entry.logprob.hex(), entry.rank)
            for token, entry in sorted((position or {}).items())
        )
        for position in logprobs or ()
    )
