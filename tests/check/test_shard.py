"""Shards of a check: each case belongs to exactly one, and a malformed shard is refused."""

import pytest
from typer.testing import CliRunner

from lockstep.check.shard import WHOLE, Shard
from lockstep.cli import app
from lockstep.errors import ConfigError


def test_every_part_is_in_one_shard() -> None:
    shards = [Shard(index, 4) for index in range(1, 5)]
    assert all(sum(shard.has(number) for shard in shards) == 1 for number in range(40))
    assert all(WHOLE.has(number) for number in range(40))


@pytest.mark.parametrize("count", [3, 9, 10, 11, 20, 30, 40])
def test_no_shard_has_one_kind_of_cases_alone(count: int) -> None:
    """Every shard gets cases of several drafters, although cases repeat a cycle of drafters."""
    # Without shuffling, one of 20 shards of check --full had only scenarios without drafts, and so
    # had six of 120.
    for cycle in (2, 3, 6, 9, 10):
        for index in range(1, count + 1):
            mine = [number for number in range(12 * count) if Shard(index, count).has(number)]
            assert len(mine) == 12
            assert len({number % cycle for number in mine}) > 1, (cycle, index)


def test_a_text_names_a_shard() -> None:
    assert Shard.read("2/4") == Shard(2, 4)
    assert str(Shard.read("2/4")) == "2/4"


@pytest.mark.parametrize(
    "text", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/2/3", "1/4096", "1/" + "9" * 99]
)
def test_malformed_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="shard=.* is not allowed; allowed: I/N"):
        CliRunner().invoke(app, ["check", "--shard", text], catch_exceptions=False)
