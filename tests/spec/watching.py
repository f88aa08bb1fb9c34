"""What drafters are asked and answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.worker.program import Drafter


@dataclass
class Seen:
    """found: for each row of each step its known tokens, and its drafts. make: the drafter's;
    context: what it was made with."""

    make: Callable[[Any], Drafter]
    found: list[tuple[list[int], list[int]]] = field(default_factory=list)
    context: Any = None

    def begun_with(self, of: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
        """Known tokens -> `of` the longest ones that begin with them, which is asked once."""
        every = {tuple(known) for known, _ in self.found}
        longest = [k for k in every if not any(o != k and o[: len(k)] == k for o in every)]
        asked = [(list(text), of(list(text))) for text in longest]
        return lambda known: next(told for text, told in asked if text[: len(known)] == known)

    def create(self, context: Any) -> Any:
        """The drafter, watched."""
        inner = self.make(context)
        self.context = context
        seen = self

        class Watched:
            def propose(self, step: Any, *others: Any) -> None:
                inner.propose(step, *others)
                count = step.shape.next_drafts
                for row in step.row_ids.tolist():
                    known = context.tokens[row, : int(context.computed[row]) + 1].tolist()
                    if row and count:
                        seen.found.append((known, context.drafts[row, :count].tolist()))

        return Watched()
