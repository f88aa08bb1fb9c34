"""From what the user chose to a runner that stands: model, plan, memory, warm-up."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import DTYPES, EngineConfig, Plan
from lockstep.engine.hooks import CheckHooks
from lockstep.errors import ConfigError
from lockstep.kernels.backends import load as load_backends
from lockstep.layers.build import Build, Choice
from lockstep.layers.linear import probe
from lockstep.models.hub import fetch
from lockstep.models.loader import build_model, fill_dummy, load_weights, read_config
from lockstep.models.reading import ConfigReader
from lockstep.runner import memory
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
from lockstep.spec import DraftContext, NoDrafter, draft_lengths, drafter_module
from lockstep.spec.vocabulary import draft_vocab_size, frequent_tokens
from lockstep.step import StepShape

Progress = Callable[[str, int, int], None]
GPU_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
GPU_SNAPSHOT_SHARE = 0.2


@dataclass
class EngineParts:
    """All that an engine stands on."""

    plan: Plan
    runner: Runner
    draft_policy: DraftLengthPolicy
    raw: dict[str, Any]
    choices: list[Choice]


def find_model(model: str | None) -> Path:
    """The checkpoint folder of a path, a hub id, or the bundled model."""
    if model is None:
        return Path(str(files("lockstep") / "assets" / "model"))
    with suppress(OSError, ValueError):  # a name that no folder can have
        if Path(model).is_dir():
            return Path(model)
    return fetch(model)


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
    reader, known = ConfigReader(raw), (*DTYPES[1:], None)
    names = [reader.only(name, *known, default=None) for name in ("dtype", "torch_dtype")]
    return getattr(torch, names[0] or names[1] or "bfloat16")


def pick_length(config: EngineConfig, raw: dict[str, Any]) -> int:
    """max_model_len, at most what the checkpoint's positions allow."""
    reader = ConfigReader(raw)
    most = reader.size("max_position_embeddings")
    reader.need(most > 1, "max_position_embeddings", "2 or more")
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is not allowed; allowed: 2 to {most} "
            "(max_position_embeddings of the checkpoint). Lower it."
        )
    return config.max_model_len or most


def numerics(device: str, dtype: torch.dtype) -> str:
    """All that bits may depend on besides weights and request: printed, and the fingerprint."""
    if device == "cuda":
        arch = "sm" + "".join(map(str, torch.cuda.get_device_capability()))
    else:
        arch = f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
    name = str(dtype).removeprefix("torch.")
    try:
        release = version("lockstep-llm")
    except PackageNotFoundError:
        from lockstep import __version__ as release
    parts = (arch, f"weights-{name}", f"kv-{name}", "state-float32", "tp1")
    return "/".join((*parts, f"torch-{torch.__version__}", f"lockstep-{release}"))


def _synthetic(config: EngineConfig) -> str:
    """What synthetic acceptance adds to the numerics: its answers are not the model's."""
    spec = config.speculative_config
    chosen = spec.synthetic_acceptance if spec else None
    return "" if chosen is None else f"/synthetic-acceptance-{chosen:g}"


@torch.inference_mode()
def build_engine(config: EngineConfig, progress: Progress, hooks: CheckHooks) -> EngineParts:
    """Builds everything. Raises ConfigError, CheckpointError or CapacityError."""
    folder, device = find_model(config.model), pick_device(config)
    raw = read_config(folder)
    dtype, length = pick_dtype(config, raw, device), pick_length(config, raw)
    window = config.num_drafts + 1
    drafting = drafter_module(config.speculative_config)
    load_backends()
    if device == "cpu":
        memory.keep_freed_memory()
    else:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    build = Build(device, dtype, window, length + 3 * window + 1, max_model_len=length)
    model, draft = build_model(raw, build, bool(drafting and drafting.NEEDS_MODULE))
    if config.load_format == "dummy":
        fill_dummy(model, draft, config.seed)
    else:
        load_weights(folder, raw, model, draft, lambda i, n: progress("loading", i, n))
    vocab = model.config.vocab_size
    ids = _draft_tokens(config, folder, draft, vocab, device)
    layers = memory.mixers(model, draft)
    plan = _plan(config, folder, device, dtype, length, layers)
    counts = {r * (k + 1) for r in plan.row_buckets for k in plan.draft_lengths}
    probe(build, model, sorted(counts))
    if draft is not None:
        own = 0 if ids is None else draft.head.weight.numel() * dtype.itemsize
        known = draft.head.weight.shape[0]
        plan = replace(plan, draft_vocab_size=known, draft_head_bytes=own)
    memory.check_room(build.room, plan, vocab)
    table = RowTable(plan, build, vocab)
    create = hooks.drafter or (drafting.create if drafting else None)
    program = _program(config, table, build, model, draft, create, ids)
    if device == "cuda" and config.num_gpu_blocks is None:
        plan = _measured(config, plan, layers, program)
    runner = Runner(plan, model, draft, program)
    taken = runner.warm_up(lambda i, n: progress("warming up", i, n))
    policy: DraftLengthPolicy = FixedDraftLength(0)
    if hooks.draft_policy:
        policy = hooks.draft_policy(plan.draft_lengths)
    elif config.speculative_config:
        policy = draft_length_policy(config.speculative_config, plan.draft_lengths, taken)
    return EngineParts(plan, runner, policy, raw, build.choices)


def _draft_tokens(
    config: EngineConfig, folder: Path, draft: Any, vocab: int, device: str
) -> Tensor | None:
    """The tokens that the draft module is reduced to, or None where it knows all."""
    spec = config.speculative_config
    if spec is None:
        return None
    if draft is None:
        if spec.draft_vocab_size != "auto":
            raise ConfigError(
                f"draft_vocab_size={spec.draft_vocab_size!r} is not allowed with method="
                f"{spec.method!r}, which has no head to shorten. Leave it out."
            )
        return None
    size = draft_vocab_size(spec.draft_vocab_size, vocab)
    if size == vocab:
        return None
    ids = torch.tensor(frequent_tokens(folder, size, vocab), device=device)
    draft.reduce_head(ids)
    return ids


def _program(
    config: EngineConfig,
    table: RowTable,
    build: Build,
    model: nn.Module,
    draft: nn.Module | None,
    create: Callable[[DraftContext], Drafter] | None,
    ids: Tensor | None,
) -> Program:
    spec, vocab = config.speculative_config, model.config.vocab_size
    sampler = Sampler(table, build, vocab)
    if spec and spec.synthetic_acceptance is not None:
        sampler = SyntheticSampler(table, build, vocab, spec.synthetic_acceptance)
    drafter: Drafter = NoDrafter()
    if spec and create:
        context = DraftContext(
            spec,
            table.drafts,
            table.tokens,
            table.computed,
            table.page_size,
            draft,
            partial(sampler.sample, ids=ids),
            build.at("drafter").op,
        )
        drafter = create(context)
    return Program(table, model, sampler, drafter)


def _plan(
    config: EngineConfig,
    folder: Path,
    device: str,
    dtype: torch.dtype,
    length: int,
    layers: dict[str, nn.Module],
) -> Plan:
    cost, seqs = memory.cache_bytes(layers), config.max_num_seqs
    per_row = -(-(length + 3 * (config.num_drafts + 1) + 1) // memory.PAGE_SIZE)
    pages = config.num_gpu_blocks
    if pages is None:
        budget = memory.CPU_CACHE_BYTES
        pages = memory.count_pages(budget, cost.page, seqs * per_row + 1, min(per_row, 2) + 1)
    snapshots = config.num_snapshots
    if snapshots is None:
        snapshots = 2 * seqs if config.enable_prefix_caching else 0
    cuda = device == "cuda"
    buckets = config.row_buckets or (GPU_ROW_BUCKETS if cuda else tuple(range(1, seqs + 1)))
    buckets = tuple(sorted({b for b in buckets if b < seqs} | {seqs}))
    return Plan(
        model_path=folder,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        query_len=config.num_drafts + 1,
        page_size=memory.PAGE_SIZE,
        num_pages=pages,
        page_bytes=cost.page,
        num_slots=1 + seqs + snapshots if cost.slot else 0,
        slot_bytes=cost.slot,
        row_buckets=buckets,
        draft_lengths=draft_lengths(config.speculative_config),
        graph_mode=config.cuda_graph_mode if cuda else "none",
        steps_in_flight=config.steps_in_flight or (2 if cuda else 1),
        numerics=numerics(device, dtype) + _synthetic(config),
    )


def largest_prompts(plan: Plan) -> list[int]:
    """The lengths of the prompts in the largest step: rows that are as long as rows may be."""
    most, tokens = plan.max_model_len, plan.max_num_batched_tokens
    lengths = [min(most, tokens - at) for at in range(0, tokens, most)]
    return lengths[: plan.max_num_seqs]


def _measured(
    config: EngineConfig, plan: Plan, layers: dict[str, nn.Module], program: Program
) -> Plan:
    """The plan with the pages that fit beside weights, state and the largest prompt step."""
    memory.allocate(layers, 2, min(plan.num_slots, 2), plan.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lengths = largest_prompts(plan)
    program.table.inputs.fill(query_lens=lengths)
    sizes = len(lengths), sum(lengths), max(lengths)
    program.run_step(StepShape(*sizes, prompt=True, next_drafts=plan.query_len - 1))
    program.run_step(StepShape.uniform(plan.row_buckets[-1], plan.query_len))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    free, total = torch.cuda.mem_get_info()
    budget = int(total * config.gpu_memory_utilization) - (total - free) - peak
    snapshots = plan.num_slots - 1 - plan.max_num_seqs if plan.num_slots else 0
    if config.num_snapshots is None and plan.slot_bytes:
        snapshots = min(snapshots, int(budget * GPU_SNAPSHOT_SHARE) // plan.slot_bytes)
    slots = 1 + plan.max_num_seqs + snapshots if plan.slot_bytes else 0
    useful = plan.max_num_seqs * plan.row_columns * 4 + 1
    pages = memory.count_pages(budget - slots * plan.slot_bytes, plan.page_bytes, useful, 3)
    return replace(plan, num_pages=pages, num_slots=slots)
