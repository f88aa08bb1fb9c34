"""Computation of grammar masks for tests."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from lockstep.scheduling.grammar import GrammarMasks
from lockstep.text.grammars.compiler import Compiler


def every_token(compiler: Compiler) -> bytes:
    """Return the mask that allows every token."""
    return b"\xff" * compiler.mask_bytes


def allows(mask: bytes, token: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(mask[token // 8] >> token % 8 & 1)


def masks_of(grammar: Any, drafts: Sequence[int] = ()) -> list[bytes]:
    """Return the masks after an answer and after each draft, up to the first forbidden draft."""
    return together([grammar], [drafts])[0]


def together(grammars: Sequence[Any], drafts: Sequence[Sequence[int]]) -> list[list[bytes]]:
    """Return masks_of each grammar, computed in one call."""
    size = grammars[0].fill.__self__.mask_bytes
    width = 1 + max(len(line) for line in drafts)
    memory = bytearray(b"\xaa" * (len(grammars) * width * size))
    pairs = list(zip(grammars, drafts, strict=True))
    requested = [GrammarMasks(grammar, line, i * width) for i, (grammar, line) in enumerate(pairs)]
    indices = len(memory) // size
    grammars[0].fill(requested, memoryview(memory).cast("B", shape=[indices, size]))
    result = []
    for one in requested:
        expected = range(one.first, one.first + 1 + len(one.drafts))
        masks = [bytes(memory[index * size : (index + 1) * size]) for index in expected]
        legal = takewhile(lambda pair: allows(*pair), zip(masks, one.drafts, strict=False))
        result.append(masks[: 1 + len(list(legal))])
    return result
