"""Loading a checkpoint: every tensor is used, every parameter filled, every setting known; errors
name what is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep import EngineConfig
from lockstep.errors import CheckpointError
from lockstep.models import ARCHITECTURES, weight_files
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.dflash import BlockCheckpoint
from lockstep.models.eagle3 import HeadCheckpoint
from lockstep.worker.build import pick_dtype
from lockstep.worker.executor import executor_of, worker_of
from tests.models.random_checkpoint import MTP, answer, build, weights_of
from tests.tiny_model import CONFIG, make_model

MLP = "model.layers.1.mlp.down_proj.weight"
FC = "mtp.fc.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[Any]]:
    """Return (tensors of a tiny checkpoint, the model's answer with them)."""
    folder = make_model(tmp_path_factory.mktemp("known"))
    llm = build(folder, load_format="dummy", speculative_config=MTP)
    return weights_of(llm), answer(llm)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a tiny model's folder without weights."""
    return make_model(tmp_path / "model")


Store = Callable[[dict[str, Tensor]], Path]


@pytest.fixture
def store(folder: Path) -> Store:
    """Return a function that writes one weights file into the folder."""

    def write(tensors: dict[str, Tensor]) -> Path:
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


def refusal(folder: Path, **settings: Any) -> str:
    """Return the message of the CheckpointError that loading raises."""
    with pytest.raises(CheckpointError) as caught:
        build(folder, **settings)
    message = str(caught.value)
    assert message.endswith(".") and len(message) > 40
    return message


def test_loaded_weights_equal_the_checkpoint(store: Store, checkpoint: Any) -> None:
    tensors, expected = checkpoint
    llm = build(store(tensors), speculative_config=MTP)
    assert answer(llm) == expected == answer(build(store(tensors)))
    for name, tensor in weights_of(llm).items():
        assert torch.equal(tensor, tensors[name]), name
    changed = {**tensors, MLP: tensors[MLP] + 0.5}
    assert answer(build(store(changed))) != expected


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_published_prefixes_load(store: Store, checkpoint: Any, prefix: str) -> None:
    tensors, expected = checkpoint
    renamed = {
        prefix + n.removeprefix("model.") if n.startswith("model.") else n: x
        for n, x in tensors.items()
    }
    renamed["model.visual.blocks.0.weight"] = torch.zeros(2)
    assert answer(build(store(renamed), speculative_config=MTP)) == expected


def test_shards_with_index_load(folder: Path, checkpoint: Any) -> None:
    tensors, expected = checkpoint
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    seen: list[tuple[str, int, int]] = []
    for file, mine in shards.items():
        save_file({name: tensors[name] for name in mine}, folder / file)
    indices = {name: file for file, mine in shards.items() for name in mine}
    index = {"metadata": {"total_size": 1}, "weight_map": indices}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    llm = build(folder, speculative_config=MTP, progress=lambda *args: seen.append(args))
    assert answer(llm) == expected
    size = sum((folder / file).stat().st_size for file in shards)
    read = [(done, of) for what, done, of in seen if what == "loading"]
    assert read == sorted(read) and read[-1] == (size, size) and {of for _, of in read} == {size}
    assert len(read) == len(names) + len(shards)
    assert (
        executor_of(llm.engine).loaded is not None and executor_of(llm.engine).loaded.bytes == size
    )
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refusal(folder)
    assert "model-00002-of-00002.safetensors" in message and "Fetch" in message


INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def store_shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write the tensors to two files with an index; return the index's weight_map."""
    names = sorted(tensors)
    indices = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for file in SHARDS:
        mine = {name: tensors[name] for name in names if indices[name] == file}
        save_file(mine, folder / file)
    write_index(folder, indices)
    return indices


def write_index(folder: Path, indices: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": indices}))


@pytest.mark.parametrize(
    "stray", ["consolidated.safetensors", "model.safetensors", "x.safetensors"]
)
def test_file_outside_index_is_not_read(
    folder: Path, checkpoint: Any, stray: str, caplog: pytest.LogCaptureFixture
) -> None:
    store_shards(folder, checkpoint[0])
    save_file({name: -x for name, x in checkpoint[0].items()}, folder / stray)
    assert answer(build(folder, speculative_config=MTP)) == checkpoint[1]
    assert f"{stray} is not read: {INDEX} does not name it" in caplog.text


def test_index_selects_copy_of_tensor(folder: Path, checkpoint: Any) -> None:
    indices = store_shards(folder, checkpoint[0])
    other = next(file for file in SHARDS if file != indices[MLP])
    extended = {**load_file(folder / other), MLP: -checkpoint[0][MLP]}
    save_file(extended, folder / other)
    assert answer(build(folder)) == checkpoint[1]
    write_index(folder, {**indices, MLP: other})
    assert answer(build(folder)) != checkpoint[1]


def test_tensor_missing_from_index_is_read(folder: Path, checkpoint: Any) -> None:
    indices = store_shards(folder, checkpoint[0])
    write_index(folder, {name: file for name, file in indices.items() if name != MLP})
    assert answer(build(folder)) == checkpoint[1]


def test_tensor_missing_from_its_file_is_named(folder: Path, checkpoint: Any) -> None:
    indices = store_shards(folder, checkpoint[0])
    other = next(file for file in SHARDS if file != indices[MLP])
    write_index(folder, {**indices, MLP: other})
    message = refusal(folder)
    assert f"{other} lacks tensors (1) that {INDEX} places in it: {MLP}" in message


def test_auto_round_extra_file_is_read(folder: Path, checkpoint: Any) -> None:
    tensors = dict(checkpoint[0])
    draft = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    store_shards(folder, tensors)
    save_file(draft, folder / "model_extra_tensors.safetensors")
    assert answer(build(folder, speculative_config=MTP)) == checkpoint[1]


def test_shards_without_index_must_be_complete(folder: Path, checkpoint: Any) -> None:
    store_shards(folder, checkpoint[0])
    (folder / INDEX).unlink()
    assert answer(build(folder)) == checkpoint[1]
    (folder / SHARDS[1]).unlink()
    message = refusal(folder)
    assert "1 of the 2 files model-*-of-00002.safetensors" in message and "no " + INDEX in message
    store_shards(folder, checkpoint[0])
    (folder / INDEX).unlink()
    save_file(checkpoint[0], folder / "model-00001-of-00001.safetensors")
    message = refusal(folder)
    assert "model-*-of-00001, model-*-of-00002" in message and "belong to another set" in message


def test_adapters_and_other_layouts_are_not_read(
    store: Store, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = store(checkpoint[0])
    save_file({"base.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    assert answer(build(folder)) == checkpoint[1]
    assert "adapter_model.safetensors is not read: an adapter, which is not applied" in caplog.text
    assert "consolidated.safetensors is not read: a copy of the weights" in caplog.text
    (folder / "model.safetensors").unlink()
    assert "holds an adapter (adapter_model.safetensors" in refusal(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert "in the layout of the publisher's own code" in refusal(folder)


def test_adapter_error_explains_merging(store: Store, checkpoint: Any, tmp_path: Path) -> None:
    """transformers would apply the adapter to weights in the same folder."""
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds an adapter (adapter_config.json)" in refusal(tmp_path)
    folder = store(dict(checkpoint[0]))
    (folder / "adapter_config.json").write_text("{}")
    message = refusal(folder)
    assert "merge_and_unload" in message and "remove adapter_config.json" in message
    for read in (HeadCheckpoint.at, BlockCheckpoint.at):
        with pytest.raises(CheckpointError, match="holds an adapter"):
            read(folder)


def test_missing_tensor_is_named(store: Store, checkpoint: Any, tmp_path: Path) -> None:
    tensors = dict(checkpoint[0])
    del tensors[MLP]
    message = refusal(store(tensors))
    assert "missing tensors (1): layers.1.mlp.down_proj.weight" in message.lower()
    assert str(tmp_path) in message and "Correct config.json" in message


def test_missing_draft_tensor_matters_only_when_drafting(store: Store, checkpoint: Any) -> None:
    tensors = {name: x for name, x in checkpoint[0].items() if name != FC}
    message = refusal(store(tensors), speculative_config=MTP)
    assert f"missing tensors (1): {FC}" in message.lower()
    assert answer(build(store(tensors), speculative_config=None)) == checkpoint[1]


def test_spare_tensor_is_named(store: Store, checkpoint: Any) -> None:
    spare = "model.layers.1.mlp.down_proj.weight_scale_inv"
    message = refusal(store({**checkpoint[0], spare: torch.ones(1)}))
    assert f"spare tensors (1): {spare}" in message
    many = {f"model.extra.{i}": torch.ones(1) for i in range(9)}
    message = refusal(store({**checkpoint[0], **many}))
    assert "spare tensors (9): model.extra.0" in message and " ..." in message


def test_duplicate_tensor_is_named(folder: Path, store: Store, checkpoint: Any) -> None:
    store(checkpoint[0])
    save_file({MLP: checkpoint[0][MLP] * 2}, folder / "other.safetensors")
    assert MLP in refusal(folder)


def test_misshapen_tensor_is_named(store: Store, checkpoint: Any) -> None:
    message = refusal(store({**checkpoint[0], MLP: torch.zeros(3, 5)}))
    assert MLP in message and "(3, 5)" in message and "config.json asks for (48, 64)" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64], ids=str)
def test_quantized_tensor_is_refused_as_weight(
    store: Store, checkpoint: Any, dtype: torch.dtype
) -> None:
    message = refusal(store({**checkpoint[0], MLP: torch.zeros(48, 64).to(dtype)}))
    assert MLP in message and str(dtype).removeprefix("torch.") in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_of_every_float_dtype_load(
    store: Store, checkpoint: Any, dtype: torch.dtype, folder: Path
) -> None:
    llm = build(store({name: x.to(dtype) for name, x in checkpoint[0].items()}))
    assert torch.equal(
        worker_of(llm.engine).model.norm.weight, checkpoint[0]["model.norm.weight"].to(dtype)
    )  # type: ignore
    assert load_file(folder / "model.safetensors")[MLP].dtype == dtype


def test_tied_and_untied_heads(tmp_path: Path, checkpoint: Any) -> None:
    tensors, expected = checkpoint
    head = tensors["model.embed_tokens.weight"]
    tied = make_model(tmp_path / "tied")
    save_file({**tensors, "lm_head.weight": head.clone()}, tied / "model.safetensors")
    assert answer(build(tied)) == expected
    untied = make_model(tmp_path / "untied", tie_word_embeddings=False)
    save_file(tensors, untied / "model.safetensors")
    assert "missing tensors (1): lm_head.weight" in refusal(untied).lower()
    save_file({**tensors, "lm_head.weight": head.clone()}, untied / "model.safetensors")
    assert answer(build(untied)) == expected
    save_file({**tensors, "lm_head.weight": -head}, untied / "model.safetensors")
    assert answer(build(untied)) != expected


def test_folder_without_checkpoint(tmp_path: Path, folder: Path) -> None:
    message = refusal(tmp_path)
    assert str(tmp_path / "config.json") in message and "Name a folder" in message
    assert f"{folder} holds no *.safetensors file" in refusal(folder)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint at all")
    message = refusal(folder)
    assert str(folder / "model.safetensors") in message and "Fetch the file again" in message


def test_names_of_file_larger_than_memory(
    store: Store, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch maps a file as a writable copy, which a system without overcommit may refuse."""
    folder = store(checkpoint[0])
    full = weight_files.safe_open

    def without_overcommit(path: Path, framework: str) -> Any:
        if framework == "pt":
            raise RuntimeError("unable to mmap 82054030496 bytes: Cannot allocate memory (12)")
        return full(path, framework=framework)

    monkeypatch.setattr(weight_files, "safe_open", without_overcommit)
    assert set(Checkpoint.read(folder).names()) == set(checkpoint[0])
    message = refusal(folder)
    assert "model.safetensors cannot be mapped into memory" in message
    assert "vm.overcommit_memory=1" in message


def test_truncated_file_is_refused(store: Store, checkpoint: Any) -> None:
    path = store(checkpoint[0]) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(path.parent)
    assert str(path) in message and "Fetch the file again" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '"x"', '{"text_config": []}'])
def test_invalid_config_json_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.read(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert "Name a folder that holds a checkpoint" in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", None, 5, ["qwen3_5"]])
def test_unknown_architecture_is_refused(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    message = refusal(folder)
    assert f"model_type={kind!r} is not allowed" in message
    assert all(name in message for name in ARCHITECTURES)


STRICT: list[tuple[str, Any, str]] = [
    ("hidden_act", "gelu", "'silu'"),
    ("attention_bias", True, "False"),
    ("attn_output_gate", False, "True"),
    ("output_gate_type", "tanh", "'swish', 'silu'"),
    ("mamba_ssm_dtype", "bfloat16", "'float32'"),
    ("mtp_use_dedicated_embeddings", True, "False"),
    ("mtp_num_hidden_layers", 2, "0, 1"),
    ("layer_scale", True, "False"),
    ("quantization_config", {"quant_method": "marlin"}, "Serve a checkpoint in one of these"),
    ("quantization_config", ["gptq"], "an object"),
    ("rope_scaling", {"type": "mrope"}, "'default', 'linear', 'dynamic', 'llama3', 'yarn'"),
    ("layer_types", ["full_attention"] * 3, "4"),
    ("num_hidden_layers", "4", "int"),
    ("num_hidden_layers", 0, "1 or more"),
    ("num_attention_heads", True, "int"),
    ("num_key_value_heads", 4, "num_"),
    ("linear_num_value_heads", 5, ""),
    ("hidden_size", 48.5, "int"),
    ("head_dim", -16, "1 or more"),
    ("linear_conv_kernel_dim", 0, "1 or more"),
    ("vocab_size", 0, "1 or more"),
    ("full_attention_interval", 0, "1 or more"),
    ("max_position_embeddings", "long", "int"),
    ("rms_norm_eps", "small", "float"),
    ("tie_word_embeddings", "yes", "bool"),
    ("rope_parameters", "default", "dict"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), STRICT, ids=lambda v: str(v)[:30])
def test_unknown_setting_value_is_refused(
    tmp_path: Path, name: str, value: Any, allowed: str
) -> None:
    folder = make_model(tmp_path / "model", **{name: value})
    message = refusal(folder, load_format="dummy")
    assert name in message
    assert allowed in message.split(" is not allowed; allowed: ", 1)[1]


@pytest.mark.parametrize(
    ("rope", "received"),
    [
        ({"rope_theta": 1e4, "rope_type": "mrope"}, "rope_type='mrope' is not allowed"),
        ({"rope_theta": 1e4, "rope_type": "yarn"}, "rope_parameters.factor; expected: float"),
        ({"partial_rotary_factor": 0.25}, "rope_theta; expected: float"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 3}, "partial_rotary_factor=3"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 is not"),
    ],
)
def test_rope_parameters_are_read_strictly(tmp_path: Path, rope: Any, received: str) -> None:
    folder = make_model(tmp_path / "model", rope_parameters=rope)
    assert received in refusal(folder, load_format="dummy")


OPTIONAL = {"head_dim", "tie_word_embeddings", "mtp_num_hidden_layers", "dtype"}


@pytest.mark.parametrize("name", sorted(set(CONFIG) - OPTIONAL - {"model_type"}))
def test_missing_setting_is_named(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder, load_format="dummy")
    assert f"config.json has no {name}" in message and "Add it" in message


def test_settings_in_text_config(tmp_path: Path, checkpoint: Any) -> None:
    folder = make_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": config.pop("tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    save_file(checkpoint[0], folder / "model.safetensors")
    assert answer(build(folder, speculative_config=MTP)) == checkpoint[1]


def test_null_for_text_config_counts_as_absent(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    plain = Checkpoint.read(folder)
    (folder / "config.json").write_text(json.dumps({**plain.raw, "text_config": None}))
    assert Checkpoint.read(folder).raw == plain.raw


def test_checkpoint_dtype_is_known_or_refused() -> None:
    config = EngineConfig()
    assert pick_dtype(config, {}, "cuda") == torch.bfloat16
    assert pick_dtype(config, {"text_config": {"dtype": "float16"}}, "cuda") == torch.float16
    assert pick_dtype(config, {"torch_dtype": "float32"}, "cuda") == torch.float32
    assert pick_dtype(config, {"dtype": "bfloat16"}, "cpu") == torch.float32
    assert pick_dtype(EngineConfig(dtype="float16"), {"dtype": "int8"}, "cuda") == torch.float16
    for wrong in ("int8", "nonsense", 5):
        with pytest.raises(CheckpointError, match="config.json dtype=.*float32.*bfloat16.*float16"):
            pick_dtype(config, {"dtype": wrong}, "cuda")
