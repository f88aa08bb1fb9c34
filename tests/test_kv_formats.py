"""kv_cache_dtype from settings to the cache: by layer, for the draft module, from a file."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from lockstep import LLM, SamplingParams
from lockstep.check.matrix.setups import PLAIN
from lockstep.check.report.report import Report, Tally
from lockstep.cli import app
from lockstep.errors import CheckpointError, ConfigError
from lockstep.kernels.formats.kv import QuantizedKV
from lockstep.kernels.formats.kv.fp8 import E4M3, Fp8
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.layers.kv_format import StaticScales
from lockstep.quantization import TensorInfo
from lockstep.worker.executor import worker_of
from tests.models.random_checkpoint import MTP, build, weights_of
from tests.selection import some_slow
from tests.tiny_model import QWEN3, make_model

PROMPT = {"prompt_token_ids": list(range(5, 90))}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, detokenize=False)
OWN = """
from dataclasses import dataclass

import torch

from lockstep.kernels.formats.kv import KVFormat, KVQuantizer


@dataclass(frozen=True)
class Signs(KVQuantizer):
    @property
    def dtype(self):
        return torch.int8

    def num_scales(self, dim):
        return 1

    def quantize(self, x):
        return x.sign().to(torch.int8), x.float().abs().mean(-1, keepdim=True)

    def dequantize(self, qdata, scales):
        return qdata.float() * scales


FORMAT = KVFormat("signs", Signs(), Signs())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny hybrid of eight layers; layers 3 and 7 are attention."""
    return make_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=8)


def engine(folder: Path, **settings: Any) -> LLM:
    """Return an LLM of the tiny hybrid."""
    settings = {"load_format": "dummy", "max_model_len": 256, "max_num_seqs": 2} | settings
    return LLM(str(folder), **{"skip_tokenizer_init": True, "speculative_config": None, **settings})


def answer(llm: LLM) -> Any:
    """Return tokens and log-probabilities."""
    out = llm.generate(PROMPT, PARAMS)[0].outputs[0]
    return out.token_ids, [[x.logprob for x in entry.values()] for entry in out.logprobs]


def layer_formats(llm: LLM) -> dict[str, str]:
    """Return the format of each attention layer's cache."""
    layers = worker_of(llm.engine).layers
    result = {n: m.k_cache for n, m in layers.items() if hasattr(m, "k_cache")}
    return {
        n: str(c.quantizer) if isinstance(c, QuantizedKV) else str(c.dtype).removeprefix("torch.")
        for n, c in result.items()
    }


def test_skipped_layers_keep_the_model_dtype(folder: Path) -> None:
    for skipped, kinds in (
        ((), ["Int8()", "Int8()"]),
        (("first",), ["float32", "Int8()"]),
        ((7,), ["Int8()", "float32"]),
        (["first", "last"], ["float32", "float32"]),
        ([3, 7, 3], ["float32", "float32"]),
        ([7, 3], ["float32", "float32"]),
    ):
        llm = engine(
            folder, kv_cache_dtype="int8_per_token_head", kv_cache_dtype_skip_layers=skipped
        )
        assert list(layer_formats(llm).values()) == kinds
        reported = "-skip-" + ".".join(sorted({str(one) for one in skipped})) if skipped else ""
        assert f"/kv-int8_per_token_head{reported}/" in llm.engine.numerics
    assert answer(llm) == answer(engine(folder))
    with pytest.raises(ConfigError, match="'4' is not allowed; allowed: first, last, 3, 7"):
        engine(folder, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=[4])


@pytest.mark.slow
def test_draft_module_format_does_not_change_the_answer(folder: Path) -> None:
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    same = engine(folder, kv_cache_dtype="fp8", speculative_config=spec)
    other = engine(
        folder,
        kv_cache_dtype="fp8",
        speculative_config=spec | {"kv_cache_dtype": "int8_per_token_head"},
    )
    mine = engine(
        folder, kv_cache_dtype="fp8", speculative_config=spec | {"kv_cache_dtype": "auto"}
    )
    fp8 = str(Fp8())
    assert [list(layer_formats(llm).values())[-1] for llm in (same, other, mine)] == [
        fp8, "Int8()", "float32",
    ]  # fmt: skip
    assert same.engine.numerics == other.engine.numerics == mine.engine.numerics
    assert "/kv-fp8_e4m3/" in same.engine.numerics
    plain = engine(folder, kv_cache_dtype="fp8")
    assert answer(same) == answer(other) == answer(mine) == answer(plain)


def test_draft_model_format_error_names_its_setting(tmp_path: Path) -> None:
    target = make_model(tmp_path / "target", QWEN3, head_dim=32)
    small = make_model(tmp_path / "small", QWEN3, head_dim=24)
    spec = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 2}
    for messages, mine in (
        ("turboquant_3bit_nc", {}),
        ("fp8", {"kv_cache_dtype": "turboquant_3bit_nc"}),
    ):
        with pytest.raises(ConfigError, match="speculative_config kv_cache_dtype='turboquant_3bit"):
            engine(target, kv_cache_dtype=messages, speculative_config=spec | mine)
    mine = {"kv_cache_dtype": "fp8"}
    engine(target, kv_cache_dtype="turboquant_3bit_nc", speculative_config=spec | mine)


@pytest.mark.slow
def test_rotations_differ_by_layer_and_draft_module(folder: Path) -> None:
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    llm = engine(folder, kv_cache_dtype="turboquant_4bit_nc", speculative_config=spec)
    layers = [m for m in worker_of(llm.engine).layers.values() if hasattr(m, "k_cache")]
    seeds = [(m.k_cache.quantizer.seed, m.v_cache.quantizer.seed) for m in layers]
    assert len({*seeds}) == len(seeds) == 3 and all(k == v for k, v in seeds)
    assert answer(llm) == answer(engine(folder, kv_cache_dtype="turboquant_4bit_nc"))


@pytest.mark.parametrize("dim", some_slow([32, 64, 128], (128,)))
def test_supported_and_refused_head_dims(tmp_path: Path, dim: int) -> None:
    """With groups of 3 query heads; drafts and chunks keep the answer."""
    sizes = dict(num_hidden_layers=4, head_dim=dim, num_attention_heads=3)
    folder = make_model(tmp_path / "dims", **sizes)
    kind = "turboquant_3bit_nc"
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    plain = answer(engine(folder, kv_cache_dtype=kind))
    assert answer(engine(folder, kv_cache_dtype=kind, max_num_batched_tokens=64)) == plain
    assert answer(engine(folder, kv_cache_dtype=kind, speculative_config=spec)) == plain
    usable = "auto, bfloat16, fp8, fp8_e4m3, fp8_e5m2, int8_per_token_head, since"
    refused = f"turboquant_3bit_nc' is not allowed; allowed: {usable} TurboQuant rotates heads"
    with pytest.raises(ConfigError, match=refused):
        engine(make_model(tmp_path / "odd", **sizes | {"head_dim": 24}), kv_cache_dtype=kind)


def test_page_bytes_are_those_of_their_tensors(folder: Path) -> None:
    sizes = {
        kind: engine(folder, kv_cache_dtype=kind).engine.plan.page_bytes
        for kind in ("auto", "bfloat16", "fp8", "int8_per_token_head", "turboquant_4bit_nc")
    }
    numbers = 2 * 2 * 64 * 16  # layers, keys and values, tokens, head dim
    assert sizes == {
        "auto": 4 * numbers,
        "bfloat16": 2 * numbers,
        "fp8": numbers,
        "int8_per_token_head": numbers + 2 * 2 * 64 * 4,
        "turboquant_4bit_nc": numbers // 2 + 2 * 2 * 64 * 2,
    }


def test_kv_format_from_a_temporary_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "signs_format.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    import signs_format  # type: ignore[import-not-found]

    monkeypatch.setitem(KV_FORMATS, "signs", signs_format.FORMAT)
    llm = engine(folder, kv_cache_dtype="signs")
    assert "/kv-signs/" in llm.engine.numerics
    assert answer(llm) != answer(engine(folder))
    drafting = engine(
        folder,
        kv_cache_dtype="signs",
        max_num_batched_tokens=64,
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
    )
    assert answer(drafting) == answer(llm)


@pytest.mark.parametrize(
    "where",
    some_slow(
        ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{}_proj.output_scale"],
        ("self_attn.{}_proj.output_scale",),
    ),
)
def test_static_scales_of_a_checkpoint(folder: Path, tmp_path: Path, where: str) -> None:
    """Read where the format uses them, under each of their names."""
    llm = build(folder, load_format="dummy", speculative_config=MTP)
    tensors = weights_of(llm)
    prefix = next(n for n in tensors if n.endswith("layers.3.self_attn.k_proj.weight"))
    prefix = prefix.removesuffix("self_attn.k_proj.weight")
    for side, scale in (("k", 0.5), ("v", 0.03)):
        tensors[prefix + where.format(side)] = torch.tensor(scale)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    scaled = engine(tmp_path, load_format="auto", kv_cache_dtype="fp8_e4m3")
    layer = next(m for n, m in worker_of(scaled.engine).layers.items() if "3" in n)
    sides = dict(k=Fp8("e4m3", 0.5), v=Fp8("e4m3", torch.tensor(0.03).item()))
    assert layer.kv_format == replace(E4M3, **sides)
    save_file(
        {n: t for n, t in tensors.items() if "scale" not in n}, tmp_path / "model.safetensors"
    )
    assert answer(scaled) != answer(engine(tmp_path, load_format="auto", kv_cache_dtype="fp8_e4m3"))
    for wrong in (-1.0, 0.0, 1e-40, math.inf, math.nan):
        tensors[prefix + where.format("k")] = torch.tensor(wrong)
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="_scale=.* is not allowed; allowed: a finite"):
            engine(tmp_path, load_format="auto", kv_cache_dtype="fp8_e4m3")


@pytest.mark.default_cases("settings0", "settings3")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme=.'num_bits': 4"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme="),
        ({"kv_cache_quant_algo": "FP8"}, None),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, None),
        ({"kv_cache_scheme": "fp8"}, None),
    ],
)
def test_scales_of_another_format_are_refused_for_fp8(
    folder: Path, tmp_path: Path, settings: dict[str, Any], message: str | None
) -> None:
    """ModelOpt's NVFP4 scales are a sixth of fp8's, so values would overflow."""
    tensors = weights_of(build(folder, load_format="dummy", speculative_config=MTP))
    prefix = next(n for n in tensors if n.endswith("layers.3.self_attn.k_proj.weight"))
    tensors[prefix.replace("k_proj.weight", "k_proj.k_scale")] = torch.tensor(0.01)
    tensors[prefix.replace("k_proj.weight", "v_proj.v_scale")] = torch.tensor(0.01)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": None, **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine(tmp_path, load_format="auto", kv_cache_dtype="int8_per_token_head")
    if message is None:
        engine(tmp_path, load_format="auto", kv_cache_dtype="fp8")
        return
    with pytest.raises(CheckpointError, match=f"k_scale=a scale under .*{message}.*scales of fp8"):
        engine(tmp_path, load_format="auto", kv_cache_dtype="fp8")


def test_shared_scale_and_precedence_of_names() -> None:
    """AutoFP8 has a kv_scale; a newer name takes precedence over an older one."""

    def scales(**modules: dict[str, float]) -> dict[str, float]:
        tensors = {
            module.replace("own", ""): {name: TensorInfo(name, (1,), "F32") for name in result}
            for module, result in modules.items()
        }
        static = StaticScales("layers.0.self_attn", E4M3, tensors)
        for key, slot in static.slots.items():
            (module, _, name) = key.rpartition(".")
            slot.fill(torch.tensor([modules[module or "own"][name]]))
        return static.scales

    assert scales(own={"kv_scale": 0.5}) == {"k": 0.5, "v": 0.5}
    assert scales(own={"kv_scale": 0.5, "k_scale": 2.0}) == {"k": 2.0, "v": 0.5}
    assert scales(own={"k_scale": 2.0}, k_proj={"k_scale": 1.0, "output_scale": 4.0}) == {"k": 2.0}
    assert scales(k_proj={"output_scale": 4.0}, v_proj={"v_scale": 8.0, "output_scale": 1.0}) == {
        "k": 4.0, "v": 8.0,
    }  # fmt: skip


def test_check_runs_every_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each once, the model's dtype first, with a report each."""
    messages = []

    def stand_in(size: str, settings: dict[str, Any], *rest: Any) -> Report:
        messages.append(settings["kv_cache_dtype"])
        return Report(size, f"kv-{messages[-1]}", tallies=[Tally(PLAIN, 1, 0, 0.0)])

    monkeypatch.setattr(sys.modules["lockstep.cli.check"], "_run", stand_in)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(
        app, ["check", "--kv-cache-dtype", "all", "--json", "--report", str(page)]
    )
    assert done.exit_code == 0, done.output
    assert messages == [
        "auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "turboquant_k8v4",
        "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
    ]  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"page-{k}.html" for k in messages)


@pytest.mark.parametrize("messages", ["all", "turboquant_k8v4"])
def test_check_names_unsupported_formats(monkeypatch: pytest.MonkeyPatch, messages: str) -> None:
    """With all formats they are skipped; one requested by name is an error."""
    checked = []

    def stand_in(size: str, settings: dict[str, Any], *rest: Any) -> Report:
        if settings["kv_cache_dtype"] == "turboquant_k8v4":
            raise ConfigError("kv_cache_dtype='turboquant_k8v4' is not allowed")
        checked.append(settings["kv_cache_dtype"])
        return Report(size, "none", tallies=[Tally(PLAIN, 1, 0, 0.0)])

    monkeypatch.setattr(sys.modules["lockstep.cli.check"], "_run", stand_in)
    done = CliRunner().invoke(app, ["check", "--kv-cache-dtype", messages, "--json"])
    reported = done.stderr + str(done.exception)
    assert "kv_cache_dtype='turboquant_k8v4' is not allowed" in reported
    assert (done.exit_code == 0) == (messages == "all") == ("skipped:" in reported)
    assert len(checked) == (8 if messages == "all" else 0)
