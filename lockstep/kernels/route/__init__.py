"""route: the router of a mixture of experts."""

from lockstep.kernels.route.contract import Routed, Scoring, best, order_of, route, softmax, summed

__all__ = ["Routed", "Scoring", "best", "order_of", "route", "softmax", "summed"]
