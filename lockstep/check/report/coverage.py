"""Coverage of a check: ops and their backends, drafters and sampling parameters.

The report lists what was not run, since the check proves nothing about it.
"""

from dataclasses import dataclass, field, fields

from lockstep.check import oracle_drafter
from lockstep.check.drafters import NO_DRAFTER
from lockstep.engine.engine import Engine
from lockstep.kernels.backends import all_ops
from lockstep.kernels.registry import Op
from lockstep.sampling_params import SamplingParams
from lockstep.spec import DRAFTERS
from lockstep.worker.capture import captured_halves
from lockstep.worker.executor import worker_of

ALL_DRAFTERS = (*DRAFTERS, oracle_drafter.NAME)

OUTSIDE_THE_ENGINE = frozenset(
    {
        "truncate_prompt_tokens",
        "output_kind",
        "thinking_token_budget",
        "forced_mismatch",
        "scored_from",
    },
)
"""Sampling parameters that the engine does not see: they change the prompt beforehand, choose how
outputs are returned, or become part of a grammar."""


NO_JOINT_STEPS = (
    "no scenario of this run had one; on a GPU only engines with CUDA graphs of whole steps do"
)
"""Reason why joint steps were not exercised."""
NO_EARLY_STARTS = "only CUDA graphs of whole steps have them, from compute capability 9.0 on"
"""Reason why no kernel started before the previous one ended."""


def engine_parameters() -> set[str]:
    """Return the names of the sampling parameters that reach the engine."""
    return set(SamplingParams.names()) - OUTSIDE_THE_ENGINE


@dataclass
class Coverage:
    """Coverage of a check.

    backends: names of the backends that ran, by op. refused: reason by backend, by op. drafters:
    drafters that ran. parameters: sampling parameters that differed from their defaults.
    refused_drafters: reason by drafter that the checkpoint does not support. has_engine: an engine
    was recorded, so that an op without a backend is none of its model's. has_joint_steps: a
    scenario had a decode step and a prompt step in one forward pass. has_early_starts: an engine's
    graphs had kernels that start before the previous one ends.
    """

    backends: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    drafters: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    refused_drafters: dict[str, str] = field(default_factory=dict)
    has_engine: bool = False
    has_joint_steps: bool = False
    has_early_starts: bool = False

    def record_engine(self, engine: Engine, drafter: str) -> None:
        """Record an engine with this drafter, or with "none"."""
        self.has_engine = True
        for choice in engine.explain()["layers"]:
            ran = {name.split(" ")[0] for name in choice["backend"].split(", ")}
            self.backends.setdefault(choice["op"], set()).update(ran)
            self.refused.setdefault(choice["op"], {}).update(choice["refused"])
        if drafter != NO_DRAFTER:
            self.drafters.add(drafter)
        if not self.has_early_starts:
            halves = captured_halves(worker_of(engine).run_step)
            self.has_early_starts = any(half.has_early_starts for half in halves)

    def record_params(self, params: SamplingParams) -> None:
        """Record the sampling parameters of a request."""
        for parameter in fields(params):
            if getattr(params, parameter.name) != parameter.default:
                self.parameters.add(parameter.name)

    def record_kernel(self, op: str, backend: str) -> None:
        """Record a backend that doctor examined."""
        self.backends.setdefault(op, set()).add(backend)

    def missing(self) -> list[tuple[str, str]]:
        """Return what was not run, each with the reason."""
        missing = [
            (f"drafter {name}", self.refused_drafters.get(name, "no engine of this run had it"))
            for name in ALL_DRAFTERS
            if name not in self.drafters
        ]
        unused = engine_parameters() - self.parameters
        missing += [
            (f"parameter {name}", "no request of this run had it")
            for name in SamplingParams.names()
            if name in unused
        ]
        if not self.has_joint_steps:
            missing.append(("joint steps", NO_JOINT_STEPS))
        if not self.has_early_starts:
            missing.append(("kernels that start early", NO_EARLY_STARTS))
        return missing + self._missing_ops() + self._missing_backends()

    def _missing_ops(self) -> list[tuple[str, str]]:
        """Return the ops that no layer chose."""
        missing = []
        for name, op in all_ops().items():
            if name not in self.backends:
                missing.append((f"op {name}", self._why_not_chosen(op)))
        return missing

    def _why_not_chosen(self, op: Op) -> str:
        """Return why no layer chose an op."""
        callers = [name for name in op.callers if name in self.backends]
        if callers:
            return f"no layer chooses it; backends of {', '.join(callers)} may run it"
        is_conditional = op.needed_for and self.has_engine
        reason = f"has {op.needed_for}" if is_conditional else "needed it"
        return f"no engine of this run {reason}"

    def _missing_backends(self) -> list[tuple[str, str]]:
        """Return the backends that did not run of ops that ran: ops by backend and reason."""
        ops_of: dict[tuple[str, str], list[str]] = {}
        for name, op in all_ops().items():
            if name not in self.backends:
                continue
            for backend in op.backends:
                if backend not in self.backends[name]:
                    refused = self.refused.get(name, {})
                    why = refused.get(backend) or "another backend is preferred"
                    ops_of.setdefault((backend, why), []).append(name)
        return [
            (f"backend {backend} of {', '.join(ops)}", why)
            for (backend, why), ops in ops_of.items()
        ]
