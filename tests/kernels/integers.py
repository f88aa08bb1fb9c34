"""Ops of integers: every backend equals the reference in every element, on memory of garbage."""

from typing import Any

import torch

from lockstep.kernels import Op
from tests.kernels.faces import Face, left

ORACLE = Face("reference", "cpu", torch.float32)


def outcome(face: Face, op: Any, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All that an op returns and writes; memory that it takes is full of garbage before."""
    arguments = face.fresh(arguments)
    found = left(op, face.run(op, arguments), arguments)
    return {part: x.cpu() for part, x in found.items()}


def assert_equals_the_reference(op: Op, face: Face, monkeypatch: Any) -> None:
    """All that the op returns and writes, over its cases."""
    empty, new_empty = torch.empty_like, torch.Tensor.new_empty
    poisoned = [
        (torch, "empty_like", lambda x, **k: empty(x, **k).fill_(-77)),
        (torch.Tensor, "new_empty", lambda x, *s, **k: new_empty(x, *s, **k).fill_(-77)),
    ]
    for name, arguments in face.cases(op):
        wanted = outcome(ORACLE, op, arguments)
        with monkeypatch.context() as patch:
            for owner, function, poison in poisoned:
                patch.setattr(owner, function, poison)
            found = outcome(face, op, arguments)
        assert list(found) == list(wanted)
        for part, want in wanted.items():
            have = found[part]
            assert have.dtype == want.dtype and torch.equal(have, want), (name, part)
