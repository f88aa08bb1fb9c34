"""Options of replicas: what is refused, and before anything is started."""

import sys
from typing import Any

import pytest

from lockstep.cli.replicas import has_replicas, load_replicas, replica_range
from lockstep.errors import ConfigError
from lockstep.serve.settings import ServerSettings


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        ({}, (1, 1)),
        ({"replicas": 3}, (3, 3)),
        ({"max_replicas": 4}, (1, 4)),
        ({"min_replicas": 2, "max_replicas": 4}, (2, 4)),
        ({"replicas": 3, "min_replicas": 2, "max_replicas": 4}, (2, 4)),
        ({"replicas": 3, "max_replicas": 4}, (3, 4)),
        ({"min_replicas": 2}, (2, 2)),
    ),
)
def test_bounds_of_autoscaling(options: dict[str, Any], expected: tuple[int, int]) -> None:
    assert replica_range(ServerSettings(**options)) == expected


@pytest.mark.parametrize(
    "options",
    (
        {"min_replicas": 3, "max_replicas": 2},
        {"replicas": 5, "min_replicas": 2, "max_replicas": 4},
        {"replicas": 2, "min_replicas": 3},
    ),
)
def test_contradicting_bounds_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="allowed: numbers that do not fall in this order"):
        replica_range(ServerSettings(**options))


def test_one_replica_needs_no_ray() -> None:
    assert not has_replicas(ServerSettings())
    assert not has_replicas(ServerSettings(disable_frontend_multiprocessing=True))
    assert has_replicas(ServerSettings(replicas=2))
    assert has_replicas(ServerSettings(ray_address="auto"))
    with pytest.raises(ConfigError, match="disable_frontend_multiprocessing=True is not allowed"):
        has_replicas(ServerSettings(replicas=2, disable_frontend_multiprocessing=True))


@pytest.mark.parametrize("address", ("ray://head:10001", "head", "", "http://head:1"))
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, or the HOST:PORT"):
        ServerSettings(ray_address=address)


def test_missing_ray_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "lockstep.replicas.ray_fleet", raising=False)
    with pytest.raises(ConfigError, match=r"replicas=2 needs Ray Serve.*pip install '\.\[ray\]'"):
        load_replicas({}, ServerSettings(replicas=2))
