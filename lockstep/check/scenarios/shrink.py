"""Shrink a scenario that differs: fewer requests, tokens and parameters, simpler engine."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.scenarios.scenario import Kind, Limits, Scenario, ScenarioRequest


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield slightly simpler scenarios, the largest reductions first."""
    yield from _fewer(scenario)
    yield from _simpler_engine(scenario)
    for index, request in enumerate(scenario.requests):
        for smaller_request in _simpler_request(request):
            requests = list(scenario.requests)
            requests[index] = smaller_request
            yield replace(scenario, requests=tuple(requests))


def _fewer(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the scenario without some of its requests or cached prefixes."""
    for index in range(len(scenario.requests)):
        if len(scenario.requests) > 2:
            yield replace(scenario, requests=(scenario.requests[index],))
    for index in range(len(scenario.requests)):
        if len(scenario.requests) > 1:
            remaining = scenario.requests[:index] + scenario.requests[index + 1 :]
            yield replace(scenario, requests=remaining)
    if len(scenario.warm_prefixes) > 1:
        yield replace(scenario, warm_prefixes=())
    for index in range(len(scenario.warm_prefixes)):
        yield replace(
            scenario,
            warm_prefixes=scenario.warm_prefixes[:index] + scenario.warm_prefixes[index + 1 :],
        )


def _simpler_engine(scenario: Scenario) -> Iterator[Scenario]:
    kind = scenario.kind
    limits = scenario.limits
    plain_kind = Kind()
    plain_limits = Limits()
    for name in (
        *("preempt_every", "host", "snapshots", "pages"),
        *("chunk", "policy", "caching", "rows", "slab_pages", "failure", "failure_step"),
    ):
        default = getattr(plain_limits, name)
        if getattr(limits, name) != default and not (name == "rows" and kind.buckets[-1] < default):
            yield replace(scenario, limits=replace(limits, **{name: default}))
    if kind.drafts:
        yield replace(scenario, kind=replace(kind, drafter=NO_DRAFTER, drafts=0, changing=False))
    if kind.changing:
        yield replace(scenario, kind=replace(kind, changing=False))
    for drafts in (d for d in (1, 2, 3) if d < kind.drafts):
        yield replace(scenario, kind=replace(kind, drafts=drafts))
    for name in ("in_flight", "graph", "lookup", "numerics", "kept"):
        if getattr(kind, name) != getattr(plain_kind, name):
            yield replace(scenario, kind=replace(kind, **{name: getattr(plain_kind, name)}))
    if kind.buckets != plain_kind.buckets and limits.rows <= plain_kind.buckets[-1]:
        yield replace(scenario, kind=replace(kind, buckets=plain_kind.buckets))
    if kind.adapters and not any(request.adapter for request in scenario.requests):
        yield replace(scenario, kind=replace(kind, adapters=False))
    if scenario.poison_seed:
        yield replace(scenario, poison_seed=0)


def _simpler_request(request: ScenarioRequest) -> Iterator[ScenarioRequest]:
    plain = ScenarioRequest(())
    for name in (
        "abort",
        "again",
        "preempt",
        "returns",
        "arrival",
        "priority",
        "speculate",
        "salt",
        "adapter",
        "wrong",
        "reports",
        "forced",
    ):
        default: Any = getattr(plain, name)
        if getattr(request, name) != default:
            yield replace(request, **{name: default})
    for name in request.params:
        if name not in ("max_tokens", "temperature", "seed"):
            yield replace(request, params={k: v for k, v in request.params.items() if k != name})
    if request.params.get("temperature"):
        yield replace(request, params={**request.params, "temperature": 0.0})
    if not -1 < request.params.get("seed", 0) < 2**16:
        yield replace(request, params={**request.params, "seed": 1})
    yield from _shorter_lists(request)
    max_tokens = request.params.get("max_tokens", 16)
    for fewer in (max_tokens // 2, max_tokens - 1):
        if fewer >= max(1, request.params.get("min_tokens", 0)):
            yield replace(request, params={**request.params, "max_tokens": fewer})
    yield from _shorter_prompts(request)


def _shorter_prompts(request: ScenarioRequest) -> Iterator[ScenarioRequest]:
    """Yield requests with a shorter prompt; first one whose prompt is not rendered."""
    if request.conversation is not None:
        # A budget needs the rendered prompt, which begins the thought.
        if "thinking_token_budget" not in request.params:
            yield replace(request, conversation=None)
        return
    length = len(request.prompt)
    for shorter in (length // 2, length - 16, length - 1):
        if 1 <= shorter < length:
            yield replace(request, prompt=request.prompt[:shorter])
            yield replace(request, prompt=request.prompt[length - shorter :])


def _shorter_lists(request: ScenarioRequest) -> Iterator[ScenarioRequest]:
    """Yield requests whose list parameters have one entry less."""
    for name, value in request.params.items():
        if isinstance(value, dict) and len(value) > 1:
            for key in value:
                shorter: Any = {k: v for k, v in value.items() if k != key}
                yield replace(request, params={**request.params, name: shorter})
        # A long list has too many variants, each of which costs a run.
        elif isinstance(value, list) and 1 < len(value) < 12:
            for index in range(len(value)):
                shorter = value[:index] + value[index + 1 :]
                yield replace(request, params={**request.params, name: shorter})
        if name == "n" and value > 2:
            yield replace(request, params={**request.params, "n": 2})


def minimise(scenario: Scenario, differs: Callable[[Scenario], bool], seconds: float) -> Scenario:
    """Return a smallest scenario that still differs: no step of `smaller` shrinks it further.

    seconds: time limit; the best scenario so far is returned after it.
    """
    deadline = time.monotonic() + seconds
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in smaller(scenario):
            if time.monotonic() > deadline:
                return scenario
            if differs(candidate):
                scenario = candidate
                shrunk = True
                break
    return scenario
