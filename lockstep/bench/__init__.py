"""Offline benchmarks: what an answer costs, and whether drafts paid."""

from lockstep.bench.offline import Comparison, Figures, compare, measure

__all__ = ["Comparison", "Figures", "compare", "measure"]
