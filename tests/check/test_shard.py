"""Shares of a check: each part belongs to one, and a wrong one is refused."""

import pytest
from typer.testing import CliRunner

from lockstep.check.shard import WHOLE, Shard
from lockstep.cli import app
from lockstep.errors import ConfigError


def test_every_part_is_in_one_shard() -> None:
    shards = [Shard(index, 4) for index in range(1, 5)]
    assert all(sum(shard.has(number) for shard in shards) == 1 for number in range(40))
    assert all(WHOLE.has(number) for number in range(40))


def test_a_text_names_a_shard() -> None:
    assert Shard.read("2/4") == Shard(2, 4)
    assert str(Shard.read("2/4")) == "2/4"


@pytest.mark.parametrize(
    "text", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/2/3", "1/4096", "1/" + "9" * 99]
)
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="shard=.* is not allowed; allowed: I/N"):
        CliRunner().invoke(app, ["check", "--shard", text], catch_exceptions=False)
