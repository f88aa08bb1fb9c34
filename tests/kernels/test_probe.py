"""A face that promises no tree serves only where a probe finds the op's bits in less time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.kernels.backends import load
from lockstep.kernels.linear import linear, probe, segments
from lockstep.kernels.linear.probe import Probed, trials
from tests.kernels.faces import same_bits

N, K = 96, 512
SHAPES = [
    *((34816, 5120), (16480, 5120), (14336, 5120), (5120, 6144), (5120, 17408)),
    *((24576, 4096), (6144, 4096), (4096, 4096), (4096, 12288)),
]
ROWS = (64, 96, 128, 192, 256, 512)


class Watched:
    """A face that counts its calls, and takes as long as it says."""

    def __init__(self, face: Callable[..., Tensor], took: float = 1.0) -> None:
        self.face, self.took, self.calls = face, took, 0

    def __call__(self, *arguments: object) -> Tensor:
        self.calls += 1
        return self.face(*arguments)


def cut_in_two(x: Tensor, weight: Tensor, segments: int = 1, partial: bool = False) -> Tensor:
    """What a library does that splits K once more: a lie only in the last bits."""
    return linear(x, weight, 2 * segments)


def backwards(x: Tensor, weight: Tensor, segments: int = 1, partial: bool = False) -> Tensor:
    """The same products, added from the other end."""
    return linear(x.flip(1), weight.flip(1), segments)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU: a face takes the time it says, and a capture is a call."""
    monkeypatch.setattr(probe, "SMALLEST", 1)
    monkeypatch.setattr(probe, "_replayed", lambda face, *arguments: face(*arguments))

    def seconds(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
        cells = {type(c.cell_contents): c.cell_contents for c in run.__closure__ or ()}
        return 1e-6 * cells[Watched].took

    monkeypatch.setattr(probe, "seconds", seconds)


def weights(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(N, K, generator=generator) for _ in range(2)]
    return [weight.to(dtype).to(device) for weight in drawn]


def some_rows(count: int) -> Tensor:
    return torch.randn(count, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_face_with_other_bits_is_refused(count: int, dtype: torch.dtype) -> None:
    for liar in (cut_in_two, backwards):
        probed = Probed(Watched(linear, 2.0), Watched(liar))
        probed.probe((40, 64), weights(dtype), count)
        assert set(probed.found) == {40, 64}
        assert all(why and why.startswith("other bits in") for why in probed.found.values())


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("only", ["the model's weight", "exponents to 0", "cancelling"])
def test_one_trial_is_enough(only: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(*arguments: object) -> list[tuple[str, Tensor, Tensor]]:
        return [(name, x.clone(), w.clone()) for name, x, w in trials(*arguments) if name == only]

    monkeypatch.setattr(probe, "trials", one)
    probed = Probed(Watched(linear, 2.0), Watched(cut_in_two))
    probed.probe((64,), weights(), 1)
    assert only in (probed.found[64] or "")


@pytest.mark.usefixtures("pretended")
def test_a_lie_at_one_number_of_rows_refuses_that_one() -> None:
    def sometimes(x: Tensor, weight: Tensor, segments: int = 1, partial: bool = False) -> Tensor:
        return (cut_in_two if len(x) == 48 else linear)(x, weight, segments)

    probed = Probed(Watched(linear, 2.0), Watched(sometimes))
    probed.probe((40, 48, 64), weights(), 1)
    assert [probed.found[rows] is None for rows in (40, 48, 64)] == [True, False, True]


@pytest.mark.usefixtures("pretended")
def test_what_was_not_probed_or_lies_elsewhere_is_the_exact_face() -> None:
    exact, fast = Watched(linear, 2.0), Watched(linear)
    probed, weight = Probed(exact, fast), weights()[0]
    probed.probe((40,), [weight], 1)
    assert probed.found == {40: None}
    x = some_rows(96)
    for part, serves in ((x[:40], fast), (x[:41], exact), (x[1:41], exact), (x[:80:2], exact)):
        part = part if part is not x[1:41] else part.clone()
        before = serves.calls
        assert same_bits(probed(part, weight), linear(part, weight))
        aligned = part.data_ptr() % probe.ALIGNED == 0 and part.is_contiguous()
        assert serves.calls == before + 1 or (serves is exact and aligned)


@pytest.mark.usefixtures("pretended")
def test_slower_small_few_and_fp32_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Probed(Watched(linear, 1.0), Watched(linear, 0.99))
    slow.probe((40,), weights(), 1)
    assert slow.found[40] is not None and slow.found[40].startswith("slower, 1 us against 1")
    few = Probed(Watched(linear, 2.0), Watched(linear))
    few.probe((1, 32), weights(), 1)
    few.probe((64,), weights(torch.float32), 1)
    monkeypatch.setattr(probe, "SMALLEST", N * K + 1)
    few.probe((64,), weights(), 1)
    assert few.found == {}


@pytest.mark.usefixtures("pretended")
def test_too_little_memory_refuses() -> None:
    def hungry(*arguments: object) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    probed = Probed(Watched(linear, 2.0), Watched(hungry))
    probed.probe((40, 64), weights(), 1)
    assert probed.found == dict.fromkeys((40, 64), "too little memory to probe")


@pytest.mark.gpu
def test_a_liar_is_refused_on_a_gpu() -> None:
    load()
    exact, cublas = (linear.backends[name][0] for name in ("triton", "cublas"))

    def liar(x: Tensor, weight: Tensor, segments: int = 1, partial: bool = False) -> Tensor:
        return cublas(x, weight, 2 * segments, partial)

    own = [torch.randn(8192, 4096, device="cuda").bfloat16() for _ in range(4)]
    for rows in (64, 256):
        probed = Probed(exact, liar)
        probed._compare(*_as_faster(probed, (rows,)), own[0], 1)
        assert "other bits" in (probed.found[rows] or "")


def _as_faster(probed: Probed, rows: tuple[int, ...]) -> tuple[tuple[int, ...]]:
    probed.found.update(dict.fromkeys(rows))
    return (rows,)


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", SHAPES)
def test_cublas_where_a_probe_lets_it(n: int, k: int) -> None:
    """Prints who agrees, and compares on inputs that the probe has not seen."""
    load()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    exact, cublas = (linear.backends[name][0] for name in ("triton", "cublas"))
    own = [
        torch.randn(n, k, device="cuda").bfloat16() for _ in range(-(-(200 << 20) // (2 * n * k)))
    ]
    probed, count = Probed(exact, cublas), segments(n, k, "cuda")
    probed.probe(ROWS, own, count)
    for rows, why in probed.found.items():
        print(f"{rows}x{n}x{k}/{count}:", why or "cuBLAS")
        x = torch.randn(rows, k, device="cuda").bfloat16()
        assert same_bits(probed(x, own[-1], count), exact(x, own[-1], count))
        alone = exact(x[3:4].contiguous(), own[-1], count)
        assert same_bits(probed(x, own[-1], count)[3:4], alone)
    assert set(probed.found) == set(ROWS)
