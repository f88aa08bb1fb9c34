"""Causal depthwise convolution before a recurrence, with SiLU: the reference."""

from torch import Tensor

from lockstep.kernels.activations import silu


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute SiLU(sum_j weight[:, j] x[t + j] + bias) in fp32.

    x [R + T, ..., C]: raw inputs, R of them before the first token. weight [C, R + 1]. bias [C].
    Returns [T, ..., C] fp32.
    """
    taps = weight.float().t()
    x = x.float()
    tokens = len(x) - len(taps) + 1
    # Ascending order of taps is part of the contract.
    total = x[:tokens] * taps[0]
    for j in range(1, len(taps)):
        total = total + x[j : j + tokens] * taps[j]
    return silu(total if bias is None else total + bias.float())
