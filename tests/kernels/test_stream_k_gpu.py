"""Stream-K launches never add partial sums left by an earlier launch."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

quantized: Any = pytest.importorskip("lockstep.kernels.linear.quantized", exc_type=ImportError)

from lockstep.kernels.epochs import launch_epochs  # noqa: E402
from lockstep.kernels.formats.weights.bench import LAYOUTS  # noqa: E402
from lockstep.kernels.linear.quantized_tuning import QuantizedTile, candidates  # noqa: E402
from lockstep.kernels.timing import record_graph  # noqa: E402
from tests.kernels.backends import same_bits  # noqa: E402

pytestmark = pytest.mark.gpu
KERNEL = quantized.stream_k_kernel


@dataclass
class StreamKLaunches:
    """Launches of one weight with stream-K, all over the same memory for partial sums.

    breaks_off: the last CTA never starts, so the partial sums that another CTA stored for it
    remain.
    """

    weight: Any
    target: Any
    tile: QuantizedTile
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]]
    incomplete: bool = False

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return KERNEL[(grid[0] - self.incomplete, *grid[1:])]

    def run(self, x: torch.Tensor, incomplete: bool = False) -> torch.Tensor:
        self.incomplete = incomplete
        return quantized.launch(x, self.weight, 1, self.tile, self.target)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> StreamKLaunches:
    """Return launches of 20,000 outputs by 40 multiprocessors' worth of CTAs."""
    weight = LAYOUTS["int4 asymmetric, fp16 scales"](20000, 2560, "cuda")
    weight.fill_dummy(torch.Generator("cuda").manual_seed(0))
    tile = next(tile for tile in candidates(64, 1, weight.bits) if tile.stream_k)
    target = replace(quantized.compile_target(weight.device), num_sms=40)
    result = StreamKLaunches(weight, target, tile, {})
    allocate = quantized._hand_over_buffers

    def reuse(x: torch.Tensor, ctas: int, tile: QuantizedTile) -> tuple[torch.Tensor, torch.Tensor]:
        if ctas not in result.memory:
            result.memory[ctas] = allocate(x, ctas, tile)
        return result.memory[ctas]

    monkeypatch.setattr(quantized, "_hand_over_buffers", reuse)
    monkeypatch.setattr(quantized, "stream_k_kernel", result)
    return result


def _rows(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(64, 2560, generator=generator, device="cuda").bfloat16()


def _has_unconsumed_flags(launches: StreamKLaunches) -> bool:
    """Return True if a launch left flags that no CTA waited for."""
    return any(bool(flags.any()) for _, flags in launches.memory.values())


def test_partials_of_incomplete_launch_are_not_used(launches: StreamKLaunches) -> None:
    launches.run(_rows(0), incomplete=True)
    assert _has_unconsumed_flags(launches)
    for seed in (1, 2):
        x = _rows(seed)
        assert same_bits(launches.run(x), quantized.expected_output(1, x, launches.weight))


def test_partials_of_incomplete_replay_are_not_used(
    launches: StreamKLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs with one serial number imitate one graph with an incomplete replay."""
    epochs = launch_epochs(torch.device("cuda", torch.cuda.current_device()))
    x = _rows(0)
    launches.run(x)
    monkeypatch.setattr(epochs, "next_serial", lambda: 7)

    def captured(incomplete: bool) -> tuple[torch.cuda.CUDAGraph, Any]:
        def step() -> torch.Tensor:
            epochs.advance()
            return launches.run(x, incomplete)

        return record_graph(step)

    (broken, _), (full, out) = captured(True), captured(False)
    for seed in (1, 2, 3):
        x.copy_(_rows(10 + seed))
        broken.replay()
        assert _has_unconsumed_flags(launches)
        x.copy_(_rows(seed))
        full.replay()
        assert same_bits(out, quantized.expected_output(1, x, launches.weight))


def test_concurrent_launches_share_only_the_weight() -> None:
    """On two streams, launches share no memory but the weight."""
    weight = LAYOUTS["int4 asymmetric, fp16 scales"](20000, 2560, "cuda")
    weight.fill_dummy(torch.Generator("cuda").manual_seed(0))
    tile = next(tile for tile in candidates(64, 1, weight.bits) if tile.stream_k)
    target = replace(quantized.compile_target(weight.device), num_sms=40)
    rows = [_rows(seed) for seed in range(2)]
    wants = [quantized.expected_output(1, x, weight) for x in rows]
    quantized.launch(rows[0], weight, 1, tile, target)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in rows]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for stream, x, got in zip(streams, rows, results, strict=True):
            with torch.cuda.stream(stream):
                got.append(quantized.launch(x, weight, 1, tile, target))
    torch.cuda.synchronize()
    for got, want in zip(results, wants, strict=True):
        assert all(same_bits(one, want) for one in got)
