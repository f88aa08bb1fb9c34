"""Tests of the mixture of experts: same computation as transformers, and its training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from training import train
from training.models.base import LanguageModel
from training.models.feed_forward import top_k_mask
from training.models.functional import CHUNK
from training.models.qwen3_5 import MOE, Model
from training.optimizers import Muon, optimizers, orthogonalise
from training.tests.saved_models import MAX_BYTES, VOCAB, save_model

TINY: dict[str, Any] = {
    **MOE,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 5,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LanguageModel]:
    """A folder as training leaves it, and the model in it."""
    return save_model("moe", tmp_path_factory.mktemp("moe"))


def test_the_folder_is_small(saved: tuple[Path, LanguageModel]) -> None:
    size = sum(path.stat().st_size for path in saved[0].iterdir())
    assert 9_000_000 < size < MAX_BYTES - 100_000


@pytest.mark.slow
@torch.no_grad()
def test_transformers_computes_the_trained_model(saved: tuple[Path, LanguageModel]) -> None:
    (folder, model) = saved
    transformers = pytest.importorskip("transformers")
    oracle, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not loading_info["missing_keys"] and not loading_info["mismatched_keys"]
    ids = torch.randint(VOCAB, (2, 2 * CHUNK), generator=torch.Generator().manual_seed(2))
    got = model.head(model.hidden(ids)[0]).view(2, 2 * CHUNK, -1)
    wanted = oracle.eval()(ids).logits
    assert float((got - wanted).norm() / wanted.norm()) < 2e-5


def test_ties_choose_the_experts_with_lower_indices() -> None:
    p = torch.tensor([[0.1, 0.3, 0.3, 0.3], [0.4, 0.1, 0.2, 0.3], [0.25] * 4])
    assert top_k_mask(p, 2).tolist() == [
        [False, True, True, False],
        [True, False, False, True],
        [True, True, False, False],
    ]


@torch.no_grad()
def test_the_balance_is_that_of_the_switch_transformer(saved: tuple[Path, LanguageModel]) -> None:
    (_, model) = saved
    mlp = model.model.layers[0].mlp
    x = torch.randn(128, MOE["hidden_size"])
    norm = torch.zeros(MOE["hidden_size"])
    _, imbalance = mlp.function(x, norm, *mlp.weights())
    h = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    logits = h @ mlp.gate.weight.T
    count = MOE["num_experts"]
    top_k = MOE["num_experts_per_tok"]
    functional = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    wanted = functional.load_balancing_loss_func((logits,), count, top_k)
    torch.testing.assert_close(imbalance, wanted / top_k)
    assert 1.0 < float(imbalance) < count / top_k


def test_muon_treats_each_expert_as_a_matrix() -> None:
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(3, 4, 8))
    p.grad = torch.randn(3, 4, 8)
    Muon([p], lr=1.0).step()
    for i in range(3):
        one = torch.nn.Parameter(torch.zeros(4, 8))
        one.grad = p.grad[i].clone()
        Muon([one], lr=1.0).step()
        torch.testing.assert_close(p[i], one, rtol=0.02, atol=0.02)
        steep = orthogonalise(p.grad[i : i + 1])[0].float()
        assert float(torch.linalg.svdvals(steep).min()) > 0.5


def test_muon_takes_the_experts_and_no_convolution() -> None:
    with torch.device("meta"):
        model = Model(MOE)
    muon, adam = optimizers(model, 0.02)
    names = {id(p): name for name, p in model.named_parameters()}
    stacks = [names[id(p)] for p in muon.param_groups[0]["params"] if p.dim() == 3]
    assert len(stacks) == 2 * (MOE["num_hidden_layers"] + 1)
    assert all(".experts." in name for name in stacks)
    rest = {names[id(p)].rpartition("linear_attn.")[2] for p in adam.param_groups[0]["params"]}
    assert "conv1d.weight" in rest and "in_proj_qkv.weight" not in rest


@pytest.mark.slow
def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    model = Model(TINY)
    ids = torch.arange(CHUNK).remainder(7).repeat(2, 1)
    weights = torch.ones(2, CHUNK)
    opts = optimizers(model, 0.02)
    seen = []
    for _ in range(12):
        loss, parts = train.loss_of(model, ids, weights)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        for o in opts:
            o.step()
            o.zero_grad(set_to_none=True)
        seen.append(float(parts[0]))
    assert seen[-1] < seen[0] * 0.8
    assert 1.0 < float(parts[-1]) < 2.0
