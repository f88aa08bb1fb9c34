"""One contract, several backends: an op is its reference plus what repeats its signature.

@op
def rms_norm(x, weight, eps): ...          # the reference: specification and oracle

@rms_norm.backend("triton", supports=gpu_trait)
def _(x, weight, eps): ...

name = rms_norm.choose(device="cuda", dtype=torch.bfloat16)   # once, when a layer is built
rms_norm.backends[name].run(x, weight, eps)
"""

from collections.abc import Callable
from typing import Any, NamedTuple, overload

from lockstep.errors import ConfigError

Function = Callable[..., Any]
Supports = Callable[..., str | None]


class Backend(NamedTuple):
    """A function with the op's signature; supports(**traits) returns None, or the reason why not.

    unchosen: why traits alone never choose it, where they do not.
    """

    run: Function
    supports: Supports
    unchosen: str | None = None


class Op:
    """A named op. Calling it runs the reference. writes: the arguments that it changes in place."""

    def __init__(self, reference: Function, writes: tuple[str, ...] = ()) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.writes = writes
        self.__doc__ = reference.__doc__
        self.backends: dict[str, Backend] = {
            "reference": Backend(reference, _reference_supports),
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def backend(
        self, name: str, supports: Supports, unchosen: str | None = None
    ) -> Callable[[Function], Function]:
        """Adds a backend, preferred to those that were added before it. See Backend."""

        def add(fn: Function) -> Function:
            self.backends[name] = Backend(fn, supports, unchosen)
            return fn

        return add

    def explain(self, **traits: Any) -> dict[str, str | None]:
        """Backend -> None where it serves these traits, else the reason why not; best first."""
        return {
            name: backend.unchosen or backend.supports(**traits)
            for name, backend in reversed(self.backends.items())
        }

    def choose(self, **traits: Any) -> str:
        """The name of the best backend for these traits. Raises ConfigError where none serves."""
        reasons = self.explain(**traits)
        for name, why_not in reasons.items():
            if why_not is None:
                return name
        raise ConfigError(f"op {self.name}: no backend serves {traits}: {reasons}")


def _reference_supports(**traits: Any) -> str | None:
    if traits.get("device", "cpu") == "cpu":
        return None
    return "the reference reads lengths on the host and its bits depend on the batch on a GPU"


@overload
def op(reference: Function) -> Op: ...


@overload
def op(*, writes: tuple[str, ...]) -> Callable[[Function], Op]: ...


def op(
    reference: Function | None = None, *, writes: tuple[str, ...] = ()
) -> Op | Callable[[Function], Op]:
    """Makes a reference function an op. writes: names of the arguments that it changes in place."""
    if reference is not None:
        return Op(reference)
    return lambda function: Op(function, writes)
