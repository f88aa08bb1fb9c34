"""Stop strings: parts of a known answer, within a token and across tokens."""

from typing import Any

from lockstep.probe.report import Section
from lockstep.probe.session import Session, refusal

PROMPTS = ("List the first 15 primes.", "Write two sentences about a river.")
MAX_TOKENS = 64


def run(session: Session, section: Section) -> None:
    """Ask again with a part of the answer as stop string, streamed and not."""
    checked = 0
    for prompt in PROMPTS:
        base = session.ask(prompt, max_tokens=MAX_TOKENS)
        stops = _stops(base.text) if base.ok else []
        if not stops:
            continue
        requests: list[dict[str, Any]] = [
            {"prompt": prompt, "max_tokens": MAX_TOKENS, "stop": [stop], "stream": stream}
            for stop in stops
            for stream in (False, True)
        ]
        answers = session.ask_all(requests, 1)
        refused = refusal(answers)
        if refused is not None:
            section.unsupported["stop"] = refused.detail
            return
        for request, answer in zip(requests, answers, strict=False):
            if not answer.ok:
                continue
            checked += 1
            stop = request["stop"][0]
            how = "streamed" if request["stream"] else "plain"
            where = f"stop {stop!r}, {how}: {answer.text[-60:]!r}"
            expected = base.text[: base.text.index(stop)]
            if stop in answer.text:
                section.fault("an answer contains its stop string", where)
            elif not expected.startswith(answer.text) and not answer.text.startswith(expected):
                section.warn("an answer changes when a stop string is given", where)
            elif expected != answer.text:
                detail = f"{where}, expected the end {expected[-40:]!r}"
                section.warn("an answer does not end at its stop string", detail)
            elif answer.finish_reason != "stop":
                section.fault(
                    "an answer that a stop string ended has another finish_reason",
                    f"{answer.finish_reason}, {where}",
                )
    if checked:
        section.figures["answers with stop strings"] = checked
    else:
        section.unsupported["stop"] = "the model's answers are too short to be stopped"


def _stops(text: str) -> list[str]:
    """Return stop strings of an answer: a part of a word, and one that crosses a space."""
    middle = len(text) // 2
    # Two letters are mostly a part of one token; letter, space, letter always span two.
    inside = text[middle : middle + 2]
    space = text.find(" ", middle)
    across = text[space - 1 : space + 2] if 0 < space < len(text) - 2 else ""
    return [stop for stop in (inside, across) if stop.strip() and text.index(stop) > 0]
