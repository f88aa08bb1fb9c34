"""Models are downloaded from a hub file by file, and errors name a remedy."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save
from typer.testing import CliRunner, Result

from lockstep.cli import app
from lockstep.errors import ConfigError
from lockstep.models import pull
from lockstep.models.cached_checkpoints import cached_checkpoints
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.hub import fetch_gguf, folder_of
from lockstep.models.pull import PullRequest
from tests.models.dense import random_oracle
from tests.models.fake_hub import COMMIT, FakeHub, retry_at_once
from tests.models.gguf_files import write_gguf
from tests.models.test_mixtures import without_unknown_settings
from tests.tiny_model import LLAMA

NAME = "someone/small"
CONFIG = LLAMA | {"vocab_size": 64, "architectures": ["LlamaForCausalLM"]}
WEIGHTS = save({"model.norm.weight": torch.ones(48)})
SMALL = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# A card",
    "model.safetensors": WEIGHTS,
    "original/consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": b"0" * 1000,
}
GGUFS = {"small-Q4_0.gguf": b"GGUF" + b"4" * 96, "small-Q8_0.gguf": b"GGUF" + b"8" * 96}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an empty cache of the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Yield a hub with one safetensors model and one GGUF model."""
    with FakeHub().serving() as hub:
        hub.models = {NAME: dict(SMALL), "someone/files": dict(GGUFS)}
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        retry_at_once(monkeypatch)
        yield hub


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def refusal(*arguments: str) -> str:
    """Return the message of the ConfigError with which a command ends."""
    error = run(*arguments).exception
    assert isinstance(error, ConfigError), error
    assert "\n" not in str(error)
    return str(error)


def test_pull_downloads_needed_files(hub: FakeHub) -> None:
    result = run("pull", NAME)
    assert result.exit_code == 0, result.exception
    folder = Path(result.stdout.splitlines()[-1])
    expected = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == expected
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert f"lockstep serve {NAME}" in result.stderr and "4 files" in result.stderr


def test_pull_skips_cached_files(hub: FakeHub) -> None:
    run("pull", NAME)
    before = list(hub.downloads)
    result = run("pull", NAME)
    assert result.exit_code == 0 and hub.downloads == before
    assert "0.00 GB, of which 0.00 GB are here" in result.stderr


def test_pull_downloads_indexed_weights(hub: FakeHub) -> None:
    index = {"weight_map": {"model.norm.weight": "model-1-of-1.safetensors"}}
    hub.models[NAME]["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.models[NAME]["model-1-of-1.safetensors"] = WEIGHTS
    run("pull", NAME)
    assert "model-1-of-1.safetensors" in hub.downloads
    assert "model.safetensors" not in hub.downloads


def test_pull_to_local_dir(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "small"
    result = run("pull", NAME, "--local-dir", str(folder), "--revision", COMMIT)
    assert result.exit_code == 0, result.exception
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert f"lockstep serve {folder}" in result.stderr


def test_pull_one_gguf_file(hub: FakeHub) -> None:
    message = refusal("pull", "someone/files")
    assert "pull someone/files:small-Q4_0.gguf" in message
    result = run("pull", "someone/files:small-Q8_0.gguf")
    assert hub.downloads == ["small-Q8_0.gguf"]
    assert "small-Q8_0.gguf" in result.stderr.splitlines()[-1]
    assert "it has small-Q4_0.gguf" in refusal("pull", "someone/files:other.gguf")


@pytest.fixture
def small_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return a GGUF file of a tiny model without a tokenizer."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    random_oracle(tmp_path, "Llama", without_unknown_settings(LLAMA))
    write_gguf(tmp_path, tmp_path / "tiny.gguf")
    return (tmp_path / "tiny.gguf").read_bytes()


def test_quantization_suffix_selects_gguf_file(hub: FakeHub, small_gguf: bytes) -> None:
    hub.models["someone/files"] = {"small-Q8_0.gguf": small_gguf, "small-Q4_0.gguf": b"GGUF"}
    result = run("pull", "someone/files:Q8_0")
    assert hub.downloads == ["small-Q8_0.gguf"]
    assert result.stderr.splitlines()[-1] == "Serve it: lockstep serve someone/files:Q8_0"
    folder = folder_of("someone/files:Q8_0")
    assert folder == folder_of("someone/files:small-Q8_0.gguf")
    assert Checkpoint.read(folder).raw["model_type"] == "llama"
    assert hub.downloads == ["small-Q8_0.gguf"], "it is here"
    (one,) = cached_checkpoints()
    assert (one.name, one.reason) == ("someone/files:small-Q8_0.gguf", None)
    assert one.bytes == len(small_gguf) and one.architecture == "llama"


def test_ambiguous_quantization_suffix_is_refused(hub: FakeHub, small_gguf: bytes) -> None:
    hub.models["someone/files"] = {"a-Q4_0.gguf": small_gguf, "b-Q4_0.gguf": small_gguf}
    both = "means 2 models.*a-Q4_0.gguf.*b-Q4_0.gguf"
    assert re.search(both, refusal("pull", "someone/files:Q4_0")) and not hub.downloads
    with pytest.raises(ConfigError, match=both):
        folder_of("someone/files:Q4_0")
    with pytest.raises(ConfigError, match="means 0 models"):
        folder_of("someone/files:Q6_K")


def test_pull_fetches_all_splits(hub: FakeHub) -> None:
    parts = {f"big-Q8_0-0000{i}-of-00002.gguf": b"GGUF%d" % i for i in (1, 2)}
    hub.models["someone/files"] = dict(parts)
    first, _ = parts
    assert fetch_gguf("someone/files", first).name == first
    assert sorted(hub.downloads) == sorted(parts)


def test_gguf_file_of_unreachable_hub(cache: Path) -> None:
    with pytest.raises(ConfigError, match="someone/files:Q8_0 cannot be fetched .*OWNER/NAME:FILE"):
        folder_of("someone/files:Q8_0")


def test_pull_include_pattern(hub: FakeHub) -> None:
    hub.models[NAME]["model.fp16.safetensors"] = WEIGHTS
    run("pull", NAME, "--include", "*.fp16.safetensors")
    assert "model.fp16.safetensors" in hub.downloads and "config.json" in hub.downloads
    assert "model.safetensors" not in hub.downloads


@pytest.mark.parametrize("name", ["a b", "a/b/c", "a/b:file.bin", "https://huggingface.co/a/b"])
def test_invalid_hub_id_is_refused(name: str) -> None:
    assert "allowed: a hub id" in refusal("pull", name)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "RepoNotFound", "HF_TOKEN"),
        (404, "RepoNotFound", "how it is spelled"),
        (403, "GatedRepo", f"accept the terms at http.*{NAME}"),
        (403, "", "token in HF_TOKEN may not read it"),
        (500, "", "run the same command again later"),
    ],
)
def test_hub_refusal_names_remedy(hub: FakeHub, status: int, code: str, expected: str) -> None:
    hub.refusals[NAME] = (status, code)
    with pytest.raises(ConfigError, match=expected):
        pull.pull(PullRequest.read(NAME), lambda *_: None, lambda _: None)


def test_missing_revision_is_named(hub: FakeHub) -> None:
    assert "revision='v2' is a branch, tag or commit" in refusal("pull", NAME, "--revision", "v2")


def test_hf_token_is_sent(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    run("pull", NAME)
    assert "Bearer hf_secret" in hub.tokens


def test_full_disk_is_refused(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=pull.SPARE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = refusal("pull", NAME)
    assert "are free" in message and "--local-dir" in message
    assert "model.safetensors" not in hub.downloads


def test_broken_connection_is_retried(hub: FakeHub) -> None:
    hub.models[NAME]["model.safetensors"] = WEIGHTS + b" " * 10_000
    hub.breaks, hub.breaks_after = 1, 6_000
    result = run("pull", NAME)
    assert result.exit_code == 0, result.exception
    assert hub.downloads.count("model.safetensors") == 2


def test_interrupted_pull_resumes(hub: FakeHub) -> None:
    """Complete files stay, and the next attempt fetches the rest."""
    hub.models[NAME]["model.safetensors"] = WEIGHTS + b" " * 10_000
    hub.breaks, hub.breaks_after = 1_000, 6_000
    message = refusal("pull", NAME)
    assert "Run the same command again" in message and "--local-dir DIR" in message
    hub.breaks = 0
    hub.downloads.clear()
    assert run("pull", NAME).exit_code == 0
    assert hub.downloads == ["model.safetensors"]


def test_pull_without_network_names_remedy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    message = refusal("pull", NAME)
    assert "--local-dir DIR; copy DIR here" in message and "HF_ENDPOINT" in message


def test_pull_offline_uses_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    run("pull", NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = run("pull", NAME)
    assert result.exit_code == 0 and (Path(result.stdout.strip()) / "config.json").exists()
    message = refusal("pull", "someone/files:small-Q4_0.gguf")
    assert "HF_HUB_OFFLINE forbids" in message and "lockstep list" in message


def test_pull_progress_reaches_total_size(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "POLL_SECONDS", 0.001)
    seen: list[tuple[str, int, int]] = []
    pull.pull(PullRequest.read(NAME), lambda *shown: seen.append(shown), lambda _: None)
    total = sum(len(data) for name, data in SMALL.items() if name in pull_names())
    assert {(what, of) for what, _, of in seen} == {("downloading", total)}
    assert all(0 <= done <= total for _, done, _ in seen)


def pull_names() -> set[str]:
    """Return the files of the model that are read."""
    return {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


def test_list_shows_what_can_be_served(hub: FakeHub) -> None:
    foreign = CONFIG | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    hub.models["someone/foreign"] = dict(SMALL) | {"config.json": json.dumps(foreign).encode()}
    run("pull", NAME)
    assert "cannot serve it: model_type='gpt_oss'" in run("pull", "someone/foreign").stderr
    actual: list[dict[str, Any]] = json.loads(run("list", "--json").stdout)
    by_name = {one["name"]: one for one in actual}
    assert by_name[NAME]["architecture"] == "LlamaForCausalLM"
    assert by_name[NAME]["weights"] == "bfloat16" and by_name[NAME]["reason"] is None
    assert by_name[NAME]["bytes"] == sum(len(SMALL[name]) for name in pull_names())
    assert "gpt_oss" in by_name["someone/foreign"]["reason"]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["list"]).stdout
    assert NAME in shown and "today" in shown and "yes" in shown


def test_list_reports_incomplete_download(hub: FakeHub) -> None:
    run("pull", NAME)
    (one,) = cached_checkpoints()
    (one.folder / "model.safetensors").unlink()
    (one,) = cached_checkpoints()
    assert one.reason is not None and "*.safetensors" in one.reason


def test_list_of_empty_cache(cache: Path) -> None:
    result = run("list")
    assert result.exit_code == 0 and "lockstep pull NAME" in result.stderr
    assert json.loads(run("list", "--json").stdout) == []
