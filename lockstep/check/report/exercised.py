"""Coverage of a check: ops and their backends, drafters and sampling parameters.

The report lists what was not run, since the check proves nothing about it.
"""

from dataclasses import dataclass, field, fields

from lockstep.check import oracle_drafter
from lockstep.check.drafters import NONE
from lockstep.engine.engine import Engine
from lockstep.kernels.backends import all_ops
from lockstep.sampling_params import SamplingParams
from lockstep.spec import DRAFTERS

EVERY_DRAFTER = (*DRAFTERS, oracle_drafter.NAME)


OUTSIDE_THE_ENGINE = frozenset(
    {"truncate_prompt_tokens", "output_kind", "thinking_token_budget"},
)
"""Sampling parameters that act on the prompt before the engine or on how answers are returned, and
those that reach the engine as a grammar, as structured_outputs do."""


def engine_parameters() -> set[str]:
    """Return the names of the sampling parameters that reach the engine."""
    return set(SamplingParams.names()) - OUTSIDE_THE_ENGINE


@dataclass
class Exercised:
    """Coverage of a check.

    backends: backends that ran, by op. refused: reasons why a backend was not chosen, by op.
    """

    backends: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    drafters: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)

    def engine(self, engine: Engine, drafter: str) -> None:
        """Record an engine with this drafter, or with "none"."""
        for choice in engine.explain()["layers"]:
            served = {name.split(" ")[0] for name in choice["backend"].split(", ")}
            self.backends.setdefault(choice["op"], set()).update(served)
            self.refused.setdefault(choice["op"], {}).update(choice["refused"])
        if drafter != NONE:
            self.drafters.add(drafter)

    def params(self, params: SamplingParams) -> None:
        """Record the sampling parameters of a request."""
        for known in fields(params):
            if getattr(params, known.name) != known.default:
                self.parameters.add(known.name)

    def lacks(self) -> list[str]:
        """Return what was not run, with the reason if it is known."""
        lacking = [f"drafter {name}" for name in EVERY_DRAFTER if name not in self.drafters]
        absent = engine_parameters() - self.parameters
        lacking += [f"parameter {name}" for name in SamplingParams.names() if name in absent]
        for name, op in all_ops().items():
            served = self.backends.get(name, set())
            if not served:
                lacking.append(f"op {name}")
                continue
            for backend in op.backends:
                if backend not in served:
                    why = self.refused[name].get(backend, "another backend is preferred")
                    lacking.append(f"{name} by {backend}: {why}")
        return lacking
