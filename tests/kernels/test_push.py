"""push: the kernels that write into peers' memory, with ranks as processes that share memory."""

import mmap
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from lockstep.kernels.activations import relu2, silu_mul
from lockstep.kernels.backends import load
from lockstep.kernels.exchange import Activation, RankGroup, exchange, exchange_add_rms_norm, push
from lockstep.kernels.exchange.cases import needed_columns
from lockstep.kernels.exchange.device_push import TAGS, Peers
from lockstep.kernels.exchange.peer_memory import FLAGS, SLOTS
from lockstep.kernels.norm.triton import add_rms_norm_triton
from tests.kernels.recorded_peers import recorded_cases

load()
SECONDS = 60
Run = Callable[[RankGroup], None]


class SharedGroup(RankGroup):
    """Rank whose peers map the same memory at the same address, as forked processes do."""

    def __init__(self, index: int, memories: list[Tensor], epoch: int) -> None:
        self.index = index
        self.size = len(memories)
        self.words = torch.zeros(2, dtype=torch.int32)
        self.state = torch.tensor([epoch, 0, 0])
        addresses = tuple(memory.data_ptr() for memory in memories)
        self.peers = Peers(addresses, self.state, self.words.data_ptr())

    def all_gather(self, local: Tensor) -> Tensor:
        raise AssertionError("the kernels move these columns")


def run_processes(size: int, run: Run, epoch: int = 0) -> None:
    """Run a function with each rank's group in processes of their own; all must succeed."""
    # Pages of a mapping are zeroed where a kernel touches them.
    mappings = [mmap.mmap(-1, FLAGS + SLOTS * size * 8) for _ in range(size)]
    memories = [torch.frombuffer(mapping, dtype=torch.uint8) for mapping in mappings]
    # A fork has the memory at the same addresses, as the GPUs of a host have their peers'.
    context = get_context("fork")
    processes = [
        context.Process(
            target=lambda index: run(SharedGroup(index, memories, epoch)), args=(index,)
        )
        for index in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * size


def columns(generator: torch.Generator, *shape: int) -> Tensor:
    x = torch.randn(*shape, generator=generator).bfloat16()
    x.view(-1)[:1] = torch.nan
    return x


def equal(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(
        actual.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)
    )


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("packets", [True, False], ids=["packets", "flags"])
@pytest.mark.parametrize("widths", [(16, 16), (24, 16, 8), (1026, 2)], ids=str)
def test_every_rank_has_all_columns_after_many_exchanges(
    widths: tuple[int, ...], packets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "PACKET_LIMIT", push.PACKET_LIMIT if packets else 0)
    monkeypatch.setattr(push, "CTAS", 2)

    def run(group: RankGroup) -> None:
        generator = torch.Generator().manual_seed(0)
        for rows in (1, 3, 2, 5):
            full = columns(generator, rows, sum(widths))
            local = full.split(widths, 1)[group.index]
            assert equal(exchange.backends["push"].run(local, widths, group), full)
            needed = torch.arange(rows, dtype=torch.int32) * 11 % 27
            actual = push.exchange_push(local, widths, group, needed=needed)
            read = needed_columns(needed, widths, rows)
            assert equal(actual[read], full[read])

    run_processes(len(widths), run)


@pytest.mark.parametrize("packets", [True, False], ids=["packets", "flags"])
def test_columns_are_made_of_partials_and_activations(
    packets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push, "PACKET_LIMIT", push.PACKET_LIMIT if packets else 0)
    widths = (24, 8)

    def run(group: RankGroup) -> None:
        generator = torch.Generator().manual_seed(0)
        partials = torch.randn(4, 3, 32, generator=generator)
        local = partials.split(widths, 2)[group.index]
        actual = push.exchange_push(local, widths, group, torch.bfloat16)
        sums = (partials[0] + partials[1]) + (partials[2] + partials[3])
        assert equal(actual, sums.bfloat16())
        gate, up = columns(generator, 3, 32), columns(generator, 3, 32)
        pairs = [x.split(widths, 1)[group.index] for x in (gate, up)]
        act = Activation("silu_mul", silu_mul)
        actual = push.exchange_push(torch.cat(pairs, 1), widths, group, torch.bfloat16, act)
        expected = silu_mul.backends["triton"].run(torch.cat([gate, up], 1))
        assert equal(actual, expected)
        act = Activation("relu2", relu2)
        actual = push.exchange_push(pairs[0], widths, group, torch.bfloat16, act)
        assert equal(actual, relu2.backends["triton"].run(gate))

    run_processes(2, run)


def test_integers_cross_as_they_are() -> None:
    """Records of the sampling kernels are words of 32 bits."""

    def run(group: RankGroup) -> None:
        generator = torch.Generator().manual_seed(0)
        full = torch.randint(-(1 << 31), 1 << 31, (3, 26), generator=generator, dtype=torch.int64)
        full = full.to(torch.int32)
        needed = torch.tensor([13, 0, 7], dtype=torch.int32)
        actual = push.exchange_push(full.split(13, 1)[group.index], (13, 13), group, needed=needed)
        read = needed_columns(needed, (13, 13), 3)
        assert torch.equal(actual[read], full[read])

    run_processes(2, run)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("widths", [(48, 48), (40, 24, 24)], ids=str)
def test_a_norm_waits_for_its_columns(widths: tuple[int, ...], parts: int) -> None:
    def run(group: RankGroup) -> None:
        generator = torch.Generator().manual_seed(0)
        for rows in (1, 3):
            width = sum(widths)
            x, weight = columns(generator, rows, width), columns(generator, width)
            delta = torch.randn(parts, rows, width, generator=generator)
            delta = delta if parts > 1 else delta[0].bfloat16()
            local = delta.split(widths, -1)[group.index]
            arguments = (x, local, weight, 1e-6, 1.0, widths, group, add_rms_norm_triton)
            actual = exchange_add_rms_norm.backends["push"].run(*arguments)
            expected = add_rms_norm_triton(x, delta, weight, 1e-6, 1.0)
            assert all(map(equal, actual, expected))

    run_processes(len(widths), run)


@pytest.mark.default_cases("flags")
@pytest.mark.parametrize("packets", [True, False], ids=["packets", "flags"])
def test_packets_of_long_ago_are_not_taken_for_new_ones(
    packets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tags repeat after TAGS exchanges; rows 1 to 4 still have packets of that time."""
    first = TAGS.value - 4
    widths = (16, 16)

    def run(group: RankGroup) -> None:
        generator = torch.Generator().manual_seed(0)

        def gather(rows: int) -> bool:
            full = columns(generator, rows, 32)
            actual = push.exchange_push(full.split(widths, 1)[group.index], widths, group)
            return equal(actual, full)

        assert all(gather(5) for _ in range(7))  # the last two have the tags 2 and 3
        # The next exchange has the other buffer, as always.
        group.state[0] = first + TAGS.value - 1  # type: ignore[attr-defined]
        for number, rows in enumerate((1, 1, 1, 1, 1, 1, 5, 5)):
            # A rank that is late gives its peer the time to take old packets.
            time.sleep(0.05 * group.index)
            # Exchanges by flags clear old packets too, where their turn comes.
            limit = 0 if number in (3, 4) and not packets else 1 << 20
            monkeypatch.setattr(push, "PACKET_LIMIT", limit)
            assert gather(rows), number

    run_processes(2, run, first)


def test_an_abort_ends_the_wait_and_names_the_rank() -> None:
    def run(group: RankGroup) -> None:
        if group.index == 1:
            return
        group.words[0] = 1  # type: ignore[attr-defined]
        push.exchange_push(torch.zeros(1, 16).bfloat16(), (16, 16), group)
        assert group.words.tolist() == [1, 2]  # type: ignore[attr-defined]
        push.exchange_push(torch.zeros(1, 16).bfloat16(), (16, 16), group)

    run_processes(2, run)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_exchange_random_tensors() -> None:
    command = [sys.executable, "-m", "tests.kernels.fuzz_push", "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "exchanges, equal on each" in done.stdout


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "packets", "step"),
    [
        pytest.param(torch.bfloat16, True, 2, id="every second"),
        pytest.param(torch.bfloat16, True, 1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, False, 1, marks=pytest.mark.slow),
        pytest.param(torch.float32, False, 1, marks=pytest.mark.slow),
    ],
)
def test_every_case_of_the_exchange(
    dtype: torch.dtype, packets: bool, step: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """step: take each case of this stride; some of both ops."""
    monkeypatch.setattr(push, "PACKET_LIMIT", push.PACKET_LIMIT if packets else 0)
    monkeypatch.setattr(push, "NORM_ROWS", push.NORM_ROWS if packets else 0)
    close = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    tested = set()
    for name, op, arguments in islice(recorded_cases(dtype, device), 0, None, step):
        tested.add(op)
        expected = torch.cat(arguments["group"].parts, dim=1).to(device)
        if op is exchange_add_rms_norm:
            actual = op.backends["push"].run(**arguments | {"add_norm": add_rms_norm_triton})
            inputs = (arguments[key] for key in ("weight", "eps", "offset"))
            close(actual, add_rms_norm_triton(arguments["x"], expected, *inputs), msg=name)
            continue
        actual = op.backends["push"].run(**arguments)
        needed = arguments["needed"].cpu() if "needed" in arguments else None
        read = needed_columns(needed, arguments["widths"], len(actual)).to(device)
        # The reference's activations have other bits.
        tolerance = 1e-2 if "act" in arguments else 0
        close(actual[read], expected[read], rtol=tolerance, atol=tolerance, msg=name)
    assert len(tested) == 2
