"""From what the user chose to a runner that stands: checkpoint, model, costs, plan, warm-up."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.cache.specs import Cached
from lockstep.config import DTYPES, EngineConfig, Plan, StepLimits
from lockstep.engine.hooks import CheckHooks
from lockstep.errors import ConfigError
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.kv import formats
from lockstep.layers.build import Build, Choice
from lockstep.layers.kv import KVLayers
from lockstep.layers.linear import probe
from lockstep.layers.room import Room
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.hub import folder_of
from lockstep.models.loader import Loaded, build_model, fill_dummy, load_weights
from lockstep.models.reading import ConfigReader
from lockstep.models.rope import longest_sequence
from lockstep.quant import Packing, packing_of
from lockstep.runner import memory
from lockstep.runner.floor import StepCosts
from lockstep.runner.program import Drafter, Program
from lockstep.runner.runner import Runner
from lockstep.runner.sampler import Sampler
from lockstep.runner.synthetic import SyntheticSampler
from lockstep.runner.table import RowTable
from lockstep.scheduling.draft_length import (
    DraftLengthPolicy,
    FixedDraftLength,
    draft_length_policy,
)
from lockstep.spec import drafter_module, passes_of
from lockstep.spec.drafter import DraftContext, NoDrafter
from lockstep.step import PAGE_SIZE, StepShape

Progress = Callable[[str, int, int], None]
GPU_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that a GPU's steps are padded to: a graph for each and number of drafts."""
GPU_STEPS_IN_FLIGHT = 2
"""The host schedules a step while the device works on the one before."""


@dataclass
class EngineParts:
    """All that an engine stands on. draft_policy: how many drafts each step brings; notes: what
    the checkpoint's weight format asks for and is not done; loaded: None where weights are random;
    costs: of its steps.
    """

    plan: Plan
    runner: Runner
    draft_policy: DraftLengthPolicy
    checkpoint: Checkpoint
    choices: list[Choice]
    notes: tuple[str, ...]
    loaded: Loaded | None
    costs: StepCosts


@torch.inference_mode()
def build_engine(config: EngineConfig, progress: Progress, hooks: CheckHooks) -> EngineParts:
    """Builds everything. Raises ConfigError, CheckpointError or CapacityError."""
    device = pick_device(config)
    checkpoint = Checkpoint.read(find_model(config.model), config.hf_overrides)
    packing = packing_of(checkpoint.quantization(), config.quantization)
    limits = step_limits(config, checkpoint, device, packing)
    prepare_device(device)
    build = Build(
        device=device,
        dtype=getattr(torch, limits.dtype),
        window=limits.query_len,
        max_positions=limits.history_len,
        max_model_len=limits.max_model_len,
        tensors=checkpoint.tensors() if config.load_format == "auto" else None,
        prefixes=checkpoint.prefixes,
        packing=packing,
        kv=kv_layers(config, getattr(torch, limits.dtype)),
        state_dtype=state_dtype(config),
    )
    model, draft, loaded = build_models(config, checkpoint, build, progress)
    layers = memory.mixers(model, draft)
    cost = memory.cache_bytes(layers)
    memory.check_table(build.room, limits, model.config.vocab_size)
    probe_linears(build, model, limits)
    program = build_program(config, limits, build, model, draft, hooks)
    size = cache_size(config, limits, build, layers, program)
    plan = Plan(
        **vars(limits),
        num_pages=size.pages,
        page_bytes=cost.page,
        num_slots=size.slots,
        slot_bytes=cost.slot,
        host_pages=memory.host_pages(config, cost, host_room(build)),
        snapshot_every=config.snapshot_every or memory.snapshot_every(model, draft),
        **draft_costs(model, draft),
    )
    runner = Runner(plan, model, draft, program)
    step_ms = runner.warm_up(lambda done, of: progress("warming up", done, of))
    policy = pick_policy(config, plan, hooks, step_ms)
    notes = () if build.packing is None else build.packing.notes
    costs = StepCosts.of(model, draft, passes_of(config.speculative_config))
    return EngineParts(plan, runner, policy, checkpoint, build.choices, notes, loaded, costs)


# What is chosen before anything is built.


def find_model(model: str | None, weights: bool = True) -> Path:
    """The checkpoint folder of a path, a hub id, or the bundled model. weights: as in fetch()."""
    if model is None:
        return Path(str(files("lockstep") / "assets" / "model"))
    return folder_of(model, weights)


def pick_device(config: EngineConfig) -> str:
    """cpu or cuda. Raises ConfigError where cuda is asked for and absent."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' but no GPU is visible to torch; use device='cpu'.")
    return config.device


def pick_dtype(config: EngineConfig, raw: dict[str, Any], device: str) -> torch.dtype:
    """auto: float32 on a CPU, else the checkpoint's own."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device == "cpu":
        return torch.float32
    reader = ConfigReader(raw)
    known = (*DTYPES[1:], None)
    names = [reader.only(name, *known, default=None) for name in ("dtype", "torch_dtype")]
    return getattr(torch, names[0] or names[1] or "bfloat16")


def pick_length(config: EngineConfig, raw: dict[str, Any]) -> int:
    """Return max_model_len, at most what the checkpoint's positions and their scaling allow."""
    most = longest_sequence(ConfigReader(raw))
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is not allowed; allowed: 2 to {most} "
            "(max_position_embeddings of the checkpoint, times the factor of its scaling). Lower "
            "it, or scale positions by rope_parameters in hf_overrides."
        )
    return config.max_model_len or most


def pick_row_buckets(config: EngineConfig, device: str) -> tuple[int, ...]:
    """The row counts that steps are padded to, ascending: the last is max_num_seqs."""
    most = config.max_num_seqs
    usual = GPU_ROW_BUCKETS if device == "cuda" else tuple(range(1, most + 1))
    buckets = config.row_buckets or usual
    return tuple(sorted({b for b in buckets if b < most} | {most}))


def step_limits(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: str,
    packing: Packing | None,
    told: str | None = None,
) -> StepLimits:
    """How large steps may be. told: the numerics of a device that is not there. Raises ConfigError
    or CheckpointError."""
    dtype = pick_dtype(config, checkpoint.raw, device)
    drafting = config.speculative_config
    cuda = device == "cuda"
    return StepLimits(
        model_path=checkpoint.folder,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=pick_length(config, checkpoint.raw),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        query_len=config.num_drafts + 1,
        page_size=PAGE_SIZE,
        row_buckets=pick_row_buckets(config, device),
        draft_lengths=drafting.draft_lengths if drafting else (0,),
        graph_mode=config.cuda_graph_mode if cuda else "none",
        steps_in_flight=config.steps_in_flight or (GPU_STEPS_IN_FLIGHT if cuda else 1),
        numerics=(told or numerics(device, dtype, packing, *_kept_as(config, dtype)))
        + _synthetic(config)
        + _overridden(config),
        quantization=None if packing is None else packing.name,
    )


def numerics(
    device: str,
    dtype: torch.dtype,
    packing: Packing | None = None,
    kv: str | None = None,
    state: torch.dtype = torch.float32,
) -> str:
    """All that bits may depend on besides weights and request: printed, and the fingerprint.

    On a GPU Triton's version too: the trees of its sums follow the layouts that it chooses. kv: the
    format of the KV cache, None for the dtype; state: the recurrent state's dtype.
    """
    if device == "cuda":
        import triton

        arch = "sm" + "".join(map(str, torch.cuda.get_device_capability()))
        libraries = [f"torch-{torch.__version__}", f"triton-{triton.__version__}"]
    else:
        arch = f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
        libraries = [f"torch-{torch.__version__}"]
    name, kept = (str(x).removeprefix("torch.") for x in (dtype, state))
    try:
        release = version("lockstep-llm")
    except PackageNotFoundError:
        from lockstep import __version__ as release
    packed = "" if packing is None else f"+{packing.name}"
    parts = (arch, f"weights-{name}{packed}", f"kv-{kv or name}", f"state-{kept}", "tp1")
    return "/".join((*parts, *libraries, f"lockstep-{release}"))


def _kv_name(config: EngineConfig, dtype: torch.dtype) -> str | None:
    """What numerics call the KV format, with the layers that it leaves out; None: the dtype."""
    format = formats.format_of(config.kv_cache_dtype, dtype)
    if format is None:
        return None
    skipped = ".".join(sorted(set(config.kv_cache_dtype_skip_layers)))
    return f"{format.name}-skip-{skipped}" if skipped else format.name


def kv_layers(config: EngineConfig, dtype: torch.dtype) -> KVLayers:
    """How the model's layers keep keys and values."""
    format = formats.format_of(config.kv_cache_dtype, dtype)
    return KVLayers(format, config.kv_cache_dtype_skip_layers)


def _kept_as(config: EngineConfig, dtype: torch.dtype) -> tuple[str | None, torch.dtype]:
    """What numerics call the formats of KV and recurrent state."""
    return _kv_name(config, dtype), state_dtype(config)


def state_dtype(config: EngineConfig) -> torch.dtype:
    """Of the state that recurrent layers keep between steps."""
    chosen = config.mamba_ssm_cache_dtype
    return torch.float32 if chosen == "auto" else getattr(torch, chosen)


def _synthetic(config: EngineConfig) -> str:
    """What synthetic acceptance adds to the numerics: its answers are not the model's."""
    drafting = config.speculative_config
    chosen = drafting.synthetic_acceptance if drafting else None
    return "" if chosen is None else f"/synthetic-acceptance-{chosen:g}"


def _overridden(config: EngineConfig) -> str:
    """What hf_overrides add to the numerics: the weights are read by other settings."""
    if not config.hf_overrides:
        return ""
    spelled = json.dumps(config.hf_overrides, sort_keys=True, default=str)
    return f"/hf-overrides-{sha256(spelled.encode()).hexdigest()[:8]}"


# The model, and the program of a step.


def prepare_device(device: str) -> None:
    """What must be set before the first op: no library may round sums as it likes."""
    load_backends()
    if device == "cpu":
        memory.keep_freed_memory()
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def build_models(
    config: EngineConfig, checkpoint: Checkpoint, build: Build, progress: Progress
) -> tuple[nn.Module, Any, Loaded | None]:
    """The target and its draft module or None, with their weights; None loaded: random ones."""
    model = build_model(checkpoint.raw, build)
    draft = build_draft(config, checkpoint, model, build)
    if config.load_format == "dummy":
        fill_dummy(model, draft, config.seed)
        return model, draft, None
    shown = partial(progress, "loading")
    return model, draft, load_weights(checkpoint, model, draft, shown, build.packing)


def build_draft(
    config: EngineConfig, checkpoint: Checkpoint, model: nn.Module, build: Build
) -> Any:
    """The configured drafter's module, not loaded yet; None where it has none.

    Its sums may be cut as it likes: no draft changes an answer.
    """
    options = config.speculative_config
    drafting = drafter_module(options.method) if options else None
    if drafting is None or not drafting.NEEDS_MODULE:
        return None
    inexact = build.at("draft")
    inexact.exact = False
    asked = getattr(options, "kv_cache_dtype", None)
    format = formats.format_of(asked or config.kv_cache_dtype, build.dtype)
    inexact.kv = KVLayers(format, setting="speculative_config kv_cache_dtype")
    draft = drafting.build(options, checkpoint, model, inexact)
    model.taps = draft.taps
    return draft


def draft_costs(model: nn.Module, draft: Any) -> dict[str, int]:
    """What a Plan says of the draft module."""
    if draft is None:
        return {}
    known = model.config.vocab_size if draft.ids is None else len(draft.ids)
    return {"draft_vocab_size": known, "draft_head_bytes": draft.head_bytes}


def probe_linears(build: Build, model: nn.Module, limits: StepLimits) -> None:
    """Lets every linear choose its fastest exact backend at the token counts of generated steps."""
    counts = {rows * (k + 1) for rows in limits.row_buckets for k in limits.draft_lengths}
    probe(build, model, sorted(counts))


def build_program(
    config: EngineConfig,
    limits: StepLimits,
    build: Build,
    model: nn.Module,
    draft: Any,
    hooks: CheckHooks,
) -> Program:
    """Table, sampler and drafter around the models. Raises ConfigError on a hook without a K."""
    options = config.speculative_config
    vocab = model.config.vocab_size
    table = RowTable(limits, build, vocab)
    sampler = Sampler(table, build, vocab)
    if options and options.synthetic_acceptance is not None:
        sampler = SyntheticSampler(table, build, vocab, options.synthetic_acceptance)
    drafter: Drafter = NoDrafter()
    if options is None:
        if hooks.drafter:
            raise ConfigError("a drafter of CheckHooks needs a speculative_config, which says K.")
        return Program(table, model, sampler, drafter)
    context = DraftContext(
        config=options,
        drafts=table.drafts,
        tokens=table.tokens,
        computed=table.computed,
        folded=table.folded,
        page_size=table.page_size,
        module=draft,
        sample=partial(sampler.sample, ids=draft.ids if draft else None),
        op=build.at("drafter").op,
    )
    create = hooks.drafter or drafter_module(options.method).create
    return Program(table, model, sampler, create(context), context.on_answer)


# What is left for the cache, and who chooses the number of drafts.


def largest_prompts(limits: StepLimits) -> list[int]:
    """The lengths of the prompts in the largest step: rows that are as long as rows may be."""
    most = limits.max_model_len
    tokens = limits.max_num_batched_tokens
    lengths = [min(most, tokens - at) for at in range(0, tokens, most)]
    return lengths[: limits.max_num_seqs]


def cache_size(
    config: EngineConfig,
    limits: StepLimits,
    build: Build,
    layers: dict[str, Cached],
    program: Program,
) -> memory.CacheSize:
    """Pages and slots: as asked for, or as many as are of use and fit. Raises CapacityError."""
    cost = memory.cache_bytes(layers)
    if limits.device == "cuda" and config.num_gpu_blocks is None:
        budget = config.kv_cache_memory_bytes or free_bytes(config, limits, layers, program)
        return memory.measured_size(config, limits, cost, budget)
    size = memory.asked_size(config, limits, cost)
    if limits.device == "cpu":
        memory.check_cache(build.room, cost, size)
    return size


def free_bytes(
    config: EngineConfig, limits: StepLimits, layers: dict[str, Cached], program: Program
) -> int:
    """Bytes of the GPU that are left beside weights, table and the largest steps, which run here on
    null rows. Negative where those take more than gpu_memory_utilization allows."""
    memory.allocate(layers, num_pages=2, num_slots=2, device=limits.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lengths = largest_prompts(limits)
    program.table.inputs.fill(query_lens=lengths)
    sizes = len(lengths), sum(lengths), max(lengths)
    prompt = StepShape(*sizes, prompt=True, next_drafts=limits.query_len - 1)
    for shape in (prompt, StepShape.uniform(limits.row_buckets[-1], limits.query_len)):
        program.decide(program.forward(shape))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    free, total = torch.cuda.mem_get_info()
    taken = total - free + peak + memory.staging_bytes(config)
    return int(total * config.gpu_memory_utilization) - taken


def host_room(build: Build) -> Room:
    """The host's memory: on a CPU, the device's own."""
    return build.room if build.device == "cpu" else Room("cpu")


def pick_policy(
    config: EngineConfig,
    plan: Plan,
    hooks: CheckHooks,
    step_ms: dict[tuple[int, int], float],
) -> DraftLengthPolicy:
    """Who chooses the number of drafts. step_ms: (rows, drafts) -> ms of a step of null rows."""
    if hooks.draft_policy:
        return hooks.draft_policy(plan.draft_lengths)
    if config.speculative_config is None:
        return FixedDraftLength(0)
    return draft_length_policy(config.speculative_config.adaptive, plan.draft_lengths, step_ms)
