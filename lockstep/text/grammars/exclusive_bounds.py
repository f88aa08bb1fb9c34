"""Exclusive bounds at whole numbers: in some ranges llguidance 1.9.1 allows the bound itself.

For {"exclusiveMinimum": 0, "maximum": 0.5} its grammar allows 0: the range has no other whole
number, and the bound remains as the part before the point. Bounds with a fraction are obeyed. So is
the bound of a range that is further from 0. That bound must not be moved: for an upper bound 0.999
the grammar refuses 0.9 and 0.99 too.
"""

from decimal import Decimal
from typing import Any

from lockstep.text.grammars.multiples import combines, objects_in
from lockstep.text.grammars.numbers import LOWER, MAX_DIGITS, UPPER, is_number, to_decimal
from lockstep.text.grammars.rewriting import rewrite

STEP_FROM_ZERO = Decimal("1e-30")
"""Distance from 0 to the bound that replaces it."""
Json = dict[str, Any]


def move_whole_bounds(schema: Json) -> Json:
    """Return the schema with exclusive bounds moved inward from whole numbers where necessary.

    If schemas are combined, the opposite bound may be in another one, so that all are moved.
    """
    joined = any(map(combines, objects_in(schema)))

    def change(node: Json) -> Json:
        if node.get("type") == "integer":
            return node
        node = _moved(node, LOWER, UPPER, 1, joined)
        return _moved(node, UPPER, LOWER, -1, joined)

    moved: Json = rewrite(schema, change)
    return moved


def _moved(
    node: Json,
    keywords: tuple[str, str],
    opposite: tuple[str, str],
    direction: int,
    joined: bool,
) -> Json:
    """Return a number's schema with one exclusive bound moved.

    keywords: inclusive and exclusive keyword of the bound. opposite: those of the other bound.
    direction: 1 to move up, -1 to move down. joined: other schemas may have the opposite bound.
    """
    inclusive, exclusive = keywords
    # Draft 4 has a boolean, which makes the other keyword's bound exclusive.
    is_draft_4 = node.get(exclusive) is True
    bound: Any = node.get(inclusive if is_draft_4 else exclusive)
    if not is_number(bound) or bound != int(bound) or len(str(abs(int(bound)))) >= MAX_DIGITS:
        return node
    if int(bound) * direction < 0:  # this bound is further from 0 than the range
        return node
    opposite_bounds = [to_decimal(node[name]) for name in opposite if is_number(node.get(name))]
    widths = [(other - int(bound)) * direction for other in opposite_bounds]
    if not joined and not any(0 < width < 1 for width in widths):
        return node
    moved_bound = _nearest(int(bound), direction, min((w for w in widths if w > 0), default=None))
    if moved_bound is None:
        return node
    rest = {k: v for k, v in node.items() if not (is_draft_4 and k == inclusive)}
    return {**rest, exclusive: moved_bound}


def _nearest(bound: int, direction: int, width: Decimal | None) -> float | None:
    """Return a number of at most MAX_DIGITS digits near a whole one; None if there is none.

    width: distance to the opposite bound, which is not reached.
    """
    step = Decimal(1).scaleb(len(str(abs(bound))) - MAX_DIGITS) if bound else STEP_FROM_ZERO
    if width is not None and width <= step:
        if bound:
            return None
        step = Decimal(1).scaleb(width.adjusted() - 3)
    return float(bound + direction * step)
