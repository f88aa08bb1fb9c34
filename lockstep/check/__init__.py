"""Conformance check: prove that optimizations never change an output."""

from lockstep.check.audit_replay import replay_audit
from lockstep.check.matrix.setups import SIZES
from lockstep.check.report.report import Interrupted, Report
from lockstep.check.run import run_check, run_replay
from lockstep.check.scenarios.examiner import Effort
from lockstep.check.scenarios.scenario import Scenario, read_replay, read_scenario
from lockstep.check.sections import SECTIONS
from lockstep.check.shard import Shard

__all__ = [
    "SECTIONS",
    "SIZES",
    "Effort",
    "Interrupted",
    "Report",
    "Scenario",
    "Shard",
    "read_replay",
    "read_scenario",
    "replay_audit",
    "run_check",
    "run_replay",
]
