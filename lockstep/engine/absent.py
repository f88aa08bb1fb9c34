"""A GPU that is not there: backends, tiles and memory of an engine on it, from config.json alone.

The model is built as an engine builds it, on tensors that have no memory (FakeTensorMode).
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.cache.kv import kv_spec
from lockstep.cache.specs import Cached
from lockstep.config import EngineConfig, StepLimits
from lockstep.engine.build import (
    build_draft,
    build_program,
    find_model,
    kv_layers,
    largest_prompts,
    pick_dtype,
    state_dtype,
    step_limits,
)
from lockstep.engine.hooks import NO_HOOKS
from lockstep.errors import CapacityError, ConfigError
from lockstep.kernels.architecture import Architecture, named
from lockstep.kernels.backends import load as load_backends
from lockstep.kernels.packed import PackedWeight
from lockstep.layers.attention import Attention
from lockstep.layers.build import Build
from lockstep.layers.latent_attention import LatentAttention
from lockstep.layers.linear import Product, Weight
from lockstep.layers.moe import MoE
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.loader import build_model
from lockstep.quant import packing_of
from lockstep.runner import memory
from lockstep.step import PAGE_SIZE

PLACE = "cuda:0"
"""With its number: torch without CUDA would look for the current GPU otherwise."""
OVERHEAD_BYTES = 1 << 30
"""CUDA's context, loaded kernels, graphs and cuBLAS' workspace: an estimate."""
SCRATCH = 4
"""Numbers in fp32 that a step keeps per token and output of the widest layer, at once: an estimate
above what its projections, the recurrence of prompts and the partial sums take."""
SHARED_NOTE = (
    "shared memory by kernel is not computed here: compiling them takes minutes; "
    "tests/kernels/architectures.py holds every tile to the architecture's"
)
PROBE_NOTE = "cuBLAS may serve some linears: only a probe on the GPU itself says where"
STEP_NOTE = "the bytes of a step and the overhead are estimates; an engine measures them"


def explain_absent(config: EngineConfig, arch: str, total: int | None) -> dict[str, Any]:
    """What lockstep explain says of a GPU of this architecture with `total` bytes, None: any.

    Raises ConfigError, also where Triton is not installed, or CheckpointError.
    """
    card = named(arch)
    if find_spec("triton") is None:
        raise ConfigError(
            "arch needs Triton, whose kernels it explains, and it is not installed; allowed: an "
            "environment with it. Install it: pip install triton."
        )
    load_backends()
    checkpoint = Checkpoint.read(find_model(config.model, weights=False), config.hf_overrides)
    packing = packing_of(checkpoint.quantization(), config.quantization)
    dtype = pick_dtype(config, checkpoint.raw, "cuda")
    limits = step_limits(config, checkpoint, "cuda", packing, told=card.name)
    has_weights = any(checkpoint.folder.glob("*.safetensors"))
    with FakeTensorMode(allow_non_fake_inputs=True):  # small tables that modules keep are real
        build = Build(
            device=PLACE,
            dtype=dtype,
            window=limits.query_len,
            max_positions=limits.history_len,
            max_model_len=limits.max_model_len,
            tensors=checkpoint.tensors() if has_weights else None,
            prefixes=checkpoint.prefixes,
            packing=packing,
            arch=card.number,
            kv=kv_layers(config, dtype),
            state_dtype=state_dtype(config),
        )
        build.room.bounded = False
        model = build_model(checkpoint.raw, build)
        draft = build_draft(config, checkpoint, model, build)
        placed = replace(limits, device=PLACE)
        program = build_program(config, placed, build, model, draft, NO_HOOKS)
        held = [t for t in _tensors(program.table) if isinstance(t, Tensor)]
        table = sum(t.numel() * t.itemsize for t in held)
    layers = memory.mixers(model, draft)
    said = {"architecture": card.name, "cards": card.cards, "shared_bytes": card.shared}
    return {
        **said,
        "layers": [vars(choice) for choice in build.choices],
        "tiles": list(tiles(card, limits, dtype, model)),
        "plan": plan(config, limits, layers, weight_bytes(model, draft), table, model, total),
        "notes": [SHARED_NOTE, PROBE_NOTE, STEP_NOTE, *(packing.notes if packing else ())],
    }


def _tensors(table: Any) -> Iterator[Tensor]:
    """The tensors that a table of rows holds."""
    yield from table.row_tensors()
    yield from (table.page_table, table.state_slots, table.inputs.storage, table.allowed)


def weight_bytes(*roots: nn.Module | None) -> int:
    """Bytes of all weights and buffers, packed or not, each storage counted once."""
    found: dict[int, int] = {}
    for root in roots:
        for module in root.modules() if root is not None else ():
            own: list[Any] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if isinstance(module, Weight):
                own.append(module.stored)
            found |= {id(weight): weight.nbytes for weight in own}
    return sum(found.values())


def step_bytes(limits: StepLimits, model: nn.Module) -> int:
    """An estimate of what the largest step takes beside weights and cache."""
    tokens = sum(largest_prompts(limits))
    widths = [m.shape[0] for m in model.modules() if isinstance(m, Product)]
    vocab = int(model.config.vocab_size)
    widest = max((width for width in widths if width != vocab), default=1)
    logits = limits.max_num_seqs * limits.query_len * vocab
    return SCRATCH * 4 * (tokens * widest + logits)


def plan(
    config: EngineConfig,
    limits: StepLimits,
    layers: dict[str, Cached],
    weights: int,
    table: int,
    model: nn.Module,
    total: int | None,
) -> dict[str, Any]:
    """The memory plan: bytes of each part and, of a GPU with `total` bytes, what fits."""
    cost = memory.cache_bytes(layers)
    step = step_bytes(limits, model)
    before = weights + table + step + OVERHEAD_BYTES + memory.staging_bytes(config)
    least = (limits.row_columns + 1) * cost.page + 2 * cost.slot
    found: dict[str, Any] = dict(
        dtype=limits.dtype,
        quantization=limits.quantization,
        state_dtype=str(state_dtype(config)).removeprefix("torch."),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        weight_bytes=weights,
        table_bytes=table,
        step_bytes=step,
        overhead_bytes=OVERHEAD_BYTES,
        page_bytes=cost.page,
        slot_bytes=cost.slot,
        one_request_bytes=least,
        host_pages=int(config.kv_offloading_size * memory.GIB) // cost.page,
        needed_bytes=int((before + least) / config.gpu_memory_utilization),
    )
    if total is None:
        return found
    left = config.kv_cache_memory_bytes or int(total * config.gpu_memory_utilization) - before
    found |= dict(gpu_memory_bytes=total, cache_bytes=max(left, 0))
    try:
        asked = config.num_gpu_blocks is not None
        size = (
            memory.asked_size(config, limits, cost)
            if asked
            else memory.measured_size(config, limits, cost, max(left, 0))
        )
    except CapacityError as error:
        return found | dict(num_pages=0, num_slots=0, fits=False, why=str(error))
    used = size.pages * cost.page + size.slots * cost.slot
    tokens = (size.pages - 1) * PAGE_SIZE
    found |= dict(num_pages=size.pages, num_slots=size.slots, cache_tokens=tokens)
    if used > left:
        return found | dict(fits=False, why=f"the cache as asked for takes {used:,} bytes")
    if size.pages - 1 < limits.row_columns:
        why = f"pages hold {tokens} tokens; a request of max_model_len needs {limits.history_len}"
        return found | dict(fits=False, why=why)
    return found | dict(fits=True, why="")


def tiles(
    card: Architecture, limits: StepLimits, dtype: torch.dtype, model: nn.Module
) -> Iterator[dict[str, Any]]:
    """(op, size, tokens, tile) of the kernels whose tiles depend on the architecture: one row, all
    rows, and the largest prompt step."""
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
    """(op, size, tokens -> tile) of what a module launches."""
    from lockstep.kernels.attention import SEGMENT
    from lockstep.kernels.attention.paged import partition
    from lockstep.kernels.linear.packed import tile_of as packed_tile
    from lockstep.kernels.linear.packed_tuning import UNPACK
    from lockstep.kernels.linear.tuning import lookup

    number = card.number
    if isinstance(module, Product):
        (n, k) = module.shape
        weight = module.stored
        packed = isinstance(weight, PackedWeight)

        def linear_tile(tokens: int) -> Any:
            tile = UNPACK
            if isinstance(weight, PackedWeight):
                tile = packed_tile(tokens, weight, module.segments, dtype, number)
            return lookup(tokens, n, k, dtype, f"sm{number}") if tile == UNPACK else tile

        yield "linear", f"{n}x{k}" + " packed" * packed, linear_tile
    elif isinstance(module, MoE):
        yield from _expert_tiles(module, number, dtype)
    elif isinstance(module, Attention):
        heads = module.heads
        kv_heads = module.kv_heads
        dim = module.head_dim
        segments = -(-limits.row_columns * PAGE_SIZE // SEGMENT)
        format = module.kv_format
        spec = kv_spec(1, dim, dtype, format)
        of_token = 0 if format is None else sum(part.nbytes for part in spec.parts)

        def attention_tile(tokens: int) -> Any:
            sizes = (*_step_of(tokens, limits), heads, kv_heads, dim, segments)
            return partition(*sizes, dtype, number, of_token)

        yield "paged_attention", f"{heads}/{kv_heads} heads of {dim}", attention_tile
    elif isinstance(module, LatentAttention):
        yield from _latent_tiles(module, number, limits, dtype)


def _expert_tiles(layer: MoE, number: int, dtype: torch.dtype) -> Iterator[tuple[str, str, Any]]:
    """_tiled of a mixture's experts."""
    from lockstep.kernels.experts import ring
    from lockstep.kernels.experts.tiles import are_few, fitting, packed_fitting, tiles_of
    from lockstep.kernels.packed._form import Target

    count = layer.experts
    top_k = layer.top_k
    target = Target(number, assembly=True)
    rings = {
        "up": lambda weight, tokens: ring.up_tile(weight, tokens, target),
        "down": lambda weight, _: ring.down_tile(weight, top_k, target),
    }

    def tile(name: str, weight: Tensor | PackedWeight, tokens: int) -> Any:
        few = are_few(tokens, top_k, count, isinstance(layer.down.stored, PackedWeight))
        found = tiles_of(tokens * top_k, count, dtype, few)
        if not isinstance(weight, PackedWeight) or dtype == torch.float32:
            return fitting(getattr(found, name), dtype, number)
        through = rings[name](weight, tokens) if few else None
        return through or packed_fitting(getattr(found, f"packed_{name}"), weight, number)

    for name, own in (("up", layer.up), ("down", layer.down)):
        packed = " packed" * isinstance(own.stored, PackedWeight)
        yield "experts", f"{name} of {top_k} of {count}{packed}", partial(tile, name, own.stored)


def _latent_tiles(
    layer: LatentAttention, number: int, limits: StepLimits, dtype: torch.dtype
) -> Iterator[tuple[str, str, Any]]:
    """_tiled of latent attention, whose tile the architecture decides alone."""
    from lockstep.kernels.latent_attention.triton import partition, tile_of

    keys = limits.row_columns * PAGE_SIZE
    own = tile_of(dtype, number)

    def tile(tokens: int) -> Any:
        return partition(*_step_of(tokens, limits), layer.heads, layer.latent, keys, own)

    size = f"{layer.heads} heads of {layer.latent} + {layer.turned}"
    yield "latent_attention", size, tile


def _step_of(tokens: int, limits: StepLimits) -> tuple[int, int]:
    """(rows, tokens of each) of a step of so many tokens: of a prompt's, one row."""
    if tokens > limits.max_num_seqs * limits.query_len:
        return 1, tokens
    return max(1, min(limits.max_num_seqs, tokens // limits.query_len)), limits.query_len
