"""Exception hierarchy. Every message names the field, the value, what is allowed and what to do.

LockstepError
+-- ConfigError       invalid setting of the engine, or invalid combination of settings
+-- CheckpointError   missing, extra or unsupported contents of a checkpoint
+-- RequestError      invalid request; the engine and all other requests continue
|   +-- ContextLengthError   its prompt is longer than the context
+-- CapacityError     not enough memory
+-- CaptureError      compilation, allocation or synchronization inside of a captured step
+-- KernelError       failure of a kernel, found by waiting for every op (sync_kernels)
+-- ComputeError      repeated failure of the engine while it ran one request, which ended
+-- RankError         end of a tensor-parallel rank
+-- NumericsError     no replica has the numerics with which an answer began
+-- EngineDeadError   the engine loop ended with an error; no request can be served
"""

from itertools import islice


class LockstepError(Exception):
    """Base class of all errors that Lockstep raises deliberately."""


class ConfigError(LockstepError, ValueError):
    """Invalid setting of the engine."""


class CheckpointError(LockstepError, ValueError):
    """Checkpoint that cannot be loaded."""


class RequestError(LockstepError, ValueError):
    """Invalid request. `field` names the parameter at fault."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(RequestError):
    """Prompt that is longer than the model's context."""


class CapacityError(LockstepError, RuntimeError):
    """Not enough memory."""


class CaptureError(LockstepError, RuntimeError):
    """Compilation, allocation or synchronization where a captured or dry step forbids it."""


class KernelError(LockstepError, RuntimeError):
    """Failure of a kernel. The message names op, backend, layer and shapes."""


class ComputeError(LockstepError, RuntimeError):
    """Repeated failure of the engine during a request. The request ended; others continue."""


class RankError(LockstepError, RuntimeError):
    """End of a tensor-parallel rank: the message names the rank and the cause."""


class NumericsError(LockstepError, RuntimeError):
    """Lack of a replica with the numerics of an answer. The request ended; others continue."""


class EngineDeadError(LockstepError, RuntimeError):
    """End of the engine loop by an error."""


def context_length_error(
    tokens: int, max_model_len: int, field: str, at_least: str = ""
) -> ContextLengthError:
    """Return the error of a prompt that does not fit into the context.

    The message begins with Anthropic's phrase and contains OpenAI's "maximum context length":
    agents recognise them and compact the conversation.
    at_least: reason for which the prompt has at least that many tokens, if they were not counted.
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
    """Return the error of a value that is not allowed: field, value, what is allowed, what to
    do."""
    return kind(f"{field}={brief(value)} is not allowed; allowed: {allowed}. {remedy}")


def install_extra(name: str) -> str:
    """Return the command that installs an extra from a checkout; the package is on no index."""
    return f"in Lockstep's checkout, pip install '.[{name}]'"


def brief(value: object, depth: int = 2) -> str:
    """Return a value for a message, bounded in length: plain types are written, others named."""
    if isinstance(value, str):
        # A message must stay short, whatever a client sends.
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
