"""The exception tree. Every message names the field, the value, what is allowed and what to do.

LockstepError
+-- ConfigError       a setting of the engine is wrong, alone or together with another
+-- CheckpointError   a checkpoint lacks a tensor, has a spare one, or asks for what we do not build
+-- RequestError      one request is wrong; the engine and all other requests go on
+-- CapacityError     memory does not suffice for what was asked
+-- CaptureError      something inside a captured step compiled, allocated or waited
+-- EngineDeadError   the engine loop ended with an error; requests cannot be served any more
"""


class LockstepError(Exception):
    """Base of all errors that Lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A setting of the engine is wrong."""


class CheckpointError(LockstepError, ValueError):
    """A checkpoint cannot be loaded as it is."""


class RequestError(LockstepError, ValueError):
    """One request is wrong. `field` names the parameter at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(LockstepError, RuntimeError):
    """Memory does not suffice for what was asked."""


class CaptureError(LockstepError, RuntimeError):
    """Something inside a captured step compiled, allocated or waited for the device."""


class EngineDeadError(LockstepError, RuntimeError):
    """The engine loop ended with an error."""


MOST_SHOWN = 200
"""Characters of a value that a message shows."""


def choice_error(
    kind: type[LockstepError], field: str, value: object, allowed: object, remedy: str
) -> LockstepError:
    """The one form of "this value is not allowed": field, value, what is allowed, what to do."""
    shown = repr(value)
    if len(shown) > MOST_SHOWN:
        shown = f"{shown[:MOST_SHOWN]}..."
    return kind(f"{field}={shown} is not allowed; allowed: {allowed}. {remedy}")
