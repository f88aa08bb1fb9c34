"""Fuzz the exchange between GPUs: random sizes, contents and kinds, with delays of random ranks.

    python -m tests.kernels.fuzz_push [--seconds 300] [--ranks 2] [--seed 0] [--pause 0]

Every rank is a process with a GPU. All ranks know all columns, so each compares each result bit for
bit with what one GPU computes. Exits with status 1 at a difference or if a rank does not answer.
Runs under compute-sanitizer as well (--target-processes all).
"""

import argparse
import random
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.kernels.activations import silu_mul
from lockstep.kernels.backends import load
from lockstep.kernels.exchange import Activation, exchange, exchange_add_rms_norm
from lockstep.kernels.exchange.peer_memory import PeerGroup, reaches_peers
from lockstep.kernels.norm import add_rms_norm
from tests.ports import free_port

ROWS = (1, 1, 1, 2, 3, 5, 8, 16, 33, 64, 100, 256)
WIDTHS = (8, 24, 64, 512, 2560, 8704)
NUM_SPLITS = 4
"""Splits of columns in use at a time. A kernel is compiled for each split, which takes a second."""
SPLIT_EXCHANGES = 20_000
"""Exchanges after which one split is replaced."""
BATCH = 20
"""Exchanges between two looks at the clock and at the results."""
MAX_DELAY_CYCLES = 1 << 20
JOIN_SECONDS = 120.0


@dataclass
class Fuzzer:
    """Rank of the fuzz. shared: random choices that are equal on all ranks; own: of this rank.

    splits: the columns of each rank, of several tensors.
    """

    group: PeerGroup
    shared: random.Random
    own: random.Random
    noise: torch.Generator
    splits: deque[tuple[int, ...]] = field(default_factory=lambda: deque(maxlen=NUM_SPLITS))

    def add_split(self) -> None:
        """Add a random split; the oldest of NUM_SPLITS goes."""
        base = self.shared.choice(WIDTHS)
        extra = (8 * self.shared.randrange(3) for _ in range(self.group.size))
        self.splits.append(tuple(base + more for more in extra))

    def values(self, rows: int, width: int) -> Tensor:
        """Return random finite bf16 values [rows, width], equal on all ranks."""
        values = torch.randn(rows, width, generator=self.noise, device="cuda")
        return values.bfloat16()

    def delay(self) -> None:
        """Delay the GPU of this rank, or its process, at times."""
        kind = self.own.random()
        if kind < 0.1:
            torch.cuda._sleep(self.own.randrange(MAX_DELAY_CYCLES))
        elif kind < 0.12:
            torch.cuda.synchronize()
            time.sleep(self.own.random() * 0.005)

    def exchange(self) -> Tensor:
        """Run one exchange of a random kind -> whether a bit differs, on the device."""
        group = self.group
        rows = self.shared.choice(ROWS)
        widths = self.shared.choice(self.splits)
        kind = self.shared.choice(("columns", "partials", "needed", "silu_mul", "norm"))
        full = self.values(rows, sum(widths))
        gathered = exchange.backends["push"].run
        mine = full.split(widths, 1)[group.index]
        self.delay()
        if kind == "partials":
            other = self.values(rows, sum(widths))
            parts = torch.stack([full.float(), other.float()])
            local = parts.split(widths, 2)[group.index]
            actual = gathered(local, widths, group, torch.bfloat16)
            return differs(actual, (parts[0] + parts[1]).bfloat16())
        if kind == "needed":
            needed = torch.arange(rows, dtype=torch.int32, device="cuda") * 7 % (min(widths) + 1)
            index = torch.cat([torch.arange(w, device="cuda") for w in widths])
            read = index < needed[:, None]
            actual = gathered(mine, widths, group, needed=needed)
            return differs(actual.masked_fill(~read, 0), full.masked_fill(~read, 0))
        if kind == "silu_mul":
            up = self.values(rows, sum(widths))
            run = silu_mul.backends["triton"].run
            local = torch.cat([mine, up.split(widths, 1)[group.index]], 1)
            actual = gathered(local, widths, group, torch.bfloat16, Activation("silu_mul", run))
            return differs(actual, run(torch.cat([full, up], 1)))
        if kind == "norm" and sum(widths) <= 1 << 13:
            x, weight = self.values(rows, sum(widths)), self.values(1, sum(widths))[0]
            run_norm = add_rms_norm.backends["triton"].run
            fused = exchange_add_rms_norm.backends["push"].run
            actual = fused(x, mine.contiguous(), weight, 1e-6, 0.0, widths, group, run_norm)
            expected = run_norm(x, full, weight, 1e-6, 0.0)
            return differs(actual[0], expected[0]) | differs(actual[1], expected[1])
        return differs(gathered(mine, widths, group), full)


def differs(actual: Tensor, expected: Tensor) -> Tensor:
    """Return whether a bit of two bf16 tensors differs, on the device."""
    return (actual.view(torch.int16) != expected.view(torch.int16)).any()


def run_rank(index: int, size: int, port: int, seconds: float, seed: int, pause: float) -> None:
    """Fuzz as one rank. Raises AssertionError at a difference, ComputeError without an answer."""
    torch.cuda.set_device(index)
    load()
    timeout = timedelta(seconds=JOIN_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, size, index == 0, timeout, wait_for_workers=False)
    assert reaches_peers(store, index, size), "GPUs without access to each other"
    group = PeerGroup(store, index, size, JOIN_SECONDS)
    noise = torch.Generator(device="cuda").manual_seed(seed)
    fuzzer = Fuzzer(group, random.Random(seed), random.Random(f"{seed} {index}"), noise)
    end = time.monotonic() + seconds
    count = 0
    for _ in range(NUM_SPLITS):
        fuzzer.add_split()
    while going_on(store, index, size, count, time.monotonic() < end):
        if count % SPLIT_EXCHANGES == SPLIT_EXCHANGES - BATCH:
            fuzzer.add_split()
        wrong = torch.stack([fuzzer.exchange() for _ in range(BATCH)])
        assert not wrong.any(), f"exchanges {(count + wrong.nonzero()).flatten().tolist()} differ"
        group.check()
        count += BATCH
        time.sleep(pause)
    if index == 0:
        print(f"{size} ranks: {count} exchanges, equal on each", flush=True)
    store.set(f"end/{index}", "")
    store.wait([f"end/{rank}" for rank in range(size)])
    group.close()


def going_on(store: dist.Store, index: int, size: int, count: int, here: bool) -> bool:
    """Return whether all ranks go on."""
    store.set(f"{count}/{index}", str(int(here)))
    return all(store.get(f"{count}/{rank}") == b"1" for rank in range(size))


def main() -> int:
    """Run all ranks -> 0 if all are equal."""
    parser = argparse.ArgumentParser(description="Fuzz the exchange between GPUs.")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after 20 exchanges")
    options = parser.parse_args()
    context = get_context("spawn")
    port = free_port()
    arguments = (options.ranks, port, options.seconds, options.seed, options.pause)
    ranks = [
        context.Process(target=run_rank, args=(index, *arguments)) for index in range(options.ranks)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return int(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    sys.exit(main())
