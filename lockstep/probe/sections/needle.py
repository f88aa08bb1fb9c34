"""Needle ladder: one fact in prompts of growing length, up to the server's limit."""

from collections.abc import Iterator

from lockstep.probe.answers import Answer
from lockstep.probe.http import REFUSED
from lockstep.probe.report import Plot, Section, Table
from lockstep.probe.session import Session

FIRST = 256
"""Tokens of the first rung; each rung doubles."""
DEPTHS = (0.25, 0.75)
RESERVED = 96
"""Tokens of the context that the question and the answer need."""
DEFAULT_CONTEXT = 131_072
"""Tokens of the last rung unless the user or the server limits it."""
MAX_CONTEXT = 1 << 21
"""Maximum tokens of the last rung, whatever context length the server names."""
MAX_CHARS_PER_TOKEN = 16.0
"""Maximum characters of a prompt per token: a server that counts too few gets no larger prompts."""
FILLER = (
    "The river runs past the mill and the old stone bridge. ",
    "In the evening the market closes and the lamps are lit. ",
    "A gardener waters the roses before the sun is high. ",
    "The train from the coast arrives a little after noon. ",
)
TRUNCATED = 0.7
"""Counted tokens below this share of the expected ones mean that the prompt was cut."""


def run(session: Session, section: Section) -> None:
    """Climb until the server's limit, and report the longest prompt in which the fact was found."""
    code = str(session.rng.randrange(1000, 10_000))
    chars_per_token = _measure(session, section, code)
    if chars_per_token is None:
        return
    limit = session.max_context or session.max_model_len or DEFAULT_CONTEXT
    limit = min(limit, session.max_model_len or MAX_CONTEXT, MAX_CONTEXT)
    rows: list[tuple[int, float, bool, float]] = []
    try:
        for size in _sizes(limit - RESERVED):
            for depth in DEPTHS:
                answer = _ask(session, size, depth, code, chars_per_token)
                if answer.failure is not None and answer.failure.kind == REFUSED:
                    section.unsupported[f"a prompt of {size:,} tokens"] = answer.failure.detail
                    return
                if not answer.ok:
                    continue
                counted = answer.prompt_tokens
                if counted is not None and counted < TRUNCATED * size:
                    section.fault(
                        "a long prompt is cut without an error",
                        f"about {size:,} tokens were sent, {counted:,} were read",
                    )
                rows.append((counted or size, depth, code in answer.output, answer.seconds))
    finally:
        _report(section, rows)


def _measure(session: Session, section: Section, code: str) -> float | None:
    """Return the characters per token of the filler, by the server's count."""
    prompts = [_text(size, 0.5, code) for size in (400, 1600)]
    answers = [session.ask(prompt, max_tokens=1) for prompt in prompts]
    counts = [answer.prompt_tokens for answer in answers]
    if counts[0] is None or counts[1] is None or counts[1] <= counts[0]:
        failure = next((answer.failure for answer in answers if answer.failure), None)
        why = failure.detail if failure else "the server does not count the tokens of a prompt"
        section.unsupported["needle ladder"] = why
        return None
    chars_per_token = (len(prompts[1]) - len(prompts[0])) / (counts[1] - counts[0])
    return min(chars_per_token, MAX_CHARS_PER_TOKEN)


def _sizes(limit: int) -> Iterator[int]:
    size = FIRST
    while size < limit:
        yield size
        size *= 2
    if limit > 0:
        yield limit


def _text(characters: int, depth: float, code: str) -> str:
    """Return a prompt with about this many characters of filler and the fact at a depth."""
    sentences: list[str] = []
    length = 0
    while length < characters:
        sentences.append(FILLER[len(sentences) % len(FILLER)])
        length += len(sentences[-1])
    sentences.insert(int(depth * len(sentences)), f"The secret code of the vault is {code}. ")
    return "".join(sentences) + "\nWhat is the secret code of the vault? Answer with the number."


def _ask(session: Session, size: int, depth: float, code: str, chars_per_token: float) -> Answer:
    characters = max(int((size - RESERVED // 2) * chars_per_token), 1)
    return session.ask(_text(characters, depth, code), max_tokens=24)


def _report(section: Section, rows: list[tuple[int, float, bool, float]]) -> None:
    if not rows:
        return
    by_size: dict[int, list[bool]] = {}
    for tokens, _, was_found, _ in rows:
        by_size.setdefault(tokens, []).append(was_found)
    complete = [tokens for tokens, results in by_size.items() if all(results)]
    lost = [tokens for tokens, results in by_size.items() if not all(results)]
    section.figures["found"] = f"{sum(row[2] for row in rows)} of {len(rows)}"
    section.figures["longest prompt, tokens"] = max(by_size)
    section.figures["longest prompt with the fact found, tokens"] = max(complete, default=0)
    if lost and complete and max(lost) > max(complete):
        first = min(tokens for tokens in lost if tokens > max(complete))
        section.warn("the fact is lost in longer prompts", f"from {first:,} tokens on")
    cells = tuple(
        (f"{tokens:,}", f"{depth:.0%}", "found" if was_found else "lost", f"{seconds:.2f}")
        for tokens, depth, was_found, seconds in rows
    )
    section.tables.append(Table(("prompt, tokens", "depth", "fact", "seconds"), cells))
    points = [(float(tokens), seconds) for tokens, _, _, seconds in rows]
    section.plots.append(
        Plot("Seconds per answer by prompt length", "prompt, tokens", "seconds", {"answer": points})
    )
