"""Seeded sampling: equal seeds give equal answers, other seeds give others."""

from lockstep.probe.report import Section
from lockstep.probe.session import Session, refusal

PROMPT = "Write a sentence of twelve random words."
SEEDS = 6
REPEATED = 3


def run(session: Session, section: Section) -> None:
    """Sample with several seeds, and repeat some of them."""
    sampled = {"temperature": 1.2, "max_tokens": 32}
    requests = [{"prompt": PROMPT, "seed": seed, **sampled} for seed in range(1, SEEDS + 1)]
    first = session.ask_all(requests, 1)
    refused = refusal(first)
    if refused is not None:
        section.unsupported["seed"] = refused.detail
        return
    again = session.ask_all(requests[:REPEATED], 1)
    together = session.ask_all(requests[:REPEATED], REPEATED)
    texts = [answer.output for answer in first if answer.ok]
    pairs = [
        (how, original.output, other.output)
        for how, repeats in (("alone", again), ("at the same time", together))
        for original, other in zip(first, repeats, strict=False)
        if original.ok and other.ok
    ]
    if len(texts) < 2:
        return
    section.figures["different answers of different seeds"] = f"{len(set(texts))} of {len(texts)}"
    equal = sum(original == other for _, original, other in pairs)
    section.figures["equal answers of equal seeds"] = f"{equal} of {len(pairs)}"
    if len(set(texts)) == 1:
        section.fault("all seeds give the same answer", f"temperature 1.2: {texts[0][:80]!r}")
    for how, original, other in pairs:
        if original != other:
            section.warn(
                f"a seed does not repeat its answer {how}",
                f"{original[:60]!r}, then {other[:60]!r}",
            )
