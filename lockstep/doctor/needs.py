"""Kernels that a model needs at the user's settings, from a build on tensors without memory."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.config import EngineConfig
from lockstep.kernels.architecture import architecture_of
from lockstep.kernels.exchange import exchange, exchange_add_rms_norm
from lockstep.kernels.exchange.group import DryGroup
from lockstep.layers.build_context import BuildContext, KernelNeed
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model
from lockstep.models.lora_adapters import adapter_table, read_adapters
from lockstep.models.weight_files import has_weights
from lockstep.quantization import read_weight_format
from lockstep.worker.build import (
    build_draft,
    build_program,
    find_model,
    kv_layers,
    prepare_device,
    state_dtype,
    step_limits,
)
from lockstep.worker.hooks import NO_HOOKS
from lockstep.worker.memory_estimate import DryEngine

MULTI_RANK_OPS = (exchange.name, exchange_add_rms_norm.name)
"""Ops that one process cannot examine. `lockstep check` with tensor_parallel_size runs them."""


def kernels_of(config: EngineConfig, device: str) -> list[KernelNeed]:
    """Return the kernels of a model, each kind once. Raises ConfigError or CheckpointError."""
    prepare_device(device)
    checkpoint = Checkpoint.read(find_model(config.model, weights=False), config.hf_overrides)
    weight_format = read_weight_format(
        checkpoint.quantization(), config.quantization, config.activation_dtype
    )
    known = has_weights(checkpoint.folder)
    limits = step_limits(config, checkpoint, device, weight_format)
    if device == "cuda":
        engine = DryEngine(
            config, checkpoint, limits, weight_format, architecture_of(device), known
        )
        with engine.mode:
            engine.program(limits, engine.build)
        return distinct(_on_device(need, device) for need in engine.build.needs)
    dtype = getattr(torch, limits.dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        build = BuildContext(
            device=device,
            dtype=dtype,
            window=limits.query_len,
            max_positions=limits.history_len,
            max_model_len=limits.max_model_len,
            tensors=checkpoint.tensors() if known and config.load_format == "auto" else None,
            prefixes=checkpoint.prefixes,
            weight_format=weight_format,
            kv=kv_layers(config, dtype),
            state_dtype=state_dtype(config),
            group=DryGroup(0, config.tensor_parallel_size),
            adapters=adapter_table(read_adapters(config.lora_modules)),
        )
        build.memory_budget.bounded = False  # tensors without memory take none
        model = build_model(checkpoint.raw, build)
        draft = build_draft(config, checkpoint, model, build)
        build_program(config, limits, build, model, draft, NO_HOOKS)
    return distinct(build.needs)


def _on_device(need: KernelNeed, device: str) -> KernelNeed:
    """Return the need on the real device instead of the one without memory."""
    traits: dict[str, Any] = {name: x for name, x in need.traits.items() if name != "arch"}
    return replace(need, traits=traits | {"device": device})


def distinct(needs: Iterable[KernelNeed]) -> list[KernelNeed]:
    """Return the needs without repetitions and without ops of several ranks."""
    by_key: dict[str, KernelNeed] = {}
    for need in needs:
        if need.op not in MULTI_RANK_OPS:
            traits = sorted((name, _trait_text(value)) for name, value in need.traits.items())
            by_key.setdefault(f"{need.op} {traits} {need.layout} {need.split_k}", need)
    return list(by_key.values())


def _trait_text(trait: Any) -> str:
    """Return a trait as text. Quantizers of two layers differ in their rotation's signs alone."""
    if isinstance(trait, tuple):
        return ", ".join(f"{type(part).__name__} {getattr(part, 'name', '')}" for part in trait)
    return str(trait)
