"""Checkpoints damaged in many ways are refused with a one-line message, and no other exception
escapes."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.errors import CapacityError, CheckpointError, ConfigError
from tests.models.random_checkpoint import MTP, build, weights_of
from tests.tiny_model import CONFIG, make_model

Damage = tuple[str, Callable[[Path], Any]]
HUGE = 10**18
VALUES: tuple[Any, ...] = (
    HUGE, -1, 0, -HUGE, 10**400, 1.5, 1e308, float("nan"), float("inf"), "16", "", None, True, [],
    [1], {}, {"a": 1}, [[[]]], 2**31, 2**24,
)  # fmt: skip
INDEX = "model.safetensors.index.json"
BIG = 1 << 40


def config_with(name: str, value: Any) -> Callable[[Path], Any]:
    """Return damage that changes a value of config.json, `a.b` within an object."""

    def apply(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        *outer, last = name.split(".")
        inner = config
        for key in outer:
            inner = inner[key]
        if value is KeyError:
            del inner[last]
        else:
            inner[last] = value
        path.write_text(json.dumps(config))

    return apply


def write_bytes(name: str, data: bytes) -> Callable[[Path], Any]:
    """Return damage that writes these bytes to a file of the folder."""
    return lambda folder: (folder / name).write_bytes(data)


def replace_by_folder(name: str) -> Callable[[Path], Any]:
    """Return damage that replaces a file by a folder."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return apply


JSONS = {
    "empty": b"",
    "cut": b'{"model_type": "qwen3_5_text", "hidden',
    "not utf-8": b'{"model_type": "\xff\xfe"}',
    "utf-16": '{"model_type": "qwen3"}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "long number": b'{"a": ' + b"9" * 10_000 + b"}",
    "null": b"null",
    "a list": b"[1, 2]",
    "a text": b'"x"',
    "binary": bytes(range(256)),
}


def json_damages(name: str) -> Iterator[Damage]:
    """Yield damages of a JSON file: no JSON, or no object."""
    for kind, data in JSONS.items():
        yield f"{name} {kind}", write_bytes(name, data)
    yield f"{name} a folder", replace_by_folder(name)


def config_damages() -> Iterator[Damage]:
    """Yield damages of config.json: every setting with every wrong value, and missing."""
    names = [n for n in CONFIG if n != "rope_parameters"]
    names += ["rope_parameters.rope_theta", "rope_parameters.partial_rotary_factor"]
    for name in names:
        for value in (*VALUES, KeyError):
            yield f"{name}={str(value)[:30]}", config_with(name, value)
    for name in ("layer_types", "text_config", "rope_parameters", "rope_scaling", "hidden_act"):
        for value in VALUES:
            yield f"{name}={str(value)[:30]}", config_with(name, value)


def weight_damages(weights: bytes) -> Iterator[Damage]:
    """Yield damages of the weights: truncated, or with a wrong header."""
    size = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + size])
    body = weights[8 + size :]
    for cut in (0, 4, 8, 9, 100, 8 + size, 9 + size, len(weights) - 1):
        yield f"weights cut at {cut}", write_bytes("model.safetensors", weights[:cut])
    for length in (0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1):
        data = length.to_bytes(8, "little") + weights[8:]
        yield f"weights with a header of {length}", write_bytes("model.safetensors", data)
    yield "weights longer", write_bytes("model.safetensors", weights + b"x")
    yield "weights a folder", replace_by_folder("model.safetensors")
    yield "weights gone", lambda folder: (folder / "model.safetensors").unlink()
    name = next(n for n in header if "mlp.down_proj" in n)
    for key, value in (
        ("dtype", "F99"), ("dtype", "I64"), ("dtype", "BF16"), ("dtype", 5), ("shape", [BIG, BIG]),
        ("shape", [-1]), ("shape", []), ("shape", "x"), ("shape", [1.5]), ("shape", [64, 48]),
        ("data_offsets", [0, BIG]), ("data_offsets", [5, 1]), ("data_offsets", []),
        ("data_offsets", [-1, 4]), ("data_offsets", [1, 2, 3]), ("shape", [2**63, 2]),
    ):  # fmt: skip
        lying = json.dumps({**header, name: {**header[name], key: value}}).encode()
        data = len(lying).to_bytes(8, "little") + lying + body
        yield f"a tensor's {key} is {value}", write_bytes("model.safetensors", data)
    for kind, text in JSONS.items():
        data = len(text).to_bytes(8, "little") + text + body
        yield f"header {kind}", write_bytes("model.safetensors", data)
    draw = random.Random(5)
    for n in range(20):
        data = bytearray(weights)
        for _ in range(3):
            data[draw.randrange(8 + size)] = draw.randrange(256)
        yield f"header with noise {n}", write_bytes("model.safetensors", bytes(data))


def index_damages() -> Iterator[Damage]:
    """Yield damages of the index, which names missing files."""
    for indices in (
        {"a": "gone.safetensors"}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": 5},
        {"a": None}, {"a": ["model.safetensors"]}, [], None, "x", HUGE,
    ):  # fmt: skip
        data = json.dumps({"weight_map": indices}).encode()
        yield f"index of {str(indices)[:40]}", write_bytes(INDEX, data)
    yield "index without a map", write_bytes(INDEX, b"{}")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the weights file of a tiny model with a draft module."""
    folder = make_model(tmp_path_factory.mktemp("whole"))
    llm = build(folder, load_format="dummy", speculative_config=MTP)
    save_file(weights_of(llm), folder / "model.safetensors")
    build(folder, speculative_config=MTP)
    return (folder / "model.safetensors").read_bytes()


def all_damages(weights: bytes) -> list[Damage]:
    """Return all damages."""
    results = [
        *json_damages("config.json"),
        *config_damages(),
        *weight_damages(weights),
        *json_damages(INDEX),
        *index_damages(),
    ]
    return results


def check(folder: Path, weights: bytes, damages: list[Damage]) -> int:
    """Load each damaged checkpoint; return the number of refused ones."""
    faults = []
    refused = 0
    for number, (name, damage) in enumerate(damages):
        mine = make_model(folder / str(number))
        (mine / "model.safetensors").write_bytes(weights)
        damage(mine)
        settings = {"max_model_len": 128, "max_num_seqs": 1, "skip_tokenizer_init": True}
        try:
            build_engine(EngineConfig.read(model=str(mine), speculative_config=MTP, **settings))
        except (CheckpointError, ConfigError, CapacityError) as error:
            received = str(error)
            refused += 1
            if not (received.endswith(".") and 40 < len(received) < 2000 and "\n" not in received):
                faults.append(f"{name}: told {received[:300]!r}")
        except Exception as error:
            faults.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    assert not faults, "\n".join(faults)
    return refused


def test_sample_of_damaged_checkpoints_is_refused(tmp_path: Path, weights: bytes) -> None:
    damages = all_damages(weights)
    assert len(damages) > 400
    assert check(tmp_path, weights, damages[::13]) > 20


@pytest.mark.slow
def test_every_damaged_checkpoint_is_refused(tmp_path: Path, weights: bytes) -> None:
    assert check(tmp_path, weights, all_damages(weights)) > 350


@pytest.mark.parametrize(
    "settings",
    [
        {name: value}
        for name in ("max_num_seqs", "num_gpu_blocks", "max_model_len", "num_snapshots",
                     "max_num_batched_tokens", "steps_in_flight", "seed")
        for value in (HUGE, -HUGE, 10**400, float("nan"), "x", [])
    ]
    + [{"row_buckets": [HUGE]}, {"row_buckets": [1] * 100_000}],
    ids=lambda s: str(s)[:50],
)  # fmt: skip
def test_absurd_settings_are_refused_before_building(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.read(**settings)
    assert len(str(caught.value)) < 500


@pytest.mark.default_cases("pages", "snapshots")
@pytest.mark.parametrize(
    ("settings", "received"),
    [
        ({"num_gpu_blocks": 1 << 30}, "the cache needs"),
        ({"num_snapshots": 1 << 20}, "the cache needs"),
        ({"max_num_seqs": 1024, "max_model_len": 1 << 24}, "the table of rows needs"),
    ],
    ids=["pages", "snapshots", "rows"],
)
def test_allocation_beyond_memory_is_refused(
    tmp_path: Path, settings: dict[str, Any], received: str
) -> None:
    folder = make_model(
        tmp_path, max_position_embeddings=1 << 24, linear_value_head_dim=512, vocab_size=64
    )
    with pytest.raises(CapacityError, match=received):
        build(folder, load_format="dummy", **{"num_gpu_blocks": 4, **settings})


def test_model_larger_than_memory_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path, hidden_size=1 << 22, vocab_size=1 << 24)
    with pytest.raises(CapacityError, match="a weight .* needs .* GiB.*Correct the sizes"):
        build(folder, load_format="dummy")
    assert torch.get_default_dtype() == torch.float32
