"""Cases by which a kernel is examined: the op's shared cases, and cases at a layer's own sizes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.attention.cases import paged
from lockstep.kernels.backends import layer_traits, load_cases
from lockstep.kernels.formats.kv import KVFormat
from lockstep.kernels.formats.weights import QuantizedWeight
from lockstep.kernels.gated_delta_rule.cases import gated_delta_chunk_cases, gated_delta_step_cases
from lockstep.kernels.latent_attention.cases import latent_rope, paged_latents
from lockstep.kernels.mamba2.cases import mamba2_chunk_cases, mamba2_step_cases
from lockstep.kernels.recurrent.cases import Dims
from lockstep.kernels.registry import Op
from lockstep.kernels.rotary.cases import rope
from lockstep.kernels.route import route
from lockstep.kernels.sampling.cases import batch as sampling_batch
from lockstep.layers.build_context import KernelNeed

Arguments = dict[str, Any]
ATTENTION_ROWS = ((0, 1), (255, 4), (700, 3), (64, 130))
"""Rows of an attention case at a layer's sizes: (tokens before, tokens)."""
TOKENS = 19
"""Tokens of a case at a layer's sizes: more than a tile of 16, and odd."""
COMPARED_COLUMNS = 512
"""Output columns of a linear that are compared with the reference, which is slow on a CPU."""
DISTINCT_ROWS = 4093
"""Random rows of a large weight, repeated: a prime, so that tiles meet different ones."""
CATEGORIES = ("quantizers", "quantized")
"""Traits by which shared cases are chosen, since they decide the kernel."""


@dataclass(frozen=True)
class Case:
    """Call of an op.

    compared: output columns that are compared with the reference; None for all.
    reference: arguments of the reference, which has only these columns.
    """

    name: str
    arguments: Arguments
    compared: Tensor | None = None
    reference: Arguments | None = None


def cases_of(op: Op, need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the shared cases that need the same kind of kernel, then those at the layer's sizes."""
    kinds = kinds_of(need)
    for name, arguments in load_cases(op)(dtype):
        traits = layer_traits(op, arguments)
        if all(category(traits.get(key)) == value for key, value in kinds.items()):
            yield Case(name, arguments)
    sized = SIZED.get(op.name)
    if sized is not None:
        yield from sized(need, dtype)


def kinds_of(need: KernelNeed) -> dict[str, str]:
    """Return the kind of each trait of CATEGORIES that a need has."""
    return {name: category(need.traits[name]) for name in CATEGORIES if name in need.traits}


def category(trait: Any) -> str:
    """Return the kind of a trait: quantizers by their classes, whatever their layer."""
    if isinstance(trait, tuple):
        return ", ".join(type(part).__name__ for part in trait)
    return str(trait or "")


# Cases at a layer's sizes, by op.


def _normal(*shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _wide_weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return a random weight [n, k]; a large one repeats its first DISTINCT_ROWS rows."""
    distinct = min(n, DISTINCT_ROWS)
    weight = _normal(distinct, k, dtype=dtype, seed=2) * k**-0.5
    return weight[torch.arange(n) % distinct]


def _linear(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    n = need.traits["n"]
    k = need.traits["k"]
    weight: Tensor | QuantizedWeight
    if need.layout is None:
        weight = _wide_weight(n, k, dtype)
    else:
        weight = need.layout.empty(n, k, "cpu")
        weight.fill_dummy(torch.Generator().manual_seed(2))
    x = _normal(TOKENS, k, dtype=dtype)
    arguments = dict(x=x, weight=weight, split_k=need.split_k)
    name = f"{TOKENS}x{n}x{k}/{need.split_k}" + f" {need.layout}" * (need.layout is not None)
    if n <= COMPARED_COLUMNS:
        yield Case(name, arguments)
        return
    generator = torch.Generator().manual_seed(3)
    columns = torch.randperm(n, generator=generator)[:COMPARED_COLUMNS].sort().values
    rows = weight[columns] if isinstance(weight, Tensor) else weight.gather(columns)
    yield Case(name, arguments, columns, arguments | dict(weight=rows))


def _norm(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    width = need.traits["width"]
    x = _normal(TOKENS, width, dtype=dtype)
    yield Case(
        f"{TOKENS}x{width}", dict(x=x, weight=_normal(width, dtype=dtype), eps=1e-6, offset=0.0)
    )


def _add_norm(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    for case in _norm(need, dtype):
        delta = _normal(TOKENS, need.traits["width"], dtype=dtype, seed=4)
        yield Case(case.name, case.arguments | dict(delta=delta))


def _attention(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    traits = need.traits
    sizes = (traits["heads"], traits["kv_heads"], traits["head_dim"])
    format = _kv_format(traits["quantizers"])
    name = f"{len(ATTENTION_ROWS)} rows, heads {sizes[0]}/{sizes[1]}, dim {sizes[2]}"
    yield Case(name, paged(ATTENTION_ROWS, *sizes, 64, dtype, format=format))


def _kv_format(quantizers: Any) -> KVFormat | None:
    return None if quantizers is None else KVFormat("served", *quantizers)


def _rope(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    traits = need.traits
    sizes = (traits["heads"], traits["kv_heads"], traits["head_dim"])
    rest = (sizes[2] // 4 * 2, traits["gated"], 0.0)
    arguments = rope(TOKENS, *sizes, *rest, dtype, _kv_format(traits["quantizers"]))
    yield Case(f"{TOKENS} tokens, heads {sizes[0]}/{sizes[1]}, dim {sizes[2]}", arguments)


def _latent_attention(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    traits = need.traits
    sizes = (traits["heads"], traits["latent"], traits["rope"])
    quantizer = (traits["quantizers"] or (None,))[0]
    name = f"{len(ATTENTION_ROWS)} rows, {sizes[0]} heads of {sizes[1]} + {sizes[2]}"
    yield Case(name, paged_latents(ATTENTION_ROWS, *sizes, 64, dtype, quantizer=quantizer))


def _latent_rope(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    traits = need.traits
    sizes = (traits["heads"], traits["nope"], traits["latent"], traits["rope"])
    quantizer = (traits["quantizers"] or (None,))[0]
    name = f"{TOKENS} tokens, {sizes[0]} heads of {sizes[1]} + {sizes[3]}, latent {sizes[2]}"
    yield Case(name, latent_rope(TOKENS, *sizes, dtype, quantizer))


def _head_linear(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    heads, inputs, outputs = (need.traits[name] for name in ("heads", "inputs", "outputs"))
    weight = _normal(heads, outputs, inputs, dtype=dtype, seed=2) * inputs**-0.5
    x = _normal(TOKENS, heads, inputs, dtype=dtype)
    yield Case(f"{TOKENS}x{heads}x{inputs} -> {outputs}", dict(x=x, weight=weight))


def _route(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    experts = need.traits["experts"]
    top_k = need.traits["top_k"]
    unused = dict(bias=None, shared=None, shared_gate=None)
    logits = _normal(TOKENS, experts, dtype=dtype) * 2
    yield Case(f"{TOKENS}x{experts}/{top_k}", dict(logits=logits, top_k=top_k, **unused))


def _experts(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    traits = need.traits
    if traits["quantized"]:
        return  # shared cases have quantized weights of each kind
    count, top_k, hidden, inner = (traits[n] for n in ("experts", "top_k", "hidden", "inner"))
    rows = inner * (1 if traits["act"] == "relu2" else 2)
    ids, weights, *_ = route(_normal(TOKENS, count, dtype=torch.float32), top_k)
    arguments = dict(
        x=_normal(TOKENS, hidden, dtype=dtype),
        up=_wide_weight(count * rows, hidden, dtype).view(count, rows, hidden),
        down=_wide_weight(count * hidden, inner, dtype).view(count, hidden, inner),
        ids=ids,
        weights=weights,
        shared=None,
        shared_gate=None,
        act=traits["act"],
    )
    yield Case(f"{TOKENS}x{hidden}/{inner}/{count}/{top_k}", arguments)


DELTA_DIMS = ("key_heads", "value_heads", "key_dim", "value_dim")
"""Traits of a Gated DeltaNet layer that are its Dims HK, HV, K and V."""
MAMBA_DIMS = ("groups", "heads", "state_dim", "head_dim")
"""Traits of a Mamba-2 layer that are its Dims HK, HV, K and V."""


def _recurrent(names: tuple[str, ...], generate: Callable[..., Any]) -> "SizedCases":
    """Return the function that generates cases of a recurrent op. names: of its dims' traits."""

    def sized(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
        hk, hv, k, v = (need.traits[name] for name in names)
        dims = Dims(hk, hv, k, v, r=need.traits["kernel"] - 1, w=need.traits["window"])
        for name, arguments in generate(dtype, (dims,)):
            yield Case(name, arguments)

    return sized


def _sample(need: KernelNeed, dtype: torch.dtype) -> Iterator[Case]:
    vocab = need.traits["vocab"]
    yield Case(f"vocab {vocab}, Q=2", sampling_batch(vocab, 2))


SizedCases = Callable[[KernelNeed, torch.dtype], Iterator[Case]]
"""Generator of the cases at a layer's sizes."""
SIZED: dict[str, SizedCases] = {
    "linear": _linear,
    "fp8_linear": _linear,
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "quantize_add_rms_norm": _add_norm,
    "paged_attention": _attention,
    "rope_and_cache": _rope,
    "latent_attention": _latent_attention,
    "latent_rope_and_cache": _latent_rope,
    "head_linear": _head_linear,
    "route": _route,
    "experts": _experts,
    "gated_delta_step": _recurrent(DELTA_DIMS, gated_delta_step_cases),
    "gated_delta_chunk": _recurrent(DELTA_DIMS, gated_delta_chunk_cases),
    "mamba2_step": _recurrent(MAMBA_DIMS, mamba2_step_cases),
    "mamba2_chunk": _recurrent(MAMBA_DIMS, mamba2_chunk_cases),
    "sample": _sample,
}
"""Op -> its cases at a layer's sizes. Other ops have shared cases alone."""
