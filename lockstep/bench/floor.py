"""The floor of any checkpoint's steps, on any machine: its model is built without its memory.

What is counted, runner/floor.py says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

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
    """A target and its draft module (or None) as they would be built, and how it is run."""

    model: nn.Module
    draft: nn.Module | None
    drafts: int
    passes: Passes

    @property
    def query_len(self) -> int:
        """Tokens that a row brings to a step."""
        return self.drafts + 1


def sketch(
    folder: Path,
    dtype: torch.dtype,
    options: SpeculativeConfig | None,
    quantization: str | None = None,
    kv: LayerKVFormats | None = None,
    state: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> Sketch:
    """The model of a folder's config.json and what it drafts with, without memory or weights.

    kv: the format of its KV cache, None for the dtype; state: the dtype of recurrent state.
    quantization: as in EngineConfig; overrides: its hf_overrides. Which weights are packed, the
    folder's files say, or its settings where it has none. Raises CheckpointError or ConfigError.
    """
    drafts = options.num_speculative_tokens if options else 0
    drafting = drafter_module(options.method) if options else None
    checkpoint = Checkpoint.read(folder, overrides)
    draft = None
    tensors = checkpoint.tensors() if has_weights(folder) else None
    with FakeTensorMode():
        build = BuildContext(
            "cpu",
            dtype,
            drafts + 1,
            max_positions=1 << 20,
            tensors=tensors,
            prefixes=checkpoint.architecture.PREFIXES,
            weight_format=read_weight_format(checkpoint.quantization(), quantization),
            kv=kv or LayerKVFormats(),
            state_dtype=state,
        )
        build.memory_budget.bounded = False
        model = build_model(checkpoint.raw, build)
        if drafting is not None and drafting.NEEDS_MODULE:
            draft = drafting.build(options, checkpoint, model, build)
    return Sketch(model, draft, drafts, passes_of(options))


def step_floor(model: Sketch, rows: int, context: int) -> StepFloor:
    """The floor of a generated step: `rows` rows with `context` tokens in the cache each."""
    costs = StepCosts.of(model.model, model.draft, model.passes)
    return costs.step(rows, model.drafts, context)


def prompt_floor(model: Sketch, tokens: int) -> Floor:
    """The floor of one prompt of `tokens` tokens that starts with an empty cache."""
    return StepCosts.of(model.model, model.draft, model.passes).prompt(tokens)


def describe_floors(step: StepFloor, prompt: Floor) -> dict[str, Any]:
    """Both floors as plain numbers, for a line of JSON."""
    passes = (step.verify.total, step.drafts.total)
    return {
        "rows": step.rows,
        "query_len": step.query_len,
        "context": step.context,
        "bytes": sum(part.bytes for part in passes),
        "flops": sum(part.flops for part in passes),
        "verify_floor_ms": round(step.verify.ms, 6),
        "drafts_floor_ms": round(step.drafts.ms, 6),
        "floor_ms": round(step.ms, 6),
        "prompt_floor_ms": round(prompt.ms, 6),
    }
