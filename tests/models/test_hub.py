"""The hub is asked for seconds, not minutes; what was fetched before serves without it."""

import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from lockstep.engine.setup import find_model
from lockstep.errors import ConfigError
from lockstep.models import hub


def hang(*_: Any, **__: Any) -> None:
    """A network that swallows everything."""
    time.sleep(30)


def unreachable(*_: Any, **__: Any) -> None:
    """A network that is down."""
    raise ConnectionError("no route to host\nand much more")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def fetched(cache: Path, name: str) -> Path:
    """A model as the hub's client leaves it in its cache."""
    home, commit = cache / f"models--{name.replace('/', '--')}", "a" * 40
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    return snapshot


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hang)
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="not answer within 3 seconds.*Name a folder"):
        find_model("someone/something")
    assert time.monotonic() - begin < hub.PATIENCE + 2


def test_no_network_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ConfigError, match=r"no route to host\).*Name a folder") as caught:
        find_model("someone/something")
    assert "\n" not in str(caught.value)


def test_what_was_fetched_before_serves_without_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    snapshot = fetched(cache, "someone/something")
    assert find_model("someone/something") == snapshot


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "x" * 5000, "a\0b", "a b"])
def test_what_is_neither_a_folder_nor_an_id_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="Name a folder") as caught:
        find_model(name)
    assert len(str(caught.value)) < 1000
