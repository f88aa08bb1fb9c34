"""lora: the definition by numpy, and what must not change a token's bits."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.backends import load
from lockstep.kernels.lora import halving_sum, lora
from lockstep.kernels.lora.cases import lora_cases
from tests.kernels.backends import NUMBA, Backend, backends, same_bits

CASES = list(lora_cases(torch.float32))[1:]
NAMES = [name for name, _ in CASES]


@pytest.fixture(params=CASES, ids=NAMES)
def arguments(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param[1])


def numpy_sum(products: np.ndarray) -> np.ndarray:
    """Add the entries of the first axis as a binary tree, with zeros up to a power of two."""
    size = 1 << (len(products) - 1).bit_length()
    padded = np.zeros((size, *products.shape[1:]), np.float32)
    padded[: len(products)] = products
    while len(padded) > 1:
        padded = padded[: len(padded) // 2] + padded[len(padded) // 2 :]
    return padded[0]


def numpy_lora(arguments: dict[str, Any], token: int) -> np.ndarray:
    """Compute one token's result in numpy, in fp32 and in the order of the contract."""
    values = {name: tensor.numpy() for name, tensor in arguments.items()}
    adapter = values["adapter_ids"][token]
    a = values["a"][adapter]
    b = values["b"][adapter]
    hidden = numpy_sum((a * values["x"][token]).T).reshape(-1, len(b))
    delta = numpy_sum(b * hidden[values["parts"]].T)
    scale = values["scales"][adapter][values["parts"]]
    y = values["y"][token]
    return np.where(scale == 0, y, y + scale * delta)


def run(backend: Backend, arguments: dict[str, Any], **changes: Tensor) -> Tensor:
    changed = backend.fresh({**arguments, **changes})
    result: Tensor = backend.run(lora, changed).cpu()
    return result


def test_cpu_has_the_bits_of_numpy(arguments: dict[str, Any]) -> None:
    load()
    for name in {"reference", "cpu", NUMBA} & {"reference", *lora.backends}:
        actual = run(Backend(name, "cpu", torch.float32), arguments)
        for token in range(len(actual)):
            assert actual[token].numpy().tobytes() == numpy_lora(arguments, token).tobytes()


def test_halving_sum_ignores_appended_zeros() -> None:
    x = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    x[0] = -0.0
    expected = halving_sum(x.clone(), 1)
    for zeros in (1, 5, 21):
        actual = halving_sum(F.pad(x, (0, zeros)), 1)
        assert actual.numpy().tobytes() == expected.numpy().tobytes()
    assert halving_sum(x[:, :1].clone(), 1).equal(x[:, 0])


@pytest.mark.parametrize("backend", backends(op=lora))
def test_base_model_and_unchanged_parts_keep_their_bits(
    backend: Backend, arguments: dict[str, Any]
) -> None:
    """A -0.0 keeps its sign."""
    y = arguments["y"].to(backend.dtype)
    y[:, ::3] = -0.0
    actual = run(backend, arguments, y=y)
    scale = arguments["scales"][arguments["adapter_ids"].long()][:, arguments["parts"].long()]
    unchanged = scale == 0
    assert unchanged.any() or len(y) == 1
    bits = {2: torch.int16, 4: torch.int32}[y.itemsize]
    assert torch.equal(actual.view(bits)[unchanged], y.view(bits)[unchanged])
    assert not torch.equal(actual, y) or len(y) == 1


@pytest.mark.parametrize("backend", backends(op=lora))
def test_table_size_and_column_cuts_change_no_bit(
    backend: Backend, arguments: dict[str, Any]
) -> None:
    """More ranks, other adapters in the table, and the columns of one rank out of two."""
    full = run(backend, arguments)
    ids = arguments["adapter_ids"]
    parts = arguments["scales"].shape[1]
    moved = {name: arguments[name].flip(0) for name in ("a", "b", "scales")}
    moved = {name: torch.cat([tensor[-1:], tensor[:-1]]) for name, tensor in moved.items()}
    last = len(arguments["scales"])
    moved["adapter_ids"] = torch.where(ids > 0, last - ids, ids)
    assert same_bits(run(backend, arguments, **moved), full)
    a = F.pad(arguments["a"].unflatten(1, (parts, -1)), (0, 0, 0, 16)).flatten(1, 2)
    assert same_bits(run(backend, arguments, a=a, b=F.pad(arguments["b"], (0, 0, 0, 16))), full)
    cut = slice(3, 3 + full.shape[1] // 2)
    columns = {name: arguments[name][..., cut].contiguous() for name in ("y", "b", "parts")}
    assert same_bits(run(backend, arguments, **columns), full[:, cut])
