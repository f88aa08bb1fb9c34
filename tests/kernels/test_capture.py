"""Every op can be captured on a GPU: a replayed graph gives the eager call's bits."""

import pytest
import torch

from lockstep.worker.capture import CapturedFunction
from tests.kernels.backends import left, of_every_op, same_bits, tensors_of, written


@pytest.mark.parametrize(("op", "backend"), [p for p in of_every_op() if p.values[1].on_gpu])
def test_graph_replay_equals_eager(op, backend):
    """A host sync or an allocation outside the pool raises (tests/worker/test_capture_gpu.py)."""
    run = op.backends[backend.name].run
    for name, arguments in backend.cases(op):
        eager = backend.fresh(arguments)
        fixed = backend.fresh(arguments)
        expected = left(op, run(**eager), eager)
        if not next(iter(expected.values())).numel():
            continue
        start = [x.clone() for x in written(op, fixed)]
        pool = torch.cuda.graph_pool_handle()
        captured = CapturedFunction(
            lambda inputs=fixed: run(**inputs), pool, lambda key: True, op.name
        )
        out = captured()
        for _ in range(2):
            for part in tensors_of(out):
                part.fill_(-1)
            for part, value in zip(written(op, fixed), start, strict=True):
                part.copy_(value)
            actual = left(op, captured(), fixed)
            assert all(same_bits(actual[part], want) for part, want in expected.items()), name
