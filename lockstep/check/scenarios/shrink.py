"""Makes a world that differs small: fewest requests, tokens and parameters, simplest engine."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lockstep.check.drafters import NONE
from lockstep.check.scenarios.scenario import Kind, Limits, World, WorldRequest


def smaller(world: World) -> Iterator[World]:
    """Worlds that are a little simpler, the boldest changes first."""
    yield from _fewer(world)
    yield from _simpler_engine(world)
    for index, given in enumerate(world.requests):
        for less in _simpler_request(given):
            requests = list(world.requests)
            requests[index] = less
            yield replace(world, requests=tuple(requests))


def _fewer(world: World) -> Iterator[World]:
    """Without some requests, or some of what is cached before."""
    for index in range(len(world.requests)):
        if len(world.requests) > 2:
            yield replace(world, requests=(world.requests[index],))
    for index in range(len(world.requests)):
        if len(world.requests) > 1:
            kept = world.requests[:index] + world.requests[index + 1 :]
            yield replace(world, requests=kept)
    if len(world.primed) > 1:
        yield replace(world, primed=())
    for index in range(len(world.primed)):
        yield replace(world, primed=world.primed[:index] + world.primed[index + 1 :])


def _simpler_engine(world: World) -> Iterator[World]:
    kind = world.kind
    limits = world.limits
    plain_kind = Kind()
    plain_limits = Limits()
    for name in (
        "preempt_every",
        "host",
        "snapshots",
        "pages",
        "chunk",
        "policy",
        "caching",
        "rows",
    ):
        usual = getattr(plain_limits, name)
        if getattr(limits, name) != usual and not (name == "rows" and kind.buckets[-1] < usual):
            yield replace(world, limits=replace(limits, **{name: usual}))
    if kind.drafts:
        yield replace(world, kind=replace(kind, drafter=NONE, drafts=0, changing=False))
    if kind.changing:
        yield replace(world, kind=replace(kind, changing=False))
    for drafts in (d for d in (1, 2, 3) if d < kind.drafts):
        yield replace(world, kind=replace(kind, drafts=drafts))
    for name in ("in_flight", "graph", "lookup"):
        if getattr(kind, name) != getattr(plain_kind, name):
            yield replace(world, kind=replace(kind, **{name: getattr(plain_kind, name)}))
    if kind.buckets != plain_kind.buckets and limits.rows <= plain_kind.buckets[-1]:
        yield replace(world, kind=replace(kind, buckets=plain_kind.buckets))
    if world.dirt:
        yield replace(world, dirt=0)


def _simpler_request(given: WorldRequest) -> Iterator[WorldRequest]:
    plain = WorldRequest(())
    for name in ("abort", "preempt", "arrival", "priority", "speculate", "salt"):
        usual: Any = getattr(plain, name)
        if getattr(given, name) != usual:
            yield replace(given, **{name: usual})
    for name in given.params:
        if name not in ("max_tokens", "temperature", "seed"):
            yield replace(given, params={k: v for k, v in given.params.items() if k != name})
    if given.params.get("temperature"):
        yield replace(given, params={**given.params, "temperature": 0.0})
    if not -1 < given.params.get("seed", 0) < 2**16:
        yield replace(given, params={**given.params, "seed": 1})
    yield from _shorter_lists(given)
    most = given.params.get("max_tokens", 16)
    for fewer in (most // 2, most - 1):
        if fewer >= max(1, given.params.get("min_tokens", 0)):
            yield replace(given, params={**given.params, "max_tokens": fewer})
    length = len(given.prompt)
    for shorter in (length // 2, length - 16, length - 1):
        if 1 <= shorter < length:
            yield replace(given, prompt=given.prompt[:shorter])
            yield replace(given, prompt=given.prompt[length - shorter :])


def _shorter_lists(given: WorldRequest) -> Iterator[WorldRequest]:
    """Parameters with one entry less."""
    for name, value in given.params.items():
        if isinstance(value, dict) and len(value) > 1:
            for key in value:
                less: Any = {k: v for k, v in value.items() if k != key}
                yield replace(given, params={**given.params, name: less})
        elif isinstance(value, list) and 1 < len(value) < 12:
            for index in range(len(value)):
                less = value[:index] + value[index + 1 :]
                yield replace(given, params={**given.params, name: less})
        if name == "n" and value > 2:
            yield replace(given, params={**given.params, "n": 2})


def minimise(world: World, differs: Callable[[World], bool], seconds: float) -> World:
    """The smallest world that still differs, as far as time allows: no single change of `smaller`
    can be made to it."""
    until = time.monotonic() + seconds
    again = True
    while again:
        again = False
        for candidate in smaller(world):
            if time.monotonic() > until:
                return world
            if differs(candidate):
                world = candidate
                again = True
                break
    return world
