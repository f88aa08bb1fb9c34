"""Facts of published checkpoints: settings of their config.json, and their tensors without values.

Each file of the folder `published` is one checkpoint: its name, where the facts are from, what was
filled in, what Lockstep makes of it, and the contents of its JSON files. Long lists are written
short: {"repeat": [...], "times": n} in a list stands for n copies, and braces in a name for
several names, as a shell expands them: `layers.{0-2,5}.{q_proj,k_proj}`.
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
"""Families whose heads share hidden_size where the file does not say how wide a head is."""
LAYER = re.compile(r"^((?:[a-z_]+\.)*layers\.)(\d+)(?=\.)")
RANGE = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Published:
    """A published checkpoint.

    result: LOADS, or a part of the error that refuses it; refused_on_gpu: a part of the error by
    which GPUs refuse what a CPU serves, None where they serve it; drafter: of a draft model, the
    method and the name of its target; files: name of a JSON file -> its content; shapes: name of a
    tensor -> its dtype and shape ("BF16 [4096, 128]"), None where only the name is known.
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
        """Its config.json."""
        return self.files["config.json"]

    @property
    def text(self) -> dict[str, Any]:
        """The settings of its text model."""
        text: dict[str, Any] = self.config.get("text_config", self.config)
        return text

    @cached_property
    def shapes(self) -> dict[str, str | None]:
        """Every tensor by its name; none where its names are not known."""
        return {
            name: shape for short, shape in self.written_shapes.items() for name in names_of(short)
        }

    @property
    def layer_kinds(self) -> list[str]:
        """What decides the kind of each layer, one word or letter a layer."""
        text = self.text
        listed = next((text[name] for name in KINDS if text.get(name)), None)
        if listed is not None:
            return list(listed)
        every = text.get("full_attention_interval", 1)
        dense = text.get("first_k_dense_replace", 0)
        layers = range(text["num_hidden_layers"])
        return [f"dense {i < dense}, full {(i + 1) % every == 0}" for i in layers]

    def first_layers(self) -> "Published":
        """Return the checkpoint with its first layers alone, as few as have every kind of layer.

        A draft module that follows the last layer follows the last one that is left.
        """
        kinds = self.layer_kinds
        left = next(n for n in range(2, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
        shapes = {
            renamed: shape
            for name, shape in self.shapes.items()
            if (renamed := _of_first_layers(name, left, len(kinds))) is not None
        }
        return replace(self._with(self._layers(range(left))), written_shapes=shapes)

    def small(self, experts: int = 16, vocabulary: int = 512) -> "Published":
        """Return the checkpoint with one layer of every kind, of the published heads, and with
        few experts, tokens and columns: a processor computes it in seconds."""
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
        """Return the settings of a model that has these layers alone."""
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
        """Write its JSON files to a folder, and return that."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        return folder


def _of_first_layers(name: str, left: int, count: int) -> str | None:
    """Return what a tensor is called where `left` of `count` layers are left; None: it is not."""
    number = LAYER.search(name)
    if number is None or int(number[2]) < left:
        return name
    if int(number[2]) < count:
        return None
    return f"{number[1]}{left}{name[number.end() :]}"


def expanded(value: Any) -> Any:
    """Return a value of a file with its lists and names written out."""
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
    """Return the names that a name with braces stands for."""
    found = BRACES.search(short)
    if found is None:
        return [short]
    before, after = short[: found.start()], short[found.end() :]
    return [name for one in _alternatives(found[1]) for name in names_of(before + one + after)]


def _alternatives(text: str) -> Iterator[str]:
    """Yield what stands between braces: words, and the numbers of ranges."""
    for part in text.split(","):
        span = RANGE.fullmatch(part)
        yield from map(str, range(int(span[1]), int(span[2]) + 1)) if span else [part]


CHECKPOINTS = {one.checkpoint: one for one in map(Published.read, sorted(FOLDER.glob("*.json")))}
"""Every published checkpoint, by its name."""


def names_known(published: Published) -> bool:
    """Return whether the checkpoint's tensors are known by name, dtype and shape."""
    return bool(published.written_shapes) and None not in published.written_shapes.values()


def read_settings(published: Published) -> WeightFormat | None:
    """Read what an engine reads before it builds a model, and return the weight format.

    Raises CheckpointError where the checkpoint is refused.
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
