"""Masks of grammars, as a step gets them."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from lockstep.scheduling.grammar import Wanted
from lockstep.text.grammars.compiler import Compiler


def every_token(compiler: Compiler) -> bytes:
    """The mask that allows all."""
    return b"\xff" * compiler.mask_bytes


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask lets a token come."""
    return bool(mask[token // 8] >> token % 8 & 1)


def masks_of(grammar: Any, drafts: Sequence[int] = ()) -> list[bytes]:
    """The masks behind an answer and behind each draft, up to one that may not come itself."""
    return together([grammar], [drafts])[0]


def together(grammars: Sequence[Any], drafts: Sequence[Sequence[int]]) -> list[list[bytes]]:
    """masks_of each, made side by side: so many places in a row of the step as the most drafts."""
    size = grammars[0].fill.__self__.mask_bytes
    width = 1 + max(len(line) for line in drafts)
    memory = bytearray(b"\xaa" * (len(grammars) * width * size))
    pairs = list(zip(grammars, drafts, strict=True))
    wanted = [Wanted(grammar, line, i * width) for i, (grammar, line) in enumerate(pairs)]
    places = len(memory) // size
    grammars[0].fill(wanted, memoryview(memory).cast("B", shape=[places, size]))
    found = []
    for one in wanted:
        own = range(one.first, one.first + 1 + len(one.drafts))
        masks = [bytes(memory[place * size : (place + 1) * size]) for place in own]
        legal = takewhile(lambda pair: allows(*pair), zip(masks, one.drafts, strict=False))
        found.append(masks[: 1 + len(list(legal))])
    return found
