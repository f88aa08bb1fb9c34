"""Tests of Mamba-2: chunked form against the recurrence, and independence of rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.models.functional import CHUNK, Fused, Positions, convolve, rms
from training.models.nemotron_h import CONFIG, Mamba2

SMALL: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
}
ROWS = 2
LENGTH = 3 * CHUNK


def _stepped(mixer: Mamba2, h: Tensor) -> Tensor:
    """h [T, hidden], normed, of one row -> the mixer's output, a token at a time."""
    heads = SMALL["mamba_num_heads"]
    p = SMALL["mamba_head_dim"]
    n = SMALL["ssm_state_size"]
    groups = SMALL["n_groups"]
    inner = heads * p
    z, raw, dt = F.linear(h, mixer.in_proj.weight).split([inner, inner + 2 * groups * n, heads], -1)
    mixed = F.conv1d(
        F.pad(raw.T, (3, 0)), mixer.conv1d.weight, mixer.conv1d.bias, groups=raw.shape[1]
    )
    u, b, c = F.silu(mixed.T).split([inner, groups * n, groups * n], -1)
    step = F.softplus(dt + mixer.dt_bias)
    decay = torch.exp(-torch.exp(mixer.A_log) * step)
    state = torch.zeros(heads, n, p)
    outputs = []
    for t in range(len(h)):
        x = u[t].view(heads, p)
        key = b[t].view(groups, n).repeat_interleave(heads // groups, 0)
        query = c[t].view(groups, n).repeat_interleave(heads // groups, 0)
        written = key[:, :, None] * (step[t, :, None] * x)[:, None]
        state = state * decay[t][:, None, None] + written
        y = torch.einsum("hn,hnp->hp", query, state) + mixer.D[:, None] * x
        gated = (y.flatten() * F.silu(z[t])).view(groups, -1)
        outputs.append(rms(gated, mixer.norm.weight.view(groups, -1)).flatten())
    return F.linear(torch.stack(outputs), mixer.out_proj.weight)


@torch.no_grad()
def test_chunks_equal_the_recurrence_in_every_row() -> None:
    torch.manual_seed(0)
    mixer = Mamba2(SMALL)
    mixer.norm.weight.add_(torch.randn_like(mixer.norm.weight) * 0.2)
    mixer.D.add_(torch.randn_like(mixer.D))
    x = torch.randn(ROWS * LENGTH, SMALL["hidden_size"])
    norm = torch.rand(SMALL["hidden_size"]) + 0.5
    positions = Positions(ROWS, LENGTH, 0, 1.0, x.device)
    got = mixer(x, positions, Fused(), norm) - x
    for row, one in zip(got.split(LENGTH), rms(x, norm).split(LENGTH), strict=True):
        torch.testing.assert_close(row, _stepped(mixer, one), rtol=1e-4, atol=1e-4)


def test_a_convolution_begins_anew_in_each_row() -> None:
    torch.manual_seed(0)
    raw = torch.randn(6, 3)
    taps = torch.randn(3, 1, 4)
    got = convolve(raw, taps, torch.tensor([0, 1, 2, 0, 1, 2]))
    for row, one in zip(got.split(3), raw.split(3), strict=True):
        wanted = F.conv1d(F.pad(one.T, (3, 0)), taps, groups=3).T
        torch.testing.assert_close(row, wanted)
