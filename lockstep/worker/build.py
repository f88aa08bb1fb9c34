"""Builders of a worker's parts: device, step limits, numerics, model and program."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.config import DTYPES, EngineConfig, StepLimits
from lockstep.errors import ConfigError
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.backends import uses_numba
from lockstep.kernels.formats.kv.table import kv_format
from lockstep.kernels.health import read_health
from lockstep.kernels.sampling import LogitShard
from lockstep.kernels.selection import KernelSelection, check_forced
from lockstep.layers.adapters import NO_ADAPTERS
from lockstep.layers.build_context import BuildContext
from lockstep.layers.kv_format import LayerKVFormats
from lockstep.layers.linear import probe
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config_reader import ConfigReader
from lockstep.models.hub import folder_of
from lockstep.models.loader import LoadResult, build_model, fill_dummy, load_weights
from lockstep.models.lora_adapters import place_adapters, read_adapters
from lockstep.models.rope import longest_sequence
from lockstep.progress import Progress
from lockstep.quantization import WeightFormat
from lockstep.spec import drafter_module, prediction
from lockstep.spec.drafter import DraftContext, NoDrafter
from lockstep.step import PAGE_SIZE, StepShape
from lockstep.worker import memory
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.memory_planner import PROMPT_GRAPHS, PromptGraphs
from lockstep.worker.program import Drafter, Program
from lockstep.worker.row_table import RowTable
from lockstep.worker.sampler import Sampler
from lockstep.worker.synthetic_sampler import SyntheticSampler

GPU_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Row counts that a GPU's steps are padded to: one graph for each, per number of drafts."""
GPU_PROMPT_BUCKETS = (64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
"""Token counts that a GPU's steps of few prompts are padded to: one graph for each.

Launching a prompt step takes the host 56 to 96 ms, whatever its tokens are. The device runs 64
tokens of Qwen3.6-27B in 17 ms (H200, 2026-11-30). For longer prompts the device is the bottleneck.
"""
CPU_ROWS = 16
"""Default max_num_seqs of a CPU: more rows make no step faster."""
TOKENS = 2048
"""Default prompt tokens of a step, where memory suffices."""
GPU_ROWS = 256
"""Default max_num_seqs of a GPU, where memory suffices."""
GPU_STEPS_IN_FLIGHT = 2
"""Default steps in flight: the host schedules a step while the device runs the previous one."""


# What is chosen before anything is built.


def find_model(model: str | None, weights: bool = True) -> Path:
    """Return the checkpoint folder of a path, a hub id, or the bundled model. weights: see
    fetch().
    """
    if model is None:
        return Path(str(files("lockstep") / "assets" / "model"))
    return folder_of(model, weights)


def pick_device(config: EngineConfig) -> str:
    """Return cpu or cuda. Raises ConfigError where cuda is configured and absent."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' but no GPU is visible to torch; use device='cpu'.")
    return config.device


def pick_dtype(config: EngineConfig, raw: dict[str, Any], device: str) -> torch.dtype:
    """Return the activation dtype; auto is float32 on a CPU, else the checkpoint's own."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device == "cpu":
        return torch.float32
    reader = ConfigReader(raw)
    known = (*DTYPES[1:], None)
    names = [reader.one_of(name, *known, default=None) for name in ("dtype", "torch_dtype")]
    return getattr(torch, names[0] or names[1] or "bfloat16")


def pick_length(config: EngineConfig, raw: dict[str, Any]) -> int:
    """Return max_model_len, at most what the checkpoint's positions and their scaling allow."""
    max_length = longest_sequence(ConfigReader(raw))
    if config.max_model_len is not None and config.max_model_len > max_length:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is not allowed; allowed: 2 to {max_length} "
            "(max_position_embeddings of the checkpoint, times the factor of its scaling). Lower "
            "it, or scale positions by rope_parameters in hf_overrides."
        )
    return config.max_model_len or max_length


def pick_row_buckets(config: EngineConfig, device: str, rows: int) -> tuple[int, ...]:
    """Return the row counts that steps are padded to, ascending: the last is max_num_seqs."""
    usual = GPU_ROW_BUCKETS if device.startswith("cuda") else tuple(range(1, rows + 1))
    buckets = config.row_buckets or usual
    return tuple(sorted({bucket for bucket in buckets if bucket < rows} | {rows}))


def pick_prompt_buckets(
    config: EngineConfig, graph_mode: str, limit: int, max_captured: int
) -> tuple[int, ...]:
    """Return the token counts that steps of few prompts are padded to, ascending.

    Padding helps graphs of whole steps alone, so without them the default is none.

    Args:
        limit: the smaller of max_num_batched_tokens and max_model_len, since padding tokens have
            positions too.
        max_captured: largest of the default counts.
    """
    buckets = config.prompt_buckets
    if buckets is None:
        usual = GPU_PROMPT_BUCKETS if graph_mode == "full" else ()
        buckets = tuple(bucket for bucket in usual if bucket <= max_captured)
    return tuple(sorted({bucket for bucket in buckets if bucket <= limit}))


def sized(
    limits: StepLimits,
    config: EngineConfig,
    rows: int,
    tokens: int,
    graphs: PromptGraphs = PROMPT_GRAPHS[0],
) -> StepLimits:
    """Return the limits with these numbers of rows and of prompt tokens of a step, and these graphs
    of prompt steps.
    """
    prompt_buckets = pick_prompt_buckets(
        config, limits.graph_mode, min(tokens, limits.max_model_len), graphs.max_tokens
    )
    captures = limits.graph_mode == "full" and bool(prompt_buckets)
    return replace(
        limits,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        row_buckets=pick_row_buckets(config, limits.device, rows),
        prompt_buckets=prompt_buckets,
        joint_graphs=graphs.joint if captures else 0,
    )


def graphs_of(limits: StepLimits) -> PromptGraphs:
    """Return the graphs of prompt steps that an engine with these limits captures."""
    return PromptGraphs(max(limits.prompt_buckets, default=0), limits.joint_graphs)


def step_limits(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: str,
    weight_format: WeightFormat | None,
    assumed_numerics: str | None = None,
) -> StepLimits:
    """Return the largest steps: the user's sizes, or the defaults for ample memory.

    assumed_numerics: numerics of a device that is not present. Raises ConfigError or
    CheckpointError.
    """
    dtype = pick_dtype(config, checkpoint.raw, device)
    drafting = config.speculative_config
    cuda = device == "cuda"
    rows = config.max_num_seqs or (GPU_ROWS if cuda else CPU_ROWS)
    length = pick_length(config, checkpoint.raw)
    tokens = config.max_num_batched_tokens or TOKENS
    # A wait for the device cannot be captured.
    graph_mode = config.cuda_graph_mode if cuda and not config.sync_kernels else "none"
    adapters = {adapter.name: adapter.digest for adapter in read_adapters(config.lora_modules)}
    limits = StepLimits(
        model_path=checkpoint.folder,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        query_len=config.max_drafts + 1,
        page_size=PAGE_SIZE,
        row_buckets=(),
        draft_lengths=drafting.draft_lengths if drafting else (0,),
        has_predictions=drafting is not None and drafting.method == prediction.METHOD,
        graph_mode=graph_mode,
        steps_in_flight=config.steps_in_flight or (GPU_STEPS_IN_FLIGHT if cuda else 1),
        numerics=(
            assumed_numerics or numerics(device, dtype, weight_format, *_kept_as(config, dtype))
        )
        + _synthetic(config)
        + _overridden(config)
        + _adapted(adapters),
        quantization=None if weight_format is None else weight_format.name,
        adapters=adapters,
    )
    return sized(limits, config, rows, tokens)


def numerics(
    device: str,
    dtype: torch.dtype,
    weight_format: WeightFormat | None = None,
    kv: str | None = None,
    state: torch.dtype = torch.float32,
) -> str:
    """Return everything but weights and request that answers may depend on.

    It is printed at start and hashed into the fingerprint. On a GPU it includes Triton's version,
    since reduction trees follow the layouts that Triton chooses. On a CPU it says whether Numba
    kernels serve, whose trees differ from torch's; their bits do not depend on Numba's version.
    kv: KV cache format, None for the dtype; state: dtype of the recurrent state.
    """
    if device == "cuda":
        import triton

        arch = "sm" + "".join(map(str, torch.cuda.get_device_capability()))
        libraries = [f"torch-{torch.__version__}", f"triton-{triton.__version__}"]
    else:
        arch = f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
        libraries = [f"torch-{torch.__version__}", *(["numba"] if uses_numba(dtype) else [])]
    name, kept = (str(x).removeprefix("torch.") for x in (dtype, state))
    try:
        release = version("lockstep-llm")
    except PackageNotFoundError:
        from lockstep import __version__ as release
    packed = "" if weight_format is None else f"+{weight_format.name}"
    rounds = weight_format is not None and weight_format.quantizes_activations
    activations = ["activations-fp8"] if rounds else []
    parts = (arch, f"weights-{name}{packed}", *activations, f"kv-{kv or name}", f"state-{kept}")
    return "/".join((*parts, *libraries, f"lockstep-{release}"))


def _kv_name(config: EngineConfig, dtype: torch.dtype) -> str | None:
    """Return the KV cache format for the numerics, with skipped layers; None for the dtype."""
    format = kv_format(config.kv_cache_dtype, dtype)
    if format is None:
        return None
    skipped = ".".join(sorted(set(config.kv_cache_dtype_skip_layers)))
    return f"{format.name}-skip-{skipped}" if skipped else format.name


def kv_layers(config: EngineConfig, dtype: torch.dtype) -> LayerKVFormats:
    """Return the KV cache format of each attention layer."""
    format = kv_format(config.kv_cache_dtype, dtype)
    return LayerKVFormats(format, config.kv_cache_dtype_skip_layers)


def _kept_as(config: EngineConfig, dtype: torch.dtype) -> tuple[str | None, torch.dtype]:
    """Return the KV cache format and the recurrent state's dtype for the numerics."""
    return _kv_name(config, dtype), state_dtype(config)


def state_dtype(config: EngineConfig) -> torch.dtype:
    """Return the dtype of the state that recurrent layers keep between steps."""
    chosen = config.mamba_ssm_cache_dtype
    return torch.float32 if chosen == "auto" else getattr(torch, chosen)


def _synthetic(config: EngineConfig) -> str:
    """Return the numerics suffix of synthetic acceptance: its answers are not the model's."""
    drafting = config.speculative_config
    chosen = drafting.synthetic_acceptance if drafting else None
    return "" if chosen is None else f"/synthetic-acceptance-{chosen:g}"


def _overridden(config: EngineConfig) -> str:
    """Return the numerics suffix of hf_overrides: they change how weights are used."""
    if not config.hf_overrides:
        return ""
    spelled = json.dumps(config.hf_overrides, sort_keys=True, default=str)
    return f"/hf-overrides-{sha256(spelled.encode()).hexdigest()[:8]}"


def _adapted(adapters: Mapping[str, str]) -> str:
    """Return the numerics suffix of LoRA adapters, with their digests."""
    if not adapters:
        return ""
    return f"/adapters-{sha256(json.dumps(adapters).encode()).hexdigest()[:8]}"


# The model, and the program of a step.


def prepare_device(device: str) -> None:
    """Configure libraries before the first op: none may choose another reduction tree."""
    load_backends()
    if device == "cpu":
        memory.keep_freed_memory()
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def select_kernels(config: EngineConfig, device: str) -> KernelSelection:
    """Return the rules of backends: the user's, then those of doctor's results for this machine.

    Call after prepare_device(). Raises ConfigError for an unknown op or backend.
    """
    forced = dict(config.kernels or {})
    check_forced(forced)
    return KernelSelection(forced, read_health(device), config.sync_kernels)


def check_served(build: BuildContext) -> None:
    """Raise ConfigError where a backend that the user named serves no layer of the model."""
    for op, backend in build.kernels.forced.items():
        chosen = [choice for choice in build.choices if choice.op == op]
        if any(choice.backend == backend for choice in chosen):
            continue
        refused = [choice.refused[backend] for choice in chosen if backend in choice.refused]
        why = f"it serves no layer: {refused[0]}" if refused else "no layer has this op"
        used = ", ".join(sorted({choice.backend for choice in chosen})) or "none"
        raise ConfigError(
            f"kernels={op}={backend} is not allowed with this model on {build.device}: {why}; "
            f"allowed: {used}. Name a backend that serves, or leave it out."
        )


def build_models(
    config: EngineConfig, checkpoint: Checkpoint, build: BuildContext, progress: Progress
) -> tuple[nn.Module, Any, LoadResult | None]:
    """Build the target and its draft module, and load their weights.

    Returns (target, draft module or None, None for random weights).
    """
    model = build_model(checkpoint.raw, build)
    # Before the weights are read: an adapter of another model is refused at once.
    placed = place_adapters(model, read_adapters(config.lora_modules))
    draft = build_draft(config, checkpoint, model, build)
    for adapter in placed:
        adapter.load()
    if config.load_format == "dummy":
        fill_dummy(model, draft, config.seed, build)
        return model, draft, None
    shown = partial(progress, "loading")
    return model, draft, load_weights(checkpoint, model, draft, shown, build.weight_format)


def build_draft(
    config: EngineConfig, checkpoint: Checkpoint, model: nn.Module, build: BuildContext
) -> Any:
    """Build the configured drafter's module without weights; None where it has none.

    Its ops may use any reduction tree, and it drafts without adapters: no draft changes an answer.
    """
    options = config.speculative_config
    drafting = drafter_module(options.method) if options else None
    if drafting is None or not drafting.NEEDS_MODULE:
        return None
    inexact = build.for_layer("draft")
    inexact.exact = False
    inexact.adapters = NO_ADAPTERS
    kv_cache_dtype = getattr(options, "kv_cache_dtype", None)
    format = kv_format(kv_cache_dtype or config.kv_cache_dtype, build.dtype)
    inexact.kv = LayerKVFormats(format, setting="speculative_config kv_cache_dtype")
    draft = drafting.build(options, checkpoint, model, inexact)
    model.aux_hidden_layers = draft.aux_hidden_layers
    return draft


def draft_costs(model: Any, draft: Any) -> dict[str, Any]:
    """Return the fields of a Plan that describe the draft module."""
    if draft is None:
        return {}
    known = model.config.vocab_size if draft.ids is None else len(draft.ids)
    return {"draft_vocab_size": known, "draft_head_bytes": draft.head_bytes}


def probe_linears(build: BuildContext, model: nn.Module, limits: StepLimits) -> None:
    """Let every linear choose its fastest exact backend at known token counts.

    These are the counts of decode steps and of a full prompt step. Long prompts, and queues of
    prompts, run in full steps; the exact backend serves all other counts.
    """
    counts = {rows * (k + 1) for rows in limits.row_buckets for k in limits.draft_lengths}
    probe(build, model, sorted(counts), limits.max_num_batched_tokens)


def build_program(
    config: EngineConfig,
    limits: StepLimits,
    build: BuildContext,
    model: nn.Module,
    draft: Any,
    hooks: CheckHooks,
) -> Program:
    """Build row table, sampler and drafter around the models.

    Raises ConfigError on a drafter hook without a speculative_config.
    """
    options = config.speculative_config
    vocab = model.config.vocab_size
    table = RowTable(limits, build, vocab)
    shard: LogitShard = model.head.logit_shard  # type: ignore[assignment, union-attr]
    sampler = Sampler(table, build, vocab, shard)
    if options and options.synthetic_acceptance is not None:
        sampler = SyntheticSampler(table, build, vocab, shard, options.synthetic_acceptance)
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
        sample=partial(
            sampler.sample,
            ids=draft.ids if draft else None,
            shard=draft.logit_shard if draft else None,
        ),
        op=build.for_layer("drafter").op,
        predictions=table.predictions.predictions(table.prompt_len),
    )
    create = hooks.drafter or drafter_module(options.method).create
    return Program(table, model, sampler, create(context), context.on_answer)


# The largest steps.


def largest_prompts(limits: StepLimits) -> list[int]:
    """Return the prompt lengths of the largest step: as many full-length rows as fit."""
    max_length = limits.max_model_len
    tokens = limits.max_num_batched_tokens
    lengths = [min(max_length, tokens - at) for at in range(0, tokens, max_length)]
    return lengths[: limits.max_num_seqs]


def largest_prompt_step(limits: StepLimits) -> tuple[list[int], StepShape]:
    """Return the largest prompts and the shape of their step."""
    lengths = largest_prompts(limits)
    sizes = len(lengths), sum(lengths), max(lengths)
    return lengths, StepShape(*sizes, prompt=True, next_drafts=limits.query_len - 1)
