"""Lockstep: an LLM inference engine whose answer never changes."""

import os

__version__ = "0.1.0"

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "LLM",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# libgomp reads it once, when torch is imported: threads that wait give their core away.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __dir__() -> list[str]:
    """Names that an editor or a shell completes, those that are not imported yet included."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Imports on first use, so that the command line answers at once."""
    from importlib import import_module

    homes = {
        "LLM": "llm",
        "AsyncLLM": "async_llm",
        "AsyncLLMEngine": "async_llm",
        "AsyncEngineArgs": "engine_args",
        "EngineArgs": "engine_args",
        "EngineConfig": "config",
        "RequestOutput": "outputs",
        "CompletionOutput": "outputs",
        "RequestOutputKind": "sampling_params",
        "SamplingParams": "sampling_params",
        "StructuredOutputsParams": "sampling_params",
        "TextPrompt": "inputs",
        "TokensPrompt": "inputs",
    }
    if name not in homes:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(import_module(f"lockstep.{homes[name]}"), name)
