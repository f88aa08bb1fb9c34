"""Checks of the documentation: links, options, code blocks, figures, generated parts."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from typer.main import get_command

from lockstep import LLM, SamplingParams, spec
from lockstep.cli import app
from lockstep.errors import ConfigError
from lockstep.example_prompts import short_prompts
from tests.ports import free_port

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "benchmarks" / "RESULTS.md",
        ROOT / "benchmarks" / "log" / "2026-11.md",
    ]
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMAGE_TEXT_PX = 12


def relative(path: Path) -> str:
    """Return the path within the repository, for test ids."""
    return str(path.relative_to(ROOT))


def code_blocks(page: Path, language: str = "python") -> list[str]:
    """Return the code blocks of a language in a page."""
    return [m[2] for m in FENCE.finditer(page.read_text()) if m[1] == language]


def code(page: Path, language: str = "python") -> str:
    """Return the first code block of a language."""
    return code_blocks(page, language)[0]


def command_lines(page: Path) -> list[list[str]]:
    """Return every `lockstep ...` command of a page as words. N, K and P become 1."""
    shell = "\n".join(code_blocks(page, "sh")).replace("\\\n", " ").splitlines()
    text = FENCE.sub("", page.read_text())
    inline = [result.replace("\n", " ") for result in re.findall(r"`(lockstep [^`]+)`", text)]
    lines = [line for line in (*shell, *inline) if line.startswith("lockstep ")]
    result = [shlex.split(line, comments=True)[1:] for line in lines]
    return [["1" if word in ("N", "K", "P") else word for word in words] for words in result]


NAMING = ("CHANGELOG.md", "vllm_flags.md")
"""Pages that name options without their values."""
COMMANDS = [
    (relative(page), words)
    for page in PAGES
    if page.name not in NAMING
    for words in command_lines(page)
]


def code_with(page: Path, word: str) -> str:
    """Return the first shell block with a word."""
    return next(block for block in code_blocks(page, "sh") if word in block)


def silence(command: Any) -> Any:
    """Replace the callbacks of a command tree with ones that do nothing, and return the tree."""
    for below in getattr(command, "commands", {}).values():
        silence(below)
    command.callback = lambda **values: None
    return command


@pytest.fixture(scope="module")
def without_effects() -> Any:
    """Return the commands with callbacks that do nothing. To build them takes 20 ms."""
    return silence(get_command(app))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(page: Path) -> Iterator[str]:
    """Yield links of a page without a target."""
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        result = (page.parent / path).resolve() if path else page
        if not result.is_file() or (anchor and anchor not in anchors(result)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_to_files(page: Path) -> None:
    assert not list(broken_links(page))


def test_broken_links_are_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A head\n[a](no.md) [b](#a-head) [c](page.md#none) [d](https://x.example)")
    assert list(broken_links(page)) == ["no.md", "page.md#none"]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert named == pages, "the nav of mkdocs.yml and docs/ differ"


def test_serving_page_names_every_option() -> None:
    reported = set(re.findall(r"--[a-z][\w-]*", (DOCS / "serving.md").read_text()))
    known = get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    flags = {f for p in known for f in (*p.opts, *p.secondary_opts) if f.startswith("--")}
    assert not flags - reported, "docs/serving.md does not tell these"
    assert not reported - flags - {"--help"}, "lockstep serve does not know these"


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[>=<;]", line)[0] for needed in lists for line in needed}
    text = (DOCS / "dependencies.md").read_text()
    assert not [name for name in names if name not in text]


def test_readme_example(capsys: pytest.CaptureFixture[str]) -> None:
    shown = code(ROOT / "README.md")
    assert shown == code(DOCS / "quickstart.md")
    exec(compile(shown, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert printed == "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37"
    assert printed in (DOCS / "quickstart.md").read_text()


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 60
    assert ("docs/quickstart.md", ["generate", "--compare"]) in COMMANDS


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda result: str(result)[:60])
def test_documented_commands_parse(without_effects: Any, page: str, words: list[str]) -> None:
    """Every option belongs to its command, and JSON is valid."""
    without_effects.main(args=words, prog_name="lockstep", standalone_mode=False)
    for word in words:
        assert not word.startswith("{") or json.loads(word)


def test_unknown_option_is_detected(without_effects: Any) -> None:
    with pytest.raises(ConfigError, match="--prot is not an option"):
        without_effects.main(args=["serve", "--prot", "1"], standalone_mode=False)


def test_structured_output_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Run the page's blocks in order; later ones use names of the first."""
    names: dict[str, object] = {}
    for block in code_blocks(DOCS / "structured_output.md"):
        exec(compile(block, "structured_output.md", "exec"), names)
    first, *calls = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[a-z]{3,9}-[0-9]{2}", first)
    assert re.search(r"get_weather.*(Rio|Rome)", " ".join(calls))


@pytest.mark.slow
@pytest.mark.parametrize("words", command_lines(DOCS / "quickstart.md")[:4], ids=" ".join)
def test_quickstart_commands(words: list[str], tmp_path: Path) -> None:
    """Run the commands for the bundled model as written."""
    assert words[0] in ("generate", "check", "explain")
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """Yield the address of a running `lockstep serve`."""
    port = free_port()
    serve = [sys.executable, "-m", "lockstep", "serve", "--port", str(port)]
    with subprocess.Popen(serve, env=os.environ | {"PYTHONPATH": str(ROOT)}) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=120) as client:
                assert client.get(f"{url}/health").status_code == 200
            yield url
        finally:
            server.terminate()


@pytest.mark.slow
def test_openai_client_example(served: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = code(DOCS / "serving.md").replace("http://127.0.0.1:8000", served)
    exec(compile(block, "serving.md", "exec"), {})
    assert capsys.readouterr().out == "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37\n"


@pytest.mark.slow
def test_quickstart_curl_example(served: str) -> None:
    """The body of its curl command gets the call that the page shows."""
    (sent,) = re.findall(r"-d '(.*?)'", code_with(DOCS / "quickstart.md", "curl"), re.DOTALL)
    answer = httpx.post(f"{served}/v1/chat/completions", json=json.loads(sent), timeout=120).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Lisbon"}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_blocks_import_existing_names(page: Path) -> None:
    """Also blocks that need a GPU: they parse, and their imports from lockstep exist."""
    for block in code_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lockstep"):
                module = import_module(str(node.module))
                missing = [one.name for one in node.names if not hasattr(module, one.name)]
                assert not missing, f"{node.module} has none of {missing}"


@pytest.mark.slow
def test_add_a_drafter_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bigram_drafter.py").write_text(code(DOCS / "add_a_drafter.md"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(spec.DRAFTERS, "bigram", "bigram_drafter")
    sizes = {"max_model_len": 512, "max_num_seqs": 4}
    plain = LLM(**sizes)
    drafting = LLM(
        **sizes,
        speculative_config={"method": "bigram", "num_speculative_tokens": 3, "adaptive": False},
    )
    prompts = [{"prompt_token_ids": ids} for ids in short_prompts(plain)[:2]]
    params = SamplingParams(temperature=0, max_tokens=48)
    expected = plain.generate(prompts, params)
    result = drafting.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in result] == [o.outputs[0].token_ids for o in expected]
    assert sum(o.metrics.num_accepted_tokens for o in result) > 0


def script(name: str) -> ModuleType:
    """Import a script of docs/."""
    result = spec_from_file_location(name, DOCS / f"{name}.py")
    assert result is not None and result.loader is not None
    module = module_from_spec(result)
    sys.modules[name] = module
    result.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    """Return docs/plots.py as a module."""
    return script("plots")


def test_counts_are_current() -> None:
    """Update: python docs/counts.py."""
    counts = script("counts")
    assert not list(counts.stale())
    wrong = counts.Count("README.md", "lockstep check --quick, ", " cases", lambda: "7")
    counts.COUNTS = (wrong, counts.Count("README.md", "no such text", "", lambda: "7"))
    assert [message for _, message, _ in counts.stale()] == [counts.QUICK(), "nothing"]


def test_package_diagram_is_current() -> None:
    """Update: python docs/package_diagram.py."""
    diagram = script("package_diagram")
    assert diagram.PICTURE.read_text() == diagram.svg()
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert diagram.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert diagram.rows(graph) == [["a"], ["b"], ["c"]]


def test_tables_of_faults_are_current() -> None:
    """Update: python docs/faults.py."""
    faults = script("faults")
    for name in faults.PAGES:
        assert (DOCS / name).read_text() == faults.page(name)


def test_results_of_faults_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = script("faults")
    monkeypatch.setattr(faults, "RESULTS", tmp_path / "faults.json")
    faults.RESULTS.write_text('{"runs": [], "faults": {}}')
    run = {"date": "2026-11-29", "machine": "16 cores", "torch": "2.11.0", "seed": 0}
    detected = {"case": "scenario 3", "what": "tokens", "seconds": 7.6, "ran": True}
    missed = {"case": "", "what": "", "seconds": 90.2, "ran": True}
    not_run = {"case": "", "what": "it needs a GPU", "seconds": 0.0, "ran": False}
    (fault, *_) = faults.groups()[faults.FAILURES]
    for part, commands in enumerate(({"quick": missed, "doctor": not_run}, {"default": detected})):
        entry = {"name": fault.name, "commands": commands}
        (tmp_path / f"{part}.json").write_text(json.dumps(run | {"faults": [entry]}))
    faults.merge([tmp_path / "0.json", tmp_path / "1.json"])
    assert faults.read_runs() == ["2026-11-29, 16 cores, torch 2.11.0, seed 0"]
    _, _, row, *_ = faults.fault_table(faults.FAILURES, faults.read_results())
    assert f"| {fault.name} | missed | 8 s | not run | not run |" in row
    summary = list(faults.summary_table(faults.read_results()))
    assert f"| `{faults.FAILURES}` | 20 | 0 of 1 | 1 of 1 | 0 of 0 | 0 of 0 | 1 of 1 |" in summary


def test_published_checkpoints_table_is_current() -> None:
    """Update: python docs/published.py."""
    published = script("published")
    assert published.PAGE.read_text() == published.page()


def test_plot_shows_the_results(plots: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of the committed plot are the figures of the log."""
    pairs = plots.pairs(plots.RESULTS.read_text())
    assert len(pairs) == 9
    expected = sorted(speed.label for pair in pairs for speed in (pair.ours, pair.theirs))
    texts = re.findall(r"<text[^>]*fill: #1f2328[^>]*>([^<]+)<", plots.PLOT.read_text())
    assert sorted(texts) == expected


def figures(text: str) -> set[str]:
    """Return the numbers in a text, without those in names and dates."""
    return set(re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-]|\.\d)", text))


@pytest.mark.parametrize("head", ["## Speed", "## Proof"])
def test_readme_figures_are_logged(head: str) -> None:
    """Every figure of these sections except numbers of rows, drafts and cores."""
    section = (ROOT / "README.md").read_text().partition(head)[2].partition("\n## ")[0]
    known = (ROOT / "benchmarks" / "log" / "2026-11.md").read_text()
    reported = figures(FENCE.sub("", section)) - {"1", "2", "3", "8", "64"}
    assert len(reported) > 5
    assert not reported - figures(known)


@pytest.mark.parametrize("image", sorted((DOCS / "images").glob("*.svg")), ids=relative)
def test_images_are_readable_on_any_background(image: Path) -> None:
    """A picture has its own background and no text below 12 px."""
    text = image.read_text()
    width = re.search(r'<svg[^>]* width="([\d.]+)(pt)?"', text, re.DOTALL)
    assert width is not None
    scale = 4 / 3 if width[2] else 1
    sizes = [float(size) * scale for size in re.findall(r"font-size: ([\d.]+)px", text)]
    assert sizes and min(sizes) >= IMAGE_TEXT_PX
    assert re.search(r'fill[=:]\s?"?#(fcfcfa|16191d)', text)
