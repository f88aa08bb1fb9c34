"""Every backend against the reference over the op's shared cases."""

from itertools import islice

import pytest
import torch

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.sampling import sample
from tests.kernels.faces import CASES, Face, changed, faces, tensors_of

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
INTERPRETED = {gated_delta_chunk: 1, gated_delta_step: 4, sample: 3, paged_attention: 3}
"""The interpreter is slow: it sees the first cases; a GPU sees all."""
ORACLE = Face("reference", "cpu", torch.float32)
OTHERS = faces()[1:]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("face", OTHERS)
@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name)
def test_agrees_with_the_reference(op, face):
    most = INTERPRETED.get(op) if face.interpreted else None
    for name, arguments in islice(CASES[op](face.dtype), most):
        expected, actual = ORACLE.fresh(arguments), face.fresh(arguments)
        wanted = tensors_of(ORACLE.run(op, expected)) + changed(expected)
        found = tensors_of(face.run(op, actual)) + changed(actual)
        for want, have in zip(wanted, found, strict=True):
            assert have.dtype == want.dtype and have.shape == want.shape, name
            skip = 1 if want.shape[:1] == (12,) else 0  # the null slot may hold anything
            torch.testing.assert_close(
                have.cpu()[skip:],
                want[skip:],
                rtol=TOLERANCE[face.dtype],
                atol=TOLERANCE[face.dtype],
                equal_nan=True,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("op", CASES, ids=lambda op: op.name)
def test_says_why_it_does_not_serve(op):
    reasons = op.explain(device="cpu", dtype=torch.float32)
    assert reasons["reference"] is None
    assert all(why for name, why in reasons.items() if name not in ("reference", "cpu"))
    best = "cpu" if "cpu" in op.backends else "reference"
    assert op.choose(device="cpu", dtype=torch.float32) == best
    assert op.explain(device="cuda", dtype=torch.float32)[best] is not None
