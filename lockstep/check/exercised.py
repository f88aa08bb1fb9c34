"""What a check has exercised: ops and their backends, drafters, sampling parameters.

What was never run proves nothing, so the report names it.
"""

from dataclasses import dataclass, field, fields

from lockstep.check import answer_oracle
from lockstep.check.drafters import NONE
from lockstep.engine.engine import Engine
from lockstep.kernels.backends import all_ops
from lockstep.sampling_params import SamplingParams
from lockstep.spec import DRAFTERS

EVERY_DRAFTER = (*DRAFTERS, answer_oracle.NAME)


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
    """What engines of a check were built from, and what they were given. backends: by op's name;
    refused: why a backend of an op served none of them."""

    backends: dict[str, set[str]] = field(default_factory=dict)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    drafters: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)

    def engine(self, engine: Engine, drafter: str) -> None:
        """An engine that was built with this drafter, or with none."""
        for choice in engine.explain()["layers"]:
            served = {name.split(" ")[0] for name in choice["backend"].split(", ")}
            self.backends.setdefault(choice["op"], set()).update(served)
            self.refused.setdefault(choice["op"], {}).update(choice["refused"])
        if drafter != NONE:
            self.drafters.add(drafter)

    def params(self, params: SamplingParams) -> None:
        """Parameters that a request had."""
        for known in fields(params):
            if getattr(params, known.name) != known.default:
                self.parameters.add(known.name)

    def lacks(self) -> list[str]:
        """What was not exercised, and why where that is known."""
        found = [f"drafter {name}" for name in EVERY_DRAFTER if name not in self.drafters]
        absent = engine_parameters() - self.parameters
        found += [f"parameter {name}" for name in SamplingParams.names() if name in absent]
        for name, op in all_ops().items():
            served = self.backends.get(name, set())
            if not served:
                found.append(f"op {name}")
                continue
            for backend in op.backends:
                if backend not in served:
                    why = self.refused[name].get(backend, "another backend is preferred")
                    found.append(f"{name} by {backend}: {why}")
        return found
