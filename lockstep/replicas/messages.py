"""Messages between a client of replicas and a replica: plain data, pickled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.cache.groups import CacheSeq, root_key
from lockstep.engine.messages import (
    Began,
    ChangedBlocks,
    Compiled,
    EngineRequest,
    Heartbeat,
    Updates,
)
from lockstep.step import PAGE_SIZE


@dataclass
class Query:
    """Call of a client to one replica, which the client's router chooses or names.

    client: id of the client. replica_id: the only replica that may take the call; "" for any.
    router: the client's ReplicaRouter; it stays in the client's process.
    """

    client: str
    replica_id: str = ""
    router: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that travel to the replica."""
        return {**vars(self), "router": None}


@dataclass
class Call(Query):
    """Request on its way to a replica.

    replica_id: the latest choice of the router, which stays in the client's process. tag: id of
    the call; a request that moves to another replica gets a new one. numerics: fingerprint and
    digest of the weights that the replica must have; "" for any. allow_other_numerics: such
    replicas are only preferred. page_keys: keys of the prompt's full pages, which stay in the
    client's process.
    """

    tag: str = ""
    numerics: str = ""
    allow_other_numerics: bool = False
    request: EngineRequest = field(kw_only=True)
    page_keys: Sequence[bytes] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that travel to the replica."""
        return {**super().__getstate__(), "page_keys": ()}


def page_keys(request: EngineRequest) -> list[bytes]:
    """Return the keys of the full pages of a prompt: equal keys mean equal prefixes.

    They are chained as those of the prefix cache. An adapter counts by its name, since its digest
    is known to the engines only.
    """
    root = root_key(f"{request.adapter}\0{request.cache_salt}")
    seq = CacheSeq(request.prompt_token_ids, root=root)
    return [seq.key(page, PAGE_SIZE) for page in range(len(seq.prompt) // PAGE_SIZE)]


@dataclass(frozen=True)
class Hello:
    """First report of a replica: its numerics, and the rows and pages that its engine has."""

    numerics: str
    num_rows: int
    num_pages: int


@dataclass(frozen=True)
class Restarting:
    """Report that the replica's engine was lost with all calls, and is being restarted."""

    why: str


@dataclass(frozen=True)
class OtherNumerics:
    """Answer of a replica that refuses a call because of its numerics."""

    numerics: str


ReplicaReport = Hello | Updates | Began | Compiled | ChangedBlocks | Heartbeat | Restarting
"""Report of a replica to one client. Updates, Began and Compiled name calls by their tags."""
