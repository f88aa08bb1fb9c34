"""The causal convolution in front of a recurrence, with its SiLU: the reference."""

from torch import Tensor

from lockstep.kernels.activations import silu


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """SiLU of sum_j weight[:, j] x[t + j] + bias, taps added in ascending order, in fp32.

    x [R + T, ..., C]: raw inputs, R of them before the first token; weight [C, R + 1]; bias [C]
    -> [T, ..., C] fp32.
    """
    taps = weight.float().t()
    x = x.float()
    tokens = len(x) - len(taps) + 1
    total = x[:tokens] * taps[0]
    for j in range(1, len(taps)):
        total = total + x[j : j + tokens] * taps[j]
    return silu(total if bias is None else total + bias.float())
