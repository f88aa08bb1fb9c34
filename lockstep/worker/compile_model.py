"""Compilation of all kernels of a model, without loading its weights: `lockstep compile`."""

import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec

import torch

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.kernels.architecture import Architecture, architecture_by_name, architecture_of
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.exchange import ALONE
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.weight_files import has_weights
from lockstep.progress import Progress
from lockstep.quantization import read_weight_format
from lockstep.worker.build import find_model, step_limits
from lockstep.worker.compile_ahead import (
    CompiledMark,
    KernelCompiler,
    kernel_cache,
    record_kernels,
)
from lockstep.worker.explain import plan
from lockstep.worker.memory_estimate import DryEngine
from lockstep.worker.startup import plan_memory


@dataclass(frozen=True)
class CompiledModel:
    """Result of a compilation.

    kernels: number of specializations of kernels. seconds: duration of the compilation. folder:
    Triton's cache. errors: one line per kernel that did not compile.
    """

    architecture: str
    kernels: int
    seconds: float
    folder: str
    errors: list[str]

    def as_dict(self) -> dict[str, object]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def compile_model(
    config: EngineConfig, arch: str | None, total: int | None, progress: Progress
) -> CompiledModel:
    """Compile the kernels of an engine into Triton's cache.

    Args:
        arch: name of the GPU's architecture; None for this machine's GPU.
        total: bytes of an absent GPU's memory, which decide the numbers of rows and tokens of a
            step; None for ample memory.
        progress: called with the work, the number of compiled kernels, and their total.

    Raises:
        ConfigError: without Triton, for an unknown architecture, or without a GPU and arch.
        CheckpointError: the checkpoint cannot be read.
        CapacityError: the weights do not fit into this machine's GPU.
    """
    card = _architecture(arch)
    load_backends()
    checkpoint = Checkpoint.read(find_model(config.model, weights=False), config.hf_overrides)
    weight_format = read_weight_format(
        checkpoint.quantization(), config.quantization, config.activation_dtype
    )
    assumed = None if arch is None else card.name
    limits = step_limits(config, checkpoint, "cuda", weight_format, assumed_numerics=assumed)
    known = config.load_format == "auto" and has_weights(checkpoint.folder)
    progress("planning", 0, 1)
    dry_engine = DryEngine(config, checkpoint, limits, weight_format, card, known)
    if arch is None:
        limits = plan_memory(config, limits, dry_engine, ALONE).sized(limits, config)
    else:
        limits, _ = plan(config, limits, dry_engine, total)
    began = time.monotonic()
    compilations = record_kernels(dry_engine, limits)
    compiler = KernelCompiler(compilations)
    try:
        compiler.start()
        compiler.wait(progress)
    finally:
        errors = compiler.close()
    if not errors:
        CompiledMark(config, limits, card).write()
    seconds = time.monotonic() - began
    return CompiledModel(card.name, len(compilations), seconds, str(kernel_cache()), errors)


def _architecture(arch: str | None) -> Architecture:
    """Return the architecture to compile for. Raises ConfigError."""
    if find_spec("triton") is None:
        raise ConfigError(
            "compile needs Triton, which is not installed; allowed: an environment with it. "
            "Install it: pip install triton."
        )
    if arch is not None:
        return architecture_by_name(arch)
    if not torch.cuda.is_available():
        raise ConfigError(
            "arch is missing, and this machine has no GPU; allowed: an architecture such as sm_90. "
            "Pass --arch with that of the GPU that will serve."
        )
    return architecture_of("cuda")
