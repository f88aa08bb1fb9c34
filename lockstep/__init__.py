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
    "ScoreOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# libgomp reads it when torch is imported. "passive" makes waiting threads yield their core: 181 ms
# of CPU per token instead of 1,065 on two busy cores. See docs/decisions/0009.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __dir__() -> list[str]:
    """Return the public names for completion, lazily imported ones included."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import public names on first use, so that the command line starts fast."""
    from importlib import import_module

    modules = {
        "LLM": "llm",
        "AsyncLLM": "async_llm",
        "AsyncLLMEngine": "async_llm",
        "AsyncEngineArgs": "engine_args",
        "EngineArgs": "engine_args",
        "EngineConfig": "config",
        "RequestOutput": "outputs",
        "CompletionOutput": "outputs",
        "ScoreOutput": "outputs",
        "RequestOutputKind": "sampling_params",
        "SamplingParams": "sampling_params",
        "StructuredOutputsParams": "sampling_params",
        "TextPrompt": "inputs",
        "TokensPrompt": "inputs",
    }
    if name not in modules:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(import_module(f"lockstep.{modules[name]}"), name)
