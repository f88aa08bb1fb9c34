"""Estimate of an engine's memory on a GPU from config.json alone, for the memory planner.

The model is built as an engine builds it, on tensors without memory (FakeTensorMode), and its
largest steps run dry.
"""

from copy import copy
from dataclasses import replace
from functools import cache
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
from lockstep.layers.linear import Weight
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
    kv_layers,
    largest_prompt_step,
    sized,
    state_dtype,
)
from lockstep.worker.dry_run import allocated, dry, step_bytes
from lockstep.worker.hooks import NO_HOOKS
from lockstep.worker.joint_steps import LARGEST_GRAPHS, MAX_GRAPHS
from lockstep.worker.memory_planner import Planner, UserSizes
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
        self.working = cache(self._working)

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

    def program(self, limits: StepLimits, build: BuildContext) -> Program:
        """Return a program on tensors without memory."""
        placed = replace(limits, device=FAKE_GPU)
        return build_program(self.config, placed, build, self.model, self.draft, NO_HOOKS)

    def _working(self, rows: int, tokens: int) -> dict[str, int]:
        """Return the bytes of the row table, the largest eager pass and the graphs, by name."""
        limits = sized(self.limits, self.config, rows, tokens)
        build = copy(self.build)
        build.choices = []  # these are recorded for the final sizes alone
        with self.mode, dry(self.card):
            table = allocated(lambda: self.program(limits, build))
            program = self.program(limits, build)
            decode = StepShape.uniform(rows, limits.query_len)
            prompt, _ = step_bytes(program, largest_prompt_step(limits)[1])
            uniform, kept = step_bytes(program, decode)
            forced, _ = step_bytes(program, forced_shape(limits, 1, FORCED_WINDOWS[-1]))
            largest_forced, _ = step_bytes(program, largest_forced_step(limits))
            padded = joint_kept = kept
            if limits.prompt_buckets:
                shape = padded_prompt_step(limits, limits.prompt_buckets[-1])
                padded, joint_kept = step_bytes(program, decode, shape)
        eager = max(prompt, largest_forced)
        if limits.graph_mode == "none":
            return {"table": table, "step": max(eager, uniform)}
        working = max(max(uniform, forced) - kept, padded - joint_kept)
        graphs = graph_bytes(limits, working, kept, joint_kept)
        # Before its capture a joint step runs eagerly, outside of the memory of the graphs.
        return {"table": table, "step": max(eager, padded), "graphs": graphs}


def graph_bytes(limits: StepLimits, working: int, kept: int, joint_kept: int) -> int:
    """Return the bytes of all graphs: the largest graph's, which the others share, and results.

    working: bytes of the largest captured pass at its peak, without its results. kept, joint_kept:
    bytes of the results of the largest decode step, and of that step and the largest padded prompt
    step.
    """
    widths = sum(drafts + 1 for drafts in limits.draft_lengths)
    largest = limits.max_num_seqs * limits.query_len
    tokens = sum(limits.row_buckets) * widths + sum(FORCED_WINDOWS)
    results = kept * tokens // largest
    shapes = len(limits.row_buckets) * len(limits.draft_lengths) + len(FORCED_WINDOWS)
    if limits.prompt_buckets:
        padded_kept = joint_kept - kept
        results += padded_kept * sum(limits.prompt_buckets) // limits.prompt_buckets[-1]
        shapes += len(limits.prompt_buckets)
        results += LARGEST_GRAPHS * joint_kept
        shapes += 2 * MAX_GRAPHS  # a joint step has a forward graph, and a decide of each step
    return working + results + shapes * GRAPH_BYTES


KEPT_BLOCKS = 2
"""Blocks of one kind that are kept from the model's beginning; the first block of all has no sum to
add. The last one of each kind is kept as well, since all auxiliary hidden states
are alive there."""


def keep_distinct_blocks(model: Any) -> None:
    """Drop the blocks of a model that allocate what others do: a dry run takes as long as a model
    has blocks, and its peak is that of one block of each kind."""
    kinds: dict[Any, list[int]] = {}
    for index, block in enumerate(model.blocks):
        kinds.setdefault(_kind_of(block), []).append(index)
    kept = {index for same in kinds.values() for index in (*same[:KEPT_BLOCKS], same[-1])}
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
    """Let quantized weights without values answer what launches ask about their scales."""
    for root in roots:
        for module in root.modules() if root is not None else ():
            if isinstance(module, Weight):
                for part in module.quantized_parts:
                    vars(part).setdefault("has_split_factors", True)


def planner_of(config: EngineConfig, limits: StepLimits, dry_engine: DryEngine) -> Planner:
    """Return the planner of an engine's memory."""
    user_sizes = UserSizes(
        rows=config.max_num_seqs,
        tokens=config.max_num_batched_tokens,
        snapshots=config.num_snapshots,
        pages=config.num_gpu_blocks,
        cache_bytes=config.kv_cache_memory_bytes,
    )
    return Planner(user_sizes, dry_engine, limits.row_columns, config.enable_prefix_caching)


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
