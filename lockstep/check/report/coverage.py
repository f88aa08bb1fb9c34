"""Coverage of a check: ops and their backends, drafters and sampling parameters.

The report lists what was not run, since the check proves nothing about it.
"""

from dataclasses import dataclass, field, fields

from lockstep.check import oracle_drafter
from lockstep.check.drafters import NO_DRAFTER
from lockstep.engine.engine import Engine
from lockstep.kernels.backends import all_ops
from lockstep.sampling_params import SamplingParams
from lockstep.spec import DRAFTERS

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


def engine_parameters() -> set[str]:
    """Return the names of the sampling parameters that reach the engine."""
    return set(SamplingParams.names()) - OUTSIDE_THE_ENGINE


@dataclass
class Coverage:
    """Coverage of a check.

    backends: names of the backends that ran, by op. refused: reason by backend, by op. drafters:
    drafters that ran. parameters: sampling parameters that differed from their defaults.
    """

    backends: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    drafters: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)

    def record_engine(self, engine: Engine, drafter: str) -> None:
        """Record an engine with this drafter, or with "none"."""
        for choice in engine.explain()["layers"]:
            ran = {name.split(" ")[0] for name in choice["backend"].split(", ")}
            self.backends.setdefault(choice["op"], set()).update(ran)
            self.refused.setdefault(choice["op"], {}).update(choice["refused"])
        if drafter != NO_DRAFTER:
            self.drafters.add(drafter)

    def record_params(self, params: SamplingParams) -> None:
        """Record the sampling parameters of a request."""
        for parameter in fields(params):
            if getattr(params, parameter.name) != parameter.default:
                self.parameters.add(parameter.name)

    def missing(self) -> list[str]:
        """Return what was not run, with the reason if it is known."""
        missing = [f"drafter {name}" for name in ALL_DRAFTERS if name not in self.drafters]
        unused = engine_parameters() - self.parameters
        missing += [f"parameter {name}" for name in SamplingParams.names() if name in unused]
        for name, op in all_ops().items():
            ran = self.backends.get(name, set())
            if not ran:
                missing.append(f"op {name}")
                continue
            for backend in op.backends:
                if backend not in ran:
                    why = self.refused[name].get(backend, "another backend is preferred")
                    missing.append(f"{name} by {backend}: {why}")
        return missing
