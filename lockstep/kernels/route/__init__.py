"""route: the router of a mixture of experts."""

from lockstep.kernels.route.contract import (
    RouterOutput,
    Scoring,
    route,
    softmax,
    sortable_keys,
    top_indices,
)

__all__ = [
    "RouterOutput",
    "Scoring",
    "route",
    "softmax",
    "sortable_keys",
    "top_indices",
]
