"""The references against textbook formulas, in double precision where that helps."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.gated_delta_rule import gated_delta_step
from lockstep.kernels.gated_delta_rule.cases import inputs, weights
from lockstep.kernels.linear import linear
from lockstep.kernels.norm import gated_rms_norm, rms_norm
from lockstep.kernels.recurrent.cases import Dims, empty_state
from lockstep.kernels.sampling import FILTERS, NOISE, SamplingState, gumbel, sample


def test_linear_and_norms_equal_torch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 96, generator=generator)
    weight = torch.randn(40, 96, generator=generator)
    gate = torch.randn(7, 96, generator=generator)
    torch.testing.assert_close(linear(x, weight), (x.double() @ weight.double().t()).float())
    scale = weight[0]
    expected = F.rms_norm(x, (96,), 1 + scale, 1e-6)
    torch.testing.assert_close(rms_norm(x, scale, 1e-6, 1.0), expected)
    expected = F.rms_norm(x, (96,), scale, 1e-6) * F.silu(gate)
    torch.testing.assert_close(gated_rms_norm(x, gate, scale, 1e-6), expected)


def test_attention_equals_causal_sdpa():
    rows = ((0, 5), (300, 3), (255, 2))
    heads = 6
    kv_heads = 2
    dim = 16
    batch = paged(rows, heads, kv_heads, dim, 16, torch.float32)
    out = paged_attention(**batch)
    at = 0
    for s, (start, count) in enumerate(rows):
        pages = batch["page_table"][s]
        k, v = (batch[n][pages].flatten(0, 1)[: start + count] for n in ("k_cache", "v_cache"))
        k, v = (x.transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        q = batch["q"][at : at + count].transpose(0, 1)
        mask = torch.arange(start + count) <= start + torch.arange(count)[:, None]
        expected = F.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)
        torch.testing.assert_close(out[at : at + count], expected)
        at += count


def test_gated_delta_step_equals_recurrence():
    """Token by token, one head at a time, in double precision."""
    dims = Dims(1, 2, 8, 12)
    tokens = 6
    data = inputs(dims, (1, tokens), torch.float32, 0)
    layer = weights(dims, torch.float32, 1)
    state = empty_state(dims, 2, torch.float32)
    outs = []
    for t in range(tokens):
        window = {n: x[:, t : t + 1] for n, x in data.items()}
        one = dict(slots=torch.tensor([1]), starts=torch.tensor([t]))
        one["folded"] = torch.tensor([max(t - 1, 0)])
        outs.append(gated_delta_step(**window, weights=layer, state=state, **one)[0, 0])
    raw = F.pad(data["mixed"][0].double().t(), (dims.r, 0))[None]
    taps = layer.conv.double()[:, None]
    mixed = F.silu(F.conv1d(raw, taps, groups=dims.channels))[0].t()
    q, k, v = mixed.split([8, 8, 24], dim=-1)
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    rate = torch.sigmoid(data["b"][0].double())
    rise = F.softplus(data["a"][0].double() + layer.dt_bias)
    fade = torch.exp(-torch.exp(layer.a_log.double()) * rise)
    gate = F.silu(data["z"][0].double())
    for h in range(dims.hv):
        s = torch.zeros(8, 12, dtype=torch.float64)
        for t in range(tokens):
            s = s * fade[t, h]
            u = (v[t, 12 * h : 12 * h + 12] - k[t] @ s) * rate[t, h]
            s = s + torch.outer(k[t], u)
            o = F.rms_norm(q[t] @ s * 8**-0.5, (12,), layer.norm.double(), layer.eps)
            expected = (o * gate[t, h]).float()
            torch.testing.assert_close(outs[t][h], expected, rtol=1e-4, atol=1e-6)


def sample_frequencies(logits, draws: int, **parameters: float) -> torch.Tensor:
    """Return the frequency of each token over `draws` sampled positions."""
    vocab = len(logits)
    state = SamplingState.empty(2, vocab, 16, (32, 8), "cpu")
    state.flags[1] = NOISE | FILTERS
    state.temperature[1] = 1.0
    state.seed[1] = 1234
    for name, value in parameters.items():
        getattr(state, name)[1] = value
    tokens = sample(
        torch.tensor(logits).expand(1, draws, vocab),
        torch.arange(draws)[None],
        torch.full((1, draws - 1), -1),
        torch.tensor([1]),
        torch.zeros(2, 8, dtype=torch.int64),
        state,
    )
    return torch.bincount(tokens.flatten(), minlength=vocab) / draws


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"min_p": 0.4}, [0, 1]),
    ],
    ids=str,
)
def test_samples_follow_the_distribution(parameters, kept):
    """Probabilities .45 .25 .15 .1 .05, renormalized over the filtered tokens, within 5 sigma."""
    probabilities = torch.tensor([0.45, 0.25, 0.15, 0.1, 0.05])
    draws = 40_000
    actual = sample_frequencies(probabilities.log().tolist(), draws, **parameters)
    expected = torch.zeros(5)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert ((actual - expected).abs() <= 5 * torch.sqrt(expected * (1 - expected) / draws)).all()


def test_gumbel_noise_is_finite():
    """Infinite noise would beat any logit. These positions include the largest hash."""
    noise = gumbel(torch.tensor([0]), torch.tensor([7]), torch.arange(1 << 22))
    assert noise.isfinite().all()
    assert float(noise.max()) > 16
