"""A backend that promises no tree serves only where a probe finds the op's bits in less time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.kernels.backends import load
from lockstep.kernels.linear import choose_split_k, linear, probe, tree_sum
from lockstep.kernels.linear.probe import Probed, RunLinear, trials
from tests.kernels.backends import same_bits

N = 96
K = 256
SHAPES = [
    *((34816, 5120), (16480, 5120), (14336, 5120), (5120, 6144), (5120, 17408)),
    *((24576, 4096), (6144, 4096), (4096, 4096), (4096, 12288)),
]
ROWS = (64, 96, 128, 192, 256, 512)


class Watched:
    """A backend that counts its calls, and takes as long as it says."""

    def __init__(self, backend: Callable[..., Tensor], took: float = 1.0) -> None:
        self.backend = backend
        self.took = took
        self.calls = 0

    def __call__(self, *arguments: object) -> Tensor:
        self.calls += 1
        return self.backend(*arguments)


def honest(x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False) -> Tensor:
    """The op as it is defined, whatever a CPU's library does: groups of 16 columns, ascending."""
    parts = []
    for a, w in zip(x.chunk(split_k, 1), weight.chunk(split_k, 1), strict=True):
        total = torch.zeros(len(x), len(weight))
        for left, right in zip(a.float().split(16, 1), w.float().split(16, 1), strict=True):
            total = total + left @ right.t()
        parts.append(total)
    return tree_sum(parts).to(x.dtype)


def cut_in_two(x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False) -> Tensor:
    """What a library does that splits K once more: a lie only in the last bits."""
    return honest(x, weight, 2 * split_k)


def backwards(x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False) -> Tensor:
    """The same products, added from the other end."""
    return honest(x.flip(1), weight.flip(1), split_k)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU: a backend takes the time it says, and a capture is a call."""
    monkeypatch.setattr(probe, "MIN_NUMEL", 1)
    monkeypatch.setattr(probe, "_run_captured", lambda backend, *arguments: backend(*arguments))

    def seconds(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
        cells = {type(c.cell_contents): c.cell_contents for c in run.__closure__ or ()}
        return 1e-6 * cells[Watched].took

    monkeypatch.setattr(probe, "seconds", seconds)


def weights(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(N, K, generator=generator) for _ in range(2)]
    return [weight.to(dtype).to(device) for weight in drawn]


def placed(rows: int, columns: int) -> Tensor:
    """Zeros that lie as torch places them on a GPU."""
    spare = torch.zeros(rows * columns + probe.ALIGNMENT, dtype=torch.bfloat16)
    skip = -spare.data_ptr() % probe.ALIGNMENT // 2
    return spare[skip : skip + rows * columns].view(rows, columns)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_face_with_other_bits_is_refused(count: int, dtype: torch.dtype) -> None:
    for liar in (cut_in_two, backwards):
        probed = Probed(Watched(honest, 2.0), Watched(liar))
        probed.probe((40, 64), weights(dtype), count)
        assert set(probed.verdicts) == {40, 64}
        assert all(why and why.startswith("other bits in") for why in probed.verdicts.values())


@pytest.mark.parametrize("liar", [cut_in_two, backwards])
@pytest.mark.parametrize("count", [1, 2])
def test_what_cancels_shows_another_order_in_most_outputs(liar: RunLinear, count: int) -> None:
    """Rounding to 16 bits hides most of what an order of addition leaves; not here."""
    shares = {
        name: (honest(x, w, count) != liar(x, w, count)).float().mean().item()
        for name, x, w in trials(64, weights()[0], count)
    }
    assert shares["cancelling"] > 0.5 and len(shares) == 5
    assert all(share < 0.01 for name, share in shares.items() if name != "cancelling")


@pytest.mark.usefixtures("pretended")
def test_a_lie_at_one_number_of_rows_refuses_that_one() -> None:
    def sometimes(
        x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False
    ) -> Tensor:
        return (cut_in_two if len(x) == 48 else honest)(x, weight, split_k)

    probed = Probed(Watched(honest, 2.0), Watched(sometimes))
    probed.probe((40, 48, 64), weights(), 1)
    assert [probed.verdicts[rows] is None for rows in (40, 48, 64)] == [True, False, True]


@pytest.mark.usefixtures("pretended")
def test_what_was_not_probed_or_lies_elsewhere_is_the_exact_face() -> None:
    exact = Watched(honest, 2.0)
    fast = Watched(honest)
    probed = Probed(exact, fast)
    weight = placed(N, K)
    x = placed(96, K)
    wide = placed(96, 2 * K)
    weight.copy_(weights()[0])
    for part in (x, wide):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    probed.probe((40,), [weight], 1)
    assert probed.verdicts == {40: None}
    shifted = placed(41, K).flatten()[8 : 40 * K + 8].view(40, K).copy_(x[:40])
    strided = wide[:40, :K]
    other = weight.t().contiguous().t()
    asked = [(x[:40], weight, fast), (x[:41], weight, exact), (strided, weight, exact)]
    for given, matrix, serves in (*asked, (shifted, weight, exact), (x[:40], other, exact)):
        before = serves.calls
        assert same_bits(probed(given, matrix), honest(given, matrix))
        assert serves.calls == before + 1


@pytest.mark.usefixtures("pretended")
def test_slower_small_few_and_fp32_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Probed(Watched(honest, 1.0), Watched(honest, 0.99))
    slow.probe((40,), weights(), 1)
    assert slow.verdicts[40] is not None and slow.verdicts[40].startswith("slower, 1 us against 1")
    few = Probed(Watched(honest, 2.0), Watched(honest))
    few.probe((1, 32), weights(), 1)
    few.probe((64,), weights(torch.float32), 1)
    monkeypatch.setattr(probe, "MIN_NUMEL", N * K + 1)
    few.probe((64,), weights(), 1)
    assert few.verdicts == {}


@pytest.mark.usefixtures("pretended")
def test_too_little_memory_refuses() -> None:
    def hungry(*arguments: object) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    probed = Probed(Watched(honest, 2.0), Watched(hungry))
    probed.probe((40, 64), weights(), 1)
    assert probed.verdicts == dict.fromkeys((40, 64), "too little memory to probe")


@pytest.mark.gpu
def test_a_liar_is_refused_on_a_gpu() -> None:
    load()
    exact, cublas = (linear.backends[name].run for name in ("triton", "cublas"))

    def liar(x: Tensor, weight: Tensor, split_k: int = 1, allow_partials: bool = False) -> Tensor:
        return cublas(x, weight, 2 * split_k, allow_partials)

    own = torch.randn(8192, 4096, device="cuda").bfloat16()
    found: dict[int, str | None] = dict.fromkeys((64, 256))
    Probed(exact, liar)._compare(found, own, 1)
    assert all("other bits" in (why or "") for why in found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", SHAPES)
def test_cublas_where_a_probe_lets_it(n: int, k: int) -> None:
    """Prints who agrees, and compares on inputs that the probe has not seen."""
    load()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    exact, cublas = (linear.backends[name].run for name in ("triton", "cublas"))
    own = [
        torch.randn(n, k, device="cuda").bfloat16() for _ in range(-(-(200 << 20) // (2 * n * k)))
    ]
    probed = Probed(exact, cublas)
    count = choose_split_k(n, k, "cuda")
    probed.probe(ROWS, own, count)
    for rows, why in probed.verdicts.items():
        print(f"{rows}x{n}x{k}/{count}:", why or "cuBLAS")
        x = torch.randn(rows, k, device="cuda").bfloat16()
        assert same_bits(probed(x, own[-1], count), exact(x, own[-1], count))
        alone = exact(x[3:4].contiguous(), own[-1], count)
        assert same_bits(probed(x, own[-1], count)[3:4], alone)
    assert set(probed.verdicts) == set(ROWS)
