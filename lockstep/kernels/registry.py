"""One contract, several faces: an op is its reference plus the backends that repeat its signature.

@op
def rms_norm(x, weight, eps): ...          # the reference: specification, oracle, CPU backend

@rms_norm.backend("triton", supports=lambda **t: None if t["device"] == "cuda" else "no GPU")
def _(x, weight, eps): ...

fn = rms_norm.select(device="cuda", dtype="bfloat16")   # once, when a layer is built
"""

from collections.abc import Callable
from typing import Any

from lockstep.errors import ConfigError

Supports = Callable[..., str | None]


class Op:
    """A named op. Calling it runs the reference."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.__doc__ = reference.__doc__
        self.backends: dict[str, tuple[Callable[..., Any], Supports]] = {
            "reference": (reference, _reference_supports)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def backend(
        self, name: str, supports: Supports
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Adds a face. `supports(**traits)` returns None, or the reason why not."""

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.backends[name] = (fn, supports)
            return fn

        return add

    def explain(self, **traits: Any) -> dict[str, str | None]:
        """Backend -> None where it serves these traits, else the reason why not; best first."""
        return {n: s(**traits) for n, (_, s) in reversed(self.backends.items())}

    def choose(self, **traits: Any) -> str:
        """The name of the best backend for these traits. Raises ConfigError where none serves."""
        reasons = self.explain(**traits)
        for name, why_not in reasons.items():
            if why_not is None:
                return name
        raise ConfigError(f"op {self.name}: no backend serves {traits}: {reasons}")

    def select(self, **traits: Any) -> Callable[..., Any]:
        """The function of the best backend for these traits."""
        return self.backends[self.choose(**traits)][0]


def _reference_supports(**traits: Any) -> str | None:
    if traits.get("device", "cpu") == "cpu":
        return None
    return "the reference reads lengths on the host and its bits depend on the batch on a GPU"


def op(reference: Callable[..., Any]) -> Op:
    """Makes a reference function an op."""
    return Op(reference)
