"""Agreement of all ranks before they work: release, numerics, settings and checkpoint are equal."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

from lockstep import __version__
from lockstep.config import EngineConfig, Plan
from lockstep.errors import ConfigError
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.weight_files import find_weight_files
from lockstep.quantization import read_weight_format
from lockstep.worker.build import find_model, pick_device, step_limits

NODE_SETTINGS = (
    "model",
    "lora_modules",
    "node_rank",
    "master_addr",
    "master_port",
    "distributed_timeout_seconds",
)
"""Settings that may differ between nodes: of a model and an adapter the contents are compared."""
SAMPLES = 8
"""Samples of a weight file that are compared: all of it takes minutes to read."""
SAMPLE_BYTES = 1 << 14
MAX_SHOWN = 160
"""Characters of a value that are sent; a longer one ends with its digest."""


def identity_of(config: EngineConfig) -> dict[str, str]:
    """Return what must be equal on all ranks: name -> value, for messages too.

    Raises ConfigError or CheckpointError for a configuration that cannot be loaded here.
    """
    checkpoint = Checkpoint.read(find_model(config.model), config.hf_overrides)
    weight_format = read_weight_format(
        checkpoint.quantization(), config.quantization, config.activation_dtype
    )
    limits = step_limits(config, checkpoint, pick_device(config), weight_format)
    # Their order too: a row names its adapter by the number in the list.
    adapters = shown(list(limits.adapters.items()))
    identity = {"release": __version__, "lora_modules": adapters, "numerics": limits.numerics}
    for field in fields(config):
        if field.name not in NODE_SETTINGS:
            identity[field.name] = shown(getattr(config, field.name))
    drafting = config.speculative_config
    draft_model = getattr(drafting, "model", None)
    if draft_model is not None:
        settings = {name: value for name, value in vars(drafting).items() if name != "model"}
        identity["speculative_config"] = shown(settings)
        identity["draft model's weights"] = weights_digest(find_model(draft_model))
    identity["config.json"] = digest([json.dumps(checkpoint.raw, sort_keys=True).encode()])
    if config.load_format == "auto":
        identity["weights"] = weights_digest(checkpoint.folder)
    return identity


def shown(value: object) -> str:
    """Return a setting as text of bounded length, which differs where the settings do."""
    text = json.dumps(value, sort_keys=True, default=lambda inner: {**vars(inner)})
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}... ({digest([text.encode()])})"


def model_digest(config: EngineConfig, plan: Plan) -> str:
    """Return a digest of an engine's weights: those of the checkpoint and of all adapters.

    Engines of equal numerics with another digest give other answers. Raises CheckpointError where
    the checkpoint is not on this machine.
    """
    checkpoint = Checkpoint.read(plan.model_path, config.hf_overrides)
    weights = weights_digest(checkpoint.folder) if config.load_format == "auto" else ""
    settings = (config.load_format, config.seed, plan.adapters, weights)
    parts = (json.dumps(checkpoint.raw, sort_keys=True), repr(settings))
    return digest([part.encode() for part in parts])


def weights_digest(folder: Path) -> str:
    """Return a digest of the sizes and of samples of a checkpoint's weight files."""
    files = find_weight_files(folder)
    return digest(part for weight_file in files for part in samples(weight_file.path))


def samples(path: Path) -> Iterator[bytes]:
    """Yield the size of a file and bytes at equal distances, its header among them."""
    size = path.stat().st_size
    yield str(size).encode()
    with path.open("rb") as file:
        for index in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def digest(parts: Iterator[bytes] | list[bytes]) -> str:
    """Return a short digest of bytes."""
    hasher = sha256()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()[:16]


def check_identity(mine: Mapping[str, str], theirs: Mapping[str, str], who: str) -> None:
    """Raise ConfigError where another rank differs. who: names the rank and its node."""
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            raise ConfigError(
                f"{name} of {who} is {theirs.get(name)}, and of rank 0 {mine.get(name)}; all ranks "
                "need the same. Start every node with the same release, command line and "
                "checkpoint, on GPUs of one kind."
            )
