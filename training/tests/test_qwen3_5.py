"""Tests of Qwen3.5: chunked form against the recurrence, names against transformers."""

from typing import Any

import pytest
import torch

from training.models import qwen3_5 as trained
from training.models.functional import CHUNK
from training.models.qwen3_5 import CONFIG, Model
from training.train import loss_of

TINY: dict[str, Any] = {
    **CONFIG,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_types": CONFIG["layer_types"][:4],
    "num_attention_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {**CONFIG["rope_parameters"], "mrope_section": [2, 1, 1]},
}


@pytest.fixture
def tiny() -> Model:
    torch.manual_seed(0)
    model = Model(TINY)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(torch.randn_like(p) * 0.2)
    return model


def test_chunks_equal_the_recurrence() -> None:
    torch.manual_seed(0)
    length = 3 * CHUNK
    heads = 3
    d = 16
    q, k, v = (torch.randn(length, heads, d) for _ in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -torch.rand(length, heads)
    beta = torch.rand(length, heads)
    state = torch.zeros(heads, d, d)
    wanted = []
    for t in range(length):
        state = state * torch.exp(g[t])[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][..., None] * delta[:, None]
        wanted.append(torch.einsum("hk,hkv->hv", q[t], state))

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q = cut(q)
    k = cut(k)
    v = cut(v)
    b = cut(beta[..., None])
    c = cut(g[..., None])[..., 0].cumsum(-1)
    decay = torch.exp((c[..., :, None] - c[..., None, :]).tril()).tril()
    inverse = trained.invert((b * (k @ k.mT) * decay).tril(-1))
    u, w, a, s = trained.delta_states(inverse, k, v, c, b)
    before = trained.walk(a[None], s[None])[0]
    got = (q * torch.exp(c)[..., None]) @ before + (q @ k.mT * decay) @ (u - w @ before)
    got = got.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-4, atol=1e-4)


def test_logits_and_names_equal_transformers(tiny: Model) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**TINY)
    oracle = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    result = oracle.load_state_dict(tiny.state_dict(), strict=False)
    assert result.missing_keys == ["lm_head.weight"]
    assert len(result.unexpected_keys) == 15
    assert all(name.startswith("mtp.") for name in result.unexpected_keys)
    ids = torch.randint(0, 64, (2, 2 * CHUNK))
    with torch.no_grad():
        got = tiny.head(tiny.hidden(ids)[0]).view(2, 2 * CHUNK, -1)
        wanted = oracle(ids).logits
    assert float((got - wanted).norm() / wanted.norm()) < 2e-5


def test_losses_line_up_with_the_tokens_they_predict(tiny: Model) -> None:
    ids = torch.randint(0, 64, (2, CHUNK))
    weights = torch.rand(2, CHUNK)
    _, parts = loss_of(tiny, ids, weights)
    hidden, *_ = tiny.hidden(ids)
    learned = weights * (weights >= 0.5)
    cases = [(hidden, weights, 1, 0)]
    cases += [(h, learned, 2, s) for s, h in enumerate(tiny.drafts(ids, hidden, 3)[0])]
    for (h, of, offset, shift), part in zip(cases, parts[:-1], strict=True):
        logits = tiny.head(h).view(2, CHUNK, -1)[:, shift:-offset]
        targets = ids[:, shift + offset :]
        w = of[:, shift + offset :]
        losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
        torch.testing.assert_close(part, ((losses * w).sum() / w.sum()).detach())


@pytest.mark.slow
def test_a_few_steps_lower_the_loss(tiny: Model) -> None:
    from training.optimizers import optimizers

    ids = torch.arange(CHUNK).remainder(7).repeat(2, 1)
    weights = torch.ones(2, CHUNK)
    opts = optimizers(tiny, 0.02)
    seen = []
    for _ in range(16):
        loss, parts = loss_of(tiny, ids, weights)
        loss.backward()
        for o in opts:
            o.step()
            o.zero_grad(set_to_none=True)
        seen.append(float(parts[0]))
    assert seen[-1] < seen[0] * 0.8


def test_the_model_fits_the_box() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in Model().parameters())
    assert 6_000_000 < count < 16 * 2**20 / 2 - 100_000
