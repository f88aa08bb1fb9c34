"""Headers of GGUF files: what is read, and errors that name field, value and remedy."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.gguf.file import GGUFFile, GGUFModel, shortest
from lockstep.models.gguf.folder import checkpoint_files
from lockstep.models.gguf.tensors import gguf_weight_files
from lockstep.worker.build import find_model
from tests.models.dense import random_oracle
from tests.models.gguf_files import finish, write_gguf, write_value
from tests.tiny_model import LLAMA

TOKENS = ["a", "b", "ab", "<|im_end|>", "<think>"]
TEXT = {
    "ggml.model": "gpt2",
    "ggml.pre": "qwen2",
    "ggml.tokens": TOKENS,
    "ggml.token_type": [1, 1, 1, 3, 4],
    "ggml.merges": ["a b"],
    "ggml.eos_token_id": 3,
    "chat_template": "{{ messages }}",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a cache folder of this test for the folders that represent GGUF files."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a transformers folder with a tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    random_oracle(folder, "Llama", {**LLAMA, "num_hidden_layers": 1, "hidden_size": 12})
    return folder


@pytest.fixture(scope="module")
def valid_file(folder: Path) -> Path:
    """Return a valid GGUF file of the folder."""
    write_gguf(folder, folder / "model.gguf", text=TEXT)
    return folder / "model.gguf"


def read_all(path: Path) -> None:
    """Translate the metadata, and read every tensor in every form."""
    checkpoint_files(GGUFModel([path]))
    for shard in gguf_weight_files([path]):
        for name in shard.views:
            shard.info(name)
            shard.read(name, ())
            shard.read(name, (torch.uint8,))


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {"a": 7, "b": True, "c": "naïve 日本語", "d": 1e-5, "e": [1, 2, 3], "f": ["x", ""]}
    for key, value in values.items():
        write_value(writer, key, value)
    writer.add_float64("g", 0.1)
    writer.add_int64("h", -(1 << 40))
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("m", matrix)
    writer.add_tensor("v", matrix[0].astype(np.float16))
    finish(writer)
    file = GGUFFile(path)
    assert file.metadata["e"] == (1, 2, 3) and file.metadata["f"] == ("x", "")
    for key in "abcd":
        assert file.metadata[key] == values[key]
    assert (file.metadata["g"], file.metadata["h"]) == (0.1, -(1 << 40))
    entry = file.tensors["m"]
    assert (entry.shape, entry.kind) == ((3, 4), "F32")
    assert torch.equal(entry.read(1, 3).view(torch.float32), torch.from_numpy(matrix[1:]))
    assert file.tensors["v"].kind == "F16"


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 0.1, 1 / 3, 5e5, 0.0, 2.5])
def test_shortest_keeps_fp32_bits(value: float) -> None:
    stored = struct.unpack("<f", struct.pack("<f", value))[0]
    actual = shortest(stored)
    assert struct.pack("<f", actual) == struct.pack("<f", value)
    assert len(repr(actual)) <= len(repr(stored))


def test_file_truncated_anywhere_is_refused(valid_file: Path, tmp_path: Path) -> None:
    data = valid_file.read_bytes()
    path = tmp_path / "cut.gguf"
    ends = [e.begin + e.rows * e.row_bytes for e in GGUFFile(valid_file).tensors.values()]
    for length in [*range(0, max(ends), 97), max(ends) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="Fetch|Name a GGUF"):
            read_all(path)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_header_raises_only_lockstep_errors(
    valid_file: Path, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(valid_file.read_bytes())
    header = GGUFFile(valid_file).header_bytes
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header - 1))
        junk = data.draw(st.sampled_from([b"\x00" * 8, b"\xff" * 8, b"\x07", b"\x00\x00\x01"]))
        damaged[at : at + len(junk)] = junk
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        read_all(path)
    except LockstepError as error:
        assert len(str(error)) < 2000


def number(value: int, code: str = "Q") -> bytes:
    """Return a little-endian number."""
    return struct.pack(f"<{code}", value)


def text(value: str) -> bytes:
    """Return a string in the file's encoding."""
    return number(len(value.encode())) + value.encode()


def header(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    """Return the start of a file."""
    return b"GGUF" + number(version, "I") + number(tensors) + number(entries)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """Return an entry of the table of tensors."""
    sizes = b"".join(map(number, shape))
    return text(name) + number(len(shape), "I") + sizes + number(kind, "I") + number(offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04", "magic='504b0304' is not allowed; allowed: 47475546. Name a GGUF file"),
        (header(version=1), "version=1 is not allowed; allowed: 2, 3"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "big-endian"),
        (header(tensors=1 << 40), "number of tensors=1099511627776 is not allowed"),
        (header(entries=1 << 40), "number of metadata entries=1099511627776"),
        (header(entries=1) + number(1 << 30), "length of metadata key=1073741824"),
        (header(entries=1) + text("a") + number(99, "I"), "type of a=99"),
        (header(entries=1) + text("a") + number(8, "I") + number(5) + b"ab", "5.*2 bytes"),
        (header(entries=1) + text("a") + number(8, "I") + number(2) + b"\xff\xfe", "a='fffe'"),
        (
            header(entries=1) + text("a") + number(9, "I") + number(4, "I") + number(1 << 60),
            "length of a=1152921504606846976 is not allowed; allowed: 0 to 8388608",
        ),
        (
            header(entries=1) + text("a") + number(9, "I") + number(4, "I") + number(1 << 20),
            "length of a=4194304 is not allowed; allowed: at most the 0 bytes that are left",
        ),
        (
            header(entries=1) + text("a") + number(9, "I") + number(9, "I") + number(1),
            "type of a's elements=9 is not allowed; allowed: numbers and strings",
        ),
        (
            header(entries=2) + (text("a") + number(0, "I") + b"\1") * 2,
            "metadata key='a' is not allowed; allowed: each key once",
        ),
        (
            header(entries=1) + text("general.alignment") + number(4, "I") + number(12, "I"),
            "general.alignment=12 is not allowed; allowed: multiples of 8",
        ),
        (header(1) + tensor("t", ()), "tensor 't' dimensions=0 is not allowed; allowed: 1 to 4"),
        (header(1) + tensor("t", (1,) * 5), "tensor 't' dimensions=5"),
        (header(1) + tensor("t", (4, 0)), "tensor 't' shape="),
        (header(1) + tensor("t", (1 << 40, 1 << 40)), "tensor 't' shape="),
        (header(1) + tensor("t", (4,), offset=3), "offset=3 is not allowed; allowed: multiples"),
        (header(1) + tensor("t", (4,)), "bytes='64 to 80'.*end within the file's 57 bytes"),
        (header(1) + tensor("t", (256,), kind=17), "type='IQ2_XS'.*Q4_K_M or Q8_0"),
        (header(1) + tensor("t", (256,), kind=77), "type='type 77'"),
        (header(1) + tensor("t", (48,), kind=2), "columns=48 is not allowed; allowed: multiples"),
        (header(2) + tensor("t", (4,)) * 2, "tensor='t' is not allowed; allowed: each name once"),
    ],
)
def test_invalid_header_is_refused_by_field_and_value(
    data: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)


Change = Callable[[gguf.GGUFWriter], None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_logit_scale(2.0), "llama.logit_scale=2.0 is not allowed"),
        (lambda w: w.add_sliding_window(64), "llama.attention.sliding_window=64"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal=False"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type"),
        (lambda w: w.add_type("adapter"), "general.type='adapter'"),
        (lambda w: w.add_nextn_predict_layers(1), "nextn_predict_layers=1"),
        (lambda w: w.add_bool("tokenizer.ggml.strange", True), "tokenizer.ggml.strange=True"),
        (lambda w: w.add_eot_token_id(99), "ggml.eot_token_id=99 is not allowed; allowed: 0 to 4"),
    ],
)
def test_unsupported_metadata_is_refused(
    change: Change, message: str, folder: Path, tmp_path: Path
) -> None:
    write_gguf(folder, tmp_path / "model.gguf", text=TEXT, change=change)
    with pytest.raises(CheckpointError, match=message):
        find_model(str(tmp_path / "model.gguf"))


def test_duplicate_tensor_name_is_refused(folder: Path, tmp_path: Path) -> None:
    def twice(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("model.norm.weight", np.zeros(12, np.float32))

    write_gguf(folder, tmp_path / "model.gguf", change=twice)
    with pytest.raises(CheckpointError, match="are both 'model.norm.weight'"):
        gguf_weight_files([tmp_path / "model.gguf"])


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "deepseek2", "clip"])
def test_unsupported_architectures_are_refused_by_name(name: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=f"general.architecture='{name}'.*qwen35moe"):
        find_model(str(tmp_path / "model.gguf"))


def test_find_model_by_path_or_folder(valid_file: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(ConfigError, match="is neither an existing folder"):
        find_model(str(home / "model.gguf"))
    (home / "model.gguf").symlink_to(valid_file)
    (home / "mmproj-model.gguf").write_bytes(b"")
    actual = find_model(str(home))
    assert actual == find_model(str(home / "model.gguf")) == find_model(str(actual))
    assert Checkpoint.read(actual).raw["model_type"] == "llama"
    (home / "other.gguf").symlink_to(valid_file)
    with pytest.raises(ConfigError, match=r"2 models \(model.gguf, other.gguf\).*Name the file"):
        find_model(str(home))


def test_changed_file_gets_a_new_folder(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, text=TEXT)
    before = find_model(str(path))
    write_gguf(folder, path, text={**TEXT, "chat_template": "{{ messages }} "})
    assert find_model(str(path)) != before


def test_unwritable_cache_is_named(
    valid_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set HF_HOME to a folder that may be written"):
        find_model(str(valid_file))


def split(valid_file: Path, folder: Path, count: int) -> list[Path]:
    """Write the tensors of a file into several files, as llama.cpp's tool does."""
    file = GGUFFile(valid_file)
    names = list(file.tensors)
    paths = []
    for index in range(count):
        path = folder / f"model-{index + 1:05}-of-{count:05}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        entries: dict[str, Any] = file.metadata if index == 0 else {}
        for key, value in entries.items():
            if key != "general.architecture":
                write_value(writer, key, list(value) if isinstance(value, tuple) else value)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(names))
        for name in names[index::count]:
            entry = file.tensors[name]
            array = entry.read().view(torch.float32).view(entry.shape).numpy()
            writer.add_tensor(name, array)
        finish(writer)
        paths.append(path)
    return paths


def test_split_model_is_joined(valid_file: Path, tmp_path: Path) -> None:
    paths = split(valid_file, tmp_path, 3)
    actual = find_model(str(paths[1]))
    assert actual == find_model(str(tmp_path))
    assert set(Checkpoint.read(actual).names()) == set(gguf_weight_files([valid_file])[0].views)
    paths[2].unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of the 3 files.*00003-of-00003"):
        find_model(str(paths[0]))
    (tmp_path / "model-00003-of-00003.gguf").write_bytes(paths[1].read_bytes())
    with pytest.raises(CheckpointError, match="is in another of the model's files too"):
        find_model(str(paths[0]))
