"""A backend without a guaranteed reduction tree serves only where a probe finds equal bits and a
shorter time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.kernels.backends import load
from lockstep.kernels.linear import choose_split_k, linear, probe, tree_sum, tuning
from lockstep.kernels.linear.probe import Probed, RunLinear, trials
from tests.kernels.backends import same_bits

N = 96
K = 256
SHAPES = [
    *((34816, 5120), (16480, 5120), (14336, 5120), (5120, 6144), (5120, 17408)),
    *((24576, 4096), (6144, 4096), (4096, 4096), (4096, 12288)),
]
ROWS = (64, 96, 128, 192, 256, 512, 2048)


class FakeBackend:
    """Backend that counts its calls and pretends to take `took` microseconds."""

    def __init__(self, backend: Callable[..., Tensor], took: float = 1.0) -> None:
        self.backend = backend
        self.took = took
        self.calls = 0

    def __call__(self, *arguments: object) -> Tensor:
        self.calls += 1
        return self.backend(*arguments)


def exact_linear(
    x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False
) -> Tensor:
    """Run linear by its definition, independent of a CPU library: groups of 16 columns,
    ascending."""
    parts = []
    for a, w in zip(x.chunk(split_k, 1), weight.chunk(split_k, 1), strict=True):
        total = torch.zeros(len(x), len(weight))
        for left, right in zip(a.float().split(16, 1), w.float().split(16, 1), strict=True):
            total = total + left @ right.t()
        parts.append(total)
    return tree_sum(parts).to(x.dtype)


def split_once_more(
    x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False
) -> Tensor:
    """Run linear with K split once more, as some libraries do: it differs only in the last bits."""
    return exact_linear(x, weight, 2 * split_k)


def reversed_linear(
    x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False
) -> Tensor:
    """Run linear with the products added in reverse order."""
    return exact_linear(x.flip(1), weight.flip(1), split_k)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the GPU: a backend takes its declared time, and a capture is a call."""
    monkeypatch.setattr(probe, "MIN_NUMEL", 1)
    monkeypatch.setattr(probe, "_run_captured", lambda backend, *arguments: backend(*arguments))

    def seconds(run: Callable[[Tensor], Tensor], weights: list[Tensor], min_launches: int) -> float:
        cells = {type(c.cell_contents): c.cell_contents for c in run.__closure__ or ()}
        return 1e-6 * cells[FakeBackend].took

    monkeypatch.setattr(probe, "seconds", seconds)


def weights(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(N, K, generator=generator) for _ in range(2)]
    return [weight.to(dtype).to(device) for weight in drawn]


def aligned_zeros(rows: int, columns: int) -> Tensor:
    """Return zeros with the alignment that torch uses on a GPU."""
    spare = torch.zeros(rows * columns + probe.ALIGNMENT, dtype=torch.bfloat16)
    skip = -spare.data_ptr() % probe.ALIGNMENT // 2
    return spare[skip : skip + rows * columns].view(rows, columns)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backend_with_other_bits_is_refused(count: int, dtype: torch.dtype) -> None:
    for wrong in (split_once_more, reversed_linear):
        probed = Probed(FakeBackend(exact_linear, 2.0), FakeBackend(wrong))
        probed.probe((40, 64), weights(dtype), count)
        assert set(probed.verdicts) == {40, 64}
        assert all(why and why.startswith("other bits in") for why in probed.verdicts.values())


@pytest.mark.parametrize("wrong", [split_once_more, reversed_linear])
@pytest.mark.parametrize("count", [1, 2])
def test_cancelling_inputs_reveal_other_orders(wrong: RunLinear, count: int) -> None:
    """Rounding to 16 bits hides most differences in the order of addition, but not on cancelling
    inputs."""
    shares = {
        name: (exact_linear(x, w, count) != wrong(x, w, count)).float().mean().item()
        for name, x, w in trials(64, weights()[0], count)
    }
    assert shares["cancelling"] > 0.5 and len(shares) == 5
    assert all(share < 0.01 for name, share in shares.items() if name != "cancelling")


@pytest.mark.usefixtures("fake_gpu")
def test_refusal_is_per_row_count() -> None:
    def sometimes(
        x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False
    ) -> Tensor:
        return (split_once_more if len(x) == 48 else exact_linear)(x, weight, split_k)

    probed = Probed(FakeBackend(exact_linear, 2.0), FakeBackend(sometimes))
    probed.probe((40, 48, 64), weights(), 1)
    assert [probed.verdicts[rows] is None for rows in (40, 48, 64)] == [True, False, True]


@pytest.mark.usefixtures("fake_gpu")
def test_unprobed_shapes_and_layouts_use_exact_backend() -> None:
    exact = FakeBackend(exact_linear, 2.0)
    fast = FakeBackend(exact_linear)
    probed = Probed(exact, fast)
    weight = aligned_zeros(N, K)
    x = aligned_zeros(96, K)
    wide = aligned_zeros(96, 2 * K)
    weight.copy_(weights()[0])
    for part in (x, wide):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    probed.probe((40,), [weight], 1)
    assert probed.verdicts == {40: None}
    shifted = aligned_zeros(41, K).flatten()[8 : 40 * K + 8].view(40, K).copy_(x[:40])
    strided = wide[:40, :K]
    other = weight.t().contiguous().t()
    requested = [(x[:40], weight, fast), (x[:41], weight, exact), (strided, weight, exact)]
    for arguments, matrix, serves in (*requested, (shifted, weight, exact), (x[:40], other, exact)):
        before = serves.calls
        assert same_bits(probed(arguments, matrix), exact_linear(arguments, matrix))
        assert serves.calls == before + 1


@pytest.mark.usefixtures("fake_gpu")
def test_slow_small_and_fp32_products_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Probed(FakeBackend(exact_linear, 1.0), FakeBackend(exact_linear, 0.99))
    slow.probe((40,), weights(), 1)
    assert slow.verdicts[40] is not None and slow.verdicts[40].startswith("slower, 1 us against 1")
    few = Probed(FakeBackend(exact_linear, 2.0), FakeBackend(exact_linear))
    few.probe((1, 32), weights(), 1)
    few.probe((64,), weights(torch.float32), 1)
    monkeypatch.setattr(probe, "MIN_NUMEL", N * K + 1)
    few.probe((64,), weights(), 1)
    assert few.verdicts == {}


@pytest.mark.usefixtures("fake_gpu")
def test_probe_out_of_memory_refuses() -> None:
    def hungry(*arguments: object) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    probed = Probed(FakeBackend(exact_linear, 2.0), FakeBackend(hungry))
    probed.probe((40, 64), weights(), 1)
    assert probed.verdicts == dict.fromkeys((40, 64), "too little memory to probe")


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("allow_partials", [False, True])
def test_times_of_partials_include_reading_them(
    monkeypatch: pytest.MonkeyPatch, allow_partials: bool
) -> None:
    """A result of no dimensions is the sum that reads all partials. Prompts are timed once."""
    timed: list[tuple[int, int]] = []

    def seconds(run: Callable[[Tensor], Tensor], weights: list[Tensor], min_launches: int) -> float:
        timed.append((run(weights[0]).dim(), min_launches))
        return 1.0

    monkeypatch.setattr(probe, "seconds", seconds)
    probed = Probed(FakeBackend(exact_linear), FakeBackend(exact_linear))
    probed.probe((40, 2048), weights(), 1, allow_partials)
    dim = 0 if allow_partials else 2
    assert set(timed) == {(dim, tuning.LAUNCHES), (dim, 1)}


@pytest.mark.gpu
def test_wrong_backend_is_refused_on_gpu() -> None:
    load()
    exact, cublas = (linear.backends[name].run for name in ("triton", "cublas"))

    def wrong(x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False) -> Tensor:
        return cublas(x, weight, 2 * split_k, allow_partials)

    mine = torch.randn(8192, 4096, device="cuda").bfloat16()
    actual: dict[int, str | None] = dict.fromkeys((64, 256))
    Probed(exact, wrong)._compare(actual, mine, 1)
    assert all("other bits" in (why or "") for why in actual.values())


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", SHAPES)
def test_probed_cublas_equals_exact_backend(n: int, k: int) -> None:
    """Print each verdict, and compare on inputs that the probe has not used."""
    load()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    exact, cublas = (linear.backends[name].run for name in ("triton", "cublas"))
    mine = [
        torch.randn(n, k, device="cuda").bfloat16() for _ in range(-(-(200 << 20) // (2 * n * k)))
    ]
    probed = Probed(exact, cublas)
    count = choose_split_k(n, k, "cuda")
    probed.probe(ROWS, mine, count)
    for rows, why in probed.verdicts.items():
        print(f"{rows}x{n}x{k}/{count}:", why or "cuBLAS")
        x = torch.randn(rows, k, device="cuda").bfloat16()
        assert same_bits(probed(x, mine[-1], count), exact(x, mine[-1], count))
        alone = exact(x[3:4].contiguous(), mine[-1], count)
        assert same_bits(probed(x, mine[-1], count)[3:4], alone)
    assert set(probed.verdicts) == set(ROWS)
