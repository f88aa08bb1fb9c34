"""Check integer ops: every backend equals the reference in every element, with allocations full of
garbage."""

from typing import Any

import torch

from lockstep.kernels import Op
from tests.kernels.backends import Backend, left

ORACLE = Backend("reference", "cpu", torch.float32)


def run_op(backend: Backend, op: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return all that an op returns and writes."""
    arguments = backend.fresh(arguments)
    result = left(op, backend.run(op, arguments), arguments)
    return {part: x.cpu() for part, x in result.items()}


def assert_equals_the_reference(op: Op, backend: Backend, monkeypatch: Any) -> None:
    """Assert that returned and written tensors equal the reference's over the op's cases."""
    empty = torch.empty_like
    new_empty = torch.Tensor.new_empty
    poisoned = [
        (torch, "empty_like", lambda x, **k: empty(x, **k).fill_(-77)),
        (torch.Tensor, "new_empty", lambda x, *s, **k: new_empty(x, *s, **k).fill_(-77)),
    ]
    for name, arguments in backend.cases(op):
        expected = run_op(ORACLE, op, arguments)
        with monkeypatch.context() as patch:
            for owner, function, poison in poisoned:
                patch.setattr(owner, function, poison)
            actual = run_op(backend, op, arguments)
        assert list(actual) == list(expected)
        for part, want in expected.items():
            have = actual[part]
            assert have.dtype == want.dtype and torch.equal(have, want), (name, part)
