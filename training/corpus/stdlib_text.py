"""Text of the Python installation: sources as documents, docstrings as filler."""

import random
import re
import sysconfig
from functools import cache
from pathlib import Path

from training.corpus import tasks, words

SKIP = ("test", "site-packages", "__pycache__", "idlelib", "lib2to3", "encodings", "turtledemo")
HELD_OUT = 20
"""Every 20th source file is for evaluation only."""

KINDS = {"def": "function", "class": "class"}
"""Keyword of a definition -> its name in a request."""
DEFINITION = re.compile(r"^(def|class) (\w+)(.*\n(?:(?:[ \t]+.*)?\n)+)", re.M)


@cache
def sources() -> tuple[str, ...]:
    """Return the standard library's source files in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if not any(
            part in SKIP or part.startswith("test") for part in path.parts[len(root.parts) :]
        ):
            text = path.read_text(errors="ignore")
            if len(text) > 400 and text.isascii():
                texts.append(text)
    return tuple(texts)


def split(evaluation: bool) -> list[str]:
    """Return the sources of the training or the evaluation side."""
    return [t for i, t in enumerate(sources()) if (i % HELD_OUT == 0) == evaluation]


@cache
def _cached_split(evaluation: bool) -> tuple[str, ...]:
    """Return the sources of one side as a tuple, cached."""
    return tuple(split(evaluation))


def document(rng: random.Random, characters: int, evaluation: bool) -> str:
    """Return consecutive lines of one source file."""
    text = rng.choice(_cached_split(evaluation))
    start = 0
    if len(text) > characters:
        start = text.rfind("\n", 0, rng.randrange(len(text) - characters // 2)) + 1
    return text[start : start + characters]


def load_filler() -> None:
    """Fill FILLER, SOURCES and DEFINITIONS of tasks, and words.VOCABULARY."""
    if tasks.FILLER:
        return
    seen: set[str] = set()
    tasks.SOURCES.update({side: _cached_split(side) for side in (False, True)})
    for text in _cached_split(False):
        for kind, name, body in DEFINITION.findall(text):
            source = f"{kind} {name}{body}".rstrip()
            if '"""' in source and len(source) < 900:
                tasks.DEFINITIONS.append((KINDS[kind], name, source))
        for doc in re.findall(r'"""(.+?)"""', text, re.S):
            for paragraph in doc.split("\n\n"):
                flat = " ".join(paragraph.split())
                if 60 < len(flat) < 600 and flat[0].isalpha():
                    tasks.FILLER.append(
                        [s.strip() + "." for s in flat.split(". ") if s.strip(" .")]
                    )
                    seen.update(re.findall(r"\b[a-z]{3,12}\b", flat))
    words.VOCABULARY.extend(sorted(seen))
