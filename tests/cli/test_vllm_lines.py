"""Command lines of vllm serve as users write them.

Most tests check the configuration from which an engine would be built for a tiny model. One test
runs three servers.
"""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from lockstep.__main__ import main
from lockstep.cli import app
from lockstep.config import EngineConfig, StepLimits
from lockstep.models.checkpoint import Checkpoint
from lockstep.quantization import read_weight_format
from lockstep.worker.build import pick_device, step_limits
from tests.forked_processes import ForkedProgram
from tests.quantization.disk import Codes, gptq, random_codes, set_config, write
from tests.tiny_model import make_model

ROOT = Path(__file__).parent.parent.parent
MAX_POSITIONS = 262_144
"""Maximum positions of the models for which the command lines were written."""
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}

FIRST = (
    "serve M --gpu-memory-utilization 0.85 --language-model-only --speculative-config "
    """'{"method":"qwen3_next_mtp","num_speculative_tokens":2}' --port 8000"""
)
QUANTIZED = (
    "serve M --quantization auto_round --dtype float16 --tensor-parallel-size 1 "
    "--max-model-len 125000 --kv-cache-dtype turboquant_3bit_nc --speculative-config "
    """'{"method":"mtp","num_speculative_tokens":3}'"""
)
EAGER = (
    "serve M --enforce-eager --mamba-ssm-cache-dtype float32 --attention-backend TRITON_ATTN "
    "--kv-cache-dtype fp8"
)
NGRAM = (
    """serve M --speculative-config '{"method":"ngram","num_speculative_tokens":5,"""
    """"prompt_lookup_max":4,"prompt_lookup_min":2}'"""
)
ALIGNED = "serve M --mamba-cache-mode align --max-num-batched-tokens 16384"


class _BuiltError(Exception):
    """Exception with the configuration, raised instead of building the engine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config = config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(make_model(path, max_position_embeddings=MAX_POSITIONS))


@pytest.fixture
def quantized(tmp_path: Path) -> str:
    changes = {"max_position_embeddings": MAX_POSITIONS, "quantization_config": AUTO_ROUND}
    return str(make_model(tmp_path / "packed", **changes))


def words(line: str, model: str) -> list[str]:
    """Split a command line, and replace M by the folder."""
    return [model if word == "M" else word for word in shlex.split(line)]


def invoke(arguments: list[str]) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def build_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: command line to (EngineConfig, StepLimits, stderr)."""

    def stop(config: EngineConfig, *rest: Any) -> None:
        raise _BuiltError(config)

    def stop_process(make: partial[Any], *rest: Any) -> None:
        raise _BuiltError(make.args[0])

    monkeypatch.setattr("lockstep.llm.Engine", stop)
    monkeypatch.setattr("lockstep.engine.process_transport.ProcessTransport", stop_process)
    monkeypatch.setattr("lockstep.serve.server.Address.bind", lambda address: socket.socket())

    def run(line: str, model: str) -> tuple[EngineConfig, StepLimits, str]:
        result = invoke(words(line, model))
        assert isinstance(result.exception, _BuiltError), (result.exception, result.output)
        config = result.exception.config
        checkpoint = Checkpoint.read(Path(str(config.model)), config.hf_overrides)
        weight_format = read_weight_format(checkpoint.quantization(), config.quantization)
        limits = step_limits(config, checkpoint, pick_device(config), weight_format)
        return config, limits, result.stderr

    return run


def test_language_model_only_with_an_older_name_of_mtp(build_config: Any, folder: str) -> None:
    config, limits, notes = build_config(FIRST, folder)
    assert config.gpu_memory_utilization == 0.85
    assert config.speculative_config.method == "mtp" and limits.query_len == 3
    assert not notes.strip(), "all of it acts"


def test_auto_round_with_a_rotated_cache(build_config: Any, quantized: str) -> None:
    config, limits, notes = build_config(QUANTIZED, quantized)
    assert limits.quantization is not None and limits.quantization.startswith("auto-round")
    assert (limits.dtype, limits.max_model_len) == ("float16", 125_000)
    assert config.kv_cache_dtype == "turboquant_3bit_nc" and "turboquant" in limits.numerics
    assert config.speculative_config.num_speculative_tokens == 3 and not notes.strip()


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [
        ("NONE", "none"),
        ("PIECEWISE", "piecewise"),
        ("FULL", "full"),
        ("FULL_AND_PIECEWISE", "full"),
        ("FULL_DECODE_ONLY", "full"),
    ],
)
def test_compilation_config(mode: str, graphs: str, build_config: Any, quantized: str) -> None:
    line = f"""{QUANTIZED} --compilation-config '{{"cudagraph_mode":"{mode}"}}'"""
    config, _, notes = build_config(line, quantized)
    assert config.cuda_graph_mode == graphs and not notes.strip()


def test_eager_with_a_named_backend(build_config: Any, folder: str) -> None:
    config, limits, notes = build_config(EAGER, folder)
    assert (config.cuda_graph_mode, config.kv_cache_dtype) == ("none", "fp8")
    assert "state-float32" in limits.numerics
    assert "\n" not in notes.strip() and "--attention-backend has no effect" in notes


def test_ngram_and_an_aligned_cache(build_config: Any, folder: str) -> None:
    config, limits, _ = build_config(NGRAM, folder)
    drafting = config.speculative_config
    assert (drafting.prompt_lookup_min, drafting.prompt_lookup_max) == (2, 4)
    assert limits.query_len == 6
    config, limits, notes = build_config(ALIGNED, folder)
    assert limits.max_num_batched_tokens == 16_384 and config.num_snapshots is None
    assert not notes.strip()


def test_host_memory_tier(build_config: Any, folder: str) -> None:
    line = "serve M --kv-offloading-size 4.5 --kv-offloading-backend native"
    config, _, notes = build_config(line, folder)
    assert config.kv_offloading_size == 4.5 and not notes.strip()
    config, _, notes = build_config(
        "serve M --swap-space 4 --kv-offloading-backend lmcache", folder
    )
    assert config.kv_offloading_size == 0
    assert "--swap-space has no effect" in notes and "moved by Lockstep itself" in notes


def test_a_socket_has_no_port(build_config: Any, folder: str) -> None:
    *_, notes = build_config("serve M --uds /tmp/socket --port 9000", folder)
    assert notes.strip() == "--port has no effect with --uds."
    *_, notes = build_config("serve M --uds /tmp/socket", folder)
    assert not notes.strip()


def test_drafters_with_a_folder_and_suffix_lookup(build_config: Any, folder: str) -> None:
    """A model without a method is a draft model, as in vLLM; unused keys are noted."""
    config, limits, notes = build_config("serve M --spec-model here --spec-tokens 15", folder)
    drafting = config.speculative_config
    assert (drafting.method, drafting.model) == ("draft_model", "here")
    assert limits.query_len == 16
    assert not notes.strip()
    config, *_ = build_config("serve M --spec-method eagle3 --spec-model here", folder)
    drafting = config.speculative_config
    assert (drafting.method, drafting.model) == ("eagle3", "here")
    keys = """'{"method":"suffix","suffix_decoding_max_tree_depth":12,"""
    keys += """"suffix_decoding_min_token_prob":0.1}'"""
    config, _, notes = build_config(f"serve M --speculative-config {keys}", folder)
    assert config.speculative_config.suffix_decoding_max_tree_depth == 12
    assert "suffix_decoding_min_token_prob" in notes


def test_sizes_names_and_config_file(build_config: Any, folder: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "max-model-len: 8K\nmax-num-seqs: 4\nenforce-eager: true\n"
        "hf-overrides: {rope_parameters: {rope_theta: 20000.0}}\n"
        "compilation-config: {cudagraph_capture_sizes: [1, 2]}\n"
    )
    line = f"serve M --config {path} --max-num-seqs 2 -tp 1 -q none --load-format safetensors"
    config, limits, _ = build_config(line, folder)
    assert (limits.max_model_len, limits.max_num_seqs) == (8192, 2)
    assert limits.row_buckets == (1, 2) and config.load_format == "auto"
    assert config.hf_overrides == {"rope_parameters": {"rope_theta": 20000.0}}
    plain = build_config("serve M", folder)[1]
    assert "/hf-overrides-" in limits.numerics and "/hf-overrides-" not in plain.numerics


@pytest.mark.parametrize("name", ["gptq", "gptq_marlin", "moe_wna16"])
def test_names_of_one_family(name: str, build_config: Any, tmp_path: Path) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    model = make_model(tmp_path / "gptq", quantization_config={**settings, "desc_act": False})
    limits = build_config(f"serve M --quantization {name}", str(model))[1]
    assert limits.quantization.startswith("gptq")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size=2 is not allowed; allowed: 1."),
        ("--tool-call-parser mistral", "tool_call_parser='mistral' is not allowed; allowed: auto"),
        ("--reasoning-parser gptoss", "reasoning_parser='gptoss' is not allowed"),
        ("--chat-template /no/file", "chat_template='/no/file' is not allowed; allowed: a file"),
        ("--generation-config /no/dir", "generation_config='/no/dir' is not allowed; allowed: a"),
        ("--override-generation-config '{\"temp\": 1}'", "key='temp' is not allowed; allowed: t"),
        ("--override-generation-config '{\"top_p\": 7}'", "top_p=7 is not allowed"),
        ("--override-generation-config hot", "override_generation_config='hot' is not allowed"),
        ("--hf-overrides 5", "hf_overrides='5' is not allowed"),
        ("--max-logprobs -1", "max_logprobs=-1 is not allowed; allowed: whole numbers from 0 to"),
        ("--root-path llm", "root_path='llm' is not allowed; allowed: a path that begins with /"),
        ("--allow-credentials --allowed-origins '*'", "not allowed with allowed_origins='*'"),
        ("--gpu-memry-utilization 0.9", "Did you mean --gpu-memory-utilization?"),
        ('--speculative-config \'{"method":"medusa"}\'', "method='medusa' is not allowed; allo"),
        ('--speculative-config \'{"method":"dflash"}\'', "model='' is not allowed; allowed: a fol"),
        ("--port many", "--port='many' is not allowed; allowed: a number"),
    ],
)
def test_errors_come_before_loading(
    arguments: str,
    message: str,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["lockstep", "serve", folder, *shlex.split(arguments)])
    monkeypatch.setattr("lockstep.serve.server.Address.bind", lambda address: socket.socket())
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and message in shown and "Traceback" not in shown


MODES = ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
BUNDLED = ROOT / "lockstep" / "assets" / "model"
BODY = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}
ONE_PROCESS = "--disable-frontend-multiprocessing"
RUN_COMMANDS = """
import json, sys
from lockstep.__main__ import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lockstep", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended
"""
"""Program that runs command lines one after another, since importing torch takes longest."""


def ask_next_server(
    server: subprocess.Popen[str] | ForkedProgram, body: dict[str, Any]
) -> dict[str, Any]:
    """Return /v1/models and a completion of the next server that is ready, and interrupt it."""
    assert server.stdout is not None and server.stderr is not None
    ready = None
    while ready is None:
        line = server.stdout.readline()
        assert line, server.stderr.read()
        ready = re.match(r"Ready: .* at (http://127\.0\.0\.1:\d+)", line)
    with httpx.Client(base_url=ready[1], timeout=60) as client:
        models = client.get("/v1/models").json()["data"]
        answer = client.post("/v1/completions", json=body).json()
    server.send_signal(signal.SIGINT)
    return {"models": models, "answer": answer}


def ask_servers(lines: list[list[str]], body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Run command lines one by one; return what each server answers, and the error output."""
    server = ForkedProgram(RUN_COMMANDS, [json.dumps(lines)])
    try:
        answers = [ask_next_server(server, body) for _ in lines]
        _, errors = server.communicate(timeout=30)
        assert server.returncode == 0
        return answers, errors
    finally:
        server.kill()


def quantized_folder(folder: Path) -> Path:
    """Return the bundled model with one quantized module, and positions for 125,000 tokens."""

    def pick(name: str, n: int, k: int) -> Codes | None:
        return random_codes(n, k) if name.endswith("layers.0.mlp.down_proj") else None

    tensors = load_file(BUNDLED / "model.safetensors")
    lay = partial(gptq, g_idx=False)
    pair = write(folder, tensors, BUNDLED, AUTO_ROUND, pick, lay)
    set_config(pair.quantized, max_position_embeddings=MAX_POSITIONS)
    return pair.quantized


@pytest.mark.slow
def test_command_lines_of_two_servers(tmp_path: Path) -> None:
    """The servers have an engine process, and a quantized checkpoint."""
    model = str(BUNDLED)
    rows = ("--max-num-seqs", "2")
    short = (*rows, "--max-model-len", "512")
    first = [*words(FIRST.replace("8000", "0"), model), *short]
    quantized = [
        *words(QUANTIZED, str(quantized_folder(tmp_path))),
        *rows,
        ONE_PROCESS,
        "--port",
        "0",
    ]
    (of_first, of_packed), notes = ask_servers([first, quantized], BODY)
    assert of_first["answer"]["usage"]["completion_tokens"] == 8
    assert of_first["models"][0]["id"] == of_first["answer"]["model"] == model
    assert of_first["models"][0]["default_sampling_params"] == {"temperature": 0.0}
    assert "mtp K=2" in notes
    assert of_packed["answer"]["usage"]["completion_tokens"] == 8
    assert of_packed["models"][0]["max_model_len"] == 125_000
    assert "weights-float16+auto-round" in notes and "kv-turboquant_3bit_nc" in notes


def test_command_line_of_an_eager_server() -> None:
    rows = ("--max-num-seqs", "2", "--max-model-len", "512")
    names = ("--served-model-name", "a", "b")
    eager = [*words(EAGER, str(BUNDLED)), *rows, ONE_PROCESS, *names, "--port", "0"]
    (of_eager,), notes = ask_servers([eager], {**BODY, "model": "b"})
    assert [model_card["id"] for model_card in of_eager["models"]] == ["a", "b"]
    assert of_eager["answer"]["model"] == "a"
    assert len(of_eager["answer"]["choices"][0]["text"]) > 0
    assert "--attention-backend has no effect" in notes
    assert "kv-fp8_e4m3" in notes and "state-float32" in notes


@pytest.mark.gpu
def test_every_graph_mode_serves_the_same_tokens() -> None:
    """The bundled model samples with drafts in every graph mode."""
    drafts = json.dumps({"method": "qwen3_next_mtp", "num_speculative_tokens": 2})
    shared = ["--max-num-seqs", "2", "--max-model-len", "512", "--num-gpu-blocks", "64"]
    line = ["serve", str(BUNDLED), *shared, "--speculative-config", drafts, "--port", "0"]
    configs = [json.dumps({"cudagraph_mode": mode}) for mode in MODES]
    lines = [[*line, ONE_PROCESS, "--compilation-config", mode] for mode in configs]
    body = {"prompt": [BODY["prompt"]] * 2, "max_tokens": 40, "temperature": 0.8, "seed": 3}
    command = [sys.executable, "-c", RUN_COMMANDS, json.dumps(lines)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as server:
        try:
            replies = [ask_next_server(server, {**body, "return_token_ids": True}) for _ in MODES]
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()
    plain, *other_modes = (
        [c["token_ids"] for c in reply["answer"]["choices"]] for reply in replies
    )
    assert all(len(tokens) == 40 for tokens in plain)
    assert other_modes == [plain] * len(other_modes)
