"""Facts of published checkpoints: settings of their config.json, and their tensors without values.

Each file of the folder `published` is one checkpoint: its name, the source of the facts, what was
filled in, the expected result in Lockstep, and the contents of its JSON files. Long lists are
abbreviated: {"repeat": [...], "times": n} in a list means n copies, and braces in a name mean
several names, as in a shell: `layers.{0-2,5}.{q_proj,k_proj}`.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.models import dflash, eagle3
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config_reader import ConfigReader
from lockstep.models.rope import longest_sequence
from lockstep.quantization import WeightFormat, read_weight_format

FOLDER = Path(__file__).parent / "published"
LOADS = "loads"
BRACES = re.compile(r"\{([^{}]*)\}")
KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
"""Settings that list the kind of each layer."""
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Settings that count the experts of a layer."""
WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
"""Settings of widths -> multiples of every weight format's blocks and groups."""
HEAD_DIM_FROM_WIDTH = ("llama", "mixtral", "qwen2")
"""Families whose head dim is hidden_size / heads if the file does not give it."""
LAYER = re.compile(r"^((?:[a-z_]+\.)*layers\.)(\d+)(?=\.)")
RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Published:
    """A published checkpoint.

    result: LOADS, or a part of the error that refuses it.
    refused_on_gpu: a part of the error by which GPUs refuse what a CPU serves, None if they serve
    it.
    drafter: for a draft model, its method and the name of its target.
    files: name of a JSON file -> its content.
    shapes: name of a tensor -> its dtype and shape ("BF16 [4096, 128]"), None if only the name is
    known.
    """

    checkpoint: str
    source: str
    filled_in: tuple[str, ...]
    result: str
    refused_on_gpu: str | None
    drafter: dict[str, str] | None
    files: dict[str, dict[str, Any]]
    written_shapes: dict[str, str | None]

    @classmethod
    def read(cls, path: Path) -> "Published":
        """Read a file of the folder."""
        raw = json.loads(path.read_text())
        return cls(
            raw.pop("checkpoint"),
            raw.pop("source"),
            tuple(raw.pop("filled_in", ())),
            raw.pop("result"),
            raw.pop("refused_on_gpu", None),
            raw.pop("drafter", None),
            written_shapes=raw.pop("tensors", {}),
            files=expanded(raw),
        )

    @property
    def config(self) -> dict[str, Any]:
        """Contents of its config.json."""
        return self.files["config.json"]

    @property
    def text(self) -> dict[str, Any]:
        """Settings of its text model."""
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    @cached_property
    def shapes(self) -> dict[str, str | None]:
        """Dtype and shape of every tensor by name; empty if its names are not known."""
        return {
            name: shape for short, shape in self.written_shapes.items() for name in names_of(short)
        }

    @property
    def layer_kinds(self) -> list[str]:
        """A word or letter per layer that determines its kind."""
        text = self.text
        listed = next((text[name] for name in KINDS if text.get(name)), None)
        if listed is not None:
            return list(listed)
        every = text.get("full_attention_interval", 1)
        dense = text.get("first_k_dense_replace", 0)
        layers = range(text["num_hidden_layers"])
        return [f"dense {i < dense}, full {(i + 1) % every == 0}" for i in layers]

    def first_layers(self) -> "Published":
        """Return the checkpoint with only its first layers, the fewest that include every kind of
        layer.

        A draft module that follows the last layer then follows the last remaining one.
        """
        kinds = self.layer_kinds
        remaining = next(n for n in range(2, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
        shapes = {
            renamed: shape
            for name, shape in self.shapes.items()
            if (renamed := _of_first_layers(name, remaining, len(kinds))) is not None
        }
        return replace(self._with(self._layers(range(remaining))), written_shapes=shapes)

    def small(self, experts: int = 16, vocabulary: int = 512) -> "Published":
        """Return the checkpoint with one layer of every kind, with the published heads, and with
        few experts, tokens and columns, so that a CPU computes it in seconds."""
        text = self.text
        kinds = self.layer_kinds
        if any(text.get(name) for name in KINDS):
            sizes = self._layers(sorted(kinds.index(kind) for kind in set(kinds)))
        else:
            dense = min(text.get("first_k_dense_replace", 0), 1)
            sizes = self._layers(range(max(2, text.get("full_attention_interval", 1))))
            sizes |= {"first_k_dense_replace": dense} if dense else {}
        sizes |= {name: experts for name in EXPERTS if text.get(name)}
        sizes |= {name: size for name, size in WIDTHS.items() if text.get(name)}
        if self.config["model_type"] in HEAD_DIM_FROM_WIDTH and not text.get("head_dim"):
            sizes["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
        if text.get("kv_lora_rank"):  # a CPU would take minutes for products of 128 heads
            sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16}
        chosen = text.get("num_experts_per_tok")
        sizes |= {"num_experts_per_tok": min(chosen, experts // 2)} if chosen else {}
        return self._with(sizes | {"vocab_size": vocabulary, "eos_token_id": vocabulary - 1})

    def _layers(self, kept: Sequence[int]) -> dict[str, Any]:
        """Return the settings of a model with only these layers."""
        sizes: dict[str, Any] = {"num_hidden_layers": len(kept)}
        for name in KINDS:
            if self.text.get(name):
                listed = [self.text[name][layer] for layer in kept]
                sizes[name] = "".join(listed) if isinstance(self.text[name], str) else listed
        return sizes

    def _with(self, sizes: dict[str, Any]) -> "Published":
        """Return the checkpoint with other settings of its text model."""
        known = {name: value for name, value in sizes.items() if name in self.config}
        config = self.config | (known if "text_config" in self.config else sizes)
        if "text_config" in self.config:
            config["text_config"] = self.text | sizes
        return replace(self, files=self.files | {"config.json": config})

    def write(self, folder: Path) -> Path:
        """Write its JSON files to a folder, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return folder


def _of_first_layers(name: str, remaining: int, count: int) -> str | None:
    """Return a tensor's name after all but the first `left` of `count` layers are removed, or None
    if it is removed."""
    number = LAYER.search(name)
    if number is None or int(number[2]) < remaining:
        return name
    if int(number[2]) < count:
        return None
    return f"{number[1]}{remaining}{name[number.end() :]}"


def expanded(value: Any) -> Any:
    """Return a JSON value with its lists and names expanded."""
    if isinstance(value, dict):
        return {name: expanded(inner) for key, inner in value.items() for name in names_of(key)}
    if not isinstance(value, list):
        return value
    written: list[Any] = []
    for one in value:
        if isinstance(one, dict) and set(one) == {"repeat", "times"}:
            written += expanded(one["repeat"]) * one["times"]
        elif isinstance(one, str):
            written += names_of(one)
        else:
            written.append(expanded(one))
    return written


def names_of(short: str) -> list[str]:
    """Expand a name with braces to all its names."""
    match = BRACES.search(short)
    if match is None:
        return [short]
    before, after = short[: match.start()], short[match.end() :]
    return [name for one in _alternatives(match[1]) for name in names_of(before + one + after)]


def _alternatives(text: str) -> Iterator[str]:
    """Yield the alternatives within braces: words, and the numbers of ranges."""
    for part in text.split(","):
        span = RANGE.fullmatch(part)
        yield from map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part]


CHECKPOINTS = {one.checkpoint: one for one in map(Published.read, sorted(FOLDER.glob("*.json")))}
"""Every published checkpoint, by its name."""


def names_known(published: Published) -> bool:
    """Return True if the checkpoint's tensors are known by name, dtype and shape."""
    return bool(published.written_shapes) and None not in published.written_shapes.values()


def read_checkpoint_settings(published: Published) -> WeightFormat | None:
    """Read what an engine reads before it builds a model, and return the weight format.

    Raises CheckpointError if the checkpoint is refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = published.write(Path(folder))
        if published.drafter is not None:
            _read_drafter(path, published.drafter)
            return None
        checkpoint = Checkpoint.read(path)
        checkpoint.architecture.Config.read(checkpoint.raw)
        longest_sequence(ConfigReader(checkpoint.raw))
        return read_weight_format(checkpoint.quantization())


def _read_drafter(folder: Path, drafter: dict[str, str]) -> None:
    """Read the settings of a draft model with those of its target."""
    of_target = CHECKPOINTS[drafter["target"]]
    with tempfile.TemporaryDirectory() as other:
        raw = Checkpoint.read(of_target.write(Path(other))).raw
    layers = range(of_target.text["num_hidden_layers"])
    target: Any = SimpleNamespace(
        config=Checkpoint(folder, raw).architecture.Config.read(raw), blocks=layers
    )
    if drafter["method"] == "dflash":
        dflash.Config.read(dflash.BlockCheckpoint.at(folder), target)
    else:
        eagle3.Config.read(eagle3.HeadCheckpoint.at(folder), target)
