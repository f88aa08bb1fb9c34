"""Weights that auto-round, AutoAWQ and GPTQModel wrote themselves load with equal values; see
write_integers.py."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.quantization.test_vectors import loaded, weight_format

WRITTEN = Path(__file__).parent / "data" / "integers.safetensors"


def names() -> list[str]:
    """Return the cases in the file."""
    with safe_open(WRITTEN, framework="pt") as file:
        return sorted(file.metadata())


@pytest.mark.parametrize("name", names())
def test_loaded_weights_equal_writing_tool(name: str) -> None:
    """Bit for bit, in fp16; also with zero points of 0, which borrow from their neighbours in
    GPTQModel's version 1."""
    with safe_open(WRITTEN, framework="pt") as file:
        settings = json.loads(file.metadata()[name])
        tensors = {
            key.removeprefix(f"{name}."): file.get_tensor(key)
            for key in file.keys()
            if key.startswith(f"{name}.")
        }
    value = tensors.pop("value")
    method = settings.pop("quant_method")
    weight = loaded(weight_format(method, **settings), *value.shape, tensors)
    assert torch.equal(weight.dequantize(torch.float16), value)
