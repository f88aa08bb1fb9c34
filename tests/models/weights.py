"""Read and replace the weights of a loaded model, prepacked or not."""

from typing import Any

from torch import Tensor


def read_weights(model: Any) -> dict[str, Tensor]:
    """Return every parameter by its name, prepacked ones as plain weights [N, K]."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        prepacked = getattr(module, "prepacked", None)
        if prepacked is not None:
            weights.setdefault(f"{name}.weight", prepacked.plain())
    return weights


def write_weights(model: Any, weights: dict[str, Tensor]) -> None:
    """Replace every weight of a model by that of its name."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.data.copy_(weights[name])
    for name, module in model.named_modules():
        if getattr(module, "prepacked", None) is not None:
            module.prepacked = type(module.prepacked)(weights[f"{name}.weight"].data)
