"""Drift: the same requests for some minutes; their answers, speed and acceptance over time."""

import math
import re
import time

from lockstep.probe.report import Plot, Section
from lockstep.probe.session import Session
from lockstep.probe.texts import loop_at_end, mean

INTERVAL = 5.0
"""Minimum seconds between two rounds."""
PROMPTS = ("List the first 20 primes.", "Write a paragraph about a harbour.")
MAX_TOKENS = 64
REQUESTS_PER_MINUTE = (len(PROMPTS) + 1) * 60 / INTERVAL
"""Requests that --minutes adds to --requests; one of each round reads /metrics."""
SLOWER = 0.7
"""Speed of the last quarter relative to the first, below which it is a finding."""
METRIC = re.compile(
    r"^vllm:spec_decode_num_(accepted|draft)_tokens(?:_total)?(?:\{[^}\n]*\})?[ \t]+([\d.eE+-]+)",
    re.MULTILINE,
)


def run(session: Session, section: Section) -> None:
    """Repeat the requests for session.minutes; without minutes the section does not run."""
    if not session.minutes:
        section.stopped = "not asked for: --minutes"
        return
    end = time.monotonic() + 60 * session.minutes
    first: dict[str, str] = {}
    rates: list[tuple[float, float]] = []
    acceptance: list[tuple[float, float]] = []
    equal = compared = loops = 0
    started = time.monotonic()
    before = _drafts(session)
    while time.monotonic() < end:
        round_started = time.monotonic()
        minute = (round_started - started) / 60
        for prompt in PROMPTS:
            answer = session.ask(prompt, max_tokens=MAX_TOKENS)
            if not answer.ok:
                continue
            loops += loop_at_end(answer.output) is not None
            if prompt in first:
                compared += 1
                equal += first[prompt] == answer.output
            first.setdefault(prompt, answer.output)
            if answer.tokens:
                rates.append((minute, answer.tokens / max(answer.seconds, 1e-6)))
        after = _drafts(session)
        if before is not None and after is not None and after[1] > before[1]:
            rate = (after[0] - before[0]) / (after[1] - before[1])
            acceptance.append((minute, 100 * rate))
        before = after
        time.sleep(max(min(round_started + INTERVAL, end) - time.monotonic(), 0))
    section.figures["minutes"] = round(session.minutes, 2)
    section.figures["identical answers"] = f"{equal} of {compared}"
    section.figures["answers that end in a loop"] = loops
    if compared > equal:
        section.warn("answers change over time", f"{equal} of {compared} identical")
    _report(section, rates, acceptance)


def _drafts(session: Session) -> tuple[float, float] | None:
    """Return the (accepted, drafted) tokens of /metrics under vLLM's names, or None."""
    text = session.server.get_text("/metrics")
    totals = {"accepted": 0.0, "draft": 0.0}
    matches = METRIC.findall(text or "")
    for kind, value in matches:
        try:
            totals[kind] += float(value)
        except ValueError:
            return None
    is_known = matches and all(math.isfinite(total) for total in totals.values())
    return (totals["accepted"], totals["draft"]) if is_known else None


def _report(
    section: Section, rates: list[tuple[float, float]], acceptance: list[tuple[float, float]]
) -> None:
    quarter = len(rates) // 4
    if quarter:
        begin, last = (mean([y for _, y in part]) for part in (rates[:quarter], rates[-quarter:]))
        section.figures["tokens/s, first quarter"] = begin
        section.figures["tokens/s, last quarter"] = last
        if last < SLOWER * begin:
            section.warn("the server slows down", f"{begin:.1f}, then {last:.1f} tokens/s")
    if rates:
        section.plots.append(Plot("Tokens/s over time", "minute", "tokens/s", {"answers": rates}))
    if acceptance:
        section.figures["acceptance rate, %"] = mean([y for _, y in acceptance])
        plot = Plot("Acceptance rate over time", "minute", "%", {"drafts": acceptance})
        section.plots.append(plot)
    else:
        section.unsupported["acceptance rate"] = "/metrics has no spec_decode counters"
