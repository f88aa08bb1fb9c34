"""sample on shards of the vocabulary: every number of ranks samples the tokens of one rank."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.exchange import exchange
from lockstep.kernels.sampling import ALLOWED, FILTERS, NOISE, LogitShard, sample
from lockstep.kernels.sampling.cases import among, batch, faulty
from lockstep.kernels.sampling.shard import HEADER_WORDS
from tests.kernels.backends import Backend, backends, same_bits
from tests.kernels.test_sampling import filter_arguments
from tests.thread_ranks import ThreadGroup, run_ranks

BACKENDS = backends()
SLOW_BACKENDS = backends(pytest.mark.slow)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ONE_AT_A_TIME = threading.Lock()
"""Lock of the rank that computes, since Triton's interpreter serves one thread."""
BLOCK = 256
"""Logits of a tile in these tests, so that small vocabularies have several."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a tile of candidates hold a small part of the groups."""
    module = sample.backends["triton"].run.__module__ if "triton" in sample.backends else None
    for name, value in dict(BLOCK=BLOCK, SPAN=2 * BLOCK, TILE=8).items():
        if module:
            monkeypatch.setattr(f"{module}.{name}", value)


def shards(widths: tuple[int, ...], watch: Callable[[Tensor], None]) -> Callable[..., Any]:
    """Return a function of a rank's group that returns its LogitShard.

    Columns that are not needed arrive as NaN. watch: called with the needed columns of the first
    rank's exchanges.
    """

    def shard_of(group: ThreadGroup) -> LogitShard:
        def run(local: Tensor, widths: tuple[int, ...], needed: Tensor | None = None) -> Tensor:
            ONE_AT_A_TIME.release()
            try:
                full = exchange(local.cpu(), widths, group).to(local.device)
            finally:
                ONE_AT_A_TIME.acquire()
            if needed is None:
                return full
            if group.index == 0:
                watch(needed.cpu())
            index = torch.cat([torch.arange(width) for width in widths]).to(local.device)
            poison = torch.full_like(full.view(torch.uint8), 255).view(full.dtype)
            return torch.where(index < needed[:, None], full, poison)

        return LogitShard(widths, group.index, run)

    return shard_of


def sample_sharded(
    backend: Backend, arguments: dict[str, Any], widths: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Sample on ranks with these numbers of logits -> tokens, which are equal on all ranks, and the
    needed columns of the first rank's exchanges."""
    seen: list[Tensor] = []
    shard_of = shards(widths, seen.append)
    parts = arguments["logits"].split(widths, dim=-1)

    def run(group: ThreadGroup) -> Tensor:
        local = dict(arguments, logits=parts[group.index].contiguous())
        with ONE_AT_A_TIME:
            tokens: Tensor = backend.run(sample, dict(local, shard=shard_of(group)))
            return tokens.cpu()

    first, *rest = run_ranks(len(widths), run)
    assert all(torch.equal(first, other) for other in rest)
    return first, seen


def check(backend: Backend, arguments: dict[str, Any], widths: tuple[int, ...]) -> list[Tensor]:
    """Assert that the ranks sample the tokens of one rank."""
    expected = backend.run(sample, arguments)
    actual, seen = sample_sharded(backend, arguments, widths)
    assert same_bits(actual, expected)
    return seen


TWO = (512, 388)
THREE = (512, 256, 132)


def slow_where_interpreted(name: str, values: tuple[Any, ...], kept: tuple[Any, ...]) -> Any:
    """Parametrize a test by these values and every backend: the interpreter runs the kept ones by
    default, and the others with the slow tests."""
    params = [
        pytest.param(
            value,
            *(b if value in kept else s).values,
            id=f"{value}-{b.id}",
            marks=(b if value in kept else s).marks,
        )
        for value in values
        for b, s in zip(BACKENDS, SLOW_BACKENDS, strict=True)
    ]
    return pytest.mark.parametrize((name, "backend"), params)


@slow_where_interpreted("widths", (TWO, THREE, (900, 0)), (THREE,))
def test_every_parameter(backend: Backend, widths: tuple[int, ...]) -> None:
    check(backend, batch(900, 2, seed=1), widths)


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
def test_invalid_logits(backend: Backend) -> None:
    """NaN, infinities and banned rows, in the shard of any rank."""
    check(backend, faulty(batch(900, 3, seed=2)), THREE)


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize("widths", [TWO, THREE], ids=str)
def test_reduced_draft_vocabulary(backend: Backend, widths: tuple[int, ...]) -> None:
    check(backend, among(batch(2000, 1, seed=3), 900), widths)


@slow_where_interpreted("slope", (0.3, 1.2, 3.0), (0.3, 3.0))
def test_filters(backend: Backend, slope: float) -> None:
    """Steep logits, whose candidates are in the tile, and flat ones, which need whole rows."""
    arguments = filter_arguments(900, slope)
    seen = check(backend, arguments, THREE)
    if backend.name == "triton":
        records, rows = seen
        assert (records == records.max()).all()
        assert set(rows.tolist()) <= {0, 512}
        assert rows.any() if slope < 1 else not rows.all()


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
def test_rows_without_filters_send_their_best_only(backend: Backend) -> None:
    arguments = batch(900, 1, seed=4)
    flags = arguments["state"].flags
    flags &= ~FILTERS
    seen = check(backend, arguments, TWO)
    if backend.name == "triton":
        records, rows = seen
        assert set(records.tolist()) == {2 * HEADER_WORDS} and not rows.any()


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize("flags", [0, NOISE, NOISE | FILTERS, ALLOWED])
def test_ties_across_the_border_of_shards(backend: Backend, flags: int) -> None:
    """The smallest token wins; top-k keeps all ties, and top-p the first of them."""
    arguments = filter_arguments(900, 1.0, torch.float32)
    arguments["state"].flags[1:] = flags
    logits = arguments["logits"]
    logits[:] = 0.0
    logits[..., [511, 512, 767, 768, 899]] = 4.0
    logits[0] = 1.5
    check(backend, arguments, THREE)
    if not flags:
        tokens, _ = sample_sharded(backend, arguments, THREE)
        assert tokens[0] == 0 and (tokens[1:] == 511).all()


@pytest.mark.parametrize("backend", SLOW_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits(backend: Backend, dtype: torch.dtype) -> None:
    arguments = batch(900, 2, seed=5)
    check(backend, dict(arguments, logits=arguments["logits"].to(dtype)), TWO)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.values[0].name == "triton"])
def test_shard_within_a_tile_is_refused(backend: Backend) -> None:
    arguments = batch(900, 1)
    local = dict(arguments, logits=arguments["logits"][..., 500:].contiguous())
    with pytest.raises(ValueError, match="logits from 500 on are no shard; allowed: multiples"):
        backend.run(sample, dict(local, shard=LogitShard((500, 400), 1)))
