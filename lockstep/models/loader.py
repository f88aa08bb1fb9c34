"""Loader: checkpoint folder -> model; every tensor is used and every parameter filled."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.kernels.upload import upload
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Embedding, Target
from lockstep.layers.norm import GatedGroupNorm, GatedRMSNorm, Norm
from lockstep.layers.sharding import Shard, WeightSpec
from lockstep.models import architecture, draft_prefix
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config_reader import ConfigReader
from lockstep.models.json_files import brief_list
from lockstep.models.weight_files import files_left_out
from lockstep.quantization import WeightFormat
from lockstep.quantization.weight_sink import FLOAT_DTYPES

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Callback with (bytes loaded, bytes in total)."""
TIED_HEAD = "lm_head.weight"
OF_SETTINGS = ".rotary_emb.inv_freq"
"""Suffix of tensors in older checkpoints that repeat settings of config.json; they are not read."""


@dataclass(frozen=True)
class LoadResult:
    """Bytes that were loaded, and the seconds that it took."""

    bytes: int
    seconds: float

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.bytes / max(self.seconds, 1e-9)


def build_model(raw: dict[str, Any], build: BuildContext) -> nn.Module:
    """Build the target that config.json describes; its weights are unfilled."""
    module = architecture(raw.get("model_type"))
    inner = ConfigReader(raw).raw.get("model_type")
    if architecture(inner) is not module:
        raise CheckpointError(
            f"config.json text_config.model_type={inner!r} is not allowed; allowed: that of the "
            f"architecture {raw.get('model_type')!r} around it. Correct config.json."
        )
    return module.Model(module.Config.read(raw), build)


@dataclass(frozen=True)
class Source:
    """Tensors of one checkpoint and their destinations.

    wanted: spec of each tensor by name, less the prefix. ignored: whether a tensor that is not
    wanted may exist. embedding: the target's, if its head is tied and may be in the files too.
    """

    checkpoint: Checkpoint
    wanted: Mapping[str, WeightSpec]
    ignored: Callable[[str], bool] = field(default=lambda name: False)
    embedding: Embedding | None = None

    @property
    def bytes(self) -> int:
        """Size of all files that are read."""
        return sum(file.path.stat().st_size for file in self.checkpoint.weight_files)

    def warn_of_files_left_out(self) -> None:
        """Log each safetensors file of the folder that is not read, and why."""
        folder = self.checkpoint.folder
        read = {file.path.name for file in self.checkpoint.weight_files}
        for name, reason in files_left_out(folder, read).items():
            log.warning("%s is not read: %s", folder / name, reason)


def weight_specs(table: Mapping[str, Target], prefix: str = "") -> dict[str, WeightSpec]:
    """Return the spec of each tensor that a model takes from its checkpoint, by the tensor's name.

    table: name -> destination, as weights() of a model gives it. prefix: put before each name.
    """
    return {f"{prefix}{name}": WeightSpec.of(f"{prefix}{name}", t) for name, t in table.items()}


def load_weights(
    checkpoint: Checkpoint,
    model: nn.Module,
    draft: Any,
    progress: Progress,
    weight_format: WeightFormat | None = None,
) -> LoadResult:
    """Load model and draft module from safetensors, and finish their layers.

    Args:
        draft: None without one. If its source() is not None, it has a separate checkpoint.
        weight_format: weight format that they were built with.

    Raises:
        CheckpointError: tensors are missing, unexpected, duplicate, or do not fit; it names them
            all.
    """
    began = time.monotonic()
    draft_source = None if draft is None else draft.source()
    within = draft if draft_source is None else None
    sources = [target_source(checkpoint, model, within, weight_format)]
    sources += [draft_source] if draft_source is not None else []
    total = sum(source.bytes for source in sources)
    loaded = 0
    for source in sources:
        source.warn_of_files_left_out()
        _read(source, loaded, total, progress)
        loaded += source.bytes
    finish(*(root for root in (model, draft) if root is not None))
    # Uploads are asynchronous: without this the time would be that of the host alone.
    if model.embed.weight.is_cuda:
        torch.cuda.synchronize()
    return LoadResult(total, time.monotonic() - began)


def target_source(
    checkpoint: Checkpoint, model: nn.Module, draft: Any, weight_format: WeightFormat | None
) -> Source:
    """Return the tensors of a model, and of the draft module in the same checkpoint, if any."""
    module = checkpoint.architecture
    drafted = draft_prefix(module, checkpoint.raw)
    wanted = weight_specs(model.weights())
    if draft is not None:
        assert drafted is not None, "else it was not built"
        wanted |= weight_specs(draft.weights(), prefix=drafted)
    unread = drafted if draft is None else None
    return Source(
        checkpoint,
        wanted,
        lambda name: _ignored(checkpoint, weight_format, name, unread),
        model.embed if model.config.tied else None,
    )


def _read(source: Source, loaded: int, total: int, progress: Progress) -> None:
    """Load a source. loaded: bytes of the sources before it, out of `total`."""
    wanted = source.wanted
    checkpoint = source.checkpoint
    filled: set[str] = set()
    twins: list[tuple[str, Tensor]] = []
    faults: dict[str, list[str]] = {"missing": [], "spare": [], "doubled": [], "unfit": []}
    for weight_file in checkpoint.weight_files:
        done = loaded
        with weight_file.open(values=True) as (file, names):
            for name in names:
                key = checkpoint.key(name)
                if key in filled:
                    faults["doubled"].append(name)
                elif key in wanted:
                    tensor = file.read(name, wanted[key].sink.dtypes)
                    faults["unfit"] += _fill(name, wanted[key], tensor)
                    filled.add(key)
                    done += tensor.nbytes
                    progress(done, total)
                # Some tied checkpoints store the head too. It must equal the embedding.
                elif key == TIED_HEAD and source.embedding is not None:
                    twins.append((name, file.read(name, FLOAT_DTYPES)))
                elif not source.ignored(name):
                    faults["spare"].append(name)
        loaded += weight_file.path.stat().st_size
        progress(loaded, total)
    faults["missing"] = sorted(set(wanted) - filled)
    faults["unfit"] += [f for twin in twins for f in _differs(*twin, source.embedding)]
    if any(faults.values()):
        kinds = [(kind, names) for kind, names in faults.items() if names]
        listed = "; ".join(
            f"{kind} tensors ({len(names)}): {brief_list(names)}" for kind, names in kinds
        )
        raise CheckpointError(
            f"{checkpoint.folder}: the checkpoint does not fit its config.json: {listed}. "
            "Correct config.json or the checkpoint."
        )


def finish(*roots: nn.Module) -> None:
    """Finish all layers after loading: outer layers first, the target before its draft module."""
    for root in roots:
        for layer in list(root.modules()):
            if hasattr(layer, "finish"):
                layer.finish()


def fill_dummy(model: nn.Module, draft: nn.Module | None, seed: int, build: BuildContext) -> None:
    """Fill weights with random values at the scale of trained ones, equal for equal seeds.

    build: context that the model was built with. A weight that is cut across ranks gets its slice
    of the whole weight's values, so that they do not depend on the number of ranks.
    """
    modules = [model] if draft is None else [model, draft]
    parameters = {id(p): p for m in modules for p in m.parameters()}
    kinds = Norm | GatedRMSNorm | GatedGroupNorm
    norms = [n for m in modules for n in m.modules() if isinstance(n, kinds)]
    # A norm's effective weight is about 1; some families store it around zero.
    centres = {id(norm.weight): 1.0 - norm.offset for norm in norms}
    for index, parameter in enumerate(parameters.values()):
        generator = torch.Generator(parameter.device).manual_seed(seed * 100003 + index)
        shard = build.shards.get(id(parameter))
        values = parameter.data if shard is None else _like(parameter, shard)
        if parameter.dim() == 1:
            values.uniform_(-0.2, 0.2, generator=generator)
            values.add_(centres.get(id(parameter), 0.0))
        else:
            values.normal_(0.0, 0.7 * parameter.shape[-1] ** -0.5, generator=generator)
        if shard is not None:
            parameter.data.copy_(shard.narrow(values))
    layers = [layer for m in modules for layer in m.modules()]
    quantized = [part for layer in layers for part in getattr(layer, "quantized_parts", ())]
    for index, weight in enumerate(quantized):
        # Seeds below those of the parameters, so that no two tensors share a sequence.
        generator = torch.Generator(weight.device).manual_seed(seed * 100003 - 1 - index)
        part = build.quantized_shards.get(id(weight))
        if part is None:
            weight.fill_dummy(generator)
        else:
            part.fill_dummy(weight, generator)
    finish(*modules)


def _like(parameter: Tensor, shard: Shard) -> Tensor:
    """Return an unfilled whole parameter with the storage order of this slice of it."""
    order = sorted(range(parameter.dim()), key=lambda axis: -parameter.stride(axis))
    shape = shard.shape_of_whole(parameter)
    stored = parameter.new_empty([shape[axis] for axis in order])
    return stored.permute([order.index(axis) for axis in range(parameter.dim())])


def _ignored(
    checkpoint: Checkpoint, weight_format: WeightFormat | None, name: str, drafted: str | None
) -> bool:
    """Return whether a tensor is ignored. drafted: prefix of a draft module that is not built."""
    module = checkpoint.architecture
    if name.startswith(module.IGNORED) or name.endswith(OF_SETTINGS):
        return True
    if weight_format is not None and name.rpartition(".")[2] in weight_format.unused:
        return True
    return drafted is not None and checkpoint.key(name).startswith(drafted)


def _fill(name: str, spec: WeightSpec, tensor: Tensor) -> list[str]:
    """Copy this rank's slice of a tensor into the model; return why it does not fit, if so."""
    mismatch = spec.mismatch(tensor)
    if mismatch is not None:
        return [f"{name} ({mismatch})"]
    # Cut on the host, so that a rank never copies more than its slice to the device.
    tensor = spec.narrow(tensor)
    spec.sink.fill(upload(tensor, spec.sink.device))
    return []


def _differs(name: str, tensor: Tensor, embedding: Embedding | None) -> list[str]:
    """Return a message if a tied head in the files differs from the embedding."""
    if embedding is not None:
        weight = embedding.weight.data
        (sink,) = embedding.weights().values()
        tensor = WeightSpec.of(name, sink).narrow(tensor)
        if torch.equal(tensor.to(weight), weight):
            return []
    return [f"{name} (not embed_tokens.weight, to which tie_word_embeddings ties it)"]
