"""Test vectors of the disk layouts, and the codes that sinks load from them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.errors import CheckpointError
from lockstep.kernels.formats.weights import IntWeight
from lockstep.quantization import CheckpointLinear, TensorInfo, WeightFormat, read_weight_format
from lockstep.quantization.awq import SHIFTS
from lockstep.quantization.integers import ascending, unpack_words
from tests.quantization.disk import AWQ_ORDER, Codes, awq, gptq, pack_words, random_codes

NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32"}


def word(text: str) -> Tensor:
    """Return 0x... as a tensor of one int32."""
    return torch.from_numpy(np.array([[int(text, 16)]], dtype=np.uint32).view(np.int32))


def codes_in(text: str, shifts: tuple[int, ...], bits: int = 4) -> list[int]:
    """Return the codes of a word."""
    return unpack_words(word(text), shifts, bits, dim=1)[0].tolist()


def test_gptq_word_order() -> None:
    assert codes_in("0x76543210", ascending(4)) == list(range(8))
    assert codes_in("0x77777777", ascending(4)) == [7] * 8
    assert codes_in("0x88888888", ascending(4)) == [8] * 8
    assert codes_in("0x7f7f7f7f", ascending(8), 8) == [127] * 4
    assert pack_words(np.arange(8)[None], 4, 1).equal(word("0x76543210"))


def test_awq_word_order() -> None:
    assert codes_in("0x75316420", SHIFTS) == list(range(8))
    assert pack_words(np.arange(8)[None], 4, 1, AWQ_ORDER).equal(word("0x75316420"))


def module(
    n: int, k: int, tensors: dict[str, Tensor] | None, path: str = "layers.0.x"
) -> CheckpointLinear:
    """Return a module with these tensors."""
    infos = None
    if tensors is not None:
        infos = {
            name: TensorInfo(f"model.{path}.{name}", tuple(t.shape), NAMES.get(t.dtype, "?"))
            for name, t in tensors.items()
        }
    return CheckpointLinear(path, (f"model.{path}", path), n, k, infos)


def weight_format(method: str, **settings: object) -> WeightFormat:
    """The weight format of these settings."""
    result = read_weight_format({"quant_method": method, **settings})
    assert result is not None
    return result


def loaded(weight_format: WeightFormat, n: int, k: int, tensors: dict[str, Tensor]) -> IntWeight:
    """Return the weight that a module's tensors fill, within a larger one."""
    read = module(n, k, tensors)
    layout = weight_format.layout(read)
    assert layout is not None
    surrounding = layout.empty(n + 11, k, "cpu")
    for tensor in surrounding.tensors().values():
        tensor.zero_()
    weight = surrounding.rows(3, 3 + n)
    slots = weight_format.sinks(read, weight)
    assert slots.keys() == tensors.keys()
    for name, slot in slots.items():
        assert slot.mismatch(tensors[name]) is None, name
        slot.fill(tensors[name])
    assert not surrounding.words[:3].any() and not surrounding.words[3 + n :].any()
    return weight  # type: ignore[return-value]


def assert_equals_codes(weight: IntWeight, codes: Codes) -> None:
    """Assert that the weight has these codes, and their values bit for bit."""
    assert np.array_equal(weight.codes().numpy(), codes.codes)
    assert torch.equal(weight.dequantize(torch.float32), codes.values())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_vectors(bits: int, group: int, sym: bool, version: int) -> None:
    n = 21
    k = 136
    codes = random_codes(n, k, bits, group, sym=sym, dtype=torch.bfloat16)
    form = {1: "gptq", 2: "gptq_v2"}[version]
    actual = weight_format("gptq", bits=bits, group_size=group, sym=sym, checkpoint_format=form)
    weight = loaded(actual, n, k, gptq(codes, less=2 - version))
    assert_equals_codes(weight, codes)
    assert (weight.zeros is None) == sym and weight.g_idx is None
    assert actual.name == f"gptq-int{bits}-" + ("channel" if group == -1 else f"g{group}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gptq_with_shuffled_groups(dtype: torch.dtype) -> None:
    codes = random_codes(24, 100, 4, 32, shuffle=True, dtype=dtype)
    actual = weight_format("gptq", bits=4, group_size=32, sym=True, desc_act=True)
    weight = loaded(actual, 24, 100, gptq(codes))
    assert_equals_codes(weight, codes)
    assert weight.g_idx is not None and weight.scales.dtype == dtype


@pytest.mark.parametrize("settings", [{"static_groups": True}, {"meta": {"static_groups": True}}])
def test_static_groups_have_no_order(settings: dict[str, Any]) -> None:
    """AutoGPTQ declares static groups next to desc_act, GPTQModel in `meta`: a column's group
    follows from its position."""
    codes = random_codes(24, 100, 4, 32)
    base = dict(bits=4, group_size=32, sym=True, desc_act=True)
    weight = loaded(weight_format("gptq", **base, **settings), 24, 100, gptq(codes))
    assert isinstance(weight, IntWeight) and weight.g_idx is None
    assert_equals_codes(weight, codes)
    received = {"meta": {"static_groups": False}, "dynamic": {".*": {"static_groups": True}}}
    for more, ordered in (({"meta": {"static_groups": False}}, True), (received, False)):
        layout = weight_format("gptq", **base, **more).layout(module(24, 100, gptq(codes)))
        assert layout is not None and dict(layout.options)["g_idx"] is ordered


def test_single_group_has_no_order() -> None:
    codes = random_codes(24, 40, 4, -1)
    actual = weight_format("gptq", bits=4, group_size=-1, sym=True, desc_act=True)
    weight = loaded(actual, 24, 40, gptq(codes))
    assert_equals_codes(weight, codes)
    assert weight.g_idx is None


@pytest.mark.parametrize("order", ["absent", "zeros", "plain"])
def test_trivial_order_is_dropped(order: str) -> None:
    codes = random_codes(8, 72, 4, 32)
    tensors = gptq(codes, g_idx=order != "absent")
    if order == "zeros":
        tensors["g_idx"].zero_()
    assert_equals_codes(
        loaded(weight_format("gptq", bits=4, group_size=32, sym=True), 8, 72, tensors), codes
    )


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("zero_point", [True, False])
def test_awq_vectors(group: int, zero_point: bool) -> None:
    n = 21
    k = 136
    codes = random_codes(n, k, 4, group, sym=not zero_point)
    actual = weight_format(
        "awq", w_bit=4, q_group_size=group, zero_point=zero_point, version="GEMM"
    )
    assert_equals_codes(loaded(actual, n, k, awq(codes)), codes)


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(
    ("form", "less"),
    [
        ("auto_round:auto_gptq", 1),
        ("auto_round:gptqmodel", 0),
        ("auto_round", 0),
        ("auto_round:auto_awq", None),
    ],
)
def test_auto_round(method: str, sym: bool, form: str, less: int | None) -> None:
    codes = random_codes(40, 72, 4, 32, sym=sym)
    tensors = awq(codes) if less is None else gptq(codes, less, g_idx=form.endswith("model"))
    actual = weight_format(method, bits=4, group_size=32, sym=sym, packing_format=form, iters=200)
    assert_equals_codes(loaded(actual, 40, 72, tensors), codes)


@pytest.mark.parametrize(
    ("setting", "form", "less"),
    [
        ("backend", "auto_round:gptq:exllamav2", 1),
        ("backend", "auto_gptq:exllamav2", 1),
        ("backend", "auto_round:exllamav2", 0),
        ("backend", "auto_round:triton", 0),
        ("backend", "auto_round:awq", None),
        ("packing_format", "auto_round:auto_gptq:exllamav2", 1),
        ("packing_format", "auto_round:exllamav2", 0),
    ],
)
@pytest.mark.parametrize("sym", [True, False], ids=["sym", "asym"])
def test_older_auto_round_formats(sym: bool, setting: str, form: str, less: int | None) -> None:
    """auto-round 0.3 to 0.5. A wrong guess would shift every weight by a step."""
    codes = random_codes(40, 72, 4, 32, sym=sym)
    tensors = awq(codes) if less is None else gptq(codes, less, g_idx=False)
    settings = {"bits": 4, "group_size": 32, "sym": sym, setting: form}
    actual = weight_format("intel/auto-round", **settings, autoround_version="0.4.3")
    assert_equals_codes(loaded(actual, 40, 72, tensors), codes)


def test_auto_round_activation_bits_are_noted() -> None:
    actual = weight_format("auto-round", bits=4, group_size=32, sym=True, act_bits=8)
    assert actual.notes == (
        "quantization_config.act_bits=8 is not followed: activations are not rounded",
    )
    assert weight_format("auto-round", bits=4, sym=True, act_bits=16).notes == ()


def test_large_weights_are_loaded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.kernels.formats.weights.quantized_weight.CHUNK", 1000)
    codes = random_codes(53, 72, 4, 32, sym=False)
    assert_equals_codes(
        loaded(weight_format("gptq", bits=4, group_size=32), 53, 72, gptq(codes)), codes
    )
    assert_equals_codes(
        loaded(weight_format("awq", bits=4, group_size=32), 53, 72, awq(codes)), codes
    )


def test_zero_points_of_zero_borrow_in_version_1() -> None:
    """Version 1 subtracts 1 from all zero points of a word at once."""
    codes = random_codes(8, 32, 4, 32, sym=False)
    codes.zeros[:] = 0
    tensors = gptq(codes)
    assert tensors["qzeros"].equal(word("0xeeeeeeef"))
    assert_equals_codes(loaded(weight_format("gptq", bits=4, group_size=32), 8, 32, tensors), codes)


def test_tensor_shapes_of_published_checkpoint() -> None:
    """Qwen3.5-27B in 4 bits, groups of 128: [17408, 5120] and [5120, 17408]."""
    cases = {
        "gptq": [((640, 17408), (40, 2176), (40, 17408)), ((2176, 5120), (136, 640), (136, 5120))],
        "awq": [((5120, 2176), (40, 2176), (40, 17408)), ((17408, 640), (136, 640), (136, 5120))],
    }
    for method, sizes in cases.items():
        actual = weight_format(method, bits=4, group_size=128)
        for (n, k), expected in zip(((17408, 5120), (5120, 17408)), sizes, strict=True):
            read = module(n, k, None)
            layout = actual.layout(read)
            assert layout is not None
            slots = actual.sinks(read, layout.empty(n, k, "meta"))
            names = ("qweight", "qzeros", "scales")
            assert tuple(slots[name].shape for name in names) == expected


@pytest.mark.parametrize("kind", ["int", "fp8", "fp4"])
def test_gather_and_reorder_rows(kind: str) -> None:
    from lockstep.kernels.formats.weights import Fp4Weight, Fp8Weight

    make = {
        "int": lambda: IntWeight.empty(12, 72, group=32, zeros=True),
        "fp8": lambda: Fp8Weight.empty(12, 72, 1, 72),
        "fp4": lambda: Fp4Weight.empty(12, 72),
    }
    weight = make[kind]()
    weight.fill_dummy(torch.Generator().manual_seed(0))
    values = weight.dequantize(torch.float32)
    ids = torch.tensor([5, 0, 11, 5])
    assert torch.equal(weight.gather(ids).dequantize(torch.float32), values[ids])
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    weight.rows(2, 10).reorder(order)
    values[2:10] = values[2:10][order]
    assert torch.equal(weight.dequantize(torch.float32), values)


def test_reorder_keeps_scale_blocks_whole() -> None:
    from lockstep.kernels.formats.weights import Fp8Weight

    weight = Fp8Weight.empty(14, 16, 4, 8)
    weight.fill_dummy(torch.Generator().manual_seed(0))
    values = weight.dequantize(torch.float32)
    ids = torch.tensor([13, 2, 7])
    part = weight.rows(1, 14)
    assert torch.equal(part.gather(ids - 1).dequantize(torch.float32), values[ids])
    blocks = [8, 9, 10, 11, 7, 6, 5, 4, 0, 1, 2, 3, 12, 13]
    weight.reorder(torch.tensor(blocks))
    values = values[blocks]
    assert torch.equal(weight.dequantize(torch.float32), values)
    for rows, order in (
        ((0, 14), [4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10, 11, 12, 13]),
        ((2, 8), [2, 3, 4, 5, 0, 1]),
        ((0, 6), [4, 5, 0, 1, 2, 3]),
    ):
        with pytest.raises(ValueError, match="cuts scale blocks of 4 rows"):
            weight.rows(*rows).reorder(torch.tensor(order))
    assert torch.equal(weight.dequantize(torch.float32), values)
    weight.rows(2, 4).reorder(torch.tensor([1, 0]))
    values[2:4] = values[2:4].flip(0)
    assert torch.equal(weight.dequantize(torch.float32), values)


STATIC = {"desc_act": True, "static_groups": True}
DAMAGES = {
    "zeros": ("qzeros", lambda t: t.fill_(0x33333333), "symmetric", {}),
    "one zero": ("qzeros", lambda t: t[0].fill_(0), "has zero points other than 8", {}),
    "infinite": ("scales", lambda t: t.fill_(torch.inf), "infinities or NaN", {}),
    "nan": ("scales", lambda t: t[1, 2].fill_(torch.nan), "infinities or NaN", {}),
    "order": ("g_idx", lambda t: t[0].fill_(1), "has no desc_act, or static_groups", {}),
    "static": ("g_idx", lambda t: t[0].fill_(1), "or static_groups", STATIC),
    "unfair order": ("g_idx", lambda t: t[0].fill_(1), "32 columns", {"desc_act": True}),
    "wild order": ("g_idx", lambda t: t[0].fill_(1 << 30), "32 columns", {"desc_act": True}),
    "negative": ("g_idx", lambda t: t[0].fill_(-1), "32 columns", {"desc_act": True}),
    "bias": ("bias", lambda t: t.fill_(1.0), "no bias here", {}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_invalid_tensor_values_are_refused(damage: str) -> None:
    name, damage_tensor, received, settings = DAMAGES[damage]
    codes = random_codes(8, 72, 4, 32)
    tensors = {**gptq(codes), "bias": torch.zeros(8)}
    actual = weight_format("gptq", bits=4, group_size=32, sym=True, **settings)
    assert_equals_codes(loaded(actual, 8, 72, tensors), codes)
    damage_tensor(tensors[name])
    with pytest.raises(CheckpointError, match=received) as caught:
        loaded(actual, 8, 72, tensors)
    assert str(caught.value).startswith(f"layers.0.x.{name} ")


def test_sink_mismatch_names_expected_shape() -> None:
    codes = random_codes(8, 72, 4, 32)
    tensors = gptq(codes)
    actual = weight_format("gptq", bits=4, group_size=64, sym=True)
    read = module(8, 72, tensors)
    layout = actual.layout(read)
    assert layout is not None
    slots = actual.sinks(read, layout.empty(8, 72, "cpu"))
    assert slots["scales"].mismatch(tensors["scales"]) == (
        "shape (3, 8), config.json asks for (2, 8)"
    )
    assert slots["qweight"].mismatch(tensors["qweight"]) is None
