"""Files and sizes in settings."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.config import EngineConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.hub import folder_of
from lockstep.models.weight_files import WeightFile, find_weight_files
from lockstep.serve.server import check_tls
from lockstep.serve.settings import ServerSettings
from lockstep.settings import check_writable, path_fault, read_bytes, read_text_file

NOBODY = 65_534


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """Yield a folder as a user who is subject to permissions, unlike root."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield folder
        finally:
            if is_root:
                os.seteuid(0)
            for path in folder.rglob("*"):
                path.chmod(stat.S_IRWXU)


def test_check_writable_keeps_files(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("what stood there")
    for path in (kept, tmp_path / "new"):
        check_writable("report", path)
    assert kept.read_text() == "what stood there"
    assert list(tmp_path.iterdir()) == [kept]


def test_unwritable_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "a", tmp_path / ("x" * 9_999)):
        with pytest.raises(ConfigError, match="report='.* is not allowed; .* can be written"):
            check_writable("report", path)


def test_error_reasons_are_short() -> None:
    assert path_fault(FileNotFoundError(2, "No such file", "x" * 9_999)) == "No such file"
    assert len(path_fault(ValueError("x" * 9_999))) == 200


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24G", 24 * 2**30), ("24GiB", 24 * 2**30), ("24gib", 24 * 2**30), ("24GB", 24 * 10**9),
        ("24g", 24 * 10**9), ("24 GB", 24 * 10**9), ("25.3e9", 25.3e9), ("512", 512), ("8B", 8),
        ("1.5MiB", 1.5 * 2**20), ("2T", 2 * 2**40),
    ],
)  # fmt: skip
def test_memory_sizes(text: str, size: float) -> None:
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "24X", "-1G", "1e999", "24GG", "nan", "1" * 40, "0x10"])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        read_bytes(text)


def test_memory_settings_accept_sizes() -> None:
    assert EngineConfig(kv_cache_memory_bytes="24GB").kv_cache_memory_bytes == 24 * 10**9
    assert EngineConfig(kv_offloading_size="4GiB").kv_offloading_size == 4
    assert ServerSettings(max_body_size="512K").max_body_size == 0.5
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes='9' .*|.*24GiB"):
        EngineConfig(kv_cache_memory_bytes="24Q")


def test_path_errors_distinguish_missing_and_forbidden(unprivileged: Path) -> None:
    """Each error names its reason: Permission denied, a folder, a file in the path, not found."""
    file = unprivileged / "secret"
    file.write_text("x")
    file.chmod(0)
    reasons = {
        file: "Permission denied",
        unprivileged: "Is a directory",
        file / "below": "Not a directory",
        unprivileged / "none": "No such file",
    }
    for path, reason in reasons.items():
        with pytest.raises(OSError) as raised:
            read_text_file(path)
        assert reason in path_fault(raised.value)


def test_unreadable_model_is_not_missing(unprivileged: Path) -> None:
    model = unprivileged / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "config.json").chmod(0)
    with pytest.raises(CheckpointError, match="config.json cannot be read .*Permission denied"):
        Checkpoint.read(folder_of(str(model)))
    (model / "model.safetensors").write_bytes(b"")
    (model / "model.safetensors").chmod(0)
    with (
        pytest.raises(CheckpointError, match="read: Permission denied.*Change its"),
        WeightFile(model / "model.safetensors", {}, frozenset()).open(),
    ):
        pass
    model.chmod(0)
    with pytest.raises(ConfigError, match="model=.* cannot be read: Permission denied"):
        folder_of(str(model / "inner"))
    with pytest.raises(CheckpointError, match="Permission denied"):
        find_weight_files(model)
    model.chmod(0o700)


def test_certificates_and_keys_without_permission(unprivileged: Path) -> None:
    file = unprivileged / "key.pem"
    file.write_text("x")
    file.chmod(0)
    with pytest.raises(ConfigError, match="ssl_certfile: Permission denied"):
        check_tls({"ssl_certfile": str(file), "ssl_keyfile": None, "ssl_keyfile_password": None})
