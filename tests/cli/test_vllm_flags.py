"""vLLM's flags: each is in the table, and is checkpoint_folder as the table says."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from lockstep.cli import app
from lockstep.cli.vllm.page import page
from lockstep.cli.vllm.read import Option, Reader
from lockstep.errors import ConfigError
from lockstep.flags.flag import Kind, read_size
from lockstep.flags.table import GROUPS, all_flags
from lockstep.worker.build import CPU_ROWS, TOKENS

ROOT = Path(__file__).parent.parent.parent
NAMES = (ROOT / "tests" / "data" / "vllm_flags.txt").read_text().split()
"""Flags of vllm serve, each as --name or --name/-short."""
TEXT_OPTIONS = (
    "model",
    "dtype",
    "quantization",
    "kv-cache-dtype",
    "kv-cache-dtype-skip-layers",
    "max-model-len",
    "max-num-seqs",
    "tensor-parallel-size",
    "speculative-config",
    "cuda-graph-mode",
    "row-buckets",
    "steps-in-flight",
    "num-snapshots",
    "hf-overrides",
    "tool-call-parser",
    "port",
    "device",
    "config",
)
"""Text options of the command for which the tests read command lines."""


def read(*words: str) -> tuple[list[str], list[str]]:
    """Return (the checkpoint_folder command line, the notes)."""
    options = [
        Option(name, switch=False, repeatable=False, negatable=False) for name in TEXT_OPTIONS
    ]
    options += [Option(name, switch=False, repeatable=True, negatable=False) for name in REPEATABLE]
    options.append(Option("enable-prefix-caching", switch=True, repeatable=False, negatable=True))
    options.append(Option("no-docs", switch=True, repeatable=False, negatable=False))
    notes: list[str] = []
    return Reader(options, notes.append).line(list(words)), notes


REPEATABLE = ("api-key", "served-model-name", "lora-modules")


def only_word(*words: str) -> str:
    """Return the only word of the checkpoint_folder command line, which has no notes."""
    line, notes = read(*words)
    assert len(line) == 1 and not notes, (line, notes)
    return line[0]


def refusal(*words: str) -> str:
    """Return the error of a command line."""
    with pytest.raises(ConfigError) as caught:
        read(*words)
    return str(caught.value)


def test_every_flag_of_vllm_is_in_the_table_once() -> None:
    table = {flag.name: flag for flag in all_flags()}
    assert len(table) == len(all_flags()) and len(NAMES) > 240
    for entry in NAMES:
        name, _, short = entry.removeprefix("--").partition("/")
        assert name in table, f"{entry} is not in the table"
        assert not short or short in table[name].short


def test_page_is_generated_from_the_table() -> None:
    """If this fails, run: lockstep vllm-flags > docs/vllm_flags.md."""
    text = (ROOT / "docs" / "vllm_flags.md").read_text()
    assert text == page() == CliRunner().invoke(app, ["vllm-flags"]).stdout
    assert all(f"`--{flag.name}`" in text for flag in all_flags())
    assert f"256 where it fits, and is {CPU_ROWS} on a CPU" in text.replace("\n", " ")
    assert f"`--max-num-batched-tokens` is {TOKENS:,}, or fewer" in text


@pytest.fixture(scope="module")
def serve_help() -> str:
    """Return the output of serve --help on a wide terminal."""
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["serve", "--help"]).output


@pytest.mark.parametrize("group", GROUPS)
def test_entries_are_complete(group: str, serve_help: str) -> None:
    """Entries have a text; those that act set an option of serve or have accepted values."""
    for entry in (only_word for flag in GROUPS[group] for only_word in (flag, *flag.keys)):
        assert len(entry.explanation) > 4 and "\n" not in entry.explanation
        setting = entry.setting.partition(".")[0].replace("_", "-")
        assert not setting or f"--{setting}" in serve_help.split(), (
            f"{setting} is no option of serve"
        )
        if entry.kind is Kind.ACTS:
            assert entry.setting or entry.no_op or entry.keys
        else:
            assert not entry.setting and not entry.mapping
        if entry.kind is Kind.REFUSED:
            assert entry.explanation.endswith("."), "a refusal is a remedy"


def test_help_is_grouped_by_the_table_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom lockstep.cli import app\n"
        "print(CliRunner(env={'COLUMNS': '200'}).invoke(app, ['serve', '--help']).output)\n"
        "assert 'torch' not in sys.modules and 'fastapi' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    # An option is shown once, in the group of the first flag that sets it.
    group_of: dict[str, str] = {}
    for group, flags in GROUPS.items():
        for flag in flags:
            if flag.setting:
                group_of.setdefault(flag.setting.partition(".")[0], group)
    assert not [group for group in set(group_of.values()) if f"\n{group}:\n" not in done.stdout]
    assert "docs/vllm_flags.md" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--dtype", "half"), "--dtype=float16"),
        (("--dtype=HALF",), "--dtype=float16"),
        (("--dtype", "float"), "--dtype=float32"),
        (("-tp", "2"), "--tensor-parallel-size=2"),
        (("-tp=2",), "--tensor-parallel-size=2"),
        (("--tensor_parallel_size=2",), "--tensor-parallel-size=2"),
        (("-q", "gptq_marlin"), "--quantization=gptq_marlin"),
        (("-qawq",), "--quantization=awq"),
        (("--max-model-len", "8k"), "--max-model-len=8000"),
        (("--max-model-len", "8K"), "--max-model-len=8192"),
        (("--max-model-len", "1.5k"), "--max-model-len=1500"),
        (("--max-num-seqs", "256"), "--max-num-seqs=256"),
        (("--enforce-eager",), "--cuda-graph-mode=none"),
        (("-cc.cudagraph_mode=NONE",), "--cuda-graph-mode=none"),
        (("-cc.cudagraph_mode=piecewise",), "--cuda-graph-mode=piecewise"),
        (("-cc", '{"cudagraph_mode": "FULL"}'), "--cuda-graph-mode=full"),
        (("-cc", '{"cudagraph_mode": "FULL_DECODE_ONLY"}'), "--cuda-graph-mode=full"),
        (("--compilation-config", '{"cudagraph_capture_sizes": [1, 8]}'), "--row-buckets=1,8"),
        (
            ("-cc.cudagraph_capture_sizes+", "1,2", "-cc.cudagraph_capture_sizes+=8"),
            "--row-buckets=1,2,8",
        ),
        (("--cudagraph-capture-sizes", "1", "2", "8"), "--row-buckets=1,2,8"),
        (("--cudagraph-capture-sizes", "[1, 2]"), "--row-buckets=1,2"),
        (("--mamba-cache-mode", "none"), "--num-snapshots=0"),
        (("--no-async-scheduling",), "--steps-in-flight=1"),
        (("--no-enable-prefix-caching",), "--no-enable-prefix-caching"),
        (("--enable_prefix_caching",), "--enable-prefix-caching"),
        (("--disable-fastapi-docs",), "--no-docs"),
        (("--no-enable-auto-tool-choice",), "--tool-call-parser=none"),
        (("--kv-cache-dtype-skip-layers", "0", "3"), "--kv-cache-dtype-skip-layers=0,3"),
        (("--hf-overrides.rope.factor", "2"), '--hf-overrides={"rope": {"factor": 2}}'),
        (("--speculative-config", "none"), "--speculative-config=none"),
        (("--port", "8000"), "--port=8000"),
        (("--device", "cpu"), "--device=cpu"),
        (("--max-model-len", "-1", "M"), "M"),
    ],
)
def test_flags_that_act(words: tuple[str, ...], expected: str) -> None:
    assert only_word(*words) == expected


def test_drafting_by_keys_and_by_flags() -> None:
    by_keys = only_word("-sc.method=ngram", "-sc.num_speculative_tokens", "5")
    assert by_keys == only_word("--spec-method", "ngram", "--spec-tokens", "5")
    assert by_keys == '--speculative-config={"method": "ngram", "num_speculative_tokens": 5}'
    over = only_word("-sc", '{"method": "mtp", "adaptive": true}', "-sc.num_speculative_tokens=2")
    assert over.endswith('{"method": "mtp", "adaptive": true, "num_speculative_tokens": 2}')
    replaced = only_word("-sc.num_speculative_tokens=2", "-sc", '{"method": "mtp"}')
    assert replaced.endswith('{"method": "mtp"}'), "a whole object takes the place of its keys"


def test_vllms_speculative_config_keys() -> None:
    """A key without effect is noted, unless its value is what Lockstep does anyway."""
    config_json = '{"method": "mtp", "draft_tensor_parallel_size": 1, "max_model_len": 4096}'
    line, notes = read("--speculative-config", config_json)
    assert line == ['--speculative-config={"method": "mtp"}']
    assert len(notes) == 1 and "--speculative-config.max_model_len has no effect" in notes[0]
    assert "allowed: 1." in refusal("-sc.draft_tensor_parallel_size=2")


@pytest.mark.parametrize(
    "words",
    [
        ("--pipeline-parallel-size", "1"),
        ("-pp", "1"),
        ("-dp=1",),
        ("--cpu-offload-gb", "0.0"),
        ("--runner", "generate"),
        ("--language-model-only",),
        ("--disable-log-requests",),
        ("--enable-auto-tool-choice",),
        ("--no-enable-lora",),
        ("--enable-chunked-prefill",),
        ("--no-enforce-eager",),
        ("--mamba-cache-mode", "align"),
        ("--tool-parser-plugin", ""),
        ("--model-loader-extra-config", "{}"),
    ],
)
def test_default_values_are_silent(words: tuple[str, ...]) -> None:
    assert read(*words) == ([], [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attention-backend", "TRITON_ATTN"), "--attention-backend has no effect: each op"),
        (("--attention-backend", "flash_attn"), "--attention-backend has no effect"),
        (("--no-enable-chunked-prefill",), "--enable-chunked-prefill has no effect"),
        (("--block-size", "16"), "a page has 64 tokens"),
        (("-O3",), "--optimization-level has no effect"),
        (("-O", "3"), "--optimization-level has no effect"),
        (("-cc.pass_config.fuse_norm_quant=true",), "--compilation-config.pass_config has no"),
        (("--limit-mm-per-prompt", '{"image": 0}'), "--limit-mm-per-prompt has no effect"),
        (("--limit-mm-per-prompt.image", "0"), "--limit-mm-per-prompt.image has no effect"),
        (("--structured-outputs-config.backend", "xgrammar"), "llguidance constrains all"),
        (("--structured-outputs-config", '{"backend": "auto"}'), "-config.backend has no effect"),
        (("--disable-access-log-for-endpoints", "/health"), "only if --uvicorn-log-level is info"),
        (("--h11-max-header-count", "256"), "--h11-max-header-count has no effect"),
        (("--trust-remote-code",), "no code of a checkpoint is run"),
        (("--enable-lora",), "--enable-lora has no effect: --lora-modules loads"),
        (("--no-enable-flashinfer-autotune",), "--enable-flashinfer-autotune has no effect"),
    ],
)
def test_ignored_flags_are_noted_in_one_line(words: tuple[str, ...], message: str) -> None:
    line, notes = read(*words)
    assert not line and len(notes) == 1 and message in notes[0] and "\n" not in notes[0]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--pipeline-parallel-size", "2"), ("--pipeline-parallel-size=2 is", "1.", "Share the")),
        (("--lora-dtype", "float16"), ("--lora-dtype='float16'", "auto", "the model's dtype")),
        (("--no-language-model-only",), ("--no-language-model-only is not supported",)),
        (("--runner", "pooling"), ("--runner='pooling'", "auto, generate", "leave it out")),
        (
            ("--structured-outputs-config", '{"enable_in_reasoning": true}'),
            ("--structured-outputs-config.enable_in_reasoning=True", "never the reasoning"),
        ),
        (
            ("--structured-outputs-config.disable_any_whitespace", "true"),
            ("Send it in a request's structured_outputs.",),
        ),
        (("--kv-transfer-config", "{}"), ("--kv-transfer-config=", "leave it out")),
        (("--tensr-parallel-size", "2"), ("Did you mean --tensor-parallel-size?",)),
        (("-cc.cudagraph_mod=NONE",), ("'cudagraph_mod'", "Did you mean cudagraph_mode?")),
        (("-cc.cudagraph_mode=HALF",), ("='HALF' is", "NONE, PIECEWISE, FULL", "Choose")),
        (("-cc", "[]"), ("--compilation-config=[] is", "cudagraph_mode")),
        (("--attention-backend", "FAST"), ("='FAST'", "FLASH_ATTN", "TRITON_ATTN")),
        (("--mamba-cache-mode", "some"), ("='some'", "align, all, none")),
        (("--distributed-executor-backend", "ray"), ("='ray'", "mp, uni")),
        (("--max-model-len", "8z"), ("--max-model-len='8z'", "whole number")),
        (("--max-model-len", "1.5K"), ("--max-model-len='1.5K'",)),
        (("--max-model-len", "1.5"), ("--max-model-len='1.5'",)),
        (("--max-model-len",), ("--max-model-len needs a value",)),
        (("--max-model-len", "--port", "1"), ("--max-model-len needs a value",)),
        (("-tp", "two"), ("--tensor-parallel-size='two'", "a number")),
        (("--enforce-eager=maybe",), ("--enforce-eager='maybe'", "true or false")),
        (("--port.x", "1"), ("--port has no keys",)),
        (("-zz",), ("-zz is not an option of this command",)),
        (("--generation-config", "vllm"), ("--generation-config is not an option of this",)),
    ],
)
def test_errors_name_flag_value_and_remedy(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    message = refusal(*words)
    assert not [part for part in parts if part not in message], message
    assert "\n" not in message and message[-1] in ".?"


def test_repeatable_flags_and_positional_words() -> None:
    line, _ = read(
        "M", "--served-model-name", "a", "b", "--api-key", "k", "--api-key", "l", "-tp=1"
    )
    assert line[:2] == ["--served-model-name=a", "--served-model-name=b"]
    assert line[2:4] == ["--api-key=k", "--api-key=l"] and line[-1] == "M"
    assert read("--port", "1", "--", "--odd")[0] == ["--port=1", "--", "--odd"]
    assert only_word("--model", "-odd-") == "--model=-odd-"


def config(folder: Path, text: str) -> str:
    path = folder / "file.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "model: M\nmax-model-len: 8k\nenforce_eager: true\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\napi-key: filed\nblock-size: 16\ndevice: cpu\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 5}\ndtype:\n",
    )
    line, notes = read("--config", path)
    assert line[-1] == f"--config={path}", "which the command leaves aside"
    assert line[:-1] == [
        "--model=M",
        "--max-model-len=8000",
        "--cuda-graph-mode=none",
        "--no-enable-prefix-caching",
        "--served-model-name=a",
        "--served-model-name=b",
        "--api-key=filed",
        "--device=cpu",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 5}',
    ]
    assert len(notes) == 1
    over = "--max-model-len auto --api-key k --served-model-name c -sc.num_speculative_tokens=2"
    line, _ = read(*over.split(), f"--config={path}", "--enable-prefix-caching")
    assert "--enable-prefix-caching" in line and "--api-key=filed" not in line
    assert [w for w in line if "name" in w] == ["--served-model-name=c"]
    assert [w for w in line if '"num_speculative_tokens": 2}' in w]
    assert not [w for w in line if "len" in w]


def test_negated_switch_overrides_the_file(tmp_path: Path) -> None:
    path = config(tmp_path, "enforce-eager: true\nmamba-cache-mode: none\n")
    line, _ = read("--config", path, "--no-enforce-eager", "--mamba-cache-mode", "all")
    assert line == [f"--config={path}"]
    other, _ = read("-cc.cudagraph_mode=PIECEWISE", "--no-enforce-eager")
    assert other == ["--cuda-graph-mode=piecewise"], "what another flag chose stays"


def test_null_in_an_object_is_kept() -> None:
    assert (
        only_word("--hf-overrides.rope_scaling", "null") == '--hf-overrides={"rope_scaling": null}'
    )
    assert only_word("-sc", '{"method": "mtp", "a": null}').endswith('{"method": "mtp", "a": null}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "has no mapping"),
        ("a: [", "cannot be read"),
        ("--port: 1", "flags without dashes"),
        ("config: other.yaml", "'config' is not allowed"),
        ("port: [1, 2]", "--port=['1', '2'] is not allowed; allowed: one value"),
        ("max-modl-len: 1", "Did you mean --max-model-len?"),
        ("max-model-len: many", "--max-model-len='many'"),
        ("a: !!python/object/apply:os.system [ls]", "cannot be read"),
        ("model: !!set {a, b}", "cannot be read"),
        ("model: !!binary aGVsbG8=", "cannot be read"),
        ("hf-overrides: " + "[" * 9000, "cannot be read"),
        ("served-model-name: [" + "a," * 40_000 + "]", "longer than 65536 characters"),
    ],
)
def test_malformed_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    assert message in refusal("--config", config(tmp_path, text))


LAUGHS = "  a0: &a0 [l, l]\n" + "".join(
    f"  a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(9)
)


@pytest.mark.parametrize(
    "text",
    [
        f"hf-overrides:\n{LAUGHS}",
        "hf-overrides: &a [*a]",
        "hf-overrides: &a {b: *a}",
        "&a\nmodel: *a",
        "hf-overrides:\n  a: &a {b: 1}\n  c:\n    <<: *a",
    ],
)
def test_aliases_of_a_file_are_refused(text: str, tmp_path: Path) -> None:
    """Ten lines of aliases can expand to more than the memory, and one can contain itself."""
    began = time.process_time()
    assert "has an alias; write out its value" in refusal("--config", config(tmp_path, text))
    assert time.process_time() - began < 1.0


def test_dates_of_a_file_are_text(tmp_path: Path) -> None:
    path = config(tmp_path, "model: 2026-11-23\nhf-overrides: {2026-11-23: 2026-11-23}")
    line, _ = read("--config", path)
    assert line[:2] == ["--model=2026-11-23", '--hf-overrides={"2026-11-23": "2026-11-23"}']


def test_missing_file_is_refused() -> None:
    assert "--config='/no/such.yaml' cannot be read" in refusal("--config", "/no/such.yaml")
    assert "--config needs a value" in refusal("--config")


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("2k", 2000), ("2K", 2048), ("1m", 10**6), ("1M", 2**20), ("1G", 2**30), ("-1", -1)],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size("--x", text) == size


WORDS = st.one_of(
    st.sampled_from([f"--{flag.name}" for flag in all_flags()]),
    st.sampled_from([short for flag in all_flags() for short in flag.short]),
    st.sampled_from(["-cc.cudagraph_mode", "-sc.method", "--hf-overrides.a.b", "--", "M", "-1"]),
    st.sampled_from(["auto", "1", "8k", "{}", "[1]", '{"a": {"b": 1}}', "null", "true", "none"]),
    st.text(alphabet='-=.{}[]":,a1', max_size=8),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(WORDS, st.builds("{}={}".format, WORDS, WORDS)), max_size=8))
def test_any_command_line_is_read_or_refused(words: list[str]) -> None:
    try:
        line, notes = read(*words)
    except ConfigError as error:
        assert str(error)
        return
    assert all(isinstance(word, str) for word in (*line, *notes))


def test_commands_accept_only_flags_of_their_settings() -> None:
    """explain has the engine's flags, but none of the server's."""
    with pytest.raises(ConfigError, match="--tool-call-parser is not an option of this command"):
        invoke("explain", "--tool-call-parser", "hermes")
    with pytest.raises(ConfigError, match="tensor_parallel_size=0 is not allowed"):
        invoke("explain", "-tp", "0", "--enforce-eager")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)
