"""Both laws of a Gated DeltaNet mixer as subjects of `lockstep bench kernels`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lockstep.bench.dimensions import Setting, Subject
from lockstep.bench.floor import WHOLE, Part
from lockstep.kernels.gated_delta_rule import (
    GatedDeltaState,
    gated_delta_chunk,
    gated_delta_step,
)
from lockstep.kernels.gated_delta_rule.cases import Dims, empty_state, inputs
from lockstep.step import GRID


def delta_step(dims: Dims, setting: Setting, query_len: int) -> Subject:
    """Windows of `query_len` tokens, rows with every number of accepted tokens among them."""
    build = setting.build(dims.w)
    traits = dict(key_dim=dims.k, value_dim=dims.v, key_heads=dims.hk, value_heads=dims.hv)
    step = build.op(gated_delta_step, **traits, kernel=dims.r + 1)
    rows = setting.enough(4 * dims.hv * dims.k * dims.v)
    state, kept = _state(dims, rows, setting)
    given = {n: x.to(setting.device) for n, x in _delta_inputs(dims, rows, query_len, setting)}
    slots = setting.ints(torch.randperm(rows) + 1, torch.int64)
    pending = setting.ints(torch.arange(rows) % (dims.w + 1), torch.int64)
    weight = given.pop("conv_weight")

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        mixed, g, beta = (given[name][begin:end] for name in ("mixed", "g", "beta"))
        places = (slots[begin:end], pending[begin:end])
        return lambda: step(mixed, g, beta, weight, state, *places)

    def cost(rows: int) -> Part:
        brought = sum(x[0].numel() * x.itemsize for x in given.values())
        out = 4 * query_len * dims.hv * dims.v
        return Part("", rows * (2 * _row_bytes(state, query_len) + brought + out))

    return Subject(
        op="gated_delta_step",
        size=f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}",
        query_len=query_len,
        backend=build.choices[-1].backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, *(x[slots[begin:end]] for x in state.tensors())],
        reset=lambda: _restore(state, kept),
    )


def delta_chunk(dims: Dims, setting: Setting, length: int) -> Subject:
    """Prompt chunks of `length` tokens behind a first one; all its flops are left out."""
    build = setting.build(dims.w)
    traits = dict(key_dim=dims.k, value_dim=dims.v, key_heads=dims.hk, value_heads=dims.hv)
    chunk = build.op(gated_delta_chunk, **traits, kernel=dims.r + 1)
    rows = setting.most
    state, kept = _state(dims, rows, setting)
    given = {n: x.to(setting.device) for n, x in _delta_inputs(dims, rows, length, setting)}
    weight = given.pop("conv_weight")
    slots = setting.ints(torch.randperm(rows) + 1)
    bounds = setting.ints(torch.arange(rows + 1) * length)
    starts, none = torch.full_like(slots, GRID), torch.zeros_like(slots)

    def call(begin: int, end: int, turn: int) -> Callable[[], Tensor]:
        mixed, g, beta = (given[n][begin:end].flatten(0, 1) for n in ("mixed", "g", "beta"))
        own = slots[begin:end]
        places = (bounds[: end - begin + 1], starts[begin:end], own, own, none[begin:end])
        return lambda: chunk(mixed, g, beta, weight, state, *places)

    def cost(rows: int) -> Part:
        brought = sum(x[0].numel() * x.itemsize for x in given.values())
        out = 4 * length * dims.hv * dims.v
        return Part("", rows * (2 * 4 * dims.hv * dims.k * dims.v + brought + out))

    return Subject(
        op="gated_delta_chunk",
        size=f"{dims.hk}/{dims.hv}x{dims.k}x{dims.v}",
        query_len=length,
        backend=build.choices[-1].backend,
        rows=rows,
        call=call,
        cost=cost,
        seen=lambda begin, end, out: [out, state.recurrent[slots[begin:end].long()]],
        reset=lambda: _restore(state, kept),
    )


def _state(dims: Dims, rows: int, setting: Setting) -> tuple[GatedDeltaState, list[Tensor]]:
    """A state of `rows` slots and the null one, and its parts as they were."""
    state = empty_state(dims, rows + 1, setting.dtype)
    for name, part in vars(state).items():
        values = setting.random(*part.shape, dtype=part.dtype).mul_(0.3)
        setattr(state, name, torch.exp(-values.abs()) if name == "decay" else values)
    return state, [part.clone() for part in state.tensors()]


def _row_bytes(state: GatedDeltaState, query_len: int) -> int:
    """What a step reads of a row's state, and as much again it writes: as the floor counts it."""
    lines = [part[0, :query_len] for name, part in vars(state).items() if name != WHOLE]
    return sum(part.numel() * part.itemsize for part in (state.recurrent[0], *lines))


def _delta_inputs(
    dims: Dims, rows: int, length: int, setting: Setting
) -> Iterator[tuple[str, Tensor]]:
    """mixed, g, beta [rows, length, ...] and conv_weight, drawn on the device."""
    one = inputs(dims, (1, 1), setting.dtype, seed=0)
    for name, like in one.items():
        if name == "conv_weight":
            yield name, like
            continue
        values = setting.random(rows, length, *like.shape[2:], dtype=like.dtype)
        if name == "g":
            values = values.abs_().mul_(-0.1)
        yield name, torch.sigmoid(values) if name == "beta" else values


def _restore(state: GatedDeltaState, kept: list[Tensor]) -> None:
    for part, value in zip(state.tensors(), kept, strict=True):
        part.copy_(value)
