"""The inventory of a worker's memory contains no weights, whatever their format."""

from types import SimpleNamespace

import torch

from lockstep.check.scenarios.inventory import tensors_of
from lockstep.kernels.formats.weights.cases import random_weights


def test_quantized_weights_are_not_poisoned() -> None:
    """A weight may have the number of rows of the table, or the number of pages."""
    state = torch.zeros(3)
    weights = dict(random_weights(40, 256))
    layers = [SimpleNamespace(weight=weight, state=state) for weight in weights.values()]
    assert len(layers) > 5
    assert [id(tensor) for tensor in tensors_of(layers)] == [id(state)]
