"""A linear layer in every storage: its tensors give the represented weight bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.kernels.formats.weights import Fp4Weight, QuantizedWeight
from lockstep.quantization import CheckpointLinear, TensorInfo, WeightFormat, read_weight_format
from tests.quantization.cases import (
    BLOCKS,
    CASES,
    FP8,
    NVFP4,
    compressed_settings,
    floats,
    ints,
    modelopt,
)
from tests.quantization.stored import fp8_weight, int_weight, words

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
WRITTEN = Path(__file__).parent / "data" / "compressed_tensors.safetensors"
"""See write_compressed_tensors.py."""
PATH = "layers.0.mlp.down_proj"
Tensors = dict[str, Tensor]


def module_of(tensors: Tensors | None, n: int, k: int, path: str = PATH) -> CheckpointLinear:
    """Return the layer as a checkpoint's headers describe it."""
    result = None
    if tensors is not None:
        result = {
            suffix: TensorInfo(f"model.{path}.{suffix}", tuple(x.shape), NAMES[x.dtype])
            for suffix, x in tensors.items()
        }
    names = (f"model.language_model.{path}", f"model.{path}", path)
    return CheckpointLinear(path, names, n, k, result)


def read(settings: dict[str, Any]) -> WeightFormat:
    """Return the weight format of these settings."""
    weight_format = read_weight_format(settings)
    assert weight_format is not None
    return weight_format


def fill(
    weight_format: WeightFormat, module: CheckpointLinear, tensors: Tensors, weight: QuantizedWeight
) -> list[str]:
    """Load the tensors that have a sink, in reverse order; return the mismatches."""
    faults = []
    slots = weight_format.sinks(module, weight)
    for suffix in sorted(tensors, reverse=True):
        if suffix not in slots:
            assert suffix in weight_format.unused, suffix
            continue
        fault = slots[suffix].mismatch(tensors[suffix])
        if fault is None:
            slots[suffix].fill(tensors[suffix])
        else:
            faults.append(f"{suffix} {fault}")
    assert set(slots) <= set(tensors)
    return faults


def loaded(settings: dict[str, Any], tensors: Tensors, n: int, k: int) -> Tensor:
    """Return the weight [n, k] in fp32 that these tensors give."""
    weight_format = read(settings)
    module = module_of(tensors, n, k)
    layout = weight_format.layout(module)
    assert layout is not None
    weight = layout.empty(n, k, "cpu")
    assert fill(weight_format, module, tensors, weight) == []
    return weight.dequantize(torch.float32)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("shape", [(192, 144), (7, 33), (300, 205), (256, 256)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loaded_weight_equals_represented_weight(name: str, shape: tuple[int, int]) -> None:
    case = CASES[name]
    (n, k) = shape
    stored = case.write(n, k, 5)
    extra = {suffix: torch.tensor(0.25) for suffix in case.extra}
    actual = loaded(case.settings, {**stored.tensors, **extra}, n, k)
    assert torch.equal(actual, stored.value)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_fused_weight_are_loaded_in_place(name: str) -> None:
    case = CASES[name]
    weight_format = read(case.settings)
    parts = [case.write(n, 144, seed) for seed, n in enumerate((256, 128, 128))]
    modules = [
        module_of(part.tensors, len(part.value), 144, f"layers.0.self_attn.{name}")
        for part, name in zip(parts, ("q_proj", "k_proj", "v_proj"), strict=True)
    ]
    layouts = [weight_format.layout(module) for module in modules]
    assert layouts[0] is not None
    fused = len(set(layouts)) == 1
    assert fused == ("weight_g_idx" not in parts[0].tensors)
    if not fused:
        return
    weight = layouts[0].empty(512, 144, "cpu")
    begin = 0
    for part, module in zip(parts, modules, strict=True):
        end = begin + module.outputs
        assert fill(weight_format, module, part.tensors, weight.rows(begin, end)) == []
        begin = end
    assert torch.equal(weight.dequantize(torch.float32), torch.cat([part.value for part in parts]))


@pytest.mark.parametrize("name", CASES)
def test_layout_without_files_follows_settings(name: str) -> None:
    case = CASES[name]
    weight_format = read(case.settings)
    layout = weight_format.layout(module_of(None, 192, 144))
    stored = read(case.settings).layout(module_of(case.write(192, 144, 1).tensors, 192, 144))
    assert layout is not None and stored is not None
    assert layout.kind is stored.kind
    weight = layout.empty(192, 144, "cpu")
    weight.fill_dummy(torch.Generator().manual_seed(1))
    assert weight_format.sinks(module_of(None, 192, 144), weight)


def signed(word: int) -> int:
    """Return a word of 32 bits as int32."""
    return word - (1 << 32) if word >> 31 else word


def test_compressed_tensors_integer_order() -> None:
    tensors = {
        "weight_packed": torch.tensor([[signed(0x76543210), signed(0xFEDCBA98)]] * 8).int(),
        "weight_scale": torch.ones(8, 1),
        "weight_shape": torch.tensor([8, 16]),
        "weight_zero_point": torch.tensor([[signed(0x76543210)]]).int(),
    }
    settings = ints(strategy="channel", group_size=None)
    plain = {name: x for name, x in tensors.items() if name != "weight_zero_point"}
    row = torch.arange(-8.0, 8.0)
    assert torch.equal(loaded(settings, plain, 8, 16), row.expand(8, 16))
    settings = ints(strategy="channel", group_size=None, symmetric=False)
    zeros = torch.arange(-8.0, 0.0)[:, None]
    assert torch.equal(loaded(settings, tensors, 8, 16), row - zeros)


def test_nvidia_fp4_code_order() -> None:
    data = [0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    stored = torch.tensor([data], dtype=torch.uint8)
    multiplied = {"weight": stored, "weight_scale": one, "weight_scale_2": torch.tensor(0.25)}
    divided = {"weight_packed": stored, "weight_scale": one}
    divided["weight_global_scale"] = torch.tensor([4.0])
    expected = torch.tensor([values]) * 0.25
    assert torch.equal(loaded(modelopt("NVFP4"), multiplied, 1, 16), expected)
    assert torch.equal(loaded(NVFP4, divided, 1, 16), expected)


def test_both_forms_of_nvfp4_are_equal() -> None:
    largest = 3.7
    blocks = torch.tensor([[3.7, 1.2, 0.4]])
    scales = (blocks / 6 / (largest / 2688)).to(torch.float8_e4m3fn)
    data = torch.arange(24, dtype=torch.uint8)[None] * 7
    mine = {"weight": data, "weight_scale": scales, "weight_scale_2": torch.tensor(largest / 2688)}
    theirs = {"weight_packed": data, "weight_scale": scales}
    theirs["weight_global_scale"] = torch.tensor([2688 / largest])
    one = loaded(modelopt("NVFP4"), mine, 1, 48)
    other = loaded(NVFP4, theirs, 1, 48)
    assert torch.allclose(one, other, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((576, 7168), (5, 56)), ((2048, 7168), (16, 56)), ((10240, 5120), (80, 40))],
)
def test_fp8_block_shapes_of_published_layers(
    shape: tuple[int, int], blocks: tuple[int, int]
) -> None:
    weight_format = read(BLOCKS)
    module = module_of(None, *shape)
    layout = weight_format.layout(module)
    assert layout is not None
    weight = layout.empty(*shape, "meta")
    assert weight_format.sinks(module, weight)["weight_scale_inv"].shape == blocks


def test_tensor_shapes_of_published_layers() -> None:
    fp4 = read(modelopt("NVFP4"))
    module = module_of(None, 17408, 5120)
    layout = fp4.layout(module)
    assert layout is not None and layout.kind is Fp4Weight
    slots = fp4.sinks(module, layout.empty(17408, 5120, "meta"))
    assert slots["weight"].shape == (17408, 2560)
    assert slots["weight_scale"].shape == (17408, 320)
    four = read(ints(group_size=128))
    layout = four.layout(module)
    assert layout is not None
    slots = four.sinks(module, layout.empty(17408, 5120, "meta"))
    assert slots["weight_packed"].shape == (17408, 640)
    assert slots["weight_scale"].shape == (17408, 40)


def test_negative_g_idx_means_no_order() -> None:
    stored = int_weight()(16, 64, 3)
    tensors = {**stored.tensors, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    assert torch.equal(loaded(ints(actorder="group"), tensors, 16, 64), stored.value)


DAMAGES = {
    "no scale": ("int4", "weight_scale", None, "weight_scale"),
    "no shape": ("int4", "weight_shape", None, "weight_shape"),
    "no zeros": ("int4 asymmetric", "weight_zero_point", None, "weight_zero_point"),
    "no order": ("int4 ordered", "weight_g_idx", None, "weight_g_idx"),
    "no fp8 scale": ("fp8 blocks", "weight_scale_inv", None, "weight_scale_inv"),
    "no factor": ("modelopt nvfp4", "weight_scale_2", None, "weight_scale_2"),
    "no divisor": ("tensors nvfp4", "weight_global_scale", None, "weight_global_scale"),
    "another name": ("fp8 blocks", "weight_scale", torch.ones(2, 2), ""),
    "scale short": ("int4", "weight_scale", torch.ones(191, 5), "shape"),
    "scale of ints": ("int4", "weight_scale", torch.ones(192, 5).int(), "int32"),
    "words short": ("int4", "weight_packed", torch.ones(192, 17).int(), "shape"),
    "words of floats": ("int4", "weight_packed", torch.ones(192, 18), "float32"),
    "weight of floats": ("fp8 blocks", "weight", torch.ones(192, 144), "float32"),
    "weight of bytes": ("fp8 tensor", "weight", torch.ones(192, 144).byte(), "uint8"),
    "blocks short": ("fp8 blocks", "weight_scale_inv", torch.ones(1, 2), "shape"),
    "scale NaN": ("fp8 blocks", "weight_scale_inv", torch.full((2, 2), torch.nan), "finite"),
    "scale inf": ("int4", "weight_scale", torch.full((192, 5), torch.inf), "finite"),
    "fp4 scale NaN": (
        "modelopt nvfp4",
        "weight_scale",
        torch.full((192, 9), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "finite",
    ),
    "divisor 0": ("tensors nvfp4", "weight_global_scale", torch.zeros(1), "more than 0"),
    "divisor NaN": ("tensors nvfp4", "weight_global_scale", torch.full((1,), torch.nan), "finite"),
    "factor huge": ("modelopt nvfp4", "weight_scale_2", torch.tensor(1e36), "below 2^119"),
    "divisor tiny": (
        "tensors nvfp4",
        "weight_global_scale",
        torch.full((1,), 1e-40),
        "below 2^119",
    ),
    "zeros of more bits": (
        "int4 old zeros",
        "weight_zero_point",
        torch.full((192, 5), 8).char(),
        "-8 to 7",
    ),
    "two factors": ("modelopt nvfp4", "weight_scale_2", torch.ones(2), "shape"),
    "other shape": ("int4", "weight_shape", torch.tensor([144, 192]), "144, 192"),
    "huge shape": ("int4", "weight_shape", torch.tensor([2**62, -1]), "192, 144"),
    "order out of range": ("int4 ordered", "weight_g_idx", torch.full((144,), 5).int(), "groups"),
    "order below 0": ("int4 ordered", "weight_g_idx", -torch.arange(144).int(), "groups"),
    "zeros short": ("int4 asymmetric", "weight_zero_point", torch.ones(23, 5).int(), "shape"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors_are_refused(name: str) -> None:
    (case, suffix, instead, received) = DAMAGES[name]
    tensors = dict(CASES[case].write(192, 144, 2).tensors)
    tensors.pop(suffix, None)
    if instead is not None:
        tensors[suffix] = instead
    weight_format = read(CASES[case].settings)
    module = module_of(tensors, 192, 144)
    try:
        layout = weight_format.layout(module)
        assert layout is not None
        weight = layout.empty(192, 144, "cpu")
        spare = [name for name in tensors if name not in weight_format.sinks(module, weight)]
        message = "; ".join(spare or fill(weight_format, module, tensors, weight))
    except CheckpointError as error:
        message = str(error)
        assert message.endswith(".") and 40 < len(message) < 2000 and "\n" not in message
        assert PATH in message
    assert message and received in message


EIGHT = {"num_bits": 8, "type": "int", "strategy": "channel"}
PLAIN: Tensors = {"weight": torch.ones(192, 144)}
GROUPS = "quantization_config.config_groups"
CONTRADICTIONS = {
    "excluded": ({**BLOCKS, "ignored_layers": [f"model.{PATH}"]}, "fp8 blocks", "ignored_layers"),
    "around": (
        {**BLOCKS, "modules_to_not_convert": ["model.layers.0"]},
        "fp8 blocks",
        "modules_to_not_convert",
    ),
    "ending": ({**FP8, "modules_to_not_convert": ["down_proj"]}, "fp8 tensor", "down_proj"),
    "ignored": ({**ints(), "ignore": [f"model.{PATH}"]}, "int4", "ignore"),
    "ignored by pattern": ({**ints(), "ignore": ["re:.*down_proj$"]}, "int4", "ignore"),
    "wildcard": (modelopt("NVFP4", ignore=["model.layers.*.mlp*"]), "modelopt nvfp4", "ignore"),
    "parent": (modelopt("FP8", exclude_modules=["model.layers.0.mlp"]), "modelopt fp8", "exclude"),
    "not named": (
        modelopt("MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": "FP8"}}),
        "modelopt fp8",
        "quantized_layers",
    ),
    "kv only": ({"quant_method": "modelopt", "quant_algo": None}, "modelopt fp8", "quant_algo"),
    "other storage": (modelopt("NVFP4"), "modelopt fp8", "weight_scale_2"),
    "blocks expected": (BLOCKS, "fp8 tensor", "weight_block_size"),
    "no blocks expected": (FP8, "fp8 blocks", "weight_block_size"),
    "no target": (
        {**ints(), "config_groups": {"a": {"targets": ["re:.*q_proj"], "weights": EIGHT}}},
        "int4",
        GROUPS,
    ),
    "plain fp8": (BLOCKS, None, "weight_block_size"),
    "plain tensors": (ints(), None, f"{GROUPS}['group_0']"),
    "plain modelopt": (modelopt("NVFP4"), None, "quant_algo"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_settings_are_refused(name: str) -> None:
    (settings, case, received) = CONTRADICTIONS[name]
    tensors = PLAIN if case is None else CASES[case].write(192, 144, 2).tensors
    with pytest.raises(CheckpointError) as caught:
        read(settings).layout(module_of(tensors, 192, 144))
    message = str(caught.value)
    assert message.startswith(f"{PATH} has the tensors ") and message.endswith(".")
    assert received in message and next(iter(tensors)) in message and len(message) < 2000


@pytest.mark.parametrize("path", ["lm_head", "mtp.layers.0.mlp.down_proj"])
@pytest.mark.parametrize("settings", [BLOCKS, ints(), modelopt("NVFP4")])
def test_unlisted_head_and_draft_module_may_be_dense(settings: dict[str, Any], path: str) -> None:
    assert read(settings).layout(module_of(PLAIN, 192, 144, path)) is None
    assert read(settings).layout(module_of({}, 192, 144, path)) is None


def test_quantized_head_needs_no_setting() -> None:
    tensors = CASES["fp8 blocks"].write(192, 144, 2).tensors
    assert read(BLOCKS).layout(module_of(tensors, 192, 144, "lm_head")) is not None
    assert read(BLOCKS).layout(module_of(None, 192, 144, "lm_head")) is None


@pytest.mark.parametrize("entry", ["lm_head", "lm_head*"])
def test_quantized_head_of_modelopt_may_be_listed_as_excluded(entry: str) -> None:
    """The tool wrote lm_head into the list whether it had quantized it or not.

    https://github.com/NVIDIA/Model-Optimizer/pull/504
    https://github.com/vllm-project/vllm/issues/45102
    """
    tensors = CASES["modelopt nvfp4"].write(192, 144, 2).tensors
    weight_format = read(modelopt("NVFP4", exclude_modules=[entry, "model.layers.0.mlp*"]))
    assert weight_format.layout(module_of(tensors, 192, 144, "lm_head")) is not None
    for listed in (PLAIN, {}, None):
        assert weight_format.layout(module_of(listed, 192, 144, "lm_head")) is None
    with pytest.raises(CheckpointError, match=f"{PATH} has the tensors"):
        weight_format.layout(module_of(tensors, 192, 144, PATH))


@pytest.mark.parametrize(
    "entry", [PATH, f"model.{PATH}", f"model.language_model.{PATH}", "model.layers.0", "down_proj"]
)
def test_fp8_exclusions_by_several_names(entry: str) -> None:
    weight_format = read({**BLOCKS, "modules_to_not_convert": [entry]})
    assert weight_format.layout(module_of(PLAIN, 192, 144)) is None
    assert weight_format.layout(module_of(None, 192, 144)) is None
    near = read({**BLOCKS, "modules_to_not_convert": [entry[:-1]]})
    assert near.layout(module_of(None, 192, 144)) is not None


def test_most_specific_target_wins() -> None:
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    sixteen = {**four, "group_size": 16}
    groups = {
        "all": {"targets": ["Linear"], "weights": EIGHT},
        "pattern": {"targets": [r"re:.*mlp\..*"], "weights": four},
        "name": {"targets": [f"model.{PATH}"], "weights": sixteen},
        "keys": {"targets": ["re:.*"], "weights": None},
    }
    weight_format = read({**compressed_settings("pack-quantized"), "config_groups": groups})
    actual = [
        weight_format.layout(module_of(None, 192, 144, path))
        for path in ("layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", PATH)
    ]
    options = [dict(one.options) for one in actual if one is not None]
    assert [(o["bits"], o["group"]) for o in options] == [(8, 144), (4, 32), (4, 16)]


@pytest.mark.parametrize(
    ("entry", "covers"),
    [
        ("*", True),
        ("model.layers.0.ml*", True),
        ("model.layers.0.mlp.down_proj*", True),
        ("model.layers.?.mlp", True),
        ("*down_proj", True),
        ("model.layers.[0-3]*", True),
        ("model.layers.1*", False),
        ("*mlp.down", False),
        ("layer*", True),
        ("?ayers.0.mlp.down_proj", True),
        ("model.layers.0.m?", False),
    ],
)
def test_modelopt_wildcards(entry: str, covers: bool) -> None:
    for more in ([], ["model.layers.0.mx*"]):
        weight_format = read(modelopt("NVFP4", exclude_modules=[*more, entry]))
        assert (weight_format.layout(module_of(None, 192, 144)) is None) == covers


def test_fp8_exclusions_are_regular_expressions() -> None:
    """They match the beginning of a name up to a dot, as in transformers 5.24."""

    def left(*entries: str, path: str = PATH) -> bool:
        weight_format = read({**BLOCKS, "modules_to_not_convert": list(entries)})
        return (
            weight_format.layout(module_of(PLAIN if path == PATH else None, 192, 144, path)) is None
        )

    for entry in (
        r"model.layers.*.mlp.down_proj",
        "model.layers.*.mlp",
        "re:.*down_proj",
        ".*mlp.",
    ):
        assert left(entry)
    gate = "layers.0.mlp.gate_proj"
    assert left("model.layers.*.mlp.gate_proj", path=gate)
    assert not left("model.layers.*.mlp.gate", path=gate)
    assert not left("layers.[1-9].*", path=gate)
    with pytest.raises(CheckpointError, match="modules_to_not_convert=.*regular expressions"):
        left("*.mlp.(")


@pytest.mark.parametrize(
    ("targets", "group"),
    [
        ((["re:.*mlp.*"], ["re:.*down.*"]), 16),
        ((["re:.*down.*"], ["re:.*mlp.*"]), 32),
        ((["re:.*mlp.*"], ["re:.*mlp.*"]), 16),
        ((["Linear"], ["Linear", "re:.*q_proj"]), 16),
    ],
)
def test_equally_specific_targets_are_sorted_alphabetically(
    targets: tuple[list[str], list[str]], group: int
) -> None:
    """The last group wins among equal targets: compressed-tensors 0.20.0 sorts and overwrites them
    so."""
    four = {"num_bits": 4, "type": "int", "strategy": "group"}
    (first, second) = targets
    groups = {
        "first": {"targets": first, "weights": {**four, "group_size": 32}},
        "second": {"targets": second, "weights": {**four, "group_size": 16}},
    }
    weight_format = read({**compressed_settings("pack-quantized"), "config_groups": groups})
    layout = weight_format.layout(module_of(None, 192, 144))
    assert layout is not None and dict(layout.options)["group"] == group


EXPERT = "layers.0.mlp.experts.3.down_proj"
NAMING = {"targets": [r"re:.*experts\..*"], "weights": EIGHT}
NAMED = {f"model.{EXPERT}": {"quant_algo": "FP8"}}


@pytest.mark.parametrize("settings", [BLOCKS, FP8, ints(), NVFP4, modelopt("FP8")])
def test_settings_of_all_layers_allow_dense_experts(settings: dict[str, Any]) -> None:
    assert read(settings).layout(module_of(PLAIN, 192, 144, EXPERT)) is None
    assert read(settings).layout(module_of(None, 192, 144, EXPERT)) is not None
    with pytest.raises(CheckpointError, match="asks for"):
        read(settings).layout(module_of(PLAIN, 192, 144, EXPERT.replace("experts", "shared")))


@pytest.mark.parametrize(
    "settings",
    [
        {**ints(), "config_groups": {"named": NAMING}},
        modelopt("MIXED_PRECISION", quantized_layers=NAMED),
    ],
)
def test_settings_that_name_experts_require_quantized_ones(settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="experts.3.down_proj has the tensors .* asks for"):
        read(settings).layout(module_of(PLAIN, 192, 144, EXPERT))


REFUSED = {
    "fp8 fmt": ({**BLOCKS, "fmt": "e5m2"}, "fmt"),
    "fp8 block": ({**BLOCKS, "weight_block_size": [64, 64]}, "weight_block_size"),
    "fp8 block text": ({**BLOCKS, "weight_block_size": "x"}, "weight_block_size"),
    "fp8 scheme": ({**FP8, "activation_scheme": "other"}, "activation_scheme"),
    "fp8 list": ({**FP8, "ignored_layers": {"lm_head": 1}}, "ignored_layers"),
    "fp8 list of numbers": ({**FP8, "modules_to_not_convert": [5]}, "modules_to_not_convert"),
    "mxfp4": (compressed_settings("mxfp4-pack-quantized", num_bits=4, type="float"), "format"),
    "mxfp8": (compressed_settings("mxfp8-quantized", num_bits=8, type="float"), "format"),
    "marlin": (compressed_settings("marlin-24"), "format"),
    "no format": ({"quant_method": "compressed-tensors"}, "format"),
    "no groups": ({**ints(), "config_groups": None}, "config_groups"),
    "groups a list": ({**ints(), "config_groups": [1]}, "config_groups"),
    "groups of numbers": ({**ints(), "config_groups": {"a": 1}}, "config_groups"),
    "pattern": ({**ints(), "ignore": ["re:("]}, "ignore"),
    "targets": (
        {**ints(), "config_groups": {"a": {"targets": "Linear", "weights": {}}}}, "targets"
    ),
    "weights": ({**ints(), "config_groups": {"a": {"targets": [], "weights": 4}}}, "weights"),
    "bits": (ints(num_bits=3), "num_bits"),
    "bits of a word": (ints(num_bits="4"), "num_bits"),
    "group": (ints(group_size=0), "group_size"),
    "group text": (ints(group_size="x"), "group_size"),
    "strategy": (ints(strategy="tensor"), "strategy"),
    "strategy token": (floats("token"), "strategy"),
    "strategy inferred": (ints(strategy=None, group_size=None), "strategy"),
    "block structure": (floats("block", block_structure=[64, 64]), "block_structure"),
    "asymmetric floats": (floats("tensor", symmetric=False), "symmetric"),
    "dynamic": (ints(dynamic=True), "dynamic"),
    "actorder": (ints(actorder="other"), "actorder"),
    "int4 as int8": (ints("int-quantized"), "num_bits"),
    "fp4 group": (
        compressed_settings("nvfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        "group_size",
    ),
    "transforms": ({**ints(), "transform_config": {"config_groups": {"a": 1}}}, "transform_config"),
    "sparse": ({**ints(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "format"),
    "algorithm": (modelopt("NVFP4_AWQ"), "quant_algo"),
    "algorithm mxfp8": (modelopt("MXFP8"), "quant_algo"),
    "algorithm number": ({"quant_method": "modelopt", "quant_algo": 5}, "quant_algo"),
    "modelopt group": (modelopt("NVFP4", group_size=32), "group_size"),
    "mixed of none": (modelopt("MIXED_PRECISION"), "quantized_layers"),
    "mixed of lists": (modelopt("MIXED_PRECISION", quantized_layers={"a": []}), "quantized_layers"),
    "mixed of unknown": (
        modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "W4A8"}}), "quant_algo"
    ),
    "exclude": (modelopt("FP8", exclude_modules={"a": 1}), "exclude_modules"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_quantization_settings_are_refused(name: str) -> None:
    (settings, field) = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        read(settings)
    message = str(caught.value)
    assert f"{field}" in message.split("=")[0] and "allowed:" in message and "serve" in message
    assert message.endswith(".") and len(message) < 1000


def test_ignored_settings_are_noted() -> None:
    group = {**ints()["config_groups"]["group_0"], "input_activations": {"num_bits": 8}}
    settings = {**ints(), "config_groups": {"g": group}, "kv_cache_scheme": {"num_bits": 8}}
    received = read(settings).notes
    assert any("['g'].input_activations" in note for note in received)
    assert any("kv_cache_scheme" in note for note in received)
    assert "static" in read({**FP8, "activation_scheme": "static"}).notes[0]
    assert "kv_cache_quant_algo" in read(modelopt("FP8", kv_cache_quant_algo="FP8")).notes[1]


def test_kv_cache_only_checkpoints() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    dense = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": scheme}
    attending = {"targets": ["LlamaAttention"], "weights": None, "input_activations": scheme}
    settings: tuple[dict[str, Any], ...] = (
        {**dense, "config_groups": {}},
        {**dense, "config_groups": {"group_0": attending}},
        modelopt(None, kv_cache_quant_algo="FP8"),
    )
    for one in settings:
        weight_format = read(one)
        assert weight_format.layout(module_of({"weight": torch.ones(192, 144)}, 192, 144)) is None
        assert weight_format.notes[-1].endswith("and fp8 takes the scales")
        with pytest.raises(CheckpointError, match="asks for a weight that is not quantized"):
            weight_format.layout(
                module_of(CASES["fp8 tensor"].write(192, 144, 2).tensors, 192, 144)
            )
    assert read(settings[2]).name == "modelopt"
    with pytest.raises(CheckpointError, match=r"\['group_0'\].format='dense' is not allowed"):
        read({**ints(), "format": "dense"})


def test_weight_format_names() -> None:
    assert read(BLOCKS).name == "fp8-128x128"
    assert read(FP8).name == "fp8"
    assert read(NVFP4).name == "compressed-tensors-nvfp4-pack-quantized"
    assert read(modelopt("FP8")).name == "modelopt-FP8"
    assert read(modelopt("fp8_pb_wo")).name == "modelopt-FP8_PB_WO"
    layers = {"a": {"quant_algo": "fp8_pb_wo"}}
    assert read(modelopt("mixed_precision", quantized_layers=layers)).name.endswith(
        "MIXED_PRECISION"
    )


def test_writers_follow_the_published_layouts() -> None:
    import numpy as np

    codes = np.arange(16, dtype=np.uint8)[None]
    assert [x & 0xFFFFFFFF for x in words(codes, 4)[0].tolist()] == [0x76543210, 0xFEDCBA98]
    stored = fp8_weight("scalar")(2, 3, 1).tensors
    assert stored["weight"].dtype == torch.float8_e4m3fn


def read_written_cases() -> dict[str, tuple[dict[str, Any], Tensors]]:
    """Return case -> (settings, tensors), as the library compressed-tensors wrote them."""
    cases: dict[str, tuple[dict[str, Any], Tensors]] = {}
    with safe_open(WRITTEN, framework="pt") as file:
        for name, settings in file.metadata().items():
            cases[name] = (json.loads(settings), {})
        for key in file.keys():
            (name, _, suffix) = key.rpartition(".")
            cases[name][1][suffix] = file.get_tensor(key)
    return cases


@pytest.mark.parametrize(
    "name",
    [
        "int4", "int4-zeros", "int4-channel", "int8-channel", "int8-zeros", "int8", "fp8-tensor",
        "fp8-channel", "fp8-block", "nvfp4",
    ],
)  # fmt: skip
def test_loaded_weights_equal_compressed_tensors(name: str) -> None:
    (settings, tensors) = read_written_cases()[name]
    value = tensors.pop("value")
    actual = loaded(settings, tensors, *value.shape)
    if name == "nvfp4":
        assert torch.allclose(actual, value, rtol=2**-7, atol=0)  # it computes in bf16
    else:
        assert torch.equal(actual, value)


ABSURD: tuple[Any, ...] = (
    10**18, -1, 0, 10**400, 1.5, float("nan"), "16", "", "x" * 500, None, True, False, [], [1],
    [[[]]], ["a", 5], {}, {"a": 1}, {"a": {}}, {"a": {"weights": []}}, ["re:("], ["re:(a"],
)  # fmt: skip


def absurd_variants(settings: Any) -> list[Any]:
    """Return the settings with each of their values, nested ones too, made absurd."""
    if not isinstance(settings, dict):
        return []
    results = []
    for name, value in settings.items():
        results += [{**settings, name: one} for one in ABSURD]
        results += [{**settings, name: inner} for inner in absurd_variants(value)]
    return results


@pytest.mark.parametrize(
    "name",
    ["fp8 blocks", "int4 ordered", "float block", "tensors nvfp4", "modelopt nvfp4"],
)
def test_absurd_quantization_settings_are_refused_or_harmless(name: str) -> None:
    case = CASES[name]
    more = {"ignore": ["a"], "exclude_modules": ["a"], "modules_to_not_convert": ["a"]}
    tensors = case.write(7, 33, 1).tensors
    refused = 0
    for settings in absurd_variants({**case.settings, **more}):
        for actual in (tensors, None):
            try:
                layout = read(settings).layout(module_of(actual, 7, 33))
                assert layout is None or layout.empty(7, 33, "meta").nbytes < 10**4
            except CheckpointError as error:
                message = str(error)
                refused += 1
                assert message.endswith(".") and 40 < len(message) < 2000 and "\n" not in message
    assert refused > 50
