"""peer_memory: processes with different histories rendezvous."""

import os
import subprocess
import sys
import threading
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from lockstep.kernels.exchange.peer_memory import PeerMemory, RendezvousStore

SECONDS = 60


def exchange_keys(store: dist.Store, rank: int, first: int) -> list[bytes]:
    """Do what torch does in a rendezvous: gather twice, wait for a barrier, gather again."""
    handles = []
    for number in (first, first + 1):
        store.set(f"Memory/{number}/{rank}", f"{number - first} of {rank}")
        handles += store.multi_get([f"Memory/{number}/{other}" for other in range(2)])
    store.barrier(f"Memory/{first + 2}", 2)
    store.set(f"Memory/{first + 3}/{rank}", str(rank))
    return [*handles, *(store.get(f"Memory/{first + 3}/{other}") for other in range(2))]


def test_ranks_meet_that_count_exchanges_from_different_numbers() -> None:
    shared = dist.HashStore()
    handles: dict[int, list[bytes]] = {}

    def run(rank: int, first: int) -> None:
        store = RendezvousStore(shared)
        # C++ calls the methods through the prefix, as it does in a rendezvous.
        handles[rank] = exchange_keys(dist.PrefixStore("lockstep-2f", store), rank, first)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in ((0, 0), (1, 17))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    expected = [b"0 of 0", b"0 of 1", b"1 of 0", b"1 of 1", b"0", b"1"]
    assert handles == {0: expected, 1: expected}


def test_a_key_without_a_number_stays() -> None:
    shared = dist.HashStore()
    RendezvousStore(shared).set("name", b"value")
    assert shared.get("name") == b"value"


def _join(index: int, port: int) -> None:
    """Share memory as a rank, write the rank into the peer's memory and read what it wrote."""
    device = index % torch.cuda.device_count()
    torch.cuda.set_device(device)
    seconds = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, 2, index == 0, seconds, wait_for_workers=False)
    memory = PeerMemory(store, index, 2)
    peer = memory._handle.get_buffer(1 - index, (1,), torch.uint8)
    peer.fill_(7 + index)
    torch.cuda.synchronize()
    store.set(f"written/{index}", "")
    store.wait(["written/0", "written/1"])
    assert memory._memory[0].item() == 8 - index
    store.set(f"read/{index}", "")
    store.wait(["read/0", "read/1"])
    memory.abort()


def _join_twice() -> None:
    """Be rank 0 of two groups, one after the other, each with a new process."""
    context = get_context("spawn")
    for _ in range(2):
        server = dist.TCPStore("127.0.0.1", 0, 1, True)
        port = server.port
        del server
        child = context.Process(target=_join, args=(1, port))
        child.start()
        _join(0, port)
        child.join(SECONDS)
        assert child.exitcode == 0
    print("joined twice")


@pytest.mark.gpu
def test_a_process_is_rank_0_of_one_group_after_another() -> None:
    """An LLM in this process is built, closed and built again: rank 1 is a new process."""
    code = "from tests.kernels.test_peer_memory import _join_twice; _join_twice()"
    # One GPU serves both ranks where there is no second one.
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS * 2,
    )
    assert result.stdout == "joined twice\n", result.stderr
