"""Ops of integers: every backend equals the reference in every element, on memory of garbage."""

from typing import Any

import torch

from lockstep.kernels import Op
from tests.kernels.backends import Backend, left

ORACLE = Backend("reference", "cpu", torch.float32)


def outcome(backend: Backend, op: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All that an op returns and writes; memory that it takes is full of garbage before."""
    arguments = backend.fresh(arguments)
    found = left(op, backend.run(op, arguments), arguments)
    return {part: x.cpu() for part, x in found.items()}


def assert_equals_the_reference(op: Op, backend: Backend, monkeypatch: Any) -> None:
    """All that the op returns and writes, over its cases."""
    empty = torch.empty_like
    new_empty = torch.Tensor.new_empty
    poisoned = [
        (torch, "empty_like", lambda x, **k: empty(x, **k).fill_(-77)),
        (torch.Tensor, "new_empty", lambda x, *s, **k: new_empty(x, *s, **k).fill_(-77)),
    ]
    for name, arguments in backend.cases(op):
        wanted = outcome(ORACLE, op, arguments)
        with monkeypatch.context() as patch:
            for owner, function, poison in poisoned:
                patch.setattr(owner, function, poison)
            found = outcome(backend, op, arguments)
        assert list(found) == list(wanted)
        for part, want in wanted.items():
            have = found[part]
            assert have.dtype == want.dtype and torch.equal(have, want), (name, part)
