"""Stream-K launches never add the partial sums that an earlier launch left in memory."""

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
class Shared:
    """Launches of one weight whose CTAs share tiles, all over one memory for partial sums.

    breaks_off: the last CTA never starts, so the sums that another one left for it stay behind.
    """

    weight: Any
    target: Any
    tile: QuantizedTile
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]]
    breaks_off: bool = False

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return KERNEL[(grid[0] - self.breaks_off, *grid[1:])]

    def run(self, x: torch.Tensor, breaks_off: bool = False) -> torch.Tensor:
        self.breaks_off = breaks_off
        return quantized.launch(x, self.weight, 1, self.tile, self.target)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    """Launches of 20,000 outputs by 40 multiprocessors' worth of CTAs."""
    weight = LAYOUTS["int4 asymmetric, fp16 scales"](20000, 2560, "cuda")
    weight.fill_dummy(torch.Generator("cuda").manual_seed(0))
    tile = next(tile for tile in candidates(64, 1, weight.bits) if tile.stream_k)
    target = replace(quantized.compile_target(weight.device), num_sms=40)
    made = Shared(weight, target, tile, {})
    allocate = quantized._hand_over_buffers

    def reuse(x: torch.Tensor, ctas: int, tile: QuantizedTile) -> tuple[torch.Tensor, torch.Tensor]:
        if ctas not in made.memory:
            made.memory[ctas] = allocate(x, ctas, tile)
        return made.memory[ctas]

    monkeypatch.setattr(quantized, "_hand_over_buffers", reuse)
    monkeypatch.setattr(quantized, "stream_k_kernel", made)
    return made


def _rows(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(64, 2560, generator=generator, device="cuda").bfloat16()


def _dirty(shared: Shared) -> bool:
    """Whether a launch left marks that nobody waited for."""
    return any(bool(flags.any()) for _, flags in shared.memory.values())


def test_sums_of_a_launch_that_broke_off_are_not_taken(shared: Shared) -> None:
    shared.run(_rows(0), breaks_off=True)
    assert _dirty(shared)
    for seed in (1, 2):
        x = _rows(seed)
        assert same_bits(shared.run(x), quantized.expected_output(1, x, shared.weight))


def test_sums_of_a_replay_that_broke_off_are_not_taken(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs of one serial number stand for one graph that broke off in a replay."""
    epochs = launch_epochs(torch.device("cuda", torch.cuda.current_device()))
    x = _rows(0)
    shared.run(x)
    monkeypatch.setattr(epochs, "next_serial", lambda: 7)

    def captured(breaks_off: bool) -> tuple[torch.cuda.CUDAGraph, Any]:
        def step() -> torch.Tensor:
            epochs.advance()
            return shared.run(x, breaks_off)

        return record_graph(step)

    (broken, _), (whole, out) = captured(True), captured(False)
    for seed in (1, 2, 3):
        x.copy_(_rows(10 + seed))
        broken.replay()
        assert _dirty(shared)
        x.copy_(_rows(seed))
        whole.replay()
        assert same_bits(out, quantized.expected_output(1, x, shared.weight))


def test_one_weight_in_two_launches_at_once() -> None:
    """On two streams: launches share no memory but the weight."""
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
