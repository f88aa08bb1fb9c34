"""LoRA adapters in the format of PEFT: adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from lockstep.errors import CheckpointError
from lockstep.kernels.upload import upload
from lockstep.layers.adapters import AdapterTable
from lockstep.layers.lora import LoRA
from lockstep.layers.sharding import WeightSpec
from lockstep.models.config_reader import ConfigReader
from lockstep.models.json_files import ADAPTER, brief_list, read_object
from lockstep.models.weight_files import WeightFile

WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 512
"""Largest rank of an adapter, that of vLLM."""
MAX_ALPHA = 1e6
"""Largest lora_alpha, far above those of real adapters."""
PREFIX = "base_model.model."
"""Prefix that PEFT puts before a module's name in the base model."""
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
REMEDY = "Serve another adapter, or merge this one into its base model by PEFT's merge_and_unload."
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""
_TRAINING = "training alone"
_WRITER = "notes of the library that wrote the file"
_TENSORS = "the names of the tensors say it"
WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("lora_dropout", "loftq_config", "eva_config", "inference_mode"), _TRAINING),
    **dict.fromkeys(
        ("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "megatron_core"),
        _WRITER,
    ),
    **dict.fromkeys(("exclude_modules", "layers_pattern", "layers_to_transform"), _TENSORS),
}


@dataclass(frozen=True)
class LoRAAdapter:
    """Adapter of a folder: W + scale B A for each module W that it changes.

    modules: their names in the base model. rank: rows of every A.
    """

    name: str
    folder: Path
    rank: int
    scale: float
    modules: frozenset[str]

    @classmethod
    def read(cls, name: str, folder: Path) -> "LoRAAdapter":
        """Read the settings of an adapter and the names of its tensors.

        Raises:
            CheckpointError: a file is missing or unsound, or the adapter asks for what is not
                supported.
        """
        raw = read_object(folder / ADAPTER, f"Name a folder with {ADAPTER} and {WEIGHTS}.")
        rank, scale, targets = _read_settings(ConfigReader(raw, file=str(folder / ADAPTER)))
        return cls(name, folder, rank, scale, _module_names(folder, targets))

    @property
    def weight_file(self) -> WeightFile:
        """File of all tensors."""
        return WeightFile(self.folder / WEIGHTS, {}, frozenset())

    @cached_property
    def digest(self) -> str:
        """Digest of everything by which the adapter changes an answer, in hexadecimal."""
        with self.weight_file.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(json.dumps([self.rank, self.scale]).encode())
        return digest.hexdigest()


def _read_settings(c: ConfigReader) -> tuple[int, float, tuple[str, ...] | None]:
    """Return rank, scale and target modules; None for targets that are not a list of names.

    Raises:
        CheckpointError: a setting would change answers and is not supported.
    """
    c.one_of("peft_type", "LORA")
    c.one_of("task_type", "CAUSAL_LM", None, default=None)
    c.one_of("bias", "none", default="none")
    for name in ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"):
        c.one_of(name, False, None, default=False)
    c.one_of("init_lora_weights", *PLAIN_INITS, default=True)
    rank = c.size("r", max_value=MAX_RANK)
    alpha = c.positive("lora_alpha")
    c.need(alpha <= MAX_ALPHA, "lora_alpha", f"numbers up to {MAX_ALPHA:g}")
    targets = c.raw.get("target_modules")
    if not isinstance(targets, str):
        targets = c.get("target_modules", list)
        are_names = bool(targets) and all(isinstance(target, str) and target for target in targets)
        c.need(are_names, "target_modules", "a list of names of modules, or a regular expression")
    # rsLoRA (Kalajdzievski, 2023): the scale falls with the root of the rank.
    divisor = rank**0.5 if c.get("use_rslora", bool, False) else rank
    c.refuse_unread(WITHOUT_EFFECT, REMEDY)
    return rank, alpha / divisor, None if isinstance(targets, str) else tuple(targets)


def _module_names(folder: Path, targets: tuple[str, ...] | None) -> frozenset[str]:
    """Return the names of the modules that an adapter's tensors change.

    Raises:
        CheckpointError: a tensor is not A or B of a target module, or one of the two is missing.
    """
    path = folder / WEIGHTS
    with WeightFile(path, {}, frozenset()).open() as (_, names):
        tensors = set(names)
    halves = [
        {name[len(PREFIX) : -len(suffix)] for name in tensors if name.endswith(suffix)}
        for suffix in SUFFIXES
    ]
    modules = frozenset(halves[0] & halves[1])
    spare = sorted(tensors - {f"{PREFIX}{m}{suffix}" for m in modules for suffix in SUFFIXES})
    if spare or not modules:
        listed = brief_list(spare) or "none"
        raise CheckpointError(
            f"{path} has tensors that are not applied ({len(spare)}): {listed}; "
            f"allowed: {PREFIX}MODULE{SUFFIXES[0]} and {SUFFIXES[1]} of linear layers, one or more "
            f"pairs. {REMEDY}"
        )
    ends = tuple(f".{target}" for target in targets or ())
    wrong = sorted(m for m in modules if targets and not f".{m}".endswith(ends))
    if wrong:
        raise CheckpointError(
            f"{path} changes modules ({len(wrong)}) that target_modules of {ADAPTER} does not "
            f"name: {brief_list(wrong)}. Fetch both files again."
        )
    return modules


def read_adapters(paths: Mapping[str, str] | None) -> list[LoRAAdapter]:
    """Read the adapters of these folders, by name. Raise CheckpointError as LoRAAdapter.read()."""
    return [LoRAAdapter.read(name, Path(path).expanduser()) for name, path in (paths or {}).items()]


def adapter_table(adapters: Sequence[LoRAAdapter]) -> AdapterTable:
    """Return the table that linear layers make room for."""
    return AdapterTable(
        tuple(adapter.modules for adapter in adapters),
        max((adapter.rank for adapter in adapters), default=0),
    )


@dataclass(frozen=True)
class PlacedAdapter:
    """Adapter whose tensors have a destination each in a model. specs: by the tensors' names."""

    adapter: LoRAAdapter
    specs: Mapping[str, WeightSpec]

    def load(self) -> None:
        """Read the tensors and fill this rank's slices. Raise CheckpointError as place() does."""
        misfits = []
        with self.adapter.weight_file.open(values=True) as (file, names):
            for name in names:
                spec = self.specs[name]
                tensor = file.read(name, spec.sink.dtypes)
                if (mismatch := spec.mismatch(tensor)) is not None:
                    misfits.append(f"{name} ({mismatch})")
                else:
                    spec.sink.fill(upload(spec.narrow(tensor), spec.sink.device))
        if misfits:
            raise CheckpointError(
                f"{self.adapter.weight_file.path} does not fit the base model and r="
                f"{self.adapter.rank} of {ADAPTER}: {brief_list(misfits)}. "
                "Name an adapter of this model."
            )


def place_adapters(model: nn.Module, adapters: Sequence[LoRAAdapter]) -> list[PlacedAdapter]:
    """Find the destination of each tensor of the adapters, and set the scales.

    Raises:
        CheckpointError: an adapter changes a module that takes no adapter.
    """
    placed = []
    for number, adapter in enumerate(adapters, 1):
        specs = dict(_specs(model, number, adapter))
        modules = {name[len(PREFIX) : -len(SUFFIXES[0])] for name in specs}
        unplaced = sorted(adapter.modules - modules)
        if unplaced:
            raise CheckpointError(
                f"{adapter.folder} changes modules ({len(unplaced)}) that take no adapter: "
                f"{brief_list(unplaced)}; allowed: linear layers of attention, recurrent mixers "
                "and MLPs of the base model, but not embeddings, heads, experts and kv_b_proj. "
                f"{REMEDY}"
            )
        placed.append(PlacedAdapter(adapter, specs))
    return placed


def _specs(model: nn.Module, number: int, adapter: LoRAAdapter) -> Iterator[tuple[str, WeightSpec]]:
    """Yield the destination of each tensor of an adapter, and set its scale in each layer."""
    for layer in model.modules():
        if isinstance(layer, LoRA):
            for part, module in layer.changes(number).items():
                layer.scales[number, part] = adapter.scale
                targets = layer.targets(number, part, adapter.rank)
                for suffix, target in zip(SUFFIXES, targets, strict=True):
                    name = f"{PREFIX}{module}{suffix}"
                    yield name, WeightSpec.of(name, target)
