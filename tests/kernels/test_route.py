"""route: each family's rule, ties and NaN; a row's bits are batch-independent."""

import pytest
import torch
import torch.nn.functional as F

from lockstep.kernels.activations import silu_mul
from lockstep.kernels.linear import tree_sum
from lockstep.kernels.route import route, sortable_keys, top_indices
from tests.kernels.backends import backends, same_bits

BACKENDS = backends(op=route)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_sortable_keys_order_with_nan_last():
    x = torch.tensor([0.0, 1.5, -2.0, float("inf"), -float("inf"), float("nan"), 3e-45, -1.5])
    keys = sortable_keys(torch.stack([x, -x]))
    assert x[top_indices(keys[0], 8)].tolist()[:-1] == sorted(x[~x.isnan()].tolist(), reverse=True)
    assert keys[0, 5] == keys[1, 5] == keys.min()
    assert top_indices(torch.tensor([2, 7, 7, 1, 7]), 4).tolist() == [1, 2, 4, 0]


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_routing(renormalize):
    """Qwen3-MoE, Qwen3-Next, Mixtral: softmax over all experts, then the best."""
    logits = random(9, 60)
    ids, weights, *_ = route(logits, 4, renormalize=renormalize)
    values, chosen = logits.double().softmax(-1).topk(4)
    assert torch.equal(ids.long(), chosen)
    values = values / values.sum(-1, keepdim=True) if renormalize else values
    torch.testing.assert_close(weights, values.float())
    assert torch.equal(route(logits, 4, dtype=torch.bfloat16)[1], route(logits, 4)[1].bfloat16())


def test_deepseek_grouped_routing():
    """DeepseekV3TopkRouter ranks groups by their two best biased scores; weights are unbiased."""
    logits = random(9, 64)
    bias = random(64, seed=1) * 0.2
    ids, weights, *_ = route(logits, 6, "sigmoid", True, 2.5, bias, groups=8, top_groups=3)
    scores = logits.sigmoid()
    choice = scores + bias
    groups = choice.view(9, 8, 8).topk(2)[0].sum(-1).topk(3)[1]
    kept = F.one_hot(groups, 8).sum(1).repeat_interleave(8, 1).bool()
    chosen = choice.masked_fill(~kept, -torch.inf).topk(6)[1]
    values = scores.gather(1, chosen)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, values / values.sum(-1, keepdim=True) * 2.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_select_lower_index(backend):
    logits = torch.ones(2, 12)
    logits[1, 5] = 2.0
    for groups in (dict(), dict(groups=3, top_groups=2)):
        ids, weights, *_ = backend.run(route, dict(logits=logits, top_k=3, **groups))
        assert ids.tolist() == [[0, 1, 2], [5, 0, 1]]
        assert weights[0].tolist() == [weights[0, 0].item()] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_nan_gives_valid_ids_and_stays_in_its_row(backend, scoring, groups):
    logits = random(6, 24)
    arguments = dict(top_k=5, scoring=scoring, groups=groups, top_groups=min(groups, 2))
    _, plain, *_ = backend.run(route, dict(logits=logits, **arguments))
    broken = logits.clone()
    broken[0] = torch.nan
    broken[2, 3:9] = torch.nan
    broken[4, 1] = torch.inf
    ids, weights, *_ = backend.run(route, dict(logits=broken, **arguments))
    for row in ids.tolist():
        assert len(set(row)) == 5 and set(row) <= set(range(24))
    assert same_bits(weights[1::2], plain[1::2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_bits_are_batch_independent(backend):
    logits = (random(33 if backend.on_gpu else 12, 130) * 3).to(backend.dtype)
    ids, weights, *_ = backend.run(route, dict(logits=logits, top_k=7))
    for begin, end in ((0, 1), (4, 7), (10, 12), (5, 5)):
        actual = backend.run(route, dict(logits=logits[begin:end], top_k=7))
        assert same_bits(actual[0], ids[begin:end]) and same_bits(actual[1], weights[begin:end])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [2, 4])
def test_partials_equal_their_rounded_sum(backend, parts):
    """A product may leave partials, depending on its tile, and that must change no bit."""
    partials = random(parts, 9, 2 * 40 + 24 + 1) * 3
    full = tree_sum(partials).to(torch.bfloat16)
    rounded = dict(dtype=torch.bfloat16, shared_dtype=torch.bfloat16)

    def routed(product):
        shared, logits, gate = product.split((2 * 40, 24, 1), dim=-1)
        arguments = dict(logits=logits, shared=shared, shared_gate=gate, top_k=4) | rounded
        return backend.run(route, arguments)

    for one, other in zip(routed(partials), routed(full), strict=True):
        assert one.dtype == other.dtype and same_bits(one, other)
    inner = backend.run(silu_mul, dict(gate_up=full[:, :80]))
    assert same_bits(routed(full).inner, inner)
    assert same_bits(routed(full).gate, full[:, -1])
