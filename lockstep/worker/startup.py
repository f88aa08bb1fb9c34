"""Startup of a worker: checkpoint, memory plan, model, program, cache, warm-up."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import Any

import torch
from torch import nn

from lockstep.cache.specs import Cached
from lockstep.config import EngineConfig, Plan, StepLimits
from lockstep.kernels.architecture import architecture_of
from lockstep.kernels.exchange import ALONE, RankGroup
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import quantized_weights
from lockstep.layers.memory_budget import MemoryBudget
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.lora_adapters import adapter_table, read_adapters
from lockstep.progress import Progress
from lockstep.quantization import WeightFormat, read_weight_format
from lockstep.scheduling.chunks import FORCED_WINDOWS
from lockstep.step import StepShape
from lockstep.worker import memory
from lockstep.worker.build import (
    build_models,
    build_program,
    check_served,
    draft_costs,
    find_model,
    graphs_of,
    kv_layers,
    largest_prompt_step,
    pick_device,
    prepare_device,
    probe_linears,
    select_kernels,
    sized,
    state_dtype,
    step_limits,
)
from lockstep.worker.compile_ahead import StartCompiler
from lockstep.worker.explain_ranks import RankBytes
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.memory_estimate import DryEngine, planner_of, weight_bytes
from lockstep.worker.memory_planner import MemoryPlan, Planner, PromptGraphs, shortage
from lockstep.worker.program import Program
from lockstep.worker.step_shapes import forced_shape, largest_forced_step, uniform_shapes
from lockstep.worker.worker import Worker, smallest


@dataclass(frozen=True)
class MemoryFit:
    """Sizes that fit into the memory of one rank, as plain data.

    num_pages and num_slots include the null page and the null slot. weights: bytes of the model.
    parts: measured bytes of the GPU by name. notes: sentences about what the memory planner chose.
    """

    limits: StepLimits
    num_pages: int
    num_slots: int
    host_pages: int
    weights: int
    parts: dict[str, int]
    notes: tuple[str, ...]

    def rank_bytes(self, plan: Plan) -> RankBytes:
        """Return the bytes of this rank by the plan of all ranks."""
        pages = plan.num_pages * plan.page_bytes
        other = {"weights", "pages", "state"}
        buffers = sum(size for name, size in self.parts.items() if name not in other)
        state = plan.num_slots * plan.slot_bytes
        return RankBytes(self.weights, pages, state, buffers if self.parts else None)


def smallest_fit(fits: Sequence[MemoryFit], config: EngineConfig) -> MemoryFit:
    """Return the sizes that fit into every rank's memory.

    weights, parts and notes: of the first rank.
    """
    rows = min(fit.limits.max_num_seqs for fit in fits)
    tokens = min(fit.limits.max_num_batched_tokens for fit in fits)
    graphs = reduce(PromptGraphs.within, (graphs_of(fit.limits) for fit in fits))
    return replace(
        fits[0],
        limits=sized(fits[0].limits, config, rows, tokens, graphs),
        num_pages=min(fit.num_pages for fit in fits),
        num_slots=min(fit.num_slots for fit in fits),
        host_pages=min(fit.host_pages for fit in fits),
    )


class WorkerStartup:
    """Startup of one rank, from loading its model to its first step.

    Call order: the constructor loads the model, fit_memory() measures, plan() fixes the sizes for
    all ranks, start() allocates the cache and warms up. loaded: None for random weights. notes:
    what the checkpoint's weight format asks for and is not done.
    """

    @torch.inference_mode()
    def __init__(
        self,
        config: EngineConfig,
        progress: Progress,
        hooks: CheckHooks,
        group: RankGroup = ALONE,
    ) -> None:
        self.config = config
        self.hooks = hooks
        self.device = pick_device(config)
        self.checkpoint = Checkpoint.read(find_model(config.model), config.hf_overrides)
        weight_format = read_weight_format(
            self.checkpoint.quantization(), config.quantization, config.activation_dtype
        )
        self.limits = step_limits(config, self.checkpoint, self.device, weight_format)
        prepare_device(self.device)
        self.planned: Planned | None = None
        self.compiler: StartCompiler | None = None
        if self.device == "cuda":
            make = cache(
                partial(dry_engine_of, config, self.checkpoint, self.limits, weight_format)
            )
            if not _sizes_are_set(config):
                self.planned = plan_memory(config, self.limits, make(), group)
            # All ranks launch the same kernels, and those of a node share Triton's cache.
            if group.index == config.node_ranks.start:
                limits = self.limits
                if self.planned is not None:
                    limits = self.planned.sized(limits, config)
                self.compiler = StartCompiler(config, limits, architecture_of("cuda"), make)
        dtype = getattr(torch, self.limits.dtype)
        self.build = BuildContext(
            device=self.device,
            dtype=dtype,
            window=self.limits.query_len,
            max_positions=self.limits.history_len,
            max_model_len=self.limits.max_model_len,
            tensors=self.checkpoint.tensors() if config.load_format == "auto" else None,
            prefixes=self.checkpoint.prefixes,
            weight_format=weight_format,
            kv=kv_layers(config, dtype),
            state_dtype=state_dtype(config),
            group=group,
            adapters=adapter_table(read_adapters(config.lora_modules)),
            kernels=select_kernels(config, self.device),
        )
        self.model: Any
        self.model, self.draft, self.loaded = build_models(
            config, self.checkpoint, self.build, progress
        )
        self.layers = memory.mixers(self.model, self.draft)
        self.cost = memory.cache_bytes(self.layers)
        self.notes = () if weight_format is None else weight_format.notes
        self._num_model_choices = len(self.build.choices)
        self._program: tuple[StepLimits, Program] | None = None

    @torch.inference_mode()
    def fit_memory(self) -> MemoryFit:
        """Return the sizes that fit. All ranks call it. Raises CapacityError where nothing fits."""
        agree_on_scales(self.build.group, self.model, self.draft)
        weights = weight_bytes(self.model, self.draft)
        if self.planned is None:
            memory.check_table(self.build.memory_budget, self.limits, self.model.config.vocab_size)
            limits = self.limits
            program = self._make_program(limits)
            size = configured_cache(self.config, limits, self.build, self.cost)
            used = Used({}, ())
        else:
            fitting = Fitting(
                self.config, self.build, self.layers, self.planned, self._make_program, weights
            )
            limits, program, size, used = fitting.fit(self.limits)
        self._program = limits, program
        host_pages = memory.host_pages(self.config, self.cost, host_room(self.build))
        return MemoryFit(
            limits, size.pages, size.slots, host_pages, weights, used.parts, used.notes
        )

    def plan(self, fit: MemoryFit) -> Plan:
        """Return the plan of all ranks. fit: the smallest of their fits."""
        redefined = "".join(f"/{choice}" for choice in sorted(self.build.redefined))
        limits = replace(fit.limits, numerics=fit.limits.numerics + redefined)
        return Plan(
            **vars(limits),
            num_pages=fit.num_pages,
            page_bytes=self.cost.page,
            num_slots=fit.num_slots,
            slot_bytes=self.cost.slot,
            host_pages=fit.host_pages,
            snapshot_every=self.config.snapshot_every
            or memory.snapshot_every(self.model, self.draft),
            **draft_costs(self.model, self.draft),
            memory=fit.parts,
            memory_notes=fit.notes,
        )

    @torch.inference_mode()
    def start(self, plan: Plan, progress: Progress) -> tuple[Worker, dict[tuple[int, int], float]]:
        """Allocate the cache and warm up -> the worker, and (rows, drafts) -> ms of a step."""
        program = self._program_of(plan)
        check_served(self.build)
        probe_linears(self.build, self.model, plan)
        if self.device == "cuda":
            torch.cuda.empty_cache()  # a probe does not free its copies of weights
        worker = Worker(plan, self.model, self.draft, program, self.build.group)
        step_ms = worker.warm_up(lambda done, of: progress("warming up", done, of))
        if self.compiler is not None:
            self.compiler.finish(progress)
        return worker, step_ms

    def _program_of(self, plan: Plan) -> Program:
        """Return the program of fit_memory(), or a new one where another rank has less memory."""
        if self._program is not None:
            limits, program = self._program
            self._program = None
            if (limits.max_num_seqs, limits.row_buckets) == (plan.max_num_seqs, plan.row_buckets):
                return program
            del program
            del self.build.choices[self._num_model_choices :]
        return self._make_program(plan)

    def _make_program(self, limits: StepLimits) -> Program:
        return build_program(self.config, limits, self.build, self.model, self.draft, self.hooks)


# Memory of a GPU: planned by estimates before the model is built, filled by what is measured.


@dataclass(frozen=True)
class Planned:
    """Memory plan with its planner, and the bytes that it was made for.

    dry_engine: says which passes take the most memory.
    """

    planner: Planner
    plan: MemoryPlan
    available: int
    dry_engine: DryEngine

    def sized(self, limits: StepLimits, config: EngineConfig) -> StepLimits:
        """Return the limits with the plan's rows, tokens of a step, and graphs of prompts."""
        entry = self.plan.entry
        return sized(limits, config, entry.rows, entry.tokens, entry.graphs)


@dataclass(frozen=True)
class Used:
    """Measured bytes by part, and sentences about what was chosen."""

    parts: dict[str, int]
    notes: tuple[str, ...]


def configured_cache(
    config: EngineConfig, limits: StepLimits, build: BuildContext, cost: memory.CacheBytes
) -> memory.CacheSize:
    """Return the configured cache size, or what fits into a CPU's memory. Raises CapacityError."""
    size = memory.configured_size(config, limits, cost)
    if limits.device == "cpu":
        memory.check_cache(build.memory_budget, cost, size)
    return size


def _sizes_are_set(config: EngineConfig) -> bool:
    """Return whether the user set all sizes, so that nothing has to be measured."""
    user_sizes = (config.max_num_seqs, config.max_num_batched_tokens, config.num_gpu_blocks)
    return None not in user_sizes


def dry_engine_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    limits: StepLimits,
    weight_format: WeightFormat | None,
) -> DryEngine:
    """Return the dry engine of a model on this GPU."""
    known = config.load_format == "auto"
    return DryEngine(config, checkpoint, limits, weight_format, architecture_of("cuda"), known)


def agree_on_scales(group: RankGroup, *roots: nn.Module | None) -> None:
    """Replace what each rank derived from its rows of quantized weights by what all rows say.

    Of numbers the largest counts; a property that is true or false must be true on all ranks. They
    choose the decoder of a weight's kernels. So ranks could launch different kernels, and one could
    compile while the others wait. No bit depends on the choice.
    """
    derived = [(weight, name) for weight in quantized_weights(*roots) for name in weight.derived]
    if group.size == 1 or not derived:
        return
    values = [getattr(weight, name) for weight, name in derived]
    local = torch.tensor(list(map(float, values)), device=derived[0][0].device)
    ranks = group.all_gather(local)
    agreed = zip(derived, values, ranks.amax(0).tolist(), ranks.amin(0).tolist(), strict=True)
    for (weight, name), value, high, low in agreed:
        vars(weight)[name] = bool(low) if isinstance(value, bool) else high


def plan_memory(
    config: EngineConfig, limits: StepLimits, dry_engine: DryEngine, group: RankGroup
) -> Planned:
    """Plan the memory of this GPU, as every rank of the group does: for the least of them.

    Raises CapacityError where not even the weights fit.
    """
    planner = planner_of(config, limits, dry_engine)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken = max(total - free - torch.cuda.memory_reserved(), 0)
    share = 1.0 if config.kv_cache_memory_bytes else config.gpu_memory_utilization
    available = smallest(group, int(total * share) - taken)
    plan = planner.plan(available)
    if sum(dry_engine.fixed.values()) > available:
        raise shortage(plan)
    return Planned(planner, plan, available, dry_engine)


@dataclass(frozen=True)
class Fitting:
    """Fit of program and cache into the memory that a loaded model leaves."""

    config: EngineConfig
    build: BuildContext
    layers: dict[str, Cached]
    planned: Planned
    make_program: Callable[[StepLimits], Program]
    weights: int

    def fit(self, limits: StepLimits) -> tuple[StepLimits, Program, memory.CacheSize, Used]:
        """Build the planned program, measure its largest steps, and give the rest to the cache.

        Where the measured steps take more than the estimate allowed for, the planner chooses again
        with that much less. Raises CapacityError where nothing fits.
        """
        planner = self.planned.planner
        plan = self.planned.plan
        choices = len(self.build.choices)
        while True:
            entry = plan.entry
            limits = sized(limits, self.config, entry.rows, entry.tokens, entry.graphs)
            program = self.make_program(limits)
            parts, budget = self._measure(limits, program)
            # All ranks choose the same entry, since they run its steps together.
            budget = smallest(self.build.group, budget)
            missing = planner.missing_bytes(entry, budget)
            if missing <= 0:
                break
            # By estimates this entry needs its minimum bytes; it now must not fit by `missing`.
            smaller = planner.plan(sum(planner.min_bytes(entry).values()) - missing)
            if smaller.short:
                raise shortage(self._measured_shortage(plan, parts, missing))
            plan = smaller
            del program
            del self.build.choices[choices:]
            gc.collect()
            torch.cuda.empty_cache()
        size = memory.CacheSize(*planner.fill_cache(entry, -missing))
        cost = memory.cache_bytes(self.layers)
        parts |= {"pages": size.pages * cost.page}
        if size.slots:
            parts |= {"state": size.slots * cost.slot}
        return limits, program, size, Used(parts, plan.notes)

    def _measure(self, limits: StepLimits, program: Program) -> tuple[dict[str, int], int]:
        """Run the largest steps on null rows -> (bytes by part, bytes left for the cache).

        Only the passes that take the most memory when they run dry are measured. They count with
        their bytes of the dry run at least. The second result is negative where the parts exceed
        the configured share of the GPU.
        """
        memory.allocate(self.layers, num_pages=2, num_slots=2, device=limits.device)
        forced = [forced_shape(limits, 1, window) for window in FORCED_WINDOWS]
        forced.append(largest_forced_step(limits))
        for shape in (*forced, *uniform_shapes(limits), largest_prompt_step(limits)[1]):
            # A kernel takes memory of the GPU when it is loaded, its threads' stacks included.
            fill_inputs(program, shape)
            program.run(shape)
        dry_engine = self.planned.dry_engine
        # Every rank runs the same passes, since all of them run the first rank's share dry.
        largest = dry_engine.largest_pass(limits)
        step_peak, _ = peak_bytes(program, *largest)
        graphs = 0
        if limits.graph_mode != "none":
            estimate = dry_engine.graphs(limits)
            peak, kept = peak_bytes(program, *estimate.largest)
            graphs = estimate.total + max(peak - kept - estimate.working, 0)
        free, total = torch.cuda.mem_get_info()
        share = 1.0 if self.config.kv_cache_memory_bytes else self.config.gpu_memory_utilization
        staging = memory.staging_bytes(self.config)
        parts = {
            "weights": self.weights,
            "overhead": total - free - self.weights,  # the row table, CUDA, other programs
            "staging": staging,
            "step": max(step_peak, dry_engine.pass_bytes(*largest).peak),
            "graphs": graphs,
        }
        budget = int(total * share) - sum(parts.values())
        bound = self.config.kv_cache_memory_bytes
        return parts, budget if bound is None else min(budget, bound)

    def _measured_shortage(
        self, plan: MemoryPlan, parts: dict[str, int], missing: int
    ) -> MemoryPlan:
        """Return the plan that does not fit, with measured bytes."""
        estimated = self.planned.planner.min_bytes(plan.entry)
        cache = {name: estimated[name] for name in ("pages", "state") if name in estimated}
        parts = {name: size for name, size in (parts | cache).items() if size}
        available = sum(parts.values()) - missing
        settings = self.planned.planner.user_sizes.settings()
        return replace(
            plan, parts=parts, available=available, short=missing, user_settings=settings
        )


def fill_inputs(program: Program, *shapes: StepShape) -> None:
    """Fill the inputs of a pass with null rows. Prompts but the last have the maximum length."""
    for inputs, shape in zip(program.table.pass_inputs, shapes, strict=False):
        begins = range(0, shape.tokens, shape.query_len) if shape.prompt else ()
        inputs.fill(query_lens=[min(shape.query_len, shape.tokens - begin) for begin in begins])


def peak_bytes(program: Program, *shapes: StepShape) -> tuple[int, int]:
    """Run the steps of a pass -> (peak bytes reserved on the GPU, bytes of their results).

    Results are those that step_bytes() counts.
    """
    fill_inputs(program, *shapes)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved = torch.cuda.memory_reserved()
    before = torch.cuda.memory_allocated()
    forwarded = program.forward(*shapes)
    outcomes = [program.decide(step) for step in forwarded]
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_reserved() - reserved
    del forwarded, outcomes
    torch.cuda.empty_cache()
    return peak, kept


def host_room(build: BuildContext) -> MemoryBudget:
    """Return the budget of host memory: on a CPU, the device's."""
    return build.memory_budget if build.device == "cpu" else MemoryBudget("cpu")
