"""The command line on a tiny model, as users run it."""

import io
import json
import re
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import lockstep
from lockstep.__main__ import main
from lockstep.bench import offline
from lockstep.check.matrix import cases, setups, tokens
from lockstep.check.matrix.setups import Setup
from lockstep.cli import app
from lockstep.cli.chat import take_turn
from lockstep.cli.conversation import LocalModel
from lockstep.cli.explain import spans
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError, RequestError
from lockstep.example_prompts import CONVERSATIONS
from lockstep.llm import LLM
from lockstep.sampling_params import SamplingParams
from lockstep.worker import explain
from tests.tiny_model import DEEPSEEK, TWO_LAYERS, make_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = make_model(tmp_path_factory.mktemp("model"), **TWO_LAYERS)
    return str(folder)


STEP_SIZE = ("--max-num-seqs", "4", "--max-num-batched-tokens", "2048")
"""One size of steps to run dry. Without it, explain for an absent GPU compares several."""


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=input, catch_exceptions=False)


def dummy(model: str) -> tuple[str, ...]:
    return ("--model", model, "--load-format", "dummy", "--max-num-seqs", "4")


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "check", "bench", "explain"])
def test_every_engine_setting_is_an_option(command: str) -> None:
    """With a wide terminal, so that no name is cut."""
    help = CliRunner(env={"COLUMNS": "300"}).invoke(app, [command, "--help"]).output
    missing = [f.name for f in fields(EngineConfig) if f"--{f.name.replace('_', '-')}" not in help]
    assert not missing


@pytest.mark.parametrize("command", ["serve", "bench", "top", "check"])
def test_help_is_complete_on_a_narrow_terminal(command: str) -> None:
    """Every line fits, no option is cut, and -h is --help."""
    narrow = CliRunner(env={"COLUMNS": "60"})
    help = narrow.invoke(app, [command, "--help"]).output
    wide = CliRunner(env={"COLUMNS": "300"}).invoke(app, [command, "--help"]).output
    flags = re.compile(r"--[a-z][\w-]+")
    assert set(flags.findall(wide)) <= set(flags.findall(help.replace("-\n", "-")))
    assert "…" not in help and "╭" not in help
    assert help == narrow.invoke(app, [command, "-h"]).output


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("foo",), "command 'foo' is not known; allowed: serve, generate.*lockstep --help"),
        (("serv",), "Did you mean serve"),
        (("top", "a", "b"), r"extra argument.*\(b\).*lockstep top --help"),
        (("check", "a", "b"), r"extra argument.*\(b\).*lockstep check all --help"),
        (("bench", "kernels", "--modl", "x"), "--modl is not an option .*Did you mean --model"),
        (("--nope",), "--nope is not an option"),
        (("bench", "serve", "--rates", "x"), "Did you mean --rate"),
    ],
)
def test_usage_errors_are_one_line(words: tuple[str, ...], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported) as raised:
        app(list(words), prog_name="lockstep", standalone_mode=False)
    assert "\n" not in str(raised.value)


def test_help_names_every_command() -> None:
    """Also subcommands and aliases."""
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, []).output
    for words in ("serve", "generate", "chat", "explain", "top", "configuration", "vllm-flags",
                  "check quality", "bench drafters", "bench kernels", "bench serving",
                  "bench serve", "bench latency", "bench throughput"):  # fmt: skip
        assert re.search(rf"\b{words}\b", shown), words
    below = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "--help"]).output
    assert "bench [OPTIONS] [model]" in below
    assert "bench kernels" in below


def test_version_option() -> None:
    assert run("--version").stdout == f"lockstep {lockstep.__version__}\n"


def test_two_models_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="model='other' and --model=.* are two models"):
        run("explain", "other", "--model", model)


def test_missing_path_is_no_hub_id(tmp_path: Path) -> None:
    """The hub is not queried, and its messages about ids are not shown."""
    file = tmp_path / "file"
    file.touch()
    for path in (str(tmp_path / "none"), str(file), "./none", "~/none"):
        with pytest.raises(ConfigError, match="is neither an existing folder or GGUF file nor"):
            run("explain", path)


def test_no_progress_bar_without_a_terminal(model: str) -> None:
    shown = run("generate", "-p", "hello", "--max-tokens", "2", *dummy(model))
    assert shown.stderr.startswith(f"{model} on cpu, mtp K=3, max_num_seqs 4, KV cache of ")


def test_configuration_page_is_current() -> None:
    """Update: lockstep configuration > docs/configuration.md."""
    assert run("configuration").stdout == (ROOT / "docs" / "configuration.md").read_text()


def test_generate_prints_the_streamed_text(model: str) -> None:
    request = (
        "generate",
        "-p",
        "hello fox",
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        *dummy(model),
    )
    streamed = run(*request)
    complete = run(*request, "--json")
    assert streamed.exit_code == complete.exit_code == 0
    answer = json.loads(complete.stdout)
    assert streamed.stdout == answer["text"] + "\n"
    assert len(answer["token_ids"]) == 12 and answer["finish_reason"] == "length"
    assert answer["system_fingerprint"].startswith("ls-")


def test_generate_reads_prompt_from_pipe_and_seed_flag(model: str) -> None:
    request = ("generate", "--seed", "7", "--max-tokens", "8", "--json", *dummy(model))
    piped = json.loads(run(*request, input="hello fox").stdout)
    flagged = json.loads(run(*request, "-p", "hello fox").stdout)
    assert piped["token_ids"] == flagged["token_ids"] and piped["seed"] == 7


def test_compare_shows_equal_tokens(model: str) -> None:
    request = ("generate", "-p", "the quick", "--compare", "--max-tokens", "8", *dummy(model))
    shown = run(*request)
    assert shown.exit_code == 0 and "the tokens agree" in shown.stdout
    result = json.loads(run(*request, "--json").stdout)
    assert result["agree"] and result["plain"]["acceptance_length"] == 1.0
    assert result["drafted"]["tokens"] == result["plain"]["tokens"] == 8


def test_compare_fails_where_tokens_differ(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = offline.measure

    def tampered(llm: LLM, *arguments: object) -> object:
        figures, outputs = measure(llm, *arguments)  # type: ignore[arg-type]
        if llm.engine.config.max_drafts:
            outputs[0].outputs[0].token_ids[-1] += 1
        return figures, outputs

    monkeypatch.setattr(offline, "measure", tampered)
    shown = run("generate", "-p", "the quick", "--compare", "--max-tokens", "8", *dummy(model))
    assert shown.exit_code == 1 and "the tokens differ" in shown.stdout


def test_explain_names_ops_backends_and_the_plan(model: str) -> None:
    result = json.loads(run("explain", "--json", *dummy(model)).stdout)
    assert {"paged_attention", "gated_delta_step", "linear"} <= {c["op"] for c in result["layers"]}
    assert result["plan"]["max_num_seqs"] == 4 and result["plan"]["query_len"] == 4
    shown = run("explain", *dummy(model))
    assert shown.exit_code == 0 and "paged_attention" in shown.stdout
    assert re.search(r"cache_bytes +│ [\d.]+ [kMG]B", shown.stdout)
    why = {reason for choice in result["layers"] for reason in choice["refused"].items()}
    assert shown.stdout.count("\nrefused ") == len(why)


def test_consecutive_layers_are_a_span() -> None:
    indices = ["layers.0", "layers.1", "layers.2", "layers.4", "mtp.layers.5", "norm", "layers.9"]
    assert spans(indices) == "layers.0-2, layers.4, mtp.layers.5, norm, layers.9"


def test_explain_for_an_absent_gpu(model: str) -> None:
    """Hopper's kernel is refused with a reason; a request of full length fits, or does not."""
    request = ("explain", "--arch", "sm_86", "--model", model, *STEP_SIZE)
    result = json.loads(run(*request, "--json", "--gpu-memory-bytes", "24e9").stdout)
    chosen = {one["op"]: one for one in result["layers"]}
    assert chosen["paged_attention"]["backend"] == "triton"
    assert "hopper" in chosen["paged_attention"]["refused"]
    assert {"linear", "sample", "prepare_step"} <= chosen.keys()
    assert {"linear", "paged_attention"} == {one["op"] for one in result["tiles"]}
    plan = result["plan"]
    assert plan["fits"] and plan["weights_bytes"] > 0 and plan["num_pages"] > 64
    small = json.loads(run(*request, "--json", "--gpu-memory-bytes", "1e9").stdout)["plan"]
    assert not small["fits"] and small["why"] and small["weights_bytes"] == plan["weights_bytes"]


@pytest.mark.slow
def test_last_line_of_explain_for_an_absent_gpu(model: str) -> None:
    request = ("explain", "--arch", "sm_86", "--model", model, "--max-num-seqs", "4")
    plan = json.loads(run(*request, "--json", "--gpu-memory-bytes", "24e9").stdout)["plan"]
    small = json.loads(run(*request, "--json", "--gpu-memory-bytes", "1e9").stdout)["plan"]
    roomy = run(*request, "--gpu-memory-bytes", "24GB").stdout.splitlines()[-1]
    assert roomy == f"The model fits, with a KV cache of {plan['cache_tokens']:,} tokens."
    tight = run(*request, "--gpu-memory-bytes", "1e9").stdout.splitlines()[-1]
    assert "other programs" not in tight  # on a card that is not there are none
    assert tight.startswith("The model does not fit: ") and small["why"] in tight
    shown = run(*request)
    assert shown.exit_code == 0 and "needed_bytes" in shown.stdout
    assert shown.stdout.splitlines()[-1].startswith("Add --gpu-memory-bytes")


def test_explain_shows_the_ranks_of_an_absent_host(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain_anew = explain.explain_architecture
    explanations: dict[str, Any] = {}

    def explain_once(config: EngineConfig, *gpu: Any) -> dict[str, Any]:
        """Return an equal command's explanation, whose dry run takes a second."""
        key = repr((config, gpu))
        explanations[key] = explanations.get(key) or explain_anew(config, *gpu)
        return explanations[key]

    monkeypatch.setattr(explain, "explain_architecture", explain_once)
    request = ("explain", "--arch", "sm_90", "--model", model, *STEP_SIZE, "-tp", "2")
    result = json.loads(run(*request, "--json").stdout)["ranks"]
    assert len(result["bytes"]) == 2
    shown = run(*request).stdout
    for title in ("Ranks", "Exchanges", "Floor of a rank's step"):
        assert f"\n{title}" in shown
    assert "backend: push or nccl" in shown and f"{result['steps'][0]['exchanges']} │" in shown
    assert "\nRanks" not in run(*request[:-2]).stdout


@pytest.mark.slow
def test_explain_counts_a_reduced_draft_head(model: str) -> None:
    """For an absent GPU its rows of the target's head are only counted."""
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    request = ("explain", "--arch", "sm_86", "--model", model, "--json", "--speculative-config")
    complete = json.loads(run(*request, json.dumps(drafts)).stdout)["plan"]
    drafts["draft_vocab_size"] = 128
    some = json.loads(run(*request, json.dumps(drafts)).stdout)["plan"]
    assert some["weights_bytes"] > complete["weights_bytes"]


def test_explain_counts_a_16_bit_state(model: str) -> None:
    request = ("explain", "--arch", "sm_86", "--model", model, *STEP_SIZE, "--json")
    plans = [json.loads(run(*request, "--mamba-ssm-cache-dtype", kept).stdout)["plan"]
             for kept in ("auto", "bfloat16")]  # fmt: skip
    assert [plan["state_dtype"] for plan in plans] == ["float32", "bfloat16"]
    assert plans[0]["slot_bytes"] != plans[1]["slot_bytes"]


@pytest.mark.slow
def test_explain_counts_latents_in_a_kv_format(tmp_path: Path) -> None:
    """With DeepSeek-V3's sizes, which Hopper's kernel supports, quantized or not."""
    sizes = dict(kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=16)
    folder = str(make_model(tmp_path / "latent", DEEPSEEK, **sizes, torch_dtype="bfloat16"))
    spec = json.dumps({"method": "ngram"})
    request = ("explain", "--arch", "sm_90", "--model", folder, "--speculative-config", spec)
    for kind, size in (("auto", 1152), ("fp8", 644), ("turboquant_4bit_nc", 386)):
        result = json.loads(run(*request, "--kv-cache-dtype", kind, "--json").stdout)
        assert result["plan"]["page_bytes"] == 3 * 64 * size
        chosen = {one["op"]: one["backend"] for one in result["layers"]}
        assert chosen["latent_attention"] == "hopper"
        assert "latent_attention" in {one["op"] for one in result["tiles"]}


def test_explain_error_names_known_architectures(model: str) -> None:
    with pytest.raises(ConfigError, match="sm_80.*sm_121"):
        run("explain", "--arch", "sm_75", "--model", model)
    with pytest.raises(ConfigError, match="gpu_memory_bytes"):
        run("explain", "--gpu-memory-bytes", "24e9", "--model", model)
    with pytest.raises(ConfigError, match="gpu_memory_bytes='24Q' is not allowed; .*24GiB"):
        run("explain", "--arch", "sm_86", "--gpu-memory-bytes", "24Q", "--model", model)


def test_compile_without_a_gpu_needs_an_architecture(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"arch is missing.*Pass --arch"):
        run("compile", "--model", model)
    with pytest.raises(ConfigError, match="sm_80.*sm_121"):
        run("compile", "--arch", "sm_75", "--model", model)


def test_bench_ends_with_one_line_of_json(model: str) -> None:
    shown = run(
        *("bench", "--input-len", "70", "--output-len", "6", "--batch-size", "2"),
        *("--num-iters-warmup", "0", "--num-iters", "2", *dummy(model)),
    )
    result = json.loads(shown.stdout.splitlines()[-1])
    assert result["tokens"] == 12 and result["prompt_tokens"] == 140 and result["runs"] == 2
    assert result["speculative_config"]["method"] == "mtp"


def test_check_status_table_and_json(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(setups.SIZES, "quick", setups.Size(max_tokens=4, alone=2, companions=1))
    monkeypatch.setattr(cases, "LONG_PROMPT", 300)
    engines = [Setup("ngram", 2, "cold", "none")]
    monkeypatch.setattr(tokens, "setups", lambda size, drafters, graphs: engines)
    request = ("check", "--quick", "--sections", "tokens,cache", "--skip-tokenizer-init")
    request += ("--load-format", "dummy", model)
    shown = run(*request)
    assert shown.exit_code == 0 and "11/11" in shown.stdout and "bit for bit" in shown.stdout
    result = json.loads(run(*request, "--quantization", "int8", "--json").stdout)
    assert (result["cases"], result["failed"]) == (11, 0) and "int8" in result["numerics"]
    engines[:] = [Setup("ngram", 2, "preempted", "none")]
    monkeypatch.setattr(tokens, "count_events", lambda answers: Counter())
    assert run(*request).exit_code == 1


@pytest.mark.parametrize("coding", ["utf-8", "ascii"])
def test_invalid_input_bytes_are_a_one_line_error(
    model: str, coding: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With strict decoding of a terminal's text."""
    pipe = io.TextIOWrapper(io.BytesIO(b"a\xffb"), encoding=coding, errors="strict")
    monkeypatch.setattr("sys.stdin", pipe)
    monkeypatch.setattr("sys.argv", ["lockstep", "generate", "--max-tokens", "1", *dummy(model)])
    with pytest.raises(SystemExit) as ended:
        main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and last.startswith("RequestError: prompt: character")


def test_piped_prompt_is_bounded(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lockstep.cli.generate"], "MAX_STDIN_CHARACTERS", 7)
    assert run("generate", "--max-tokens", "1", *dummy(model), input="x" * 7).exit_code == 0
    with pytest.raises(ConfigError, match="more than 7 characters"):
        run("generate", *dummy(model), input="x" * 8)


def test_parameters_are_checked_before_the_model() -> None:
    with pytest.raises(RequestError, match="temperature=-1.0 is not allowed"):
        run("generate", "/nowhere", "-p", "a", "--temperature", "-1")


def test_generate_argument_is_the_model(model: str) -> None:
    short = ("--max-tokens", "4", "--temperature", "0")
    options = ("--prompt", "hello fox", *short, "--json", *dummy(model)[2:])
    named = json.loads(run("generate", model, *options).stdout)
    flagged = json.loads(run("generate", "--model", model, *options).stdout)
    assert named["token_ids"] == flagged["token_ids"] and named["prompt"] == "hello fox"


def test_prompt_as_model_error_names_the_option() -> None:
    with pytest.raises(ConfigError, match="model='What is a fox.*Write a prompt after -p"):
        run("generate", "What is a fox?")


def test_generate_without_a_prompt_shows_question_and_answer(model: str) -> None:
    request = ("generate", "--max-tokens", "4", "--temperature", "0", *dummy(model))
    shown = run(*request)
    result = json.loads(run(*request, "--json").stdout)
    assert result["prompt"] == CONVERSATIONS[0][0][-1]
    assert f"question: {result['prompt']}" in shown.stderr
    assert shown.stdout == result["text"] + "\n"


def test_chat_keeps_the_conversation(model: str) -> None:
    shown = run(
        "chat", "--max-tokens", "4", *dummy(model), input="hello\n\nagain\n/new\nhi\n/exit\n"
    )
    assert shown.exit_code == 0
    assert shown.stderr.count("acceptance length") == 3


def test_chat_asks_for_the_result_of_a_tool_call(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, load_format="dummy", max_num_seqs=1)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = (
        "<tool_call>\n<function=look>\n<parameter=at>\nsky\n</parameter>\n</function>\n</tool_call>"
    )
    texts = iter([call, "It is blue."])
    chat = llm.chat

    def answer(*arguments: object, **options: object) -> object:
        outputs = chat(*arguments, **options)  # type: ignore[arg-type]
        outputs[0].outputs[0].text = next(texts)
        return outputs

    monkeypatch.setattr(llm, "chat", answer)
    monkeypatch.setattr("builtins.input", lambda sign: f"blue ({sign})")
    messages: list[dict[str, object]] = [{"role": "user", "content": "Look."}]
    params = SamplingParams(max_tokens=4, temperature=0.0)
    take_turn(LocalModel(llm, params, [tool]), messages)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2]["content"] == "blue (result of look> )"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculative-config", "mtp"), "speculative_config='mtp' is not allowed"),
        (("--speculative-config", '{"method": "oracle"}'), "method='oracle' is not allowed"),
        (("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 16}'), "1 to 15"),
        (("--row-buckets", "1;2"), "row_buckets='1;2' is not allowed"),
        (("--max-model-len", "1000000"), "max_model_len=1000000 is not allowed"),
        (("--config", "x" * 9_999), "cannot be read: File name too long"),
        (("--row-buckets", "x" * 9_999), "xxx'... is not allowed"),
        (("--kv-cache-dtype", "\udcff"), "kv_cache_dtype='\\udcff' is not allowed"),
    ],
)
def test_errors_are_one_line_and_status_2(
    arguments: tuple[str, ...],
    message: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", "explain", *dummy(model), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and message in shown and "Traceback" not in shown
    assert len(shown) < 1000


def test_output_files_are_checked_first() -> None:
    with pytest.raises(ConfigError, match="report='/none/a.html' is not .*No such file"):
        run("check", "--quick", "--report", "/none/a.html")
    with pytest.raises(ConfigError, match="plot='/none/a.svg' is not .*No such file"):
        run("check", "quality", "--text", __file__, "--plot", "/none/a.svg")


def test_check_refuses_settings_that_it_varies(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="--max-num-batched-tokens is not allowed here"):
        run("check", "--quick", "--max-num-batched-tokens", "64", *dummy(model))
