"""Choice of a backend for each op of a layer: by traits, by the user, by what doctor examined.

All backends of an op that `choose` may pick on a GPU give equal bits (the reduction tree is part of
the op's definition), so a choice changes the speed and no answer. On a CPU Numba kernels have other
trees than the other backends: a choice between the two is part of the numerics (redefined()). A
backend that promises no tree (cuBLAS, and the reference on a GPU) is never a replacement.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.errors import ConfigError, KernelError, choice_error
from lockstep.kernels.backends import all_ops
from lockstep.kernels.registry import Op

DOCTOR = "lockstep doctor"
NUMBA = "numba"
"""Backend whose reduction trees differ from those of the other backends of a CPU."""
PROBED = "cublas"
"""Backend of linear that is chosen by a probe on the GPU, next to the backend `triton`."""


@dataclass(frozen=True)
class Replacement:
    """Backend that serves an op in place of one that doctor found sick.

    finding: what doctor found. slowdown: time of the replacement divided by the time of the
    replaced backend; None where the replaced one could not be timed.
    """

    op: str
    replaced: str
    backend: str
    finding: str
    slowdown: float | None = None

    def __str__(self) -> str:
        cost = "its cost was not measured"
        if self.slowdown is not None:
            cost = f"{self.slowdown:.2f} times its time"
        return (
            f"{self.op}: {self.backend} replaces {self.replaced}, which {DOCTOR} found sick "
            f"({self.finding}); {cost}"
        )


@dataclass(frozen=True)
class BackendHealth:
    """Result of doctor for one backend of an op on this machine.

    finding: first fault found, None for a healthy backend. us: case name -> microseconds.
    """

    op: str
    backend: str
    finding: str | None = None
    us: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelSelection:
    """Rules by which layers choose backends.

    forced: op name -> backend that the user named. health: results of doctor by (op, backend).
    sync: wait for the device after every op, and name the op that failed.
    """

    forced: Mapping[str, str] = field(default_factory=dict)
    health: Mapping[tuple[str, str], BackendHealth] = field(default_factory=dict)
    sync: bool = False

    def choose(self, op: Op, **traits: Any) -> tuple[str, dict[str, str], Replacement | None]:
        """Return (backend, reason why each other one was refused, replacement of a sick one).

        A forced backend serves wherever it supports the traits, sick or not. Raises ConfigError
        where no healthy backend supports them.
        """
        reasons = op.explain(**traits)
        refused = {name: why for name, why in reasons.items() if why is not None}
        served = [name for name, why in reasons.items() if why is None]
        forced = self.forced.get(op.name)
        if forced in served:
            return forced, refused, None
        if not served:
            op.choose(**traits)  # raises ConfigError with all reasons
        findings = {name: self.finding(op.name, name) for name in served}
        healthy = [name for name, finding in findings.items() if finding is None]
        if not healthy:
            listed = "; ".join(f"{name}: {finding}" for name, finding in findings.items())
            raise ConfigError(
                f"op {op.name} has no healthy backend on this machine ({listed}); allowed: a "
                f"backend that {DOCTOR} examined without a finding. Run {DOCTOR} again after a "
                f"repair, or set kernels {op.name}={served[0]} to use it anyway."
            )
        name = healthy[0]
        sick = {other: findings[other] for other in served[: served.index(name)]}
        refused |= {other: f"sick: {why}" for other, why in sick.items()}
        if not sick:
            return name, refused, None
        replaced, finding = next(iter(sick.items()))
        slowdown = self.slowdown(op.name, replaced, name)
        return name, refused, Replacement(op.name, replaced, name, str(finding), slowdown)

    def redefined(self, op: Op, name: str, **traits: Any) -> bool:
        """Return whether a backend has other bits than the one that serves by default."""
        if not self.forced and not self.health:
            return False
        default = op.choose(**traits)
        return name != default and NUMBA in (name, default)

    def finding(self, op: str, backend: str) -> str | None:
        """Return what doctor found wrong with a backend; None if healthy or not examined."""
        health = self.health.get((op, backend))
        return None if health is None else health.finding

    def slowdown(self, op: str, replaced: str, backend: str) -> float | None:
        """Return the replacement's time divided by the replaced backend's, over common cases."""
        pair = [self.health.get((op, name)) for name in (replaced, backend)]
        times = [{} if health is None else health.us for health in pair]
        common = times[0].keys() & times[1].keys()
        total = sum(times[0][case] for case in common)
        return sum(times[1][case] for case in common) / total if total else None

    def probes_cublas(self, op: Op) -> bool:
        """Return whether a probe may let cuBLAS serve linear next to Triton."""
        return op.name not in self.forced and self.finding(op.name, PROBED) is None

    def wrapped(
        self, run: Callable[..., Any], op: str, backend: str, layer: str, device: str
    ) -> Callable[..., Any]:
        """Return `run`, followed by a wait for the device where `sync` is set."""
        if not self.sync:
            return run

        def run_and_wait(*args: Any, **kwargs: Any) -> Any:
            return call_and_wait(run, (op, backend, layer), device, *args, **kwargs)

        return run_and_wait


DEFAULT = KernelSelection()
"""Selection without user, without results of doctor and without waits."""


def call_and_wait(
    run: Callable[..., Any], name: tuple[str, str, str], device: str, *args: Any, **kwargs: Any
) -> Any:
    """Call a backend, wait for the device, and raise KernelError that names (op, backend, layer).

    Without the wait an asynchronous error is raised by a later op.
    """
    op, backend, layer = name
    try:
        result = run(*args, **kwargs)
        if device.startswith("cuda") and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        shapes = ", ".join(str(list(x.shape)) for x in args if isinstance(x, torch.Tensor))
        where = f" of layer {layer}" if layer else ""
        raise KernelError(
            f"op {op}, backend {backend}{where}, failed with tensors {shapes}: "
            f"{str(error).strip().partition(chr(10))[0]}. Run {DOCTOR} to examine its backends, "
            f"or choose another one by kernels {op}=BACKEND."
        ) from error
    return result


def check_forced(forced: Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown op or backend, or one that promises no reduction tree.

    Backends must be loaded already.
    """
    # Every engine is checked, and the search for ops reads the package's folders.
    ops = all_ops() if forced else {}
    for name, backend in forced.items():
        if name not in ops:
            allowed = ", ".join(sorted(ops))
            raise choice_error(ConfigError, "kernels", name, allowed, "Name one of these ops.")
        known = ops[name].backends
        promising = [backend for backend, entry in known.items() if entry.opt_in_reason is None]
        if backend not in promising:
            entry = known.get(backend)
            why = "" if entry is None else f" ({backend}: {entry.opt_in_reason})"
            raise choice_error(
                ConfigError,
                "kernels",
                f"{name}={backend}",
                f"{name}= {', '.join(promising)}{why}",
                "Name one of these backends.",
            )
