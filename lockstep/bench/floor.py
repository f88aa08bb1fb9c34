"""Roofline floors of any checkpoint on any machine, from a model that is built without memory.

lockstep/worker/roofline.py defines which bytes and flops count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.kernels.exchange.group import DryGroup
from lockstep.layers.build_context import BuildContext
from lockstep.layers.kv_format import LayerKVFormats
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model
from lockstep.models.weight_files import has_weights
from lockstep.quantization import read_weight_format
from lockstep.spec import Passes, drafter_module, passes_of
from lockstep.spec.config import SpeculativeConfig
from lockstep.worker.roofline import Floor, StepCosts, StepFloor


@dataclass(frozen=True)
class Sketch:
    """Model built without memory: target, draft module or None, drafts per step and passes."""

    model: nn.Module
    draft: nn.Module | None
    drafts: int
    passes: Passes

    @property
    def query_len(self) -> int:
        """Return the tokens of a row in a decode step."""
        return self.drafts + 1


def sketch(
    folder: Path,
    dtype: torch.dtype,
    options: SpeculativeConfig | None,
    quantization: str | None = None,
    kv_formats: LayerKVFormats | None = None,
    state_dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
    ranks: int = 1,
) -> Sketch:
    """Build the model of a folder's config.json and its draft module without allocating memory.

    quantization: as in EngineConfig. kv_formats: formats of the KV cache, None for the dtype.
    state_dtype: dtype of recurrent states. overrides: hf_overrides. ranks: tensor-parallel size;
    the sketch is that of the first rank, which has the most columns. The weight files decide
    which weights are quantized, or config.json if there are none. Raises CheckpointError or
    ConfigError.
    """
    num_drafts = options.num_speculative_tokens if options else 0
    drafter = drafter_module(options.method) if options else None
    checkpoint = Checkpoint.read(folder, overrides)
    draft = None
    tensors = checkpoint.tensors() if has_weights(folder) else None
    # Fake tensors have shapes and dtypes but no storage, so a model of any size can be built.
    with FakeTensorMode():
        build = BuildContext(
            "cpu",
            dtype,
            num_drafts + 1,
            max_positions=1 << 20,
            tensors=tensors,
            prefixes=checkpoint.architecture.PREFIXES,
            weight_format=read_weight_format(checkpoint.quantization(), quantization),
            kv=kv_formats or LayerKVFormats(),
            state_dtype=state_dtype,
            group=DryGroup(0, ranks),
        )
        # Nothing is allocated, so the memory of this machine is no limit.
        build.memory_budget.bounded = False
        model = build_model(checkpoint.raw, build)
        if drafter is not None and drafter.NEEDS_MODULE:
            draft = drafter.build(options, checkpoint, model, build)
    return Sketch(model, draft, num_drafts, passes_of(options))


def step_floor(model: Sketch, rows: int, context: int) -> StepFloor:
    """Return the floor of a decode step of `rows` rows with `context` cached tokens each."""
    costs = StepCosts.of(model.model, model.draft, model.passes)
    return costs.step(rows, model.drafts, context)


def prompt_floor(model: Sketch, tokens: int) -> Floor:
    """Return the floor of one prompt of `tokens` tokens with an empty cache."""
    return StepCosts.of(model.model, model.draft, model.passes).prompt(tokens)


def describe_floors(step: StepFloor, prompt: Floor) -> dict[str, Any]:
    """Return both floors as plain data for JSON. exchanges: with other tensor-parallel ranks."""
    passes = (step.verify.total, step.drafts.total)
    return {
        "rows": step.rows,
        "query_len": step.query_len,
        "context": step.context,
        "bytes": sum(part.bytes for part in passes),
        "flops": sum(part.flops for part in passes),
        "exchanges": step.exchanged.count,
        "exchanged_bytes": step.exchanged.bytes,
        "verify_floor_ms": round(step.verify.ms, 6),
        "drafts_floor_ms": round(step.drafts.ms, 6),
        "floor_ms": round(step.ms, 6),
        "prompt_floor_ms": round(prompt.ms, 6),
    }
