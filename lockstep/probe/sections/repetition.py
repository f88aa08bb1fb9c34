"""Repetition: loops and collapsing vocabulary in long answers."""

from lockstep.probe.report import FAULT, Section
from lockstep.probe.session import Session
from lockstep.probe.texts import collapse, loop_at_end

PROMPTS = {
    "essay": "Write an essay of 300 words about the history of paper.",
    "story": "Tell a story about a clockmaker and a storm, with dialogue.",
    "explanation": "Explain step by step how a bicycle stays upright.",
}
MAX_TOKENS = 320


def run(session: Session, section: Section) -> None:
    """Ask for long answers, greedy and sampled, and look for loops and cascades.

    A small model loops on any server, so both are warnings.
    """
    requests = [
        {"prompt": prompt, "max_tokens": MAX_TOKENS, **sampling}
        for prompt in PROMPTS.values()
        for sampling in ({}, {"temperature": 0.8, "seed": 1})
    ]
    labels = [f"{name}, {how}" for name in PROMPTS for how in ("greedy", "temperature 0.8")]
    answers = session.ask_all(requests, 2)
    loops = cascades = 0
    texts = [(label, a.output) for label, a in zip(labels, answers, strict=False) if a.ok]
    for label, text in texts:
        unit = loop_at_end(text)
        word = collapse(text)
        if unit is not None:
            loops += 1
            section.warn("an answer ends in a loop", f"{label}: {unit.strip()[:60]!r}")
        elif word is not None:
            cascades += 1
            part = " ".join(text.split()[word : word + 10])
            section.warn("the vocabulary of an answer collapses", f"{label}: {part[:80]!r}")
        if "\ufffd" in text:
            section.add(FAULT, "an answer has broken characters", f"{label}: U+FFFD")
    if texts:
        section.figures["answers that end in a loop"] = f"{loops} of {len(texts)}"
        section.figures["answers whose vocabulary collapses"] = f"{cascades} of {len(texts)}"
