"""Every backend of every op agrees with the reference over the op's shared cases."""

from itertools import islice

import pytest
import torch

from lockstep.doctor.examine import CODE_TOLERANCE, QUANTIZING
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.experts import experts
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.formats.weights.fp8 import e4m3_values
from lockstep.kernels.gated_delta_rule import gated_delta_chunk, gated_delta_step
from lockstep.kernels.latent_attention import latent_attention
from lockstep.kernels.mamba2 import mamba2_chunk, mamba2_step
from lockstep.kernels.rotary import rope_and_cache
from lockstep.kernels.sampling import sample
from tests.kernels.backends import (
    CPU,
    GPU_DTYPES,
    OPS,
    Backend,
    left,
    of_every_op,
    read_only,
    same_bits,
    written,
)

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
STATE_TOLERANCE = 4e-3
"""Tolerance of a state that is rounded to 16 bits: one fp32 ulp may become one 16-bit ulp."""
INTERPRETED = {
    gated_delta_chunk: (1, 2),
    gated_delta_step: (2, 3),
    mamba2_chunk: (1, 2),
    mamba2_step: (2, 3),
    sample: (1, 3),
    paged_attention: (2, 2),
    latent_attention: (2, 2),
    experts: (3, 7),
    rope_and_cache: (6, 12),
}
"""Op -> number of first cases that the interpreter runs, since it is slow: by default, and with
the slow tests. A GPU runs all.

test_kv.py compares the quantized caches that rope_and_cache writes.
"""
ORACLE = Backend("reference", "cpu", torch.float32)


def parts_of_cases():
    """Return params (op, backend, first case, last case) of every backend; those of the
    interpreter in two parts, the second slow."""
    results = []
    for param in of_every_op(reference=False):
        op, backend = param.values
        first, last = INTERPRETED.get(op, (None, None)) if backend.interpreted else (None, None)
        results.append(pytest.param(op, backend, 0, first, id=param.id, marks=param.marks))
        if first != last:
            marks = [*param.marks, pytest.mark.slow]
            results.append(
                pytest.param(op, backend, first, last, id=f"{param.id}-more", marks=marks)
            )
    return results


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "backend", "first", "last"), parts_of_cases())
def test_backend_agrees_with_reference(op, backend, first, last):
    """Within a tolerance, on a CPU bit for bit; only the declared arguments are written."""
    for name, arguments in islice(backend.cases(op), first, last):
        tolerance = TOLERANCE[backend.dtype]
        if any(part.dtype == torch.bfloat16 for part in written(op, arguments)):
            tolerance = max(tolerance, STATE_TOLERANCE)
        expected = ORACLE.fresh(arguments)
        actual = backend.fresh(arguments)
        wanted_value = left(op, ORACLE.run(op, expected), expected)
        result = left(op, backend.run(op, actual), actual)
        assert list(result) == list(wanted_value), name
        quantized_names = tuple(
            p for p, inputs in arguments.items() if isinstance(inputs, QuantizedKV)
        )
        assert_unchanged(op, name, arguments, expected, actual)
        for part, want in wanted_value.items():
            have = result[part].cpu()
            assert have.dtype == want.dtype and have.shape == want.shape, (name, part)
            if part.startswith(quantized_names) and not backend.exact:
                continue  # a code away where k is an ulp away: tests/kernels/test_kv.py
            if backend.exact:
                assert same_bits(have, want), (name, part)
                continue
            close = max(tolerance, TOLERANCE.get(want.dtype, 0.0))
            if op.name in QUANTIZING and want.dtype == torch.int32:
                # A code away where the norm is an ulp away: test_fp8_linear.py compares the bits.
                have, want = (e4m3_values(x.view(torch.uint8)) for x in (have, want))
                close = CODE_TOLERANCE
            torch.testing.assert_close(
                have,
                want,
                rtol=close,
                atol=close * magnitude(want),
                equal_nan=True,
                msg=lambda text, what=f"{name}, {part}": f"{what}: {text}",
            )


def magnitude(x: torch.Tensor) -> float:
    """Return the root mean square of the finite values, at least 1: a small value that results from
    cancellation is as inexact as its summands."""
    finite = x[x.isfinite()].double()
    return max(1.0, float(finite.square().mean().sqrt())) if finite.numel() else 1.0


def assert_unchanged(op, name, inputs, *called):
    """Assert that arguments which the op does not declare as written are unchanged."""
    for arguments in called:
        here = read_only(op, arguments)
        for argument, tensors in read_only(op, inputs).items():
            pairs = zip(tensors, here[argument], strict=True)
            assert all(same_bits(a, b) for a, b in pairs), (name, argument)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_explain_gives_reason_for_each_unsupported_backend(op):
    reasons = op.explain(device="cpu", dtype=torch.float32)
    serves = next(name for name in reversed(CPU) if name in op.backends)
    assert reasons[serves] is None
    assert all(why for name, why in reasons.items() if name not in CPU)
    assert op.choose(device="cpu", dtype=torch.float32) == serves


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_backend_serves_a_case(op, monkeypatch):
    """Checked as if on a Hopper GPU: a backend that no case reaches would be untested."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    for name in op.backends:
        tried = [Backend(name, "cuda", dtype) for dtype in GPU_DTYPES]
        assert any(any(backend.cases(op)) for backend in tried), name
