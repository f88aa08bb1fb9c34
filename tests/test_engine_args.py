"""Keywords of LLM: settings, vLLM's flags, and explanations of all others."""

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lockstep import EngineArgs
from lockstep.engine_args import keyword_values
from lockstep.errors import ConfigError
from lockstep.flags.flag import Kind
from lockstep.flags.table import SERVER_OPTIONS, all_flags
from lockstep.serve.settings import ServerSettings
from tests.tiny_model import make_model


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"enforce_eager": True}, {"cuda_graph_mode": "none"}),
        ({"enforce_eager": False}, {}),
        ({"dtype": "half", "max_model_len": None}, {"dtype": "float16"}),
        ({"num_gpu_blocks_override": 64}, {"num_gpu_blocks": 64}),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {"cuda_graph_mode": "piecewise"}),
        ({"speculative_config": None}, {"speculative_config": None}),
        ({"speculative_config": "auto"}, {"speculative_config": "auto"}),
        ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
        ({"tokenizer_mode": "auto", "cpu_offload_gb": 0, "task": "generate"}, {}),
        ({"reasoning_parser": "qwen3", "num_snapshots": 3}, None),
        ({"disable_log_stats": True, "enable_log_requests": False}, {}),
    ],
    ids=str,
)
def test_keyword_values(arguments: dict[str, Any], settings: dict[str, Any] | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keyword_values(arguments) == (arguments if settings is None else settings)


def test_flag_without_effect_warns_in_python_terms() -> None:
    with pytest.warns(UserWarning) as reported:
        assert (
            keyword_values({"max_seq_len_to_capture": 8192, "enable_chunked_prefill": False}) == {}
        )
    lines = [str(one.message) for one in reported]
    assert lines[0].startswith("max_seq_len_to_capture has no effect: graphs")
    assert "cut at max_num_batched_tokens" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not.*tensor_parallel_size"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds=True is not supported: prompts"),
        ({"tokenizer": "other"}, "tokenizer='other' is not allowed.*another tokenizer.json"),
        ({"revision": "v2"}, "revision='v2' is not.*`hf download ID --revision REVISION`"),
        ({"disable_log_stats": False}, "disable_log_stats is a setting of the HTTP server"),
        ({"api_key": "k"}, "api_key is a setting of the HTTP server.*--api-key of lockstep serve"),
        ({"request_timeout": 3.0}, "request_timeout is a setting of the HTTP server"),
        ({"gpu_memory_utilisation": 0.5}, "Did you mean gpu_memory_utilization"),
        ({"max_num_seq": 4}, "setting='max_num_seq' is not allowed.*Did you mean max_num_seqs"),
        ({"compilation_config": {"cudagraf_mode": 1}}, "compilation_config key='cudagraf_mode'"),
    ],
    ids=str,
)
def test_refused_keyword_suggests_a_remedy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        keyword_values(arguments)
    assert "_" not in str(caught.value).split()[0][:1]


def test_every_serve_flag_is_accepted_or_explained() -> None:
    """With a value of a type that no flag expects; no flag fails otherwise."""
    for flag in all_flags():
        name = flag.name.replace("-", "_")
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            try:
                taken = keyword_values({name: "sonder"})
            except ConfigError as error:
                assert str(error).startswith(name) and len(str(error)) > len(name) + 20
                continue
        assert bool(taken) != bool(reported) or (flag.kind is Kind.ACTS and not flag.setting), name


def test_server_options_are_known() -> None:
    flags = {flag.name.replace("-", "_") for flag in all_flags()}
    assert {one.name for one in fields(ServerSettings)} <= {*flags, *SERVER_OPTIONS}


def test_drafter_defaults_to_the_checkpoint(tmp_path: Path) -> None:
    model = str(make_model(tmp_path))
    for messages, method in (({}, "mtp"), ({"speculative_config": "auto"}, "mtp")):
        config, _ = EngineArgs(model, load_format="dummy", **messages).read()
        assert config.speculative_config is not None and config.speculative_config.method == method
        assert config.max_drafts == 3
    config, _ = EngineArgs(model, load_format="dummy", speculative_config=None).read()
    assert config.speculative_config is None
