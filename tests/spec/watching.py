"""Record the drafts of a drafter with the tokens known at each step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.worker.program import Drafter


@dataclass
class RecordedDrafts:
    """Recorder of a drafter.

    drafts: for each row of each step its known tokens and its drafts. make: creates the drafter;
    context: what it was created with.
    """

    make: Callable[[Any], Drafter]
    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    context: Any = None

    def by_longest_prefix(self, of: Callable[[list[int]], Any]) -> Callable[[list[int]], Any]:
        """Return a function: known tokens -> `of` the longest recorded tokens that begin with them,
        computed once."""
        every = {tuple(known) for known, _ in self.drafts}
        longest = [k for k in every if not any(o != k and o[: len(k)] == k for o in every)]
        requested = [(list(text), of(list(text))) for text in longest]
        return lambda known: next(
            received for text, received in requested if text[: len(known)] == known
        )

    def create(self, context: Any) -> Any:
        """Return the drafter with recording."""
        inner = self.make(context)
        self.context = context
        seen = self

        class Watched:
            def propose(self, step: Any, *args: Any) -> None:
                inner.propose(step, *args)
                count = step.shape.next_drafts
                for row in step.row_ids.tolist():
                    known = context.tokens[row, : int(context.computed[row]) + 1].tolist()
                    if row and count:
                        seen.drafts.append((known, context.drafts[row, :count].tolist()))

        return Watched()
