"""The floor of a step: the bytes and flops that it must move at least, and how long they take.

A model is walked as it was built: its weights are its parameters and buffers, what it keeps between
steps is what its layers state in cache_spec(). sketch() builds it without its memory, so that the
floor of any checkpoint can be computed anywhere.

Counted: every weight once per pass; the KV of the context read, that of the step's tokens written;
recurrent state read and written once, and the lines of one window. Of a mixture, the experts that
are really read: tokens are taken to choose independently and evenly, as distinct_experts says; real
texts choose less evenly, and tokens of one row more alike. Activations are neglected, and
so are the flops that are not products with a weight (attention's: 3 % at a prompt of 8,192 tokens).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.cache.specs import Law, Spec, unit_bytes
from lockstep.layers.build import Build
from lockstep.layers.kv import KVLayers
from lockstep.layers.latent_attention import AbsorbedHeads
from lockstep.layers.linear import Embedding, Head, Product
from lockstep.layers.moe import ExpertWeight
from lockstep.layers.rotary import Rotary
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model
from lockstep.quant import packing_of
from lockstep.runner.memory import mixers
from lockstep.spec import drafter_module
from lockstep.spec.config import SpeculativeConfig

MEMORY_RATE = 4.3e12
"""Bytes/s that an H200 reaches at best in a copy, read and written bytes both counted."""
MATRIX_RATE = 790e12
"""Flop/s of an H200's bf16 products on random data."""

GATHERED = (Embedding, Rotary)
"""Layers that read one line of their table per token, not the table."""


@dataclass(frozen=True)
class Part:
    """One line of the table: what it moves and multiplies."""

    name: str
    bytes: int
    flops: int = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(self.name, self.bytes + other.bytes, self.flops + other.flops)

    @property
    def memory_ms(self) -> float:
        """Time of its bytes at MEMORY_RATE."""
        return 1e3 * self.bytes / MEMORY_RATE

    @property
    def matrix_ms(self) -> float:
        """Time of its flops at MATRIX_RATE."""
        return 1e3 * self.flops / MATRIX_RATE


@dataclass(frozen=True)
class Floor:
    """The parts of one pass, or of several alike."""

    parts: tuple[Part, ...]

    @property
    def total(self) -> Part:
        """All parts as one."""
        return sum(self.parts, Part("total", 0))

    @property
    def ms(self) -> float:
        """The least time: bytes and flops go on at once, so the longer of the two decides."""
        return max(self.total.memory_ms, self.total.matrix_ms)


@dataclass(frozen=True)
class StepFloor:
    """A step of `rows` rows that bring `query_len` tokens each, behind `context` tokens: verify is
    the target's pass, drafts the draft module's passes (no parts where nothing is drafted with)."""

    rows: int
    query_len: int
    context: int
    verify: Floor
    drafts: Floor

    @property
    def ms(self) -> float:
        """The floor of the whole step."""
        return self.verify.ms + self.drafts.ms


def no_passes(rows: int, tokens: int, count: int) -> tuple[int, ...]:
    """Those of a step without a draft module."""
    return ()


@dataclass(frozen=True)
class Sketch:
    """A target and its draft module (or None) as they would be built. passes: of the module in a
    step, as in lockstep.spec."""

    model: nn.Module
    draft: nn.Module | None
    drafts: int
    passes: Callable[[int, int, int], tuple[int, ...]] = no_passes

    @property
    def query_len(self) -> int:
        """Tokens that a row brings to a step."""
        return self.drafts + 1


def sketch(
    folder: Path,
    dtype: torch.dtype,
    options: SpeculativeConfig | None,
    quantization: str | None = None,
    kv: KVLayers | None = None,
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
    passes = no_passes
    tensors = checkpoint.tensors() if any(folder.glob("*.safetensors")) else None
    with FakeTensorMode():
        build = Build(
            "cpu",
            dtype,
            drafts + 1,
            max_positions=1 << 20,
            tensors=tensors,
            prefixes=checkpoint.architecture.PREFIXES,
            packing=packing_of(checkpoint.quantization(), quantization),
            kv=kv or KVLayers(),
            state_dtype=state,
        )
        build.room.bounded = False
        model = build_model(checkpoint.raw, build)
        if drafting is not None and drafting.NEEDS_MODULE:
            draft = drafting.build(options, checkpoint, model, build)
            draft.finish()
            passes = drafting.passes
    return Sketch(model, draft, drafts, passes)


def step_floor(model: Sketch, rows: int, context: int) -> StepFloor:
    """The floor of a generated step: `rows` rows with `context` tokens in the cache each."""
    tokens = rows * model.query_len
    verify = Floor(
        _weights(model.model, tokens, tokens) + _kept(model.model, rows, tokens, context)
    )
    passes = [
        _weights(model.draft, brought, rows) + _kept(model.draft, rows, brought, context)
        for brought in model.passes(rows, tokens, model.drafts)
    ]
    return StepFloor(rows, model.query_len, context, verify, Floor(_summed(passes)))


def prompt_floor(model: Sketch, tokens: int) -> Floor:
    """The floor of one prompt of `tokens` tokens that starts with an empty cache.

    Its keys and values are written, and read at least once by the tokens behind them.
    """
    return Floor(_weights(model.model, tokens, 1) + _kept(model.model, 1, tokens, tokens))


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """The expected number of experts that `tokens` tokens go to, each to top_k of them, chosen
    evenly: an expert is missed by all of them with probability (1 - top_k / experts)^tokens."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _weights(root: nn.Module | None, tokens: int, logits: int) -> tuple[Part, ...]:
    """A pass over the weights, by the outermost layer that has them; `logits` rows of the head."""
    found: dict[str, Part] = {}
    for label, module in _labelled(root):
        columns = logits if isinstance(module, Head) else tokens
        if isinstance(module, Product):
            flops = 2 * prod(module.shape) * columns
            part = Part(label, module.stored.nbytes, flops)
            found[label] = found[label] + part if label in found else part
            continue
        if isinstance(module, ExpertWeight):
            part = _experts(label, module, tokens)
            found[label] = found[label] + part if label in found else part
            continue
        for tensor in _own(module):
            part = Part(label, tensor.numel() * tensor.itemsize)
            if isinstance(module, GATHERED):
                lines = min(tokens, tensor.shape[0])
                part = Part(label, tensor[0].numel() * tensor.itemsize * lines)
            elif tensor.dim() == 2 or isinstance(module, AbsorbedHeads):
                part = Part(label, part.bytes, 2 * tensor.numel() * columns)
            found[label] = found[label] + part if label in found else part
    return tuple(found.values())


def _experts(label: str, module: ExpertWeight, tokens: int) -> Part:
    """What a pass reads and multiplies of one linear map of a mixture's experts."""
    read = distinct_experts(module.experts, module.top_k, tokens) / module.experts
    flops = 2 * prod(module.shape) // module.experts * module.top_k * tokens
    return Part(label, round(module.stored.nbytes * read), flops)


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _labelled(root: nn.Module | None, label: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module below, under the class name of the outermost layer that it is part of."""
    for child in root.children() if root is not None else ():
        layer = hasattr(child, "cache_spec") or type(child).__module__.startswith("lockstep.layers")
        below = label or (type(child).__name__ if layer or _own(child) else "")
        yield below, child
        yield from _labelled(child, below)


def _kept(root: nn.Module | None, rows: int, tokens: int, context: int) -> tuple[Part, ...]:
    """What the mixers keep between steps: KV read and written, state read and written."""
    layers = mixers(root, None).values()
    specs: list[Spec] = [layer.cache_spec() for layer in layers]  # type: ignore[operator]
    each = tokens // rows
    seen = context // 2 if each == context else context  # of a prompt, half on average
    flops = sum(int(getattr(layer, "key_flops", 0)) for layer in layers) * tokens * seen
    token = unit_bytes(specs, Law.PAGED, 1)
    moved = sum(spec.step_bytes(each) for spec in specs if spec.law is Law.STATE)
    parts = (
        Part("KV read", token * context * rows, flops),
        Part("KV written", token * tokens),
        Part("state", 2 * moved * rows),
    )
    return tuple(part for part in parts if part.bytes)


def _summed(passes: list[tuple[Part, ...]]) -> tuple[Part, ...]:
    """The parts of several passes, added by name."""
    found: dict[str, Part] = {}
    for part in (part for one in passes for part in one):
        found[part.name] = found[part.name] + part if part.name in found else part
    return tuple(found.values())


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
