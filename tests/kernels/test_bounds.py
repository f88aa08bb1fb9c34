"""No Triton kernel writes outside of its tensors, or leaves a part of its result unwritten."""

import dataclasses

import pytest
import torch
from torch import Tensor

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.sampling import sample
from tests.kernels.backends import left, of_every_op, same_bits
from tests.kernels.canaries import MARGIN, Canaries

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
"""The interpreter is slow: it sees the first cases."""


def guarded(value, canaries):
    """The same arguments between canaries."""
    if isinstance(value, Tensor):
        return canaries.between(value)
    if isinstance(value, dict):
        return {name: guarded(part, canaries) for name, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        return type(value)(**{n: guarded(getattr(value, n), canaries) for n in names})
    return value


@pytest.mark.parametrize(("op", "backend"), [p for p in of_every_op() if not p.values[1].exact])
def test_writes_stay_inside_and_fill_the_result(op, backend):
    most = INTERPRETED.get(op, 3) if backend.interpreted else None
    for name, arguments in backend.cases(op, most):
        plain = backend.fresh(arguments)
        canaries = Canaries()
        inside = guarded(backend.fresh(arguments), canaries)
        expected = left(op, backend.run(op, plain), plain)
        with canaries:
            found = left(op, op.backends[backend.name].run(**inside), inside)
        assert not canaries.broken(), name
        for part, want in expected.items():
            assert same_bits(found[part], want), (name, part)


def test_a_write_outside_is_seen():
    """One element before or behind; and what is made while the canaries watch."""
    for place in (MARGIN // 4 - 1, MARGIN // 4 + 10):
        canaries = Canaries()
        x = canaries.between(torch.ones(4)[:3])
        with canaries:
            made = torch.empty(5, 2)
        assert x.tolist() == [1, 1, 1] and made.isnan().all()
        x.fill_(2)
        made.zero_()
        assert not canaries.broken()
        made.as_strided((1,), (1,), place).fill_(7)
        assert canaries.broken() == [40]
