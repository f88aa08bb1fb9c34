"""Triton and Numba kernels write only inside their tensors and fill their whole result."""

import dataclasses
from itertools import islice

import pytest
import torch
from torch import Tensor

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.backends import numba_trait
from lockstep.kernels.canaries import MARGIN, Canaries
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.sampling import sample
from tests.kernels.backends import left, of_every_op, same_bits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
INTERPRETED = {
    gated_delta_chunk: 1,
    gated_delta_step: 2,
    mamba2_chunk: 1,
    mamba2_step: 2,
    paged_attention: 2,
    latent_attention: 2,
    sample: 1,
}
"""Op -> number of first cases that the interpreter runs, since it is slow: one of them by default,
all with the slow tests."""


def add_canaries(value, canaries):
    """Return the same arguments between canaries."""
    if isinstance(value, Tensor):
        return canaries.add_margins(value)
    if isinstance(value, dict):
        return {name: add_canaries(part, canaries) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return type(value)(**{n: add_canaries(getattr(value, n), canaries) for n in names})
    return value


def parts_of_cases():
    """Return params (op, backend, first case, last case) of every backend that writes by address;
    those of the interpreter in two parts, the second slow."""
    results = []
    for param in of_every_op(reference=False):
        op, backend = param.values
        if backend.exact and op.backends[backend.name].supports is not numba_trait:
            continue  # torch's ops
        if not backend.interpreted:
            results.append(pytest.param(op, backend, 0, None, id=param.id, marks=param.marks))
            continue
        last = INTERPRETED.get(op, 3)
        first = 1 if op in INTERPRETED else last
        results.append(pytest.param(op, backend, 0, first, id=param.id, marks=param.marks))
        if first < last:
            marks = [*param.marks, pytest.mark.slow]
            more = pytest.param(op, backend, first, last, id=f"{param.id}-more", marks=marks)
            results.append(more)
    return results


@pytest.mark.parametrize(("op", "backend", "first", "last"), parts_of_cases())
def test_kernel_writes_stay_in_bounds_and_fill_outputs(op, backend, first, last):
    check_bounds(op, backend, islice(backend.cases(op), first, last))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "backend"),
    [p for p in of_every_op((gated_delta_step, mamba2_step)) if p.values[1].interpreted],
)
def test_committed_windows_write_in_bounds(op, backend):
    """They are longer than the history buffers. A GPU runs them in the test above."""
    every = backend.cases(op)
    check_bounds(op, backend, [c for c in every if c[1]["committed"] is not None][-1:])


def check_bounds(op, backend, cases):
    """Assert that a backend writes only inside of its tensors and fills its results."""
    for name, arguments in cases:
        plain = backend.fresh(arguments)
        canaries = Canaries()
        inside = add_canaries(backend.fresh(arguments), canaries)
        expected = left(op, backend.run(op, plain), plain)
        with canaries:
            actual = left(op, op.backends[backend.name].run(**inside), inside)
        assert not canaries.overwritten(), name
        for part, want in expected.items():
            assert same_bits(actual[part], want), (name, part)


def test_canaries_detect_out_of_bounds_write():
    """Write one element before and one after tensors that were allocated under the canaries."""
    for offset in (MARGIN // 4 - 1, MARGIN // 4 + 10):
        canaries = Canaries()
        x = canaries.add_margins(torch.ones(4)[:3])
        with canaries:
            result = torch.empty(5, 2)
        assert x.tolist() == [1, 1, 1] and result.isnan().all()
        x.fill_(2)
        result.zero_()
        assert not canaries.overwritten()
        result.as_strided((1,), (1,), offset).fill_(7)
        assert canaries.overwritten() == [40]
