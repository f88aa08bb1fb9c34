"""Registry of ops: a contract, its reference implementation, and backends of the same signature.

@op
def rms_norm(x, weight, eps): ...          # contract and reference: what backends are tested by

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
    """Implementation of an op.

    run: has the op's signature. supports: returns None for traits that it serves, else the reason
    why not. opt_in_reason: why `choose` never picks this backend, for one that is chosen otherwise.
    """

    run: Function
    supports: Supports
    opt_in_reason: str | None = None


class Op:
    """Op with its backends. Calling it runs the reference.

    writes: names of the arguments that the op changes in place. needed_for: what engines that need
    the op have and others lack, e.g. experts; "" for an op without such a condition. callers: names
    of the ops whose backends run this one, if no layer chooses it.
    """

    def __init__(
        self,
        reference: Function,
        writes: tuple[str, ...] = (),
        needed_for: str = "",
        callers: tuple[str, ...] = (),
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.writes = writes
        self.needed_for = needed_for
        self.callers = callers
        self.__doc__ = reference.__doc__
        self.backends: dict[str, Backend] = {
            "reference": Backend(reference, _reference_supports),
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def backend(
        self, name: str, supports: Supports, opt_in_reason: str | None = None
    ) -> Callable[[Function], Function]:
        """Return a decorator that adds a backend, preferred to all backends before it."""

        def add(fn: Function) -> Function:
            self.backends[name] = Backend(fn, supports, opt_in_reason)
            return fn

        return add

    def explain(self, **traits: Any) -> dict[str, str | None]:
        """Return, best backend first, None or the reason why it does not serve the traits."""
        return {
            name: backend.opt_in_reason or backend.supports(**traits)
            for name, backend in reversed(self.backends.items())
        }

    def choose(self, **traits: Any) -> str:
        """Return the name of the best backend that serves the traits. Raises ConfigError."""
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
def op(
    *, writes: tuple[str, ...] = (), needed_for: str = "", callers: tuple[str, ...] = ()
) -> Callable[[Function], Op]: ...


def op(
    reference: Function | None = None,
    *,
    writes: tuple[str, ...] = (),
    needed_for: str = "",
    callers: tuple[str, ...] = (),
) -> Op | Callable[[Function], Op]:
    """Turn a reference function into an op. writes, needed_for, callers: see Op."""
    if reference is not None:
        return Op(reference)
    return lambda function: Op(function, writes, needed_for, callers)
