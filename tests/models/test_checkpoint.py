"""Loading: every tensor used, every parameter filled, every setting known; else it is named."""

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
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[Any]]:
    """A tiny checkpoint's tensors, and what the model answers with them."""
    folder = make_model(tmp_path_factory.mktemp("known"))
    llm = build(folder, load_format="dummy", speculative_config=MTP)
    return weights_of(llm), answer(llm)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model's folder, without weights."""
    return make_model(tmp_path / "model")


Store = Callable[[dict[str, Tensor]], Path]


@pytest.fixture
def store(folder: Path) -> Store:
    """Writes one weights file into the folder."""

    def write(tensors: dict[str, Tensor]) -> Path:
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


def refused(folder: Path, **settings: Any) -> str:
    """The message of the CheckpointError that loading raises."""
    with pytest.raises(CheckpointError) as caught:
        build(folder, **settings)
    message = str(caught.value)
    assert message.endswith(".") and len(message) > 40
    return message


def test_a_checkpoint_gives_the_weights_it_was_made_from(store: Store, known: Any) -> None:
    tensors, expected = known
    llm = build(store(tensors), speculative_config=MTP)
    assert answer(llm) == expected == answer(build(store(tensors)))
    for name, tensor in weights_of(llm).items():
        assert torch.equal(tensor, tensors[name]), name
    changed = {**tensors, MLP: tensors[MLP] + 0.5}
    assert answer(build(store(changed))) != expected


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_the_published_prefixes_are_known(store: Store, known: Any, prefix: str) -> None:
    tensors, expected = known
    renamed = {
        prefix + n.removeprefix("model.") if n.startswith("model.") else n: x
        for n, x in tensors.items()
    }
    renamed["model.visual.blocks.0.weight"] = torch.zeros(2)
    assert answer(build(store(renamed), speculative_config=MTP)) == expected


def test_shards_and_their_index_load(folder: Path, known: Any) -> None:
    tensors, expected = known
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2]}
    shards["model-00002-of-00002.safetensors"] = names[1::2]
    seen: list[tuple[str, int, int]] = []
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    places = {name: file for file, own in shards.items() for name in own}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    llm = build(folder, speculative_config=MTP, progress=lambda *told: seen.append(told))
    assert answer(llm) == expected
    size = sum((folder / file).stat().st_size for file in shards)
    read = [(done, of) for what, done, of in seen if what == "loading"]
    assert read == sorted(read) and read[-1] == (size, size) and {of for _, of in read} == {size}
    assert len(read) == len(names) + len(shards)
    assert (
        executor_of(llm.engine).loaded is not None and executor_of(llm.engine).loaded.bytes == size
    )
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refused(folder)
    assert "model-00002-of-00002.safetensors" in message and "Fetch" in message


INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def store_shards(folder: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write the tensors to two files with an index; return the index's weight_map."""
    names = sorted(tensors)
    places = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for file in SHARDS:
        own = {name: tensors[name] for name in names if places[name] == file}
        save_file(own, folder / file)
    write_index(folder, places)
    return places


def write_index(folder: Path, places: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


@pytest.mark.parametrize(
    "stray", ["consolidated.safetensors", "model.safetensors", "x.safetensors"]
)
def test_a_file_that_the_index_does_not_name_is_not_read(
    folder: Path, known: Any, stray: str, caplog: pytest.LogCaptureFixture
) -> None:
    store_shards(folder, known[0])
    save_file({name: -x for name, x in known[0].items()}, folder / stray)
    assert answer(build(folder, speculative_config=MTP)) == known[1]
    assert f"{stray} is not read: {INDEX} does not name it" in caplog.text


def test_the_index_decides_which_copy_of_a_tensor_is_read(folder: Path, known: Any) -> None:
    places = store_shards(folder, known[0])
    other = next(file for file in SHARDS if file != places[MLP])
    extended = {**load_file(folder / other), MLP: -known[0][MLP]}
    save_file(extended, folder / other)
    assert answer(build(folder)) == known[1]
    write_index(folder, {**places, MLP: other})
    assert answer(build(folder)) != known[1]


def test_a_tensor_that_the_index_does_not_list_is_read(folder: Path, known: Any) -> None:
    places = store_shards(folder, known[0])
    write_index(folder, {name: file for name, file in places.items() if name != MLP})
    assert answer(build(folder)) == known[1]


def test_a_tensor_that_its_file_lacks_is_named(folder: Path, known: Any) -> None:
    places = store_shards(folder, known[0])
    other = next(file for file in SHARDS if file != places[MLP])
    write_index(folder, {**places, MLP: other})
    message = refused(folder)
    assert f"{other} lacks tensors (1) that {INDEX} places in it: {MLP}" in message


def test_the_extra_file_of_auto_round_is_read_though_no_index_names_it(
    folder: Path, known: Any
) -> None:
    tensors = dict(known[0])
    draft = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    store_shards(folder, tensors)
    save_file(draft, folder / "model_extra_tensors.safetensors")
    assert answer(build(folder, speculative_config=MTP)) == known[1]


def test_without_an_index_all_shards_of_one_set_must_be_there(folder: Path, known: Any) -> None:
    store_shards(folder, known[0])
    (folder / INDEX).unlink()
    assert answer(build(folder)) == known[1]
    (folder / SHARDS[1]).unlink()
    message = refused(folder)
    assert "1 of the 2 files model-*-of-00002.safetensors" in message and "no " + INDEX in message
    store_shards(folder, known[0])
    (folder / INDEX).unlink()
    save_file(known[0], folder / "model-00001-of-00001.safetensors")
    message = refused(folder)
    assert "model-*-of-00001, model-*-of-00002" in message and "belong to another set" in message


def test_without_an_index_adapters_and_other_layouts_are_left_out(
    store: Store, known: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = store(known[0])
    save_file({"base.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    assert answer(build(folder)) == known[1]
    assert "adapter_model.safetensors is not read: an adapter, which is not applied" in caplog.text
    assert "consolidated.safetensors is not read: a copy of the weights" in caplog.text
    (folder / "model.safetensors").unlink()
    assert "holds an adapter (adapter_model.safetensors" in refused(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert "in the layout of the publisher's own code" in refused(folder)


def test_a_folder_with_an_adapter_says_how_to_merge_it(
    store: Store, known: Any, tmp_path: Path
) -> None:
    """transformers would apply the adapter to weights in the same folder."""
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "holds an adapter (adapter_config.json)" in refused(tmp_path)
    folder = store(dict(known[0]))
    (folder / "adapter_config.json").write_text("{}")
    message = refused(folder)
    assert "merge_and_unload" in message and "remove adapter_config.json" in message
    for read in (HeadCheckpoint.at, BlockCheckpoint.at):
        with pytest.raises(CheckpointError, match="holds an adapter"):
            read(folder)


def test_a_missing_tensor_is_named(store: Store, known: Any, tmp_path: Path) -> None:
    tensors = dict(known[0])
    del tensors[MLP]
    message = refused(store(tensors))
    assert "missing tensors (1): layers.1.mlp.down_proj.weight" in message.lower()
    assert str(tmp_path) in message and "Correct config.json" in message


def test_a_missing_tensor_of_the_drafter_matters_only_where_it_drafts(
    store: Store, known: Any
) -> None:
    tensors = {name: x for name, x in known[0].items() if name != FC}
    message = refused(store(tensors), speculative_config=MTP)
    assert f"missing tensors (1): {FC}" in message.lower()
    assert answer(build(store(tensors), speculative_config=None)) == known[1]


def test_a_spare_tensor_is_named(store: Store, known: Any) -> None:
    spare = "model.layers.1.mlp.down_proj.weight_scale_inv"
    message = refused(store({**known[0], spare: torch.ones(1)}))
    assert f"spare tensors (1): {spare}" in message
    many = {f"model.extra.{i}": torch.ones(1) for i in range(9)}
    message = refused(store({**known[0], **many}))
    assert "spare tensors (9): model.extra.0" in message and " ..." in message


def test_a_tensor_in_two_files_is_named(folder: Path, store: Store, known: Any) -> None:
    store(known[0])
    save_file({MLP: known[0][MLP] * 2}, folder / "other.safetensors")
    assert MLP in refused(folder)


def test_a_misshapen_tensor_is_named(store: Store, known: Any) -> None:
    message = refused(store({**known[0], MLP: torch.zeros(3, 5)}))
    assert MLP in message and "(3, 5)" in message and "config.json asks for (48, 64)" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64], ids=str)
def test_a_quantised_tensor_is_not_taken_for_a_weight(
    store: Store, known: Any, dtype: torch.dtype
) -> None:
    message = refused(store({**known[0], MLP: torch.zeros(48, 64).to(dtype)}))
    assert MLP in message and str(dtype).removeprefix("torch.") in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_of_every_float_dtype_load(
    store: Store, known: Any, dtype: torch.dtype, folder: Path
) -> None:
    llm = build(store({name: x.to(dtype) for name, x in known[0].items()}))
    assert torch.equal(
        worker_of(llm.engine).model.norm.weight, known[0]["model.norm.weight"].to(dtype)
    )  # type: ignore
    assert load_file(folder / "model.safetensors")[MLP].dtype == dtype


def test_tied_and_untied_heads(tmp_path: Path, known: Any) -> None:
    tensors, expected = known
    head = tensors["model.embed_tokens.weight"]
    tied = make_model(tmp_path / "tied")
    save_file({**tensors, "lm_head.weight": head.clone()}, tied / "model.safetensors")
    assert answer(build(tied)) == expected
    untied = make_model(tmp_path / "untied", tie_word_embeddings=False)
    save_file(tensors, untied / "model.safetensors")
    assert "missing tensors (1): lm_head.weight" in refused(untied).lower()
    save_file({**tensors, "lm_head.weight": head.clone()}, untied / "model.safetensors")
    assert answer(build(untied)) == expected
    save_file({**tensors, "lm_head.weight": -head}, untied / "model.safetensors")
    assert answer(build(untied)) != expected


def test_a_folder_that_holds_no_checkpoint(tmp_path: Path, folder: Path) -> None:
    message = refused(tmp_path)
    assert str(tmp_path / "config.json") in message and "Name a folder" in message
    assert f"{folder} holds no *.safetensors file" in refused(folder)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint at all")
    message = refused(folder)
    assert str(folder / "model.safetensors") in message and "Fetch the file again" in message


def test_a_file_larger_than_memory_still_tells_its_names(
    store: Store, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch maps a file as a writable copy, which a system without overcommit may refuse."""
    folder = store(known[0])
    whole = weight_files.safe_open

    def without_overcommit(path: Path, framework: str) -> Any:
        if framework == "pt":
            raise RuntimeError("unable to mmap 82054030496 bytes: Cannot allocate memory (12)")
        return whole(path, framework=framework)

    monkeypatch.setattr(weight_files, "safe_open", without_overcommit)
    assert set(Checkpoint.read(folder).names()) == set(known[0])
    message = refused(folder)
    assert "model.safetensors cannot be mapped into memory" in message
    assert "vm.overcommit_memory=1" in message


def test_a_file_cut_short(store: Store, known: Any) -> None:
    path = store(known[0]) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refused(path.parent)
    assert str(path) in message and "Fetch the file again" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '"x"', '{"text_config": []}'])
def test_a_config_that_is_no_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.read(folder)
    assert str(folder / "config.json") in str(caught.value)
    assert "Name a folder that holds a checkpoint" in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", None, 5, ["qwen3_5"]])
def test_an_unknown_architecture(tmp_path: Path, kind: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    message = refused(folder)
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
def test_an_unknown_value_of_a_setting_that_matters(
    tmp_path: Path, name: str, value: Any, allowed: str
) -> None:
    folder = make_model(tmp_path / "model", **{name: value})
    message = refused(folder, load_format="dummy")
    assert name in message
    assert allowed in message.split(" is not allowed; allowed: ", 1)[1]


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_theta": 1e4, "rope_type": "mrope"}, "rope_type='mrope' is not allowed"),
        ({"rope_theta": 1e4, "rope_type": "yarn"}, "rope_parameters.factor; expected: float"),
        ({"partial_rotary_factor": 0.25}, "rope_theta; expected: float"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 3}, "partial_rotary_factor=3"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 is not"),
    ],
)
def test_rope_parameters_are_read_strictly(tmp_path: Path, rope: Any, told: str) -> None:
    folder = make_model(tmp_path / "model", rope_parameters=rope)
    assert told in refused(folder, load_format="dummy")


OPTIONAL = {"head_dim", "tie_word_embeddings", "mtp_num_hidden_layers", "dtype"}


@pytest.mark.parametrize("name", sorted(set(CONFIG) - OPTIONAL - {"model_type"}))
def test_a_setting_that_is_missing_is_named(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    message = refused(folder, load_format="dummy")
    assert f"config.json has no {name}" in message and "Add it" in message


def test_settings_may_stand_in_text_config(tmp_path: Path, known: Any) -> None:
    folder = make_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": config.pop("tie_word_embeddings")}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    save_file(known[0], folder / "model.safetensors")
    assert answer(build(folder, speculative_config=MTP)) == known[1]


def test_the_dtype_of_a_checkpoint_is_known_or_refused() -> None:
    config = EngineConfig()
    assert pick_dtype(config, {}, "cuda") == torch.bfloat16
    assert pick_dtype(config, {"text_config": {"dtype": "float16"}}, "cuda") == torch.float16
    assert pick_dtype(config, {"torch_dtype": "float32"}, "cuda") == torch.float32
    assert pick_dtype(config, {"dtype": "bfloat16"}, "cpu") == torch.float32
    assert pick_dtype(EngineConfig(dtype="float16"), {"dtype": "int8"}, "cuda") == torch.float16
    for wrong in ("int8", "nonsense", 5):
        with pytest.raises(CheckpointError, match="config.json dtype=.*float32.*bfloat16.*float16"):
            pick_dtype(config, {"dtype": wrong}, "cuda")
