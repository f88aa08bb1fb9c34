"""The conformance check that ships with the product: the answer never changes, shown here."""

from lockstep.check.logits import run_logits
from lockstep.check.matrix import SIZES
from lockstep.check.report import Report
from lockstep.check.tokens import run_check

__all__ = ["SIZES", "Report", "run_check", "run_logits"]
