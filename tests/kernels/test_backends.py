"""Every backend of every op against the reference over the op's shared cases."""

import pytest
import torch

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.experts import experts
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.sampling import sample
from tests.kernels.backends import (
    GPU_DTYPES,
    OPS,
    Backend,
    kept,
    left,
    of_every_op,
    same_bits,
    written,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROUNDED = 4e-3
"""Where a state is rounded to 16 bits: it is an ulp away where it was one of 32 bits away."""
INTERPRETED = {
    gated_delta_chunk: 2,
    gated_delta_step: 3,
    mamba2_chunk: 2,
    mamba2_step: 3,
    sample: 3,
    paged_attention: 2,
    latent_attention: 2,
    experts: 7,
    rope_and_cache: 12,
}
"""The interpreter is slow: it sees the first cases; a GPU sees all. Of rope_and_cache, what packed
caches hold is compared in test_kv.py."""
ORACLE = Backend("reference", "cpu", torch.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "backend"), of_every_op(reference=False))
def test_agrees_with_the_reference(op, backend):
    """To a tolerance, a CPU's in every bit; and writes what it says and nothing else."""
    for name, arguments in backend.cases(op, INTERPRETED.get(op) if backend.interpreted else None):
        tolerance = TOLERANCE[backend.dtype]
        if any(part.dtype == torch.bfloat16 for part in written(op, arguments)):
            tolerance = max(tolerance, ROUNDED)
        expected = ORACLE.fresh(arguments)
        actual = backend.fresh(arguments)
        wanted = left(op, ORACLE.run(op, expected), expected)
        found = left(op, backend.run(op, actual), actual)
        assert list(found) == list(wanted), name
        packed = tuple(p for p, given in arguments.items() if isinstance(given, QuantizedKV))
        assert_kept(op, name, arguments, expected, actual)
        for part, want in wanted.items():
            have = found[part].cpu()
            assert have.dtype == want.dtype and have.shape == want.shape, (name, part)
            if part.startswith(packed) and not backend.exact:
                continue  # a code away where k is an ulp away: tests/kernels/test_kv.py
            if backend.exact:
                assert same_bits(have, want), (name, part)
                continue
            close = max(tolerance, TOLERANCE.get(want.dtype, 0.0))
            torch.testing.assert_close(
                have,
                want,
                rtol=close,
                atol=close * magnitude(want),
                equal_nan=True,
                msg=lambda text, what=f"{name}, {part}": f"{what}: {text}",
            )


def magnitude(x: torch.Tensor) -> float:
    """The root mean square of its finite numbers, or 1 if that is more: a number that is small
    since a sum cancelled is as inexact as what was summed."""
    finite = x[x.isfinite()].double()
    return max(1.0, float(finite.square().mean().sqrt())) if finite.numel() else 1.0


def assert_kept(op, name, given, *called):
    """What the op does not say that it writes is what it was."""
    for arguments in called:
        here = kept(op, arguments)
        for argument, tensors in kept(op, given).items():
            pairs = zip(tensors, here[argument], strict=True)
            assert all(same_bits(a, b) for a, b in pairs), (name, argument)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_says_why_it_does_not_serve(op):
    reasons = op.explain(device="cpu", dtype=torch.float32)
    serves = "cpu" if "cpu" in op.backends else "reference"
    assert reasons[serves] is None
    assert all(why for name, why in reasons.items() if name not in ("reference", serves))
    assert op.choose(device="cpu", dtype=torch.float32) == serves


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_backend_serves_some_case(op, monkeypatch):
    """On a Hopper GPU, whatever stands here; a backend that no case reaches is not tested."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    for name in op.backends:
        tried = [Backend(name, "cuda", dtype) for dtype in GPU_DTYPES]
        assert any(any(backend.cases(op)) for backend in tried), name
