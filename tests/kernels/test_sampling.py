"""sample in Triton equals the reference for any tiles, filters and 16-bit logits.

Token ids are compared, under the interpreter and on a GPU.
"""

from typing import Any

import pytest
import torch

from lockstep.kernels.canaries import Canaries
from lockstep.kernels.sampling import (
    ALLOWED,
    BIAS,
    FILTERS,
    NOISE,
    PENALTIES,
    SamplingState,
    sample,
)
from lockstep.kernels.sampling.cases import FAULTS, batch, faulty
from lockstep.kernels.sampling.reference import MANY
from tests.kernels.backends import Backend, backends, same_bits

BACKENDS = backends()[1:]
SLOW_BACKENDS = backends(pytest.mark.slow)[1:]
ORACLE = Backend("reference", "cpu", torch.float32)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FILTER_SETTINGS = {
    "k 20, p 0.95": dict(top_k=20, top_p=0.95),
    "k 50": dict(top_k=50),
    "k 1000, p 0.8": dict(top_k=1000, top_p=0.8),
    "k 0": dict(top_p=0.9999),
    "p 0.9": dict(top_p=0.9),
    "p 0.3": dict(top_p=0.3),
    "min_p 0.05": dict(min_p=0.05),
    "min_p 1e-4, p 0.99": dict(min_p=1e-4, top_p=0.99),
    "all": dict(min_p=0.01, top_k=40, top_p=0.9),
}


def filter_arguments(
    vocab: int, slope: float, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Return a row for each of FILTER_SETTINGS, with logits that fall with the log of a token's
    rank."""
    generator = torch.Generator().manual_seed(vocab)
    rows = len(FILTER_SETTINGS)
    indices = torch.rand(rows, vocab, generator=generator)
    state = SamplingState.empty(rows + 1, vocab, 16, (32, 8), "cpu")
    state.flags[1:] = FILTERS | NOISE
    state.temperature[1:] = 0.8
    state.seed[1:] = torch.arange(rows) * 77
    for row, settings in enumerate(FILTER_SETTINGS.values(), 1):
        for name, value in settings.items():
            getattr(state, name)[row] = value
    logits = -slope * torch.log(indices.argsort(1).argsort(1) + 1.0)
    return dict(
        logits=logits[:, None].to(dtype),
        positions=torch.arange(rows)[:, None] + 50,
        drafts=torch.empty(rows, 0, dtype=torch.int64),
        row_ids=torch.arange(1, rows + 1),
        history=torch.zeros(rows + 1, 100, dtype=torch.int64),
        state=state,
    )


@pytest.mark.default_cases("300-1.2", "20000-0.3")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "slope"), [(300, 1.2), (20000, 0.3), (20000, 3.0)])
def test_filters_equal_reference(backend, vocab, slope):
    """Flat logits, for which no tile has all remaining candidates, and steep ones; tied 16-bit
    logits."""
    arguments = filter_arguments(vocab, slope)
    assert same_bits(backend.run(sample, arguments), ORACLE.run(sample, arguments))


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
def test_sampling_tiles_change_no_token(backend, monkeypatch):
    """Small tiles make every filter pass over whole logit rows, two at a time; spans end at other
    columns."""
    actual = set()
    for slope in (0.5, 2.0):
        arguments = filter_arguments(4000, slope)
        expected = ORACLE.run(sample, arguments)
        for tile, span, block, full, many in ((128, 4096, 1024, 32, 1), (4, 1024, 512, 2, 16)):
            module = sample.backends["triton"].run.__module__
            sizes = dict(TILE=tile, SPAN=span, BLOCK=block, WHOLE=full, MANY=many)
            for name, value in sizes.items():
                monkeypatch.setattr(f"{module}.{name}", value)
            assert same_bits(backend.run(sample, arguments), expected), (slope, tile)
        actual |= set(expected.flatten().tolist())
    assert len(actual) > 10


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits_equal_their_fp32_values(backend, dtype):
    arguments = batch(300, 2)
    narrow = arguments["logits"].to(dtype)
    for logits in (narrow, narrow.float()):
        actual = backend.run(sample, dict(arguments, logits=logits))
        assert same_bits(actual, ORACLE.run(sample, dict(arguments, logits=narrow.float())))


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize("flags", [0, NOISE, NOISE | FILTERS])
def test_sampled_ties_and_vocabulary_bounds(backend, flags):
    """Constant logits: greedy takes the first id; the token is always in the vocabulary, or there
    is none."""
    arguments = filter_arguments(20000, 1.0)
    arguments["state"].flags[1:] = flags
    for value in (1.5, -torch.inf, torch.inf, torch.nan):
        arguments["logits"] = torch.full_like(arguments["logits"], value)
        tokens = backend.run(sample, arguments)
        if value == 1.5:
            assert ((tokens >= 0) & (tokens < 20000)).all()
            assert flags or not tokens.any()
        else:
            assert (tokens == -1).all()
    tied = arguments["logits"].zero_()
    tied[:, :, [19999, 8191, 8192, 700]] = 2.0
    if not flags:
        assert (backend.run(sample, arguments) == 700).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shown", [0, 90])
def test_nan_logits_overrun_no_buffer(backend, shown):
    """Use more groups of NaN than a tile has; no key may rank them highest."""
    arguments = filter_arguments(5000, 1.0)
    for name in ("positions", "drafts", "row_ids"):
        arguments[name] = arguments[name][3:5].contiguous()
    logits = arguments["logits"][3:5].clone()
    logits[..., shown:] = torch.nan
    arguments = backend.place(dict(arguments, logits=logits))
    canaries = Canaries()
    with canaries:
        tokens = backend.run(sample, arguments)
    assert not canaries.overwritten()
    assert (tokens == -1).all()


@pytest.mark.parametrize("backend", backends())
def test_invalid_logits_give_no_token_and_stay_in_their_row(backend):
    check_faults(backend, 100, 2, torch.float32)


@pytest.mark.parametrize("backend", backends(pytest.mark.slow))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invalid_logits_of_several_spans(backend, dtype):
    check_faults(backend, 5000, 4, dtype)


def check_faults(backend: Backend, vocab: int, queries: int, dtype: torch.dtype) -> None:
    """Assert that invalid logits give no token for any sampling parameters, and that a row with
    some valid logits has a token."""
    healthy = batch(vocab, queries, seed=vocab)
    healthy["logits"] = healthy["logits"].to(dtype)
    worse = faulty(healthy)
    actual = backend.run(sample, worse).flatten().cpu()
    without = ORACLE.run(sample, healthy).flatten()
    assert (without >= 0).all() and torch.equal(actual[1::2], without[1::2])
    assert torch.equal(actual, ORACLE.run(sample, worse).flatten())
    for line, token in enumerate(actual[::2].tolist()):
        name, (_, _, has_one) = list(FAULTS.items())[line % len(FAULTS)]
        assert (token >= 0) == has_one, name


@pytest.mark.parametrize("backend", backends())
def test_scores_that_overflow_fp32_give_no_token(backend):
    """Finite logits become infinite by the temperature, with and without filters."""
    arguments = filter_arguments(300, 1.0, torch.float32)
    arguments["logits"][:, :, 7] = 3e38
    arguments["state"].temperature[1:] = 1e-5
    for flags in (NOISE, NOISE | FILTERS):
        arguments["state"].flags[1:] = flags
        assert (backend.run(sample, arguments) == -1).all()
    arguments["state"].flags[1:] = 0
    assert (backend.run(sample, arguments) == 7).all()


@pytest.mark.parametrize("backend", backends())
def test_top_k_keeps_all_tokens_that_tie_with_its_last(backend):
    state = SamplingState.empty(2, 40, 16, (32, 8), "cpu")
    state.flags[1] = FILTERS | NOISE
    state.temperature[1] = 1.0
    state.top_p[1] = 1.0
    state.top_k[1] = 2
    logits = torch.zeros(64, 1, 40)
    logits[..., 9] = 3.0
    logits[..., [5, 7, 30]] = 2.0
    tokens = backend.run(sample, sampled_alone(state, logits))
    assert set(tokens.flatten().tolist()) == {5, 7, 9, 30}


@pytest.mark.parametrize("backend", backends())
def test_penalties_count_each_draft_of_the_longest_window(backend):
    """A token's lead of 10.5 lasts for 11 positions, since each draft of it costs 1."""
    state = SamplingState.empty(2, 40, 16, (32, 8), "cpu")
    state.flags[1] = PENALTIES
    state.repetition[1] = 1.0
    state.frequency[1] = 1.0
    logits = torch.zeros(1, 16, 40)
    logits[..., 7] = 10.5
    arguments = sampled_alone(state, logits) | {"drafts": torch.full((1, 15), 7)}
    assert backend.run(sample, arguments)[0].tolist() == [7] * 11 + [0] * 5


def sampled_alone(state: SamplingState, logits: torch.Tensor) -> dict[str, Any]:
    """Return arguments that sample the logits [S, Q, V] for row 1, each at its own position."""
    rows, queries = logits.shape[:2]
    return dict(
        logits=logits,
        positions=torch.arange(rows * queries).view(rows, queries) + 50,
        drafts=torch.full((rows, queries - 1), -1),
        row_ids=torch.ones(rows, dtype=torch.int64),
        history=torch.zeros(2, 200, dtype=torch.int64),
        state=state,
    )


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_mask_equals_infinite_bias(queries, share):
    """The reference considers only allowed tokens, in filters and penalties too."""
    arguments = batch(900, queries, seed=queries)
    state = arguments["state"]
    generator = torch.Generator().manual_seed(queries)
    permitted = torch.rand(len(state.flags), 900, generator=generator) < share
    masks = [packed_bits(permitted[row]) for row in arguments["row_ids"]]
    state.flags[1:] |= ALLOWED
    arguments["allowed"] = torch.stack(masks)[:, None].expand(-1, queries, -1)
    masked = ORACLE.run(sample, arguments)
    state.bias[state.flags & BIAS == 0] = 0.0
    state.bias.masked_fill_(~permitted, -torch.inf)
    state.flags[1:] |= BIAS
    banned = ORACLE.run(sample, {**arguments, "allowed": None})
    assert same_bits(masked, banned)
    assert len(set(masked.flatten().tolist())) > 1 or share == 0.0


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_greedy_takes_first_largest_allowed_token(share):
    """The largest of many equal logits is allowed in some rows only."""
    arguments = batch(900, 3)
    arguments["state"].flags[:] = ALLOWED
    logits = arguments["logits"].round()
    generator = torch.Generator().manual_seed(1)
    permitted = torch.rand(logits.shape, generator=generator) < share
    allowed = torch.stack([packed_bits(bits) for bits in permitted.flatten(0, 1)])
    arguments |= {"logits": logits, "allowed": allowed.unflatten(0, logits.shape[:2])}
    expected = logits.masked_fill(~permitted, -torch.inf).argmax(-1)
    inside = permitted.gather(-1, logits.argmax(-1, keepdim=True))
    assert inside.any() and not inside.all()
    assert same_bits(ORACLE.run(sample, arguments), expected)


def packed_bits(permitted: torch.Tensor) -> torch.Tensor:
    """Return the mask [V] as int32 words [ceil(V / 32)], lowest bit first."""
    words = torch.zeros(-(-len(permitted) // 32), dtype=torch.int64)
    for token in permitted.nonzero().flatten().tolist():
        words[token // 32] |= 1 << token % 32
    return words.to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("vocab", [MANY, MANY + 1])
def test_greedy_first_largest_in_large_vocabulary(vocab):
    arguments = batch(vocab, 1)
    arguments["state"].flags[:] = 0
    logits = arguments["logits"].round()
    logits[1, 0, 5000:] = -torch.inf
    logits[2, 0, 9000] = torch.nan
    logits[3] = -torch.inf
    actual = ORACLE.run(sample, {**arguments, "logits": logits})
    expected = logits.argmax(-1)
    expected[2] = -1
    expected[3] = -1
    assert same_bits(actual, expected)
