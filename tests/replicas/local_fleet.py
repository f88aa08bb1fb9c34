"""Replicas in this process: hosts of ReplicaHost with the transport, without Ray."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from typing import Any

from lockstep import LLM
from lockstep.engine.thread_transport import ThreadTransport
from lockstep.replicas.host import ReplicaHost
from lockstep.replicas.messages import Call, Hello, OtherNumerics, Query, ReplicaReport
from lockstep.replicas.router import ReplicaRouter
from lockstep.replicas.transport import ReplicaLostError

NO_REPLICA_SECONDS = 0.01


class LocalFleet:
    """Fleet of hosts, each with the engine of an LLM. numerics: of each replica, by default its
    engine's own.
    """

    def __init__(self, llms: dict[str, LLM], numerics: dict[str, str] | None = None) -> None:
        self.hosts: dict[str, ReplicaHost] = {}
        self.router: ReplicaRouter
        self.routed: list[tuple[str, str]] = []
        self._listed: set[str] = set()
        self._deaths: dict[str, asyncio.Event] = {}
        self._started: set[str] = set()
        for name, llm in llms.items():
            plan = llm.engine.plan
            fingerprint = (numerics or {}).get(name, llm.engine.fingerprint)
            hello = Hello(fingerprint, plan.max_num_seqs, plan.num_pages)
            transport = ThreadTransport(llm.engine)
            self.hosts[name] = ReplicaHost(transport, hello, llm.processor.grammar_of)
            self._deaths[name] = asyncio.Event()

    def start(self, router: ReplicaRouter) -> None:
        """List all replicas."""
        self.router = router
        self.list(*self.hosts)

    def list(self, *names: str) -> None:
        """List these replicas as present; the others drain."""
        self._listed = set(names)
        self.router.update(names)

    def kill(self, name: str) -> None:
        """End a replica as kill -9 does: nothing that it has not sent arrives any more."""
        death = self._deaths[name]
        self.hosts[name]._loop.call_soon_threadsafe(death.set)

    def disconnect(self, name: str) -> None:
        """Break the connections to a replica, which lives on."""

        def break_all() -> None:
            self._deaths[name].set()
            self._deaths[name] = asyncio.Event()

        self.hosts[name]._loop.call_soon_threadsafe(break_all)

    async def run(self, call: Call) -> AsyncIterator[OtherNumerics]:
        """See Fleet."""
        while (name := call.router and call.router.choose(call, self._listed)) is None:
            await asyncio.sleep(NO_REPLICA_SECONDS)
        self.routed.append((call.request.id, name))
        async for refusal in self._until_death(name, self.hosts[name].run(_sent(call))):
            yield refusal

    async def reports(self, query: Query) -> AsyncIterator[Sequence[ReplicaReport]]:
        """See Fleet."""
        name = query.replica_id
        if name not in self._started:
            self._started.add(name)
            self.hosts[name].start()
        async for reports in self._until_death(name, self.hosts[name].reports(_sent(query))):
            yield _sent(reports)

    async def reset_prefix_cache(self, query: Query) -> None:
        """See Fleet."""
        await self.hosts[query.replica_id].reset_prefix_cache()

    def restart(self) -> None:
        """See Fleet."""
        raise AssertionError("replicas restart on Ray only: see test_on_ray.py")

    def stop(self) -> None:
        """See Fleet."""
        for name in self._started:
            self.hosts[name].stop()

    async def _until_death(self, name: str, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the items of a replica until it is killed or the connection breaks."""
        death = asyncio.ensure_future(self._deaths[name].wait())
        try:
            while True:
                item = asyncio.ensure_future(anext(items))
                done, _ = await asyncio.wait({item, death}, return_when=asyncio.FIRST_COMPLETED)
                if death in done:
                    item.cancel()
                    await asyncio.wait({item})
                    await items.aclose()  # type: ignore[attr-defined]
                    raise ReplicaLostError("it was killed")
                try:
                    yield item.result()
                except StopAsyncIteration:
                    return
        finally:
            death.cancel()


def _sent(message: Any) -> Any:
    """Return a message as it arrives at the other end."""
    return pickle.loads(pickle.dumps(message))
