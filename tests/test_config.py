"""Invalid settings are refused by name, value, allowed values and remedy; plans follow the
config."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.config import GRAPH_MODES, Plan
from lockstep.errors import CapacityError, CheckpointError, ConfigError
from lockstep.spec import DRAFTERS, OLDER_NAMES, drafter_module, read
from lockstep.spec.config import MAX_DRAFTS, SpeculativeConfig
from lockstep.worker import memory
from lockstep.worker.executor import executor_of
from tests.tiny_model import make_model

KV_FORMATS = "auto, bfloat16, fp8, fp8_e4m3, fp8_e5m2, int8_per_token_head, "
KV_FORMATS += "turboquant_k8v4, turboquant_4bit_nc, turboquant_k3v4_nc, turboquant_3bit_nc"
BAD: list[tuple[str, Any, str]] = [
    ("model", 5, "a folder, a GGUF file, a hub id"),
    ("model", "", "a folder, a GGUF file, a hub id"),
    ("dtype", "fp8", "auto, float32, bfloat16, float16"),
    ("dtype", None, "auto, float32"),
    ("activation_dtype", "int8", "auto, fp8"),
    ("quantization", 4, "fp8, int8, int4"),
    ("quantization", ["int4"], "fp8, int8, int4"),
    ("device", "tpu", "auto, cpu, cuda"),
    ("load_format", "gguf", "auto, dummy"),
    ("kv_events_config", 5557, "None or a dict"),
    ("hf_overrides", "rope_theta", "a dict of config.json's settings"),
    ("hf_overrides", {1: 2}, "a dict of config.json's settings"),
    ("kv_cache_memory_bytes", 0, "from 1 to 1125899906842624"),
    ("kv_cache_dtype", "int2", KV_FORMATS),
    ("kv_cache_dtype", None, KV_FORMATS),
    ("mamba_ssm_cache_dtype", "float16", "auto, float32, bfloat16"),
    ("kv_cache_dtype_skip_layers", ["middle"], "first, last and indices of attention layers"),
    ("kv_cache_dtype_skip_layers", [-1], "first, last and indices of attention layers"),
    ("kv_cache_dtype_skip_layers", "first", "first, last and indices of attention layers"),
    ("cuda_graph_mode", "partial", "full, piecewise, none"),
    ("cuda_graph_mode", ["full"], "full, piecewise, none"),
    ("scheduling_policy", "random", "fcfs, priority"),
    ("lora_modules", ["sql"], "up to 64 of NAME=FOLDER, each name once"),
    ("lora_modules", ["sql=a", "sql=b"], "each name once"),
    ("lora_modules", {"sql": 3}, "NAME=FOLDER"),
    ("lora_modules", {"": "a"}, "NAME=FOLDER"),
    ("lora_modules", [{"name": "sql", "path": "a", "rank": 8}], "NAME=FOLDER"),
    ("tensor_parallel_size", 0, "from 1 to 64"),
    ("tensor_parallel_size", True, "from 1 to 64"),
    ("nnodes", 0, "from 1 to 64"),
    ("node_rank", -1, "from 0 to 63"),
    ("master_addr", "", "a host name or an address"),
    ("master_port", 0, "from 1 to 65535"),
    ("distributed_timeout_seconds", 0, "from 1 to 86400"),
    ("max_model_len", 1, "from 2 to 16777216"),
    ("max_model_len", "4096", "whole numbers from 2"),
    ("max_num_seqs", 0, "from 1 to 1024"),
    ("max_num_seqs", 1025, "from 1 to 1024"),
    ("max_num_seqs", 1.5, "whole numbers from 1"),
    ("max_num_seqs", True, "whole numbers from 1"),
    ("max_num_batched_tokens", 63, "from 64 to 1048576"),
    ("max_num_batched_tokens", "many", "whole numbers from 64"),
    ("gpu_memory_utilization", 0.0, "from 0.05 to 0.98"),
    ("gpu_memory_utilization", 90, "from 0.05 to 0.98"),
    ("gpu_memory_utilization", math.nan, "from 0.05 to 0.98"),
    ("gpu_memory_utilization", None, "from 0.05 to 0.98"),
    ("num_gpu_blocks", 1, "from 2 to 1073741824"),
    ("num_gpu_blocks", 2.5, "whole numbers from 2"),
    ("num_snapshots", -1, "from 0 to 1048576"),
    ("kv_offloading_size", -0.5, "numbers from 0 to 1048576"),
    ("kv_offloading_size", math.inf, "numbers from 0 to 1048576"),
    ("kv_offloading_size", "4GX", "numbers from 0 to 1048576"),
    ("snapshot_every", 0, "from 1 to 1048576"),
    ("enable_prefix_caching", "no", "True, False"),
    ("audit", "no", "numbers from 0.0 to 1.0"),
    ("sync_kernels", "no", "True, False"),
    ("kernels", "linear", "OP=BACKEND"),
    ("kernels", ["linear=cpu", "linear=triton"], "each op once"),
    ("kernels", {"linear": 3}, "OP=BACKEND"),
    ("disable_custom_all_reduce", "no", "True, False"),
    ("skip_tokenizer_init", None, "True, False"),
    ("seed", 1.5, "whole numbers from 0"),
    ("seed", -1, "from 0"),
    ("seed", None, "from 0"),
    ("steps_in_flight", 3, "from 1 to 2"),
    ("row_buckets", (), "whole numbers from 1 to 1024"),
    ("row_buckets", (1, 0), "whole numbers from 1 to 1024"),
    ("row_buckets", (1, "2"), "whole numbers from 1 to 1024"),
    ("row_buckets", 4, "whole numbers from 1 to 1024"),
    ("prompt_buckets", (64, 0), "whole numbers from 1 to 16384"),
    ("speculative_config", "mtp", '{"method": "mtp", "num_speculative_tokens": 3}'),
    ("speculative_config", 3, '{"method": "mtp", "num_speculative_tokens": 3}'),
]

BAD_DRAFTS: list[tuple[str, Any, str]] = [
    ("method", 5, "mtp"),
    ("num_speculative_tokens", 0, f"from 1 to {MAX_DRAFTS}"),
    ("num_speculative_tokens", MAX_DRAFTS + 1, f"from 1 to {MAX_DRAFTS}"),
    ("num_speculative_tokens", -3, f"from 1 to {MAX_DRAFTS}"),
    ("num_speculative_tokens", 2.0, f"whole numbers from 1 to {MAX_DRAFTS}"),
    ("num_speculative_tokens", True, f"from 1 to {MAX_DRAFTS}"),
    ("num_speculative_tokens", None, f"from 1 to {MAX_DRAFTS}"),
    ("prompt_lookup_min", 0, "1 to 4"),
    ("prompt_lookup_min", 5, "1 to 4"),
    ("prompt_lookup_min", 1.5, "whole numbers from 1 to 4"),
    ("prompt_lookup_min", "a", "whole numbers from 1 to 4"),
    ("prompt_lookup_max", 17, "1 to 16"),
    ("prompt_lookup_max", None, "1 to 16"),
]


def assert_complete_error(message: str, field: str, value: Any, allowed: str) -> None:
    """Assert that the message has the field with its value, allowed values, and then a remedy."""
    head, result, rest = message.partition(" is not allowed; allowed: ")
    assert head == f"{field}={value!r}" and result, message
    assert allowed in rest, message
    remedy = rest.split(allowed, 1)[1].split(". ", 1)[1]
    assert len(remedy) > 8 and remedy.endswith("."), message


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a tiny model's folder."""
    return str(make_model(tmp_path / "model"))


def build(folder: str, **settings: Any) -> LLM:
    """Return an engine of the tiny model with random weights."""
    settings = {"max_model_len": 256, "max_num_seqs": 2, **settings}
    return LLM(folder, load_format="dummy", skip_tokenizer_init=True, **settings)


@pytest.mark.parametrize(("field", "value", "allowed"), BAD)
def test_invalid_setting_is_refused(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.read(**{field: value})
    assert_complete_error(str(caught.value), field, value, allowed)


@pytest.mark.parametrize(("field", "value", "allowed"), BAD_DRAFTS)
def test_invalid_drafter_setting_is_refused(field: str, value: Any, allowed: str) -> None:
    drafting = {"method": "ngram", "prompt_lookup_max": 4, field: value}
    with pytest.raises(ConfigError) as caught:
        EngineConfig.read(speculative_config=drafting)
    assert_complete_error(str(caught.value), f"speculative_config {field}", value, allowed)


@pytest.mark.parametrize("name", OLDER_NAMES)
def test_older_drafter_names_are_known(name: str) -> None:
    config = EngineConfig.read(speculative_config={"method": name, "num_speculative_tokens": 2})
    assert config.speculative_config.method == "mtp"


def test_unknown_setting_error_names_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.read(max_seqs=4)
    assert_complete_error(str(caught.value), "setting", "max_seqs", "max_num_seqs")
    for field in dataclasses.fields(EngineConfig):
        assert field.name in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        EngineConfig.read(speculative_config={"method": "mtp", "k": 3})
    assert_complete_error(
        str(caught.value), "speculative_config key", "k", "num_speculative_tokens"
    )
    with pytest.raises(ConfigError, match='no "method"; name a drafter'):
        EngineConfig.read(speculative_config={"num_speculative_tokens": 3})


def test_adapters_have_the_forms_of_vllm() -> None:
    entry = {"name": "sql", "path": "a/b=c", "base_model_name": "x"}
    for value in (["sql=a/b=c"], "sql=a/b=c", entry, [entry], [json.dumps(entry)]):
        assert EngineConfig.read(lora_modules=value).lora_modules == {"sql": "a/b=c"}
    paths = {"sql": Path("a"), "name": "b"}
    assert EngineConfig.read(lora_modules=paths).lora_modules == {"sql": "a", "name": "b"}
    assert EngineConfig.read().lora_modules is None
    with pytest.raises(ConfigError, match="up to 64"):
        EngineConfig.read(lora_modules={f"sql-{i}": "a" for i in range(65)})
    with pytest.raises(ConfigError, match="NAME=FOLDER"):
        EngineConfig.read(lora_modules=[{"name": ["sql"], "path": "a"}])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 3}, "multiples of 2, such as 2 or 4"),
        ({"nnodes": 4}, "multiples of 4, such as 4"),
        ({"nnodes": 3, "tensor_parallel_size": 64}, "multiples of 3, such as 63:"),
        ({"node_rank": 1}, "nnodes=1; allowed: 0 to 0"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "nnodes=2; allowed: 0 to 1"),
    ],
)
def test_sizes_that_nodes_cannot_share_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        EngineConfig.read(**settings)


def test_nodes_have_equally_many_ranks() -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 6, "nnodes": 3}
    ranks = [EngineConfig.read(node_rank=node, **settings).node_ranks for node in range(3)]
    assert ranks == [range(2), range(2, 4), range(4, 6)]


def test_every_field_has_an_invalid_value_and_help() -> None:
    reported = {field for field, _, _ in BAD}
    for field in dataclasses.fields(EngineConfig):
        assert field.name in reported
    options = [drafter_module(name).Options for name in DRAFTERS]
    for settings in (EngineConfig, *options):
        assert all(field.metadata["help"] for field in dataclasses.fields(settings))


def test_drafter_refuses_keys_of_others() -> None:
    for method, foreign, expected in (
        ("ngram", "draft_vocab_size", "prompt_lookup_max"),
        ("mtp", "prompt_lookup_max", "draft_vocab_size"),
    ):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.read(speculative_config={"method": method, foreign: 64})
        assert_complete_error(str(caught.value), "speculative_config key", foreign, expected)
        assert f"method={method!r}" in str(caught.value)
        value = 64 if method == "mtp" else 5
        EngineConfig.read(speculative_config={"method": method, expected: value})


@pytest.mark.parametrize("value", [0, 32, 100, 2**30, 64.0, True, "short", None])
def test_invalid_draft_vocab_size_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.read(speculative_config={"method": "mtp", "draft_vocab_size": value})
    allowed = "auto, full, or multiples of 64 from 64"
    assert_complete_error(str(caught.value), "speculative_config draft_vocab_size", value, allowed)


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"dtype": "bfloat16", "device": "cpu", "max_model_len": 2, "max_num_seqs": 1024},
        {"max_num_batched_tokens": 64, "num_gpu_blocks": 2, "num_snapshots": 0, "seed": 2**31},
        {"gpu_memory_utilization": 0.05, "row_buckets": [1, 4], "steps_in_flight": 2},
        {"kv_offloading_size": 64},
        {"kv_offloading_size": 0.5},
        {"speculative_config": SpeculativeConfig("mtp", 7)},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1}},
        *({"cuda_graph_mode": mode} for mode in GRAPH_MODES),
    ],
)
def test_valid_settings_are_kept(chosen: dict[str, Any]) -> None:
    config = EngineConfig.read(**chosen)
    for name, value in chosen.items():
        if name == "speculative_config":
            value = read(value)
            assert value and config.max_drafts == value.num_speculative_tokens
        assert getattr(config, name) == (tuple(value) if name == "row_buckets" else value)
    assert chosen.get("speculative_config") or config.max_drafts == 0


def test_model_may_be_a_path(tmp_path: Path) -> None:
    assert EngineConfig.read(model=tmp_path).model == str(tmp_path)


def test_configs_are_frozen() -> None:
    config = EngineConfig.read(speculative_config={"method": "mtp"})
    for frozen, name in ((config, "dtype"), (config.speculative_config, "method")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, name, "auto")


def test_max_model_len_above_checkpoint_positions(folder: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(folder, max_model_len=5000)
    assert_complete_error(str(caught.value), "max_model_len", 5000, "2 to 4096")


def test_unknown_drafter(folder: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(folder, speculative_config={"method": "medusa"})
    assert_complete_error(
        str(caught.value), "speculative_config method", "medusa", "ngram, suffix, mtp, "
    )


def test_mtp_without_its_module(tmp_path: Path) -> None:
    folder = str(make_model(tmp_path / "model", mtp_num_hidden_layers=0))
    with pytest.raises(CheckpointError, match="method='mtp'.*mtp_num_hidden_layers.*ngram"):
        build(folder, speculative_config={"method": "mtp"})
    build(folder, speculative_config={"method": "ngram"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the GPU that is asked for")
def test_absent_gpu(folder: str) -> None:
    with pytest.raises(ConfigError, match="device='cuda' .* use device='cpu'"):
        build(folder, device="cuda")


def test_cache_size_is_set_once() -> None:
    with pytest.raises(ConfigError, match="num_gpu_blocks=9 is not allowed with kv_cache_memory"):
        EngineConfig(num_gpu_blocks=9, kv_cache_memory_bytes=1 << 30)


def test_missing_model(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no" / "such" / "folder")
    with pytest.raises(ConfigError) as caught:
        LLM(nowhere)
    assert f"model={nowhere!r}" in str(caught.value) and "Name a folder" in str(caught.value)


def test_cache_too_small_for_one_request(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CPU_CACHE_BYTES", 40_000)
    with pytest.raises(CapacityError) as caught:
        build(folder)
    message = str(caught.value)
    assert "room for 2 pages of 64 tokens" in message and "at least 3 are needed" in message
    assert "max_model_len" in message.partition(" Lower ")[2]


def test_cache_uses_the_given_bytes(folder: str) -> None:
    usual = build(folder).engine.plan
    num_bytes = usual.page_bytes * 5 + usual.page_bytes // 2
    assert build(folder, kv_cache_memory_bytes=num_bytes).engine.plan.num_pages == 5
    with pytest.raises(CapacityError, match="the KV cache has room for 0 pages"):
        build(folder, kv_cache_memory_bytes=1)


def test_hf_overrides_change_model_and_numerics(folder: str) -> None:
    usual = build(folder).engine
    result = build(folder, hf_overrides={"rms_norm_eps": 0.5}).engine
    assert executor_of(result).checkpoint.raw["rms_norm_eps"] == 0.5
    assert "/hf-overrides-" in result.numerics and result.fingerprint != usual.fingerprint
    assert build(folder, hf_overrides={}).engine.numerics == usual.numerics


def test_page_pool_too_small_for_one_prompt(folder: str) -> None:
    llm = build(folder, num_gpu_blocks=2, num_snapshots=0)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
    with pytest.raises(CapacityError) as caught:
        llm.generate({"prompt_token_ids": [1] * 64}, params)
    message = str(caught.value)
    assert "prompt is too long: 64 tokens > 63 maximum" in message
    assert "1 pages of 64" in message and "more pages" in message
    out = llm.generate({"prompt_token_ids": [1] * 63}, params)[0].outputs[0]
    assert (len(out.token_ids), out.finish_reason) == (1, "length")


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("k", [0, 1, MAX_DRAFTS])
@pytest.mark.parametrize("length", [63, 64, 250])
def test_plan_follows_from_the_config(folder: str, k: int, length: int) -> None:
    spec = {"method": "ngram", "num_speculative_tokens": k} if k else None
    llm = build(folder, max_model_len=length, row_buckets=(9, 1, 1), speculative_config=spec)
    plan = llm.engine.plan
    assert (plan.device, plan.dtype, plan.graph_mode) in (
        ("cpu", "float32", "none"),
        ("cuda", "bfloat16", "full"),
    )
    assert (plan.max_model_len, plan.max_num_seqs, plan.query_len) == (length, 2, k + 1)
    assert plan.row_buckets == (1, 2), "sorted, none above max_num_seqs, max_num_seqs among them"
    assert plan.num_slots == 1 + 2 + 4, "the null slot, a slot per row, two snapshots per row"
    assert plan.history_len >= length + 2 * plan.query_len
    assert plan.row_columns == math.ceil(plan.history_len / plan.page_size)
    assert plan.num_pages >= plan.max_num_seqs * math.ceil(length / plan.page_size) + 1
    assert plan.dtype in plan.numerics and plan.numerics == llm.engine.numerics
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_pages = 1  # type: ignore[misc]


def test_explain_reports_every_plan_field(folder: str) -> None:
    reported = build(folder).engine.explain()
    assert set(reported["plan"]) == {field.name for field in dataclasses.fields(Plan)}
    assert reported["plan"]["model_path"] == folder
