"""Explanation of a GPU that is absent: backends, tiles and memory plan from config.json alone."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.cache.kv import kv_spec
from lockstep.config import EngineConfig, StepLimits
from lockstep.errors import ConfigError
from lockstep.kernels.architecture import Architecture, architecture_by_name
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.exchange import exchange
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.fp8_linear import fp8_linear
from lockstep.layers.attention import Attention
from lockstep.layers.latent_attention import LatentAttention
from lockstep.layers.linear import Gemm
from lockstep.layers.moe import MoE
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.weight_files import has_weights
from lockstep.quantization import read_weight_format
from lockstep.step import PAGE_SIZE
from lockstep.worker import memory
from lockstep.worker.build import (
    find_model,
    graphs_of,
    largest_prompts,
    sized,
    state_dtype,
    step_limits,
)
from lockstep.worker.explain_ranks import RankBytes, explain_ranks
from lockstep.worker.memory_estimate import DryEngine, planner_of
from lockstep.worker.memory_planner import PromptGraphs, shortage_reason

SHARED_NOTE = (
    "shared memory by kernel is not computed here: compiling them takes minutes; "
    "tests/kernels/architectures.py compares every tile with the architecture's"
)
PROBE_NOTE = "cuBLAS may run some linears: only a probe on the GPU decides which"
STEP_NOTE = (
    "steps were run dry, the overhead is an estimate; an engine measures both before it takes pages"
)


def explain_architecture(config: EngineConfig, arch: str, total: int | None) -> dict[str, Any]:
    """Return what `lockstep explain` prints for a GPU of this architecture with `total` bytes.

    total: None for unlimited memory. Raises ConfigError, also without Triton, or CheckpointError.
    """
    card = architecture_by_name(arch)
    if find_spec("triton") is None:
        raise ConfigError(
            "arch needs Triton, whose kernels it explains, and it is not installed; allowed: an "
            "environment with it. Install it: pip install triton."
        )
    load_backends()
    checkpoint = Checkpoint.read(find_model(config.model, weights=False), config.hf_overrides)
    weight_format = read_weight_format(
        checkpoint.quantization(), config.quantization, config.activation_dtype
    )
    limits = step_limits(config, checkpoint, "cuda", weight_format, assumed_numerics=card.name)
    known = has_weights(checkpoint.folder)
    make_engine = partial(DryEngine, config, checkpoint, limits, weight_format, card, known)
    dry_engine = make_engine()
    limits, planned = plan(config, limits, dry_engine, total)
    build = dry_engine.build
    with dry_engine.mode:
        dry_engine.program(limits, build)
    engines = [dry_engine, *map(make_engine, range(1, config.tensor_parallel_size))]
    ranks = list(rank_bytes(engines, planned, graphs_of(limits)))
    device = {"architecture": card.name, "cards": card.cards, "shared_bytes": card.shared_memory}
    return {
        **device,
        "layers": [vars(choice) for choice in build.choices],
        "tiles": list(tiles(card, limits, build.dtype, dry_engine.model)),
        "plan": planned,
        "ranks": explain_ranks(ranks, dry_engine.costs, limits, exchange_backend(config)),
        "notes": [
            SHARED_NOTE,
            PROBE_NOTE,
            STEP_NOTE,
            *(weight_format.notes if weight_format else ()),
        ],
    }


def plan(
    config: EngineConfig, limits: StepLimits, dry_engine: DryEngine, total: int | None
) -> tuple[StepLimits, dict[str, Any]]:
    """Plan the memory of a GPU with `total` bytes -> (step limits, bytes by part and sizes).

    total None: the preferred plan. needed_bytes: memory of the smallest GPU that fits the model.
    """
    planner = planner_of(config, limits, dry_engine)
    share = 1.0 if config.kv_cache_memory_bytes else config.gpu_memory_utilization
    ladder = planner.ladder()
    known = total is not None
    chosen = planner.plan(int((total or 0) * share)) if known else planner.min_plan(ladder[0])
    entry = chosen.entry
    limits = sized(limits, config, entry.rows, entry.tokens, entry.graphs)
    smallest = sum(planner.min_bytes(ladder[-1]).values())
    parts = {f"{name}_bytes": size for name, size in chosen.parts.items()}
    report: dict[str, Any] = dict(
        dtype=limits.dtype,
        quantization=limits.quantization,
        state_dtype=str(state_dtype(config)).removeprefix("torch."),
        max_model_len=limits.max_model_len,
        max_num_seqs=entry.rows,
        max_num_batched_tokens=entry.tokens,
        row_buckets=limits.row_buckets,
        prompt_buckets=limits.prompt_buckets,
        joint_graphs=limits.joint_graphs,
        **parts,
        page_bytes=dry_engine.page,
        slot_bytes=dry_engine.slot,
        host_pages=int(config.kv_offloading_size * memory.GIB) // dry_engine.page,
        needed_bytes=int(smallest / share),
    )
    if total is None:
        return limits, report
    report |= dict(gpu_memory_bytes=total, available_bytes=chosen.available)
    report["fits"] = not chosen.short
    if chosen.short:
        return limits, report | dict(
            num_pages=0, num_slots=0, notes=(), why=shortage_reason(chosen)
        )
    tokens = (chosen.pages - 1) * PAGE_SIZE
    size = dict(num_pages=chosen.pages, num_slots=chosen.slots, cache_tokens=tokens)
    if tokens < limits.max_model_len:  # the user's num_gpu_blocks are fewer than one request needs
        why = f"pages hold {tokens} tokens; a request may have {limits.max_model_len}"
        return limits, report | size | dict(fits=False, notes=(), why=why)
    return limits, report | size | dict(notes=chosen.notes, why="")


def rank_bytes(
    engines: Sequence[DryEngine], planned: dict[str, Any], graphs: PromptGraphs
) -> Iterator[RankBytes]:
    """Yield the bytes of each rank with as many pages and slots as the first one's plan.

    Dry runs take seconds, so ranks whose tensors have the same shapes share them.
    """
    first = engines[0]
    working: dict[tuple[torch.Size, ...], dict[str, int]] = {}
    for engine in engines:
        shapes = engine.tensor_shapes()
        if shapes not in working:
            sizes = (planned["max_num_seqs"], planned["max_num_batched_tokens"])
            working[shapes] = engine.working(*sizes, graphs)
        parts = engine.fixed | working[shapes]
        weights = parts.pop("weights")
        pages = planned["pages_bytes"] // first.page * engine.page
        state = planned.get("state_bytes", 0) // max(first.slot, 1) * engine.slot
        yield RankBytes(weights, pages, state, sum(parts.values()))


def exchange_backend(config: EngineConfig) -> str:
    """Return the backend of exchanges with and without access to the peers' memory, "" for one
    rank. Ranks of other nodes have none.
    """
    if config.tensor_parallel_size == 1:
        return ""
    traits = dict(device="cuda", ranks=config.tensor_parallel_size)
    by_nccl = config.disable_custom_all_reduce or config.nnodes > 1
    reaches = (False,) if by_nccl else (True, False)
    return " or ".join(exchange.choose(**traits, peer_access=access) for access in reaches)


def tiles(
    card: Architecture, limits: StepLimits, dtype: torch.dtype, model: nn.Module
) -> Iterator[dict[str, Any]]:
    """Yield (op, size, tokens, tile) of kernels whose tiles depend on the architecture.

    Tokens: of one row, of all rows, and of the largest prompt step.
    """
    steps = {limits.query_len, limits.max_num_seqs * limits.query_len}
    counts = sorted(steps | {sum(largest_prompts(limits))})
    seen: set[tuple[str, str]] = set()
    for module in model.modules():
        for op, size, make in _tiled(module, card, limits, dtype):
            if (op, size) in seen:
                continue
            seen.add((op, size))
            for tokens in counts:
                yield dict(op=op, size=size, tokens=tokens, tile=asdict(make(tokens)))


def _tiled(
    module: nn.Module, card: Architecture, limits: StepLimits, dtype: torch.dtype
) -> Iterator[tuple[str, str, Any]]:
    """Yield (op, size, function of tokens -> tile) of the kernels of a module."""
    from lockstep.kernels.attention import KV_SPLIT
    from lockstep.kernels.attention.triton import choose_partition
    from lockstep.kernels.compile_target import CompileTarget
    from lockstep.kernels.fp8_linear.hopper import tile_of as fp8_tile
    from lockstep.kernels.linear.quantized import tile_of as quantized_tile
    from lockstep.kernels.linear.quantized_tuning import DEQUANTIZE_FIRST
    from lockstep.kernels.linear.tuning import lookup

    number = card.number
    gpu = CompileTarget(number, inline_ptx=True)
    if isinstance(module, Gemm):
        (n, k) = module.shape
        weight = module.stored
        suffix = " quantized" * isinstance(weight, QuantizedWeight)

        def linear_tile(tokens: int) -> Any:
            if module.product is fp8_linear:
                return fp8_tile(tokens, weight, module.split_k, may_split=True, target=gpu)
            tile = DEQUANTIZE_FIRST
            if isinstance(weight, QuantizedWeight):
                tile = quantized_tile(tokens, weight, module.split_k, dtype, gpu)
            if tile != DEQUANTIZE_FIRST:
                return tile
            return lookup(tokens, n, k, dtype, f"sm{number}", module.split_k)

        yield module.product.name, f"{n}x{k}" + suffix, linear_tile
    elif isinstance(module, MoE):
        yield from _expert_tiles(module, number, dtype)
    elif isinstance(module, Attention):
        heads = module.heads
        kv_heads = module.kv_heads
        dim = module.head_dim
        segments = -(-limits.row_columns * PAGE_SIZE // KV_SPLIT)
        format = module.kv_format
        spec = kv_spec(1, dim, dtype, format)
        of_token = 0 if format is None else sum(part.nbytes for part in spec.parts)

        def attention_tile(tokens: int) -> Any:
            sizes = (*_step_of(tokens, limits), heads, kv_heads, dim, segments)
            return choose_partition(*sizes, dtype, number, of_token)

        yield "paged_attention", f"{heads}/{kv_heads} heads of {dim}", attention_tile
    elif isinstance(module, LatentAttention):
        yield from _latent_tiles(module, number, limits, dtype)


def _expert_tiles(layer: MoE, number: int, dtype: torch.dtype) -> Iterator[tuple[str, str, Any]]:
    """Yield what _tiled() does for the experts of an MoE layer."""
    from lockstep.kernels.compile_target import CompileTarget
    from lockstep.kernels.experts import pipeline
    from lockstep.kernels.experts.tiles import (
        fit_dense_tile,
        fit_quantized_tile,
        runs_unsorted,
        tiles_of,
    )

    count = layer.experts
    top_k = layer.top_k
    target = CompileTarget(number, inline_ptx=True)
    pipelines = {
        "up": lambda weight, tokens: pipeline.up_tile(weight, tokens, target),
        "down": lambda weight, _: pipeline.down_tile(weight, top_k, target),
    }

    def tile(name: str, weight: Tensor | QuantizedWeight, tokens: int) -> Any:
        unsorted = runs_unsorted(
            tokens, top_k, count, isinstance(layer.down.stored, QuantizedWeight)
        )
        tile_set = tiles_of(tokens * top_k, count, dtype, unsorted)
        if not isinstance(weight, QuantizedWeight) or dtype == torch.float32:
            return fit_dense_tile(getattr(tile_set, name), dtype, number)
        pipeline_tile = pipelines[name](weight, tokens) if unsorted else None
        return pipeline_tile or fit_quantized_tile(
            getattr(tile_set, f"quantized_{name}"), weight, number
        )

    for name, experts in (("up", layer.up), ("down", layer.down)):
        suffix = " quantized" * isinstance(experts.stored, QuantizedWeight)
        yield (
            "experts",
            f"{name} of {top_k} of {count}{suffix}",
            partial(tile, name, experts.stored),
        )


def _latent_tiles(
    layer: LatentAttention, number: int, limits: StepLimits, dtype: torch.dtype
) -> Iterator[tuple[str, str, Any]]:
    """Yield what _tiled() does for latent attention; the architecture alone decides its tile."""
    from lockstep.kernels.latent_attention.triton import choose_partition, choose_tile

    keys = limits.row_columns * PAGE_SIZE
    latent_tile = choose_tile(dtype, number)

    def tile(tokens: int) -> Any:
        return choose_partition(
            *_step_of(tokens, limits), layer.heads, layer.latent, keys, latent_tile
        )

    size = f"{layer.heads} heads of {layer.latent} + {layer.rope_dim}"
    yield "latent_attention", size, tile


def _step_of(tokens: int, limits: StepLimits) -> tuple[int, int]:
    """Return (rows, query length) of a step of `tokens` tokens; prompts are one row."""
    if tokens > limits.max_num_seqs * limits.query_len:
        return 1, tokens
    return max(1, min(limits.max_num_seqs, tokens // limits.query_len)), limits.query_len
