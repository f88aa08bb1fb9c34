"""Damaged quantized checkpoints are refused with a one-line message."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.errors import CapacityError, CheckpointError, ConfigError
from tests.models.random_checkpoint import MTP, build, weights_of
from tests.models.test_damaged import VALUES
from tests.quantization.disk import Codes, Pair, copy_files, gptq, names_in, random_codes, write
from tests.tiny_model import make_model

SETTINGS: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
MODULE = "model.layers.0.mlp.down_proj"
FUSED = "model.layers.3.self_attn.q_proj"
READ = ("bits", "group_size", "sym", "desc_act", "lm_head", "dynamic", "checkpoint_format",
        "pack_dtype", "modules_in_block_to_quantize", "quant_method")  # fmt: skip
Damage = tuple[str, Callable[[dict[str, Tensor], dict[str, Any]], Any]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a tiny hybrid with quantized layers, and its draft module."""
    folder = make_model(tmp_path_factory.mktemp("whole") / "model", num_hidden_layers=4)
    llm = build(folder, load_format="dummy", speculative_config=MTP)

    def pick(name: str, n: int, k: int) -> Codes | None:
        remaining = names_in(
            name, ("embed", "in_proj_a", "in_proj_b", "layers.1.", "layers.2.", "mtp.")
        )
        return None if remaining else random_codes(n, k, 4, 32)

    lay = partial(gptq, less=1)
    return write(folder.parent, weights_of(llm), folder, SETTINGS, pick, lay)


def tensor(name: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    """Return damage that replaces or removes one tensor."""

    def apply(tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed.contiguous()

    return name, apply


def damages() -> Iterator[Damage]:
    """Yield damages: tensors that are missing, of another size or type, or with invalid values;
    wrong settings."""
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        for module in (MODULE, FUSED):
            name = f"{module}.{suffix}"
            yield tensor(name, lambda t: t[:-1])
            yield tensor(name, lambda t: t.t() if t.dim() == 2 else t[None])
            yield tensor(name, lambda t: t.flatten()[0])
            yield tensor(name, lambda t: t[:0])
            yield tensor(name, lambda t: t.to(torch.int8))
            yield tensor(name, lambda t: t.to(torch.float64))
        if suffix != "g_idx":
            yield tensor(f"{MODULE}.{suffix}", lambda t: None)
    yield tensor(f"{MODULE}.qzeros", lambda t: t ^ 1)
    yield tensor(f"{MODULE}.scales", lambda t: t * torch.inf)
    yield tensor(f"{MODULE}.g_idx", lambda t: t.flip(0))
    yield (
        "both",
        lambda tensors, settings: tensors.update({f"{MODULE}.weight": torch.zeros(48, 64)}),
    )
    yield "bias", lambda tensors, settings: tensors.update({f"{MODULE}.bias": torch.ones(48)})
    for name in ("qweight", "qzeros", "scales"):
        yield (
            f"embed.{name}",
            lambda tensors, settings, name=name: tensors.update(
                {f"model.embed_tokens.{name}": torch.zeros(2, 2)}
            ),
        )
    for name in READ:
        for value in VALUES:
            yield (
                f"{name}={str(value)[:30]}",
                lambda tensors, settings, name=name, value=value: settings.update({name: value}),
            )


def outcome(folder: Path, pair: Pair, damage: Damage) -> str | None:
    """Return the message that refuses a damaged checkpoint, or None if it loads; raise any other
    error."""
    name, apply = damage
    tensors = dict(pair.tensors)
    settings = dict(SETTINGS)
    apply(tensors, settings)
    folder.mkdir()
    copy_files(pair.quantized, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(tensors, folder / "model.safetensors")
    small = {"max_model_len": 64, "max_num_seqs": 1, "skip_tokenizer_init": True}
    try:
        build_engine(EngineConfig.read(model=str(folder), **small))
    except (CheckpointError, ConfigError, CapacityError) as error:
        return str(error)
    return None


def test_sample_of_quantized_damages_is_refused(tmp_path: Path, pair: Pair) -> None:
    every = list(damages())
    tensors = [one for one in every if "=" not in one[0]]
    settings = [one for one in every if "=" in one[0]]
    check(tmp_path, pair, tensors[::2] + settings[::15])


@pytest.mark.slow
def test_every_quantized_damage_is_refused(tmp_path: Path, pair: Pair) -> None:
    check(tmp_path, pair, list(damages()))


def check(folder: Path, pair: Pair, chosen: list[Damage]) -> None:
    """Assert that damaged tensors are all refused, and that every message is one line; wrong
    settings may be harmless."""
    assert outcome(folder / "whole", pair, ("whole", lambda tensors, settings: None)) is None
    for number, damage in enumerate(chosen):
        received = outcome(folder / str(number), pair, damage)
        if received is None:
            assert "=" in damage[0], damage[0]
            continue
        assert received.endswith(".") and 40 < len(received) < 2000 and "\n" not in received, (
            received
        )
