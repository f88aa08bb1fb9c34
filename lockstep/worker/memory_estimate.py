"""Estimate of an engine's memory on a GPU from config.json alone, for the memory planner.

The model is built as an engine builds it, on tensors without memory (FakeTensorMode), and its
largest steps run dry.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.cache.specs import is_cached
from lockstep.config import EngineConfig, StepLimits
from lockstep.kernels.architecture import Architecture
from lockstep.kernels.exchange.group import DryGroup
from lockstep.kernels.formats.kv.table import load_device_functions
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Weight, quantized_weights
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model
from lockstep.models.lora_adapters import adapter_table, read_adapters
from lockstep.quantization import WeightFormat
from lockstep.scheduling.chunks import FORCED_WINDOWS
from lockstep.spec import passes_of
from lockstep.step import StepShape
from lockstep.worker import memory
from lockstep.worker.build import (
    build_draft,
    build_program,
    graphs_of,
    kv_layers,
    largest_prompt_step,
    sized,
    state_dtype,
)
from lockstep.worker.dry_run import PassBytes, allocated, dry, step_bytes
from lockstep.worker.hooks import NO_HOOKS
from lockstep.worker.joint_steps import max_graphs
from lockstep.worker.memory_planner import Planner, PromptGraphs, UserSizes
from lockstep.worker.program import Program
from lockstep.worker.roofline import StepCosts
from lockstep.worker.step_shapes import forced_shape, largest_forced_step, padded_prompt_step

FAKE_GPU = "cuda:0"
"""Device of fake tensors. Without its index, torch without CUDA would look for the current GPU."""
OVERHEAD_BYTES = 1 << 30
"""Bytes of CUDA's context, loaded kernels, cuBLAS' workspace and unused parts of the allocator's
blocks. On an H200 they took 0.74 GiB with an engine of Qwen3.6-27B.
"""
GRAPH_BYTES = 2 << 20
"""Bytes of the driver for the two graphs of a shape: parameters of about 1,000 kernels."""


class DryEngine:
    """Model and steps on tensors without memory: costs for the planner.

    fixed: bytes by name that rows and prompts do not change. weights_known: the checkpoint's files
    are present, which say what is quantized. rank: tensor-parallel rank; the first one has the most
    columns. costs: bytes and FLOPs of its steps.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        limits: StepLimits,
        weight_format: WeightFormat | None,
        card: Architecture,
        weights_known: bool,
        rank: int = 0,
    ) -> None:
        self.config = config
        self.limits = replace(limits, device=FAKE_GPU)
        self.card = card
        dtype = getattr(torch, limits.dtype)
        load_device_functions()  # their tables would be tensors without memory otherwise
        # Small tables that modules keep are real.
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.build = BuildContext(
                device=FAKE_GPU,
                dtype=dtype,
                window=limits.query_len,
                max_positions=limits.history_len,
                max_model_len=limits.max_model_len,
                tensors=checkpoint.tensors() if weights_known else None,
                prefixes=checkpoint.prefixes,
                weight_format=weight_format,
                arch=card.number,
                kv=kv_layers(config, dtype),
                state_dtype=state_dtype(config),
                group=DryGroup(rank, config.tensor_parallel_size),
                adapters=adapter_table(read_adapters(config.lora_modules)),
            )
            self.build.memory_budget.bounded = False  # fake tensors take no memory
            self.model = build_model(checkpoint.raw, self.build)
            self.draft = build_draft(config, checkpoint, self.model, self.build)
            layers = memory.mixers(self.model, self.draft)
            memory.allocate(layers, num_pages=2, num_slots=2, device=FAKE_GPU)
        self.cache_bytes = memory.cache_bytes(layers)
        staging = memory.staging_bytes(config)
        self.fixed = {"weights": weight_bytes(self.model, self.draft), "overhead": OVERHEAD_BYTES}
        self.fixed |= {"staging": staging} if staging else {}
        self.costs = StepCosts.of(self.model, self.draft, passes_of(config.speculative_config))
        _assume_scales(self.model, self.draft)
        keep_distinct_blocks(self.model)
        self.pass_bytes = cache(self._pass_bytes)

    @property
    def page(self) -> int:
        """Return the bytes of a page over all layers."""
        return self.cache_bytes.page

    @property
    def slot(self) -> int:
        """Return the bytes of a slot of recurrent state over all layers; 0 without recurrent
        layers.
        """
        return self.cache_bytes.slot

    def tensor_shapes(self) -> tuple[torch.Size, ...]:
        """Return the shapes of all tensors of the model and the draft model.

        Ranks with the same ones take the same memory.
        """
        modules = [module for module in (self.model, self.draft) if module is not None]
        return tuple(
            tensor.shape
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
        )

    def program(self, limits: StepLimits, build: BuildContext) -> Program:
        """Return a program on tensors without memory."""
        placed = replace(limits, device=FAKE_GPU)
        return build_program(self.config, placed, build, self.model, self.draft, NO_HOOKS)

    def working(self, rows: int, tokens: int, graphs: PromptGraphs) -> dict[str, int]:
        """Return the bytes of the row table, the largest eager pass and the graphs, by name."""
        limits = sized(self.limits, self.config, rows, tokens, graphs)
        with self.mode, dry(self.card):
            table = allocated(lambda: self.program(limits, self._unrecorded_build()))
        parts = {"table": table, "step": self.pass_bytes(*self.largest_pass(limits)).peak}
        if limits.graph_mode == "none":
            return parts
        return parts | {"graphs": self.graphs(limits).total}

    def largest_pass(self, limits: StepLimits) -> tuple[StepShape, ...]:
        """Return the shapes of the forward pass with the highest peak of those that an engine runs
        without a graph while it serves.

        A joint step runs so before its capture, outside of the memory of the graphs.
        """
        decode = decode_shapes(limits)
        passes: list[tuple[StepShape, ...]]
        passes = [(largest_prompt_step(limits)[1],), (largest_forced_step(limits),)]
        if limits.graph_mode != "full":
            passes += [(shape,) for shape in (*decode, *one_row_forced(limits))]
        if limits.joint_graphs:
            widest = max(decode, key=lambda shape: self.pass_bytes(shape).peak)
            passes.append((widest, padded_shapes(limits)[-1]))
        return max(passes, key=lambda shapes: self.pass_bytes(*shapes).peak)

    def graphs(self, limits: StepLimits) -> "GraphBytes":
        """Return the bytes of all graphs."""
        return graph_bytes(limits, self.pass_bytes)

    @cached_property
    def _largest_program(self) -> Program:
        """Program with the most rows. The bytes of a step depend on its shape alone, so it runs the
        steps of all others.
        """
        return self.program(self.limits, self._unrecorded_build())

    def _unrecorded_build(self) -> BuildContext:
        """Return the build context with a list of choices that nothing reads: they are recorded
        for the final sizes alone.
        """
        build = copy(self.build)
        build.choices = []
        return build

    def _pass_bytes(self, *shapes: StepShape) -> PassBytes:
        """Run the steps of a forward pass dry, and count their bytes."""
        with self.mode, dry(self.card):
            return step_bytes(self._largest_program, *shapes)


@dataclass(frozen=True)
class GraphBytes:
    """Bytes of all CUDA graphs of an engine.

    largest: shapes of the pass with the most working memory, which all graphs share. working: bytes
    of it. results: bytes that the graphs keep, each its own. driver: bytes of the driver.
    """

    largest: tuple[StepShape, ...]
    working: int
    results: int
    driver: int

    @property
    def total(self) -> int:
        """Return the bytes of all parts."""
        return self.working + self.results + self.driver


def graph_bytes(limits: StepLimits, pass_bytes: Callable[..., PassBytes]) -> GraphBytes:
    """Return the bytes of all graphs. pass_bytes: returns those of a forward pass by its shapes.

    Results of a decode step are hidden states and logits of its tokens, so they shrink with its
    drafts. A joint step has three graphs and counts as two shapes.
    """
    passes = captured_passes(limits, pass_bytes)
    largest = max(passes, key=lambda shapes: passes[shapes].working)
    decode = decode_shapes(limits)
    forced = one_row_forced(limits)
    padded = padded_shapes(limits)
    widths = sum(drafts + 1 for drafts in limits.draft_lengths)
    results = sum(passes[shape,].results for shape in decode) * widths // limits.query_len
    results += sum(passes[shape,].results for shape in (*forced, *padded))
    count = len(decode) * len(limits.draft_lengths) + len(forced) + len(padded)
    if limits.joint_graphs:
        joint_results = passes[decode[-1],].results + passes[padded[-1],].results
        results += limits.joint_graphs * joint_results
        count += 2 * max_graphs(limits)
    return GraphBytes(largest, passes[largest].working, results, count * GRAPH_BYTES)


def captured_passes(
    limits: StepLimits, pass_bytes: Callable[..., PassBytes]
) -> dict[tuple[StepShape, ...], PassBytes]:
    """Return the bytes of captured passes by their shapes: decode steps with the most drafts, steps
    of forced tokens and of prompts, and the joint step with the most working memory.
    """
    decode = decode_shapes(limits)
    padded = padded_shapes(limits)
    single = (*decode, *one_row_forced(limits), *padded)
    passes: dict[tuple[StepShape, ...], PassBytes]
    passes = {(shape,): pass_bytes(shape) for shape in single}
    if limits.joint_graphs:
        widest = max(decode, key=lambda shape: passes[shape,].working)
        passes[widest, padded[-1]] = pass_bytes(widest, padded[-1])
    return passes


def decode_shapes(limits: StepLimits) -> list[StepShape]:
    """Return the shapes of decode steps with the most drafts, smallest first.

    Steps of few rows may take more memory than larger ones: attention splits their KV, and each
    split has a partial result.
    """
    return [StepShape.uniform(rows, limits.query_len) for rows in limits.row_buckets]


def one_row_forced(limits: StepLimits) -> list[StepShape]:
    """Return the shapes of captured steps of forced tokens, smallest first."""
    return [forced_shape(limits, 1, window) for window in FORCED_WINDOWS]


def padded_shapes(limits: StepLimits) -> list[StepShape]:
    """Return the shapes of padded prompt steps, smallest first."""
    return [padded_prompt_step(limits, tokens) for tokens in limits.prompt_buckets]


def keep_distinct_blocks(model: Any) -> None:
    """Drop the blocks of a model that allocate what others do: a dry run takes as long as a model
    has blocks, and its peak is that of one block of each kind.

    The first block of all has no sum to add, so the next one of its kind is kept as well. With
    auxiliary hidden states, so is the last one of each kind: all of them are alive there.
    """
    kinds: dict[Any, list[int]] = {}
    for index, block in enumerate(model.blocks):
        kinds.setdefault(_kind_of(block), []).append(index)
    kept = {index for same in kinds.values() for index in same[: 2 if same[0] == 0 else 1]}
    if model.aux_hidden_layers:
        kept |= {same[-1] for same in kinds.values()}
    order = sorted(kept | {index for index in model.aux_hidden_layers if index < len(model.blocks)})
    new_index = {old: new for new, old in enumerate(order)} | {len(model.blocks): len(order)}
    model.aux_hidden_layers = tuple(new_index[index] for index in model.aux_hidden_layers)
    model.blocks = nn.ModuleList(model.blocks[index] for index in order)


def _kind_of(block: nn.Module) -> tuple[Any, ...]:
    """Return what decides a block's allocations: modules, sizes of weights, and cache."""
    return tuple(
        (
            name,
            type(module),
            tuple((tensor.shape, tensor.dtype) for tensor in module.parameters(recurse=False)),
            tuple(map(type, module.quantized_parts)) if isinstance(module, Weight) else (),
            getattr(module, "shape", None),
            module.cache_spec() if is_cached(module) else None,
        )
        for name, module in block.named_modules()
    )


def _assume_scales(*roots: nn.Module | None) -> None:
    """Let quantized weights without values answer what launches ask about their scales.

    A checkpoint's scales are not read before. A weight that answers otherwise launches kernels that
    are compiled at their first launch.
    """
    for weight in quantized_weights(*roots):
        vars(weight).update(has_split_factors=True, max_scale=0.0)


def planner_of(config: EngineConfig, limits: StepLimits, dry_engine: DryEngine) -> Planner:
    """Return the planner of an engine's memory."""
    user_sizes = UserSizes(
        rows=config.max_num_seqs,
        tokens=config.max_num_batched_tokens,
        snapshots=config.num_snapshots,
        pages=config.num_gpu_blocks,
        cache_bytes=config.kv_cache_memory_bytes,
        prompt_buckets=config.prompt_buckets,
    )
    return Planner(
        user_sizes,
        dry_engine,
        limits.row_columns,
        config.enable_prefix_caching,
        max_graphs=graphs_of(limits),
    )


def weight_bytes(*roots: nn.Module | None) -> int:
    """Return the bytes of all weights and buffers, quantized or not, each storage once."""
    sizes: dict[int, int] = {}
    for root in roots:
        for module in root.modules() if root is not None else ():
            tensors: list[Any] = [*module.parameters(recurse=False)]
            tensors += module.buffers(recurse=False)
            if isinstance(module, Weight):
                tensors.append(module.loaded)
            sizes |= {id(weight): weight.nbytes for weight in tensors}
    return sum(sizes.values())
