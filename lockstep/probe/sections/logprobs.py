"""Log-probabilities: whether the numbers of a greedy answer can be true."""

from collections.abc import Iterator
from math import exp

from lockstep.probe.answers import Answer, Position
from lockstep.probe.report import Section
from lockstep.probe.session import Session, refusal

TOP = 5
"""Number of top log-probabilities per token."""
ROUNDING = 2e-3
"""Difference in nats that rounding explains."""
PROMPTS = (
    "Name three fruits.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List the first 8 primes.",
)


def run(session: Session, section: Section) -> None:
    """Ask for log-probabilities, streamed and not, and check each position."""
    params = {"logprobs": True, "top_logprobs": TOP, "max_tokens": 24}
    requests = [{"prompt": prompt, **params} for prompt in PROMPTS]
    requests += [{"prompt": prompt, "stream": True, **params} for prompt in PROMPTS[:2]]
    answers = session.ask_all(requests, 2)
    refused = refusal(answers)
    if refused is not None:
        section.unsupported["logprobs"] = refused.detail
        return
    answered = [answer for answer in answers if answer.ok and answer.output]
    with_positions = [answer for answer in answered if answer.positions]
    if answered and not with_positions:
        section.unsupported["logprobs"] = "accepted, but the answers have none"
        return
    session.has_logprobs = bool(with_positions)
    for answer in with_positions:
        for position in answer.positions:
            for name, detail in _contradictions(position):
                section.fault(name, detail)
        _check_text(answer, section)
    section.figures["positions checked"] = sum(len(a.positions) for a in with_positions)
    section.figures["answers with log-probabilities"] = f"{len(with_positions)} of {len(answered)}"


def _contradictions(position: Position) -> Iterator[tuple[str, str]]:
    """Yield (name, detail) for what cannot be true of one position of a greedy answer."""
    token = f"token {position.token[:20]!r}"
    top = list(position.top)
    values = [logprob for _, logprob in top]
    if max([position.logprob, *values]) > ROUNDING:
        yield "a log-probability is above 0", f"{token}: {max([position.logprob, *values]):.4f}"
    listed = [logprob for name, logprob in top if name == position.token]
    total = sum(exp(min(value, 50.0)) for value in values)
    if not listed:
        total += exp(min(position.logprob, 50.0))
    if total > 1 + ROUNDING:
        yield "probabilities add up to more than 1", f"{token}: {total:.4f}"
    if any(after > before + 1e-6 for before, after in zip(values, values[1:], strict=False)):
        yield "top_logprobs are not sorted", f"{token}: {[round(v, 4) for v in values]}"
    if len(top) > TOP + 1:
        yield "more top_logprobs than asked for", f"{token}: {len(top)}"
    if values and position.logprob < max(values) - ROUNDING:
        yield (
            "a greedy answer's token is not the most likely one",
            f"{token}: {position.logprob:.4f}, the largest is {max(values):.4f}",
        )
    if listed and min(abs(value - position.logprob) for value in listed) > ROUNDING:
        yield (
            "a token has two different log-probabilities",
            f"{token}: {position.logprob:.4f}, in top_logprobs {listed[0]:.4f}",
        )


def _check_text(answer: Answer, section: Section) -> None:
    """Check that the tokens of the log-probabilities are those of the answer."""
    text = "".join(position.token for position in answer.positions)
    # Tokens of an incomplete character, of special meaning or of markup are no plain text.
    if answer.reasoning or answer.tool_calls or "\ufffd" in text + answer.text:
        return
    if answer.text.strip() not in text:
        detail = f"tokens {text[:60]!r}, answer {answer.text[:60]!r}"
        section.fault("the tokens of logprobs are not the answer's", detail)
