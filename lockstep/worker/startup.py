"""Assemble an engine: checkpoint, memory plan, model, program, cache, warm-up."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep.cache.specs import Cached
from lockstep.config import EngineConfig, Plan, StepLimits
from lockstep.kernels.architecture import architecture_of
from lockstep.layers.build_context import BackendChoice, BuildContext
from lockstep.layers.memory_budget import MemoryBudget
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import LoadResult
from lockstep.quantization import WeightFormat, read_weight_format
from lockstep.scheduling.draft_length import (
    DraftLengthPolicy,
    FixedDraftLength,
    draft_length_policy,
)
from lockstep.spec import passes_of
from lockstep.step import StepShape
from lockstep.worker import memory
from lockstep.worker.build import (
    Progress,
    build_models,
    build_program,
    draft_costs,
    find_model,
    kv_layers,
    largest_prompt_step,
    pick_device,
    prepare_device,
    probe_linears,
    sized,
    state_dtype,
    step_limits,
)
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.memory_estimate import DryEngine, graph_bytes, planner_of, weight_bytes
from lockstep.worker.memory_planner import MemoryPlan, Planner, shortage
from lockstep.worker.program import Program
from lockstep.worker.roofline import StepCosts
from lockstep.worker.worker import Runner, uniform_shapes


@dataclass
class EngineParts:
    """Parts of an engine. draft_policy: how many drafts each step brings; notes: what the
    checkpoint's weight format asks for and is not done; loaded: None where weights are random;
    costs: of its steps.
    """

    plan: Plan
    runner: Runner
    draft_policy: DraftLengthPolicy
    checkpoint: Checkpoint
    choices: list[BackendChoice]
    notes: tuple[str, ...]
    loaded: LoadResult | None
    costs: StepCosts


@torch.inference_mode()
def build_engine(config: EngineConfig, progress: Progress, hooks: CheckHooks) -> EngineParts:
    """Build everything. Raises ConfigError, CheckpointError or CapacityError."""
    device = pick_device(config)
    checkpoint = Checkpoint.read(find_model(config.model), config.hf_overrides)
    packing = read_weight_format(checkpoint.quantization(), config.quantization)
    limits = step_limits(config, checkpoint, device, packing)
    prepare_device(device)
    planned = None
    if device == "cuda" and not _everything_typed(config):
        planned = plan_memory(config, checkpoint, limits, packing)
    dtype = getattr(torch, limits.dtype)
    build = BuildContext(
        device=device,
        dtype=dtype,
        window=limits.query_len,
        max_positions=limits.history_len,
        max_model_len=limits.max_model_len,
        tensors=checkpoint.tensors() if config.load_format == "auto" else None,
        prefixes=checkpoint.prefixes,
        packing=packing,
        kv=kv_layers(config, dtype),
        state_dtype=state_dtype(config),
    )
    model: Any
    model, draft, loaded = build_models(config, checkpoint, build, progress)
    layers = memory.mixers(model, draft)
    cost = memory.cache_bytes(layers)

    def make_program(limits: StepLimits) -> Program:
        return build_program(config, limits, build, model, draft, hooks)

    if planned is None:
        memory.check_table(build.room, limits, model.config.vocab_size)
        program = make_program(limits)
        size = asked_cache(config, limits, build, cost)
        used = Used({}, ())
    else:
        weights = weight_bytes(model, draft)
        fitting = Fitting(config, build, layers, planned, make_program, weights)
        limits, program, size, used = fitting.fit(limits)
    probe_linears(build, model, limits)
    if device == "cuda":
        torch.cuda.empty_cache()  # a probe does not free its copies of weights
    plan = Plan(
        **vars(limits),
        num_pages=size.pages,
        page_bytes=cost.page,
        num_slots=size.slots,
        slot_bytes=cost.slot,
        host_pages=memory.host_pages(config, cost, host_room(build)),
        snapshot_every=config.snapshot_every or memory.snapshot_every(model, draft),
        **draft_costs(model, draft),
        memory=used.parts,
        memory_notes=used.notes,
    )
    runner = Runner(plan, model, draft, program)
    step_ms = runner.warm_up(lambda done, of: progress("warming up", done, of))
    policy = pick_policy(config, plan, hooks, step_ms)
    notes = () if build.packing is None else build.packing.notes
    costs = StepCosts.of(model, draft, passes_of(config.speculative_config))
    return EngineParts(plan, runner, policy, checkpoint, build.choices, notes, loaded, costs)


# Memory of a GPU: planned by estimates before the model is built, filled by what is measured.


@dataclass(frozen=True)
class Planned:
    """A memory plan with its planner, and the bytes that it was made for."""

    planner: Planner
    plan: MemoryPlan
    available: int


@dataclass(frozen=True)
class Used:
    """Bytes by part, as measured, and sentences about what was chosen."""

    parts: dict[str, int]
    notes: tuple[str, ...]


def asked_cache(
    config: EngineConfig, limits: StepLimits, build: BuildContext, cost: memory.CacheBytes
) -> memory.CacheSize:
    """Return the cache as the config says, or as a CPU has room for. Raises CapacityError."""
    size = memory.asked_size(config, limits, cost)
    if limits.device == "cpu":
        memory.check_cache(build.room, cost, size)
    return size


def _everything_typed(config: EngineConfig) -> bool:
    """Return whether nothing is left to choose and nothing to measure."""
    typed = (config.max_num_seqs, config.max_num_batched_tokens, config.num_gpu_blocks)
    return None not in typed


def plan_memory(
    config: EngineConfig, checkpoint: Checkpoint, limits: StepLimits, packing: WeightFormat | None
) -> Planned:
    """Plan the memory of this GPU. Raises CapacityError where not even the weights fit."""
    known = config.load_format == "auto"
    dry_engine = DryEngine(config, checkpoint, limits, packing, architecture_of("cuda"), known)
    planner = planner_of(config, limits, dry_engine)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    taken = max(total - free - torch.cuda.memory_reserved(), 0)
    share = 1.0 if config.kv_cache_memory_bytes else config.gpu_memory_utilization
    available = int(total * share) - taken
    plan = planner.plan(available)
    if sum(dry_engine.fixed.values()) > available:
        raise shortage(plan)
    return Planned(planner, plan, available)


@dataclass(frozen=True)
class Fitting:
    """Fit of the program and the cache into the memory that a loaded model leaves."""

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
            limits = sized(limits, self.config, entry.rows, entry.tokens)
            program = self.make_program(limits)
            parts, budget = self._measure(limits, program)
            lacking = planner.lacking(entry, budget)
            if lacking <= 0:
                break
            # By estimates this entry needs its least bytes; it now must not fit by `lacking`.
            smaller = planner.plan(sum(planner.least(entry).values()) - lacking)
            if smaller.short:
                raise shortage(self._measured_shortage(plan, parts, lacking))
            plan = smaller
            del program
            del self.build.choices[choices:]
            gc.collect()
            torch.cuda.empty_cache()
        size = memory.CacheSize(*planner.fill(entry, -lacking))
        cost = memory.cache_bytes(self.layers)
        parts |= {"pages": size.pages * cost.page}
        if size.slots:
            parts |= {"state": size.slots * cost.slot}
        return limits, program, size, Used(parts, plan.notes)

    def _measure(self, limits: StepLimits, program: Program) -> tuple[dict[str, int], int]:
        """Run the largest steps on null rows -> (bytes by part, bytes left for the cache).

        The second is negative where the parts take more than the share of the GPU.
        """
        memory.allocate(self.layers, num_pages=2, num_slots=2, device=limits.device)
        program.table.inputs.fill()
        for shape in uniform_shapes(limits):
            # A kernel takes memory of the GPU when it is loaded, its threads' stacks included.
            program.decide(program.forward(shape))
        lengths, prompt = largest_prompt_step(limits)
        program.table.inputs.fill(query_lens=lengths)
        uniform = StepShape.uniform(limits.row_buckets[-1], limits.query_len)
        prompt_peak, _ = peak_bytes(program, prompt)
        uniform_peak, kept = peak_bytes(program, uniform)
        graphs = limits.graph_mode != "none"
        free, total = torch.cuda.mem_get_info()
        share = 1.0 if self.config.kv_cache_memory_bytes else self.config.gpu_memory_utilization
        staging = memory.staging_bytes(self.config)
        parts = {
            "weights": self.weights,
            "overhead": total - free - self.weights,  # the row table, CUDA, other programs
            "staging": staging,
            "step": prompt_peak if graphs else max(prompt_peak, uniform_peak),
            "graphs": graph_bytes(limits, uniform_peak, kept) if graphs else 0,
        }
        budget = int(total * share) - sum(parts.values())
        bound = self.config.kv_cache_memory_bytes
        return parts, budget if bound is None else min(budget, bound)

    def _measured_shortage(
        self, plan: MemoryPlan, parts: dict[str, int], lacking: int
    ) -> MemoryPlan:
        """The plan that does not fit, with measured bytes."""
        estimated = self.planned.planner.least(plan.entry)
        cache = {name: estimated[name] for name in ("pages", "state") if name in estimated}
        parts = {name: size for name, size in (parts | cache).items() if size}
        available = sum(parts.values()) - lacking
        typed = self.planned.planner.typed.named()
        return replace(plan, parts=parts, available=available, short=lacking, typed=typed)


def peak_bytes(program: Program, shape: StepShape) -> tuple[int, int]:
    """Run a step -> (the most bytes that it reserved on the GPU, bytes of its results)."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved = torch.cuda.memory_reserved()
    before = torch.cuda.memory_allocated()
    outcome = program.decide(program.forward(shape))
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_reserved() - reserved
    del outcome
    torch.cuda.empty_cache()
    return peak, kept


def host_room(build: BuildContext) -> MemoryBudget:
    """Return the host's memory: on a CPU, the device's."""
    return build.room if build.device == "cpu" else MemoryBudget("cpu")


def pick_policy(
    config: EngineConfig,
    plan: Plan,
    hooks: CheckHooks,
    step_ms: dict[tuple[int, int], float],
) -> DraftLengthPolicy:
    """Return the policy of draft lengths. step_ms: (rows, drafts) -> ms of a step of null rows."""
    if hooks.draft_policy:
        return hooks.draft_policy(plan.draft_lengths)
    if config.speculative_config is None:
        return FixedDraftLength(0)
    return draft_length_policy(config.speculative_config.adaptive, plan.draft_lengths, step_ms)
