"""Split-K partials of the gates of Gated DeltaNet: the ops add them as linear does."""

import pytest
import torch
from torch import Tensor

from lockstep.kernels.gated_delta_rule import cases, gated_delta_chunk, gated_delta_step
from lockstep.kernels.linear import linear, tree_sum
from lockstep.kernels.recurrent.cases import COMMITTED, Dims, chunk_rows, random_state, step_rows
from tests.kernels.backends import backends, left, same_bits

BACKENDS = backends()
DIMS = Dims(1, 3, 24, 40, r=2)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def partials(count: int, *tokens: int) -> Tensor:
    """Return partials [P, *tokens, 2 HV] fp32 whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(3)
    shape = (count, *tokens, 2 * DIMS.hv)
    exponents = torch.randint(-12, 3, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponents.float())


def assert_equal_to_rounded_sum(backend, op, arguments, product):
    """Assert that an op gives the same bits with partials and with their rounded tree sum."""
    rounded = tree_sum(product).to(backend.dtype)
    results = []
    for gates in (product, rounded):
        b, a = gates.split(DIMS.hv, dim=-1)
        inputs = backend.fresh(arguments | dict(b=b, a=a), op.writes)
        results.append(left(op, backend.run(op, inputs), inputs))
    expected = results[1]
    assert set(results[0]) == set(expected)
    for name, value in results[0].items():
        assert same_bits(value, expected[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("count", "length"), [(8, 1), (2, 4), (8, COMMITTED[0])])
def test_recurrent_form_adds_partials(backend, count, length):
    rows = len(COMMITTED)
    raw = cases.inputs(DIMS, (rows, length), backend.dtype, 1)
    committed = torch.tensor(COMMITTED, dtype=torch.int32) if length == COMMITTED[0] else None
    arguments = raw | dict(weights=cases.weights(DIMS, backend.dtype, 1), committed=committed)
    arguments |= step_rows(DIMS, backend.dtype, 1)
    product = partials(count, rows, length)
    assert_equal_to_rounded_sum(backend, gated_delta_step, arguments, product)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunked_form_adds_partials(backend):
    rows = chunk_rows()
    tokens = int(rows["cu_seqlens"][-1])
    raw = cases.chunk_inputs(DIMS, (tokens,), backend.dtype, 1)
    state = random_state(DIMS, 12, [2, 3, 4, 9], backend.dtype, 1)
    arguments = raw | dict(weights=cases.weights(DIMS, backend.dtype, 1), state=state, **rows)
    assert_equal_to_rounded_sum(backend, gated_delta_chunk, arguments, partials(8, tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 4, 64, 300])
def test_gates_of_a_linear_equal_its_rounded_result(dtype, tokens):
    """The partials of the linear's own tile, at the size of Qwen3.6-27B."""
    triton = linear.backends["triton"].run
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 5120, generator=generator).to(dtype).cuda()
    weight = torch.randn(96, 5120, generator=generator).to(dtype).cuda()
    product = triton(x, weight, 8, allow_partials=True)
    assert product.shape == (8, tokens, 96)
    assert same_bits(tree_sum(product).to(dtype), triton(x, weight, 8))
