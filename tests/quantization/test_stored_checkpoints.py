"""Whole partly quantized checkpoints equal their dense weights bit for bit."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from lockstep import LLM, SamplingParams
from lockstep.cli import app
from lockstep.errors import CheckpointError
from lockstep.layers.linear import Gemm
from lockstep.worker.executor import worker_of
from tests.models.oracle import RELATIVE, TIE, logits_error
from tests.models.random_checkpoint import build, weights_of
from tests.quantization.cases import BLOCKS, compressed_settings, floats, ints, modelopt
from tests.quantization.stored import MODELOPT_FP4, TENSORS_FP4, Writer, fp8_weight, int_weight
from tests.tiny_model import CONFIG, LLAMA, QWEN3, make_model

MTP = {"method": "mtp", "num_speculative_tokens": 2}
HYBRID = {**CONFIG, "hidden_size": 144, "intermediate_size": 205, "tie_word_embeddings": False}
DENSE = {**QWEN3, "hidden_size": 144, "intermediate_size": 200}
GROUPED = {**LLAMA, "hidden_size": 144, "intermediate_size": 256}
IDS = list(range(3, 60))
SMALL = ("in_proj_a", "in_proj_b")
MIXERS = ("self_attn", "linear_attn")
Choose = Callable[[str], Writer | None]


@dataclass(frozen=True)
class Model:
    """A checkpoint.

    settings: its quantization_config.
    choose: a linear layer's name -> its writer, None: dense.
    own: the settings' file, if it is not config.json.
    unused: names of unused tensors, {} for a linear layer.
    count: tokens to generate.
    """

    base: dict[str, Any]
    settings: dict[str, Any]
    choose: Choose
    settings_file: str | None = None
    unused: tuple[str, ...] = ()
    count: int = 16


def all_except(*parts: str, to: Writer) -> Choose:
    """Quantize all layers without one of these parts in their names."""
    return lambda name: None if any(part in name for part in parts) else to


def mixed_blocks(name: str) -> Writer | None:
    """Quantize as Qwen's FP8 checkpoints: a, b, fc and the head are dense, the draft module is
    quantized."""
    if name.endswith((*SMALL, "mtp.fc", "lm_head")):
        return None
    return fp8_weight("block", "weight_scale_inv", torch.bfloat16)


def mixed_groups(name: str) -> Writer | None:
    """Use each kind of compressed-tensors in one checkpoint."""
    if name.startswith("mtp.") or name.endswith(("lm_head", *SMALL)):
        return None
    if name.endswith("down_proj"):
        return TENSORS_FP4
    if "mlp" in name:
        return int_weight(4, 16, zeros="words")
    if name.endswith(("q_proj", "k_proj")):
        return fp8_weight("channel", dtype=torch.bfloat16)
    return fp8_weight("tensor")


def mixed_modelopt(name: str) -> Writer | None:
    """Quantize as nvidia/Qwen3.6-35B-A3B-NVFP4: head and MLP in 4 bits, mixers in 8, the draft
    module dense."""
    if name.startswith("mtp.") or name.endswith(SMALL):
        return None
    return fp8_weight("scalar") if any(part in name for part in MIXERS) else MODELOPT_FP4


LISTED = [
    "lm_head",
    "mtp.fc",
    *(f"model.layers.{i}.linear_attn.{name}" for i in range(3) for name in SMALL),
]
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False}
EIGHT = {"num_bits": 8, "type": "float", "strategy": "tensor"}
MIXED_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head", "re:.*in_proj_[ab]$", "re:^mtp.*"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": EIGHT, "format": "float-quantized"},
        "group_1": {
            "targets": [r"re:.*mlp\.(gate|up)_proj$"],
            "weights": FOUR,
            "format": "pack-quantized",
        },
        "group_2": {
            "targets": [f"model.layers.{i}.mlp.down_proj" for i in range(4)],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16},
            "format": "nvfp4-pack-quantized",
            "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
        },
        "group_3": {
            "targets": ["re:.*[qk]_proj$"],
            "weights": {**EIGHT, "strategy": "channel"},
        },
    },
}
PROJECTIONS = {
    "linear_attn": ("in_proj_qkv", "in_proj_z", "out_proj"),
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
LAYERS = {
    f"model.language_model.layers.{i}.{body}.{name}": (
        {"quant_algo": "FP8"} if body != "mlp" else {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    )
    for i in range(4)
    for body in (MIXERS[i < 3], "mlp")
    for name in PROJECTIONS[body]
}
MIXED_MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.40"},
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["mtp*", "*in_proj_a", "*in_proj_b"],
        "quantized_layers": {**LAYERS, "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
    },
}
MODELS = {
    "fp8 of a hybrid": Model(
        HYBRID, {**BLOCKS, "modules_to_not_convert": LISTED}, mixed_blocks, count=64
    ),
    "compressed-tensors of a hybrid": Model(
        HYBRID,
        MIXED_GROUPS,
        mixed_groups,
        unused=("{}.input_global_scale", "model.layers.3.self_attn.k_scale"),
        count=64,
    ),
    "modelopt of a hybrid": Model(
        HYBRID,
        MIXED_MODELOPT,
        mixed_modelopt,
        "hf_quant_config.json",
        ("{}.input_scale", "model.layers.3.self_attn.k_proj.k_scale"),
        count=64,
    ),
    "int4 of a dense model": Model(
        DENSE,
        {**ints(group_size=16), "ignore": ["lm_head"]},
        all_except("lm_head", to=int_weight(4, 16)),
        count=64,
    ),
    "ordered int4 of a dense model": Model(
        DENSE,
        {**ints(actorder="group"), "ignore": ["lm_head", "re:.*self_attn.*"]},
        all_except("lm_head", "self_attn", to=int_weight(ordered=True)),
    ),
    "int8 of a dense model": Model(
        GROUPED,
        {
            **ints("int-quantized", num_bits=8, strategy="channel", group_size=None),
            "ignore": ["lm_head"],
        },
        all_except("lm_head", to=int_weight(8, 0, in_words=False)),
    ),
    "fp8 of a dense model": Model(
        GROUPED,
        {**floats("tensor"), "ignore": ["lm_head"]},
        all_except("lm_head", to=fp8_weight("tensor")),
    ),
    "modelopt nvfp4 of a dense model": Model(
        DENSE,
        modelopt("NVFP4", "modelopt_fp4", ignore=["lm_head", "*.layers.1.*"]),
        all_except("lm_head", ".layers.1.", to=MODELOPT_FP4),
    ),
}


def is_linear(name: str, value: Tensor) -> bool:
    """Return True if a tensor of a dense checkpoint is a linear layer's weight."""
    return value.dim() == 2 and name.endswith(".weight") and "embed" not in name


def write(folder: Path, model: Model) -> tuple[Path, Path, set[str]]:
    """Write a quantized checkpoint in several files, and its dense weights; return (both folders,
    names of the quantized layers)."""
    drafting = {"speculative_config": MTP} if model.base is HYBRID else {}
    plain_folder = make_model(folder / "plain", model.base, dtype="float32", torch_dtype="float32")
    llm = build(plain_folder, load_format="dummy", **drafting)
    plain = weights_of(llm) if drafting else target_weights(llm)
    files: list[dict[str, Tensor]] = [{}, {}]
    done = set()
    for seed, name in enumerate(sorted(plain)):
        module = name.removesuffix(".weight")
        writer = model.choose(module) if is_linear(name, plain[name]) else None
        if writer is None:
            files[0][name] = plain[name]
            continue
        stored = writer(*plain[name].shape, seed)
        plain[name] = stored.value
        done.add(module)
        for at, suffix in enumerate(sorted(stored.tensors)):
            files[(at + seed) % 2][f"{module}.{suffix}"] = stored.tensors[suffix]
        for spare in model.unused:
            files[seed % 2][spare.format(module)] = torch.tensor(0.5)
    save_file(plain, plain_folder / "model.safetensors")
    outer = {} if model.settings_file else {"quantization_config": model.settings}
    packed = make_model(folder / "packed", model.base, **outer)
    if model.settings_file:
        (packed / model.settings_file).write_text(json.dumps(model.settings))
    for index, tensors in enumerate(files):
        save_file(tensors, packed / f"model-{index}.safetensors")
    return packed, plain_folder, done


def target_weights(llm: LLM) -> dict[str, Tensor]:
    """Return the weights of a model without a draft module as a checkpoint."""
    model: Any = worker_of(llm.engine).model
    return {
        name if name == "lm_head.weight" else f"model.{name}": x.detach().clone().contiguous()
        for name, x in model.weights().items()
    }


def answer(llm: LLM, count: int) -> list[Any]:
    """Return greedy tokens, and the bits of the log-probabilities of answer and prompt."""
    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    result = llm.generate({"prompt_token_ids": IDS}, params)[0]
    out = result.outputs[0]
    prompt = [{t: e.logprob.hex() for t, e in one.items()} for one in result.prompt_logprobs[1:]]
    steps = [{t: e.logprob.hex() for t, e in one.items()} for one in out.logprobs or ()]
    assert len(out.token_ids) == count
    return [out.token_ids, prompt, steps]


def parameters(llm: LLM) -> list[Tensor]:
    """Return the weights of the linear layers as a CPU has them, of target and draft."""
    runner: Any = worker_of(llm.engine)
    roots = [runner.model]
    draft = getattr(getattr(runner.program.drafter, "context", None), "module", None)
    roots += [draft] if draft is not None else []
    products = [m for root in roots for m in root.modules() if isinstance(m, Gemm)]
    return [product.weight for product in products if product.weight is not None]


@pytest.mark.default_cases(
    "fp8 of a hybrid", "ordered int4 of a dense model", "modelopt nvfp4 of a dense model"
)
@pytest.mark.parametrize("name", MODELS)
def test_quantized_model_equals_dense_model(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    (packed_folder, plain_folder, done) = write(tmp_path, model)
    assert len(done) > 6
    drafting = {"speculative_config": MTP} if model.base is HYBRID else {}
    packed = build(packed_folder, **drafting)
    plain = build(plain_folder, **drafting)
    ours = torch.cat([weight.flatten() for weight in rows(packed)])
    theirs = torch.cat([weight.flatten() for weight in rows(plain)])
    assert torch.equal(ours, theirs) and not ours.isnan().any()
    actual = answer(packed, model.count)
    assert actual == answer(plain, model.count)
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        plain_folder, dtype=torch.float32
    ).eval()
    assert logits_error(packed, oracle, IDS) < RELATIVE
    with torch.no_grad():
        logits = oracle(torch.tensor([IDS + actual[0]])).logits[0, len(IDS) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(actual[0])[:, None])[:, 0]
    assert float((logits.amax(-1) - chosen).max()) <= TIE


def rows(llm: LLM) -> list[Tensor]:
    """Return each row of the linear layers; their fusion depends on their formats."""
    return [row for weight in parameters(llm) for row in weight.unbind(0)]


def test_equal_or_small_layers_are_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder, _, done) = write(tmp_path, MODELS["fp8 of a hybrid"])
    answers = []
    for maximum, fused in ((1 << 22, [200]), (0, [192, 8])):
        monkeypatch.setattr("lockstep.layers.linear.MAX_DEQUANTIZED", maximum)
        llm = build(folder, speculative_config=MTP)
        runner: Any = worker_of(llm.engine)
        mixer = runner.model.blocks[0].sublayers[0].body
        assert [product.shape[0] for product in mixer.in_proj.gemms] == fused
        answers.append(answer(llm, 16))
    assert answers[0] == answers[1]
    assert "mtp.layers.0.mlp.down_proj" in done and "mtp.fc" not in done


def test_quantized_head_is_shared_by_draft(tmp_path: Path) -> None:
    (folder, _, done) = write(tmp_path, MODELS["modelopt of a hybrid"])
    assert "lm_head" in done
    with_draft = build(folder, speculative_config=MTP)
    assert answer(with_draft, 16) == answer(build(folder), 16)


def test_dummy_weights_follow_quantization_settings(tmp_path: Path) -> None:
    for name in ("fp8 of a hybrid", "compressed-tensors of a hybrid"):
        model = MODELS[name]
        (tmp_path / name).mkdir()
        folder = make_model(tmp_path / name / "m", model.base, quantization_config=model.settings)
        llm = build(folder, load_format="dummy", speculative_config=MTP)
        assert len(answer(llm, 4)[0]) == 4


def test_explain_notes_ignored_settings(tmp_path: Path) -> None:
    model = MODELS["compressed-tensors of a hybrid"]
    folder = make_model(tmp_path / "m", model.base, quantization_config=model.settings)
    received = build(folder, load_format="dummy").engine.explain()["notes"]
    assert any("kv_cache_scheme is not followed: --kv-cache-dtype" in note for note in received)
    assert any("['group_2'].input_activations is not used" in note for note in received)
    settings = ("--model", str(folder), "--load-format", "dummy", "--max-num-seqs", "2")
    shown = CliRunner().invoke(app, ["explain", *settings]).stdout.replace("\n", " ")
    assert "note: quantization_config.config_groups['group_2'].input_activations" in shown


def refusal_after_edit(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> str:
    """Return the message of the error that the edited checkpoint raises."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: x for file in files for name, x in load_file(file).items()}
    edit(tensors)
    for file in files:
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        build(folder)
    message = str(caught.value)
    assert message.endswith(".") and 40 < len(message) < 2000 and "\n" not in message
    return message


DOWN = "model.layers.1.mlp.down_proj"
EDITS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scale": (lambda t: t.pop(f"{DOWN}.weight_scale"), "weight_scale"),
    "no words": (lambda t: t.pop(f"{DOWN}.weight_packed"), "weight_packed"),
    "no tensor": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith(DOWN)],
        "issing tensors (1): layers.1.mlp.down_proj.weight",
    ),
    "scale cut": (
        lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"][:-1].clone()}),
        "unfit tensors (1)",
    ),
    "scale NaN": (lambda t: t[f"{DOWN}.weight_scale"].fill_(torch.nan), "not finite numbers"),
    "spare": (lambda t: t.update({f"{DOWN}.weight_scale_inv": torch.ones(1)}), "spare tensors (1)"),
    "shape": (lambda t: t[f"{DOWN}.weight_shape"].fill_(3), "weight_shape"),
    "both": (lambda t: t.update({f"{DOWN}.weight": torch.ones(144, 200)}), "spare tensors (1)"),
}


def test_damaged_tensors_of_checkpoints_are_named(tmp_path: Path) -> None:
    model = MODELS["int4 of a dense model"]
    for name, (edit, received) in EDITS.items():
        (tmp_path / name).mkdir()
        (folder, _, _) = write(tmp_path / name, model)
        message = refusal_after_edit(folder, edit)
        assert received in message and "layers.1.mlp.down_proj" in message, message


@pytest.mark.parametrize("inner", [5, "x", [1], None])
def test_malformed_settings_file_is_refused(tmp_path: Path, inner: Any) -> None:
    folder = make_model(tmp_path / "m", DENSE)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    with pytest.raises(CheckpointError, match="hf_quant_config.json quantization="):
        build(folder, load_format="dummy")


def test_unsupported_weight_format_is_refused(tmp_path: Path) -> None:
    settings = compressed_settings("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32)
    folder = make_model(tmp_path / "m", DENSE, quantization_config=settings)
    with pytest.raises(CheckpointError, match="format='mxfp4-pack-quantized' is not allowed"):
        build(folder, load_format="dummy")
