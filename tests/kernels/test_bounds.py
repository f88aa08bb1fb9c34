"""No Triton kernel writes outside of its tensors, or leaves a part of its result unwritten."""

import dataclasses
from itertools import islice

import pytest
import torch
from torch import Tensor

from lockstep.kernels.gated_delta_rule import gated_delta_chunk
from lockstep.kernels.sampling import sample
from tests.kernels.canaries import MARGIN, Canaries
from tests.kernels.faces import CASES, changed, faces, same_bits, tensors_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON = [face for face in faces() if face.values[0].backend == "triton"]
INTERPRETED = {gated_delta_chunk: 1, sample: 1}


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


@pytest.mark.parametrize("face", TRITON)
@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name)
def test_writes_stay_inside_and_fill_the_result(op, face):
    most = INTERPRETED.get(op, 3) if face.interpreted else None
    for name, arguments in islice(CASES[op](face.dtype), most):
        plain, canaries = face.fresh(arguments), Canaries()
        inside = guarded(face.fresh(arguments), canaries)
        expected = tensors_of(face.run(op, plain)) + changed(plain)
        with canaries:
            found = tensors_of(op.backends["triton"][0](**inside)) + changed(inside)
        assert not canaries.broken(), name
        for want, have in zip(expected, found, strict=True):
            skip = 1 if want.shape[:1] == (12,) else 0  # the null slot may hold anything
            assert same_bits(have[skip:], want[skip:]), name


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
