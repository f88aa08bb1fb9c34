"""The exception tree. Every message names the field, the value, what is allowed and what to do.

LockstepError
+-- ConfigError       a setting of the engine is wrong, alone or together with another
+-- CheckpointError   a checkpoint lacks a tensor, has a spare one, or asks for what we do not build
+-- RequestError      one request is wrong; the engine and all other requests go on
|   +-- ContextLengthError   its prompt is longer than the context
+-- CapacityError     memory does not suffice for what was asked
+-- CaptureError      something inside a captured step compiled, allocated or waited
+-- ComputeError      a step of one request failed; the request ended, others go on
+-- EngineDeadError   the engine loop ended with an error; requests cannot be served any more
"""

from itertools import islice


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


class ContextLengthError(RequestError):
    """The prompt of one request is longer than the model's context."""


class CapacityError(LockstepError, RuntimeError):
    """Memory does not suffice for what was asked."""


class CaptureError(LockstepError, RuntimeError):
    """A step compiles, allocates or waits for the device where a captured or a dry one must not."""


class ComputeError(LockstepError, RuntimeError):
    """A step of the request failed; it ended, others go on."""


class EngineDeadError(LockstepError, RuntimeError):
    """The engine loop ended with an error."""


def context_length_error(
    tokens: int, max_model_len: int, field: str, at_least: str = ""
) -> ContextLengthError:
    """Return the error of a prompt that does not fit into the context.

    Agents compact a conversation where they recognise the message: by Anthropic's phrase, with
    which it begins, or by OpenAI's "maximum context length".

    at_least: why the prompt has at least that many tokens, where they were not counted.
    """
    counted = f" (at least, since {at_least})" if at_least else ""
    return ContextLengthError(
        f"prompt is too long: {tokens} tokens > {max_model_len - 1} maximum{counted}: the maximum "
        f"context length is {max_model_len} tokens (max_model_len), one of them for the answer. "
        "Shorten it.",
        field,
    )


def choice_error(
    kind: type[LockstepError], field: str, value: object, allowed: object, remedy: str
) -> LockstepError:
    """The one form of "this value is not allowed": field, value, what is allowed, what to do."""
    return kind(f"{field}={brief(value)} is not allowed; allowed: {allowed}. {remedy}")


def install_extra(name: str) -> str:
    """Return the command that installs an extra. The package is on no index, so a checkout is."""
    return f"in Lockstep's checkout, pip install '.[{name}]'"


def brief(value: object, depth: int = 2) -> str:
    """A value for a message, short however large it is: plain types are spelled, others named."""
    if isinstance(value, str):
        return repr(value[:60]) + "..." * (len(value) > 60)
    if isinstance(value, int) and value.bit_length() > 128:
        return f"<whole number of {value.bit_length()} bits>"
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict) and depth:
        items = islice(value.items(), 4)
        spelled = [f"{brief(key, depth - 1)}: {brief(item, depth - 1)}" for key, item in items]
        return "{" + ", ".join(spelled + ["..."] * (len(value) > 4)) + "}"
    if isinstance(value, (list, tuple)) and depth:
        spelled = [brief(item, depth - 1) for item in value[:4]]
        listed = ", ".join(spelled + ["..."] * (len(value) > 4))
        return f"[{listed}]" if isinstance(value, list) else f"({listed})"
    return f"<{type(value).__name__}>"
