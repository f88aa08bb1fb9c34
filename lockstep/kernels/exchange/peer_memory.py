"""Memory of each GPU of a host that all of its GPUs write, and the group that has it."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from lockstep.errors import ComputeError
from lockstep.kernels.exchange.device_push import Peers
from lockstep.kernels.exchange.group import NcclGroup

BUFFER_BYTES = 32 << 20
"""Bytes of the two buffers: half of it is the largest tensor that is exchanged by writes to peers.
"""
PACKET_BYTES = 8 << 20
"""Bytes of the two buffers of packets: half of it is the largest tensor in packets."""
SLOTS = 1024
"""Maximum CTAs of an exchange by flags: each has a flag for every rank."""
BUFFERS = 0
PACKETS = BUFFERS + BUFFER_BYTES
FLAGS = PACKETS + PACKET_BYTES
"""Offsets in the shared memory of a rank."""
_NUMBER = re.compile(r"/(\d+)(?=/|$)")


class RendezvousStore(dist.Store):
    """Store for the rendezvous of one group, under keys that all of its processes agree on.

    torch puts the number of an exchange into its keys and counts exchanges per process. A process
    that had a group before would wait for other keys than a new process. Here the first number
    that a process uses is 0, the next one 1.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        """Return the key with the number of the exchange in this group."""
        match = _NUMBER.search(key)
        if match is None:
            return key
        number = self._numbers.setdefault(match[1], len(self._numbers))
        return f"{key[: match.start()]}/{number}{key[match.end() :]}"

    def set(self, key: str, value: bytes) -> None:
        """See Store. torch calls the methods of this class from C++."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """See Store."""
        return self._store.get(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See Store."""
        return self._store.multi_get([self._key(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        """See Store."""
        return self._store.add(self._key(key), amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See Store."""
        names = [self._key(key) for key in keys]
        self._store.wait(names, *[timeout] if timeout else [])

    def has_extended_api(self) -> bool:
        """See Store."""
        return self._store.has_extended_api()


class PeerMemory:
    """Shared memory of every rank, and the state of this rank's exchanges.

    Attributes:
        pointers: kernel argument. Shared memory has two buffers, two buffers of packets, and flags
            [SLOTS, size] int64.
        words: [2] int32 in host memory, see device_push.Peers.

    Raises:
        RuntimeError: a GPU cannot reach the memory of another one.
    """

    def __init__(self, store: dist.Store, index: int, size: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        # torch finds the store of symmetric memory by the name of a registered process group. The
        # name may be part of keys, so it is the same on all ranks.
        if index == 0:
            store.set("peers-name", f"lockstep-{uuid4().hex}")
        self._name = store.get("peers-name").decode()
        # The group keeps its store in C++ only; the methods of the class need the Python object.
        self._store = RendezvousStore(dist.PrefixStore("peers", store))
        self._named = dist.ProcessGroup(self._store, index, size)
        _register_process_group(self._name, self._named)
        total = (FLAGS + SLOTS * size * 8,)
        self._memory = _SymmetricMemory.empty_strided_p2p(total, (1,), torch.uint8, device)
        self._memory.zero_()
        torch.cuda.synchronize()
        handle: Any = _SymmetricMemory.rendezvous(self._memory, self._name)
        self._handle = handle
        addresses = tuple(int(address) for address in handle.buffer_ptrs)
        self.words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        state = torch.zeros(3, dtype=torch.int64, device=device)
        self.pointers = Peers(addresses, state, self.words.data_ptr())

    def check(self) -> None:
        """Raise ComputeError if a rank did not answer."""
        rank = int(self.words[1])
        if rank:
            name = f"rank {rank - 1}" if rank > 0 else "a rank"
            raise ComputeError(f"{name} did not answer in an exchange between GPUs")

    def abort(self) -> None:
        """Let kernels that wait for a peer end."""
        if not self.words[0]:
            self.words[0] = 1
            _unregister_process_group(self._name)


class PeerGroup(NcclGroup):
    """Group of GPUs that write each other's memory. NCCL carries what is too large for that."""

    def __init__(self, store: dist.Store, index: int, size: int, seconds: float) -> None:
        super().__init__(store, index, size, seconds)
        self.memory = PeerMemory(store, index, size)
        self.peers = self.memory.pointers

    def check(self) -> None:
        """See RankGroup."""
        self.memory.check()

    def close(self) -> None:
        """See RankGroup."""
        self.memory.abort()
        super().close()


def reaches_peers(store: dist.Store, index: int, size: int) -> bool:
    """Return whether the GPUs of all ranks, which run on one host, reach each other's memory.

    All ranks call it and get the same answer. The GPU of a rank is the one with its index.
    """
    peers = (peer for peer in range(size) if peer != index)
    reaches = torch.cuda.device_count() >= size
    reaches = reaches and all(torch.cuda.can_device_access_peer(index, peer) for peer in peers)
    store.set(f"peer-access/{index}", str(reaches))
    return all(store.get(f"peer-access/{rank}") == b"True" for rank in range(size))
