"""What the pages promise: links that lead somewhere, every option, code that runs, true figures."""

import re
import tomllib
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from lockstep import LLM, SamplingParams, spec
from lockstep.cli import app
from lockstep.example_prompts import short_prompts

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        ROOT / "benchmarks" / "RESULTS.md",
    ]
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMAGE_TEXT_PX = 12


def relative(path: Path) -> str:
    """docs/a.md, for ids."""
    return str(path.relative_to(ROOT))


def code(page: Path, language: str = "python") -> str:
    """The first block of this language in a page."""
    return next(m[2] for m in FENCE.finditer(page.read_text()) if m[1] == language)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of this page may be called."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken(page: Path) -> Iterator[str]:
    """Links of a page that lead nowhere."""
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.is_file() or (anchor and anchor not in anchors(found)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_to_files(page: Path) -> None:
    assert not list(broken(page))


def test_broken_links_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A head\n[a](no.md) [b](#a-head) [c](page.md#none) [d](https://x.example)")
    assert list(broken(page)) == ["no.md", "page.md#none"]


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert named == pages, "the nav of mkdocs.yml and docs/ differ"


def test_serving_names_every_option() -> None:
    told = set(re.findall(r"--[a-z][\w-]*", (DOCS / "serving.md").read_text()))
    known = get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    flags = {f for p in known for f in (*p.opts, *p.secondary_opts) if f.startswith("--")}
    assert not flags - told, "docs/serving.md does not tell these"
    assert not told - flags - {"--help"}, "lockstep serve does not know these"


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[>=<;]", line)[0] for needed in lists for line in needed}
    text = (DOCS / "dependencies.md").read_text()
    assert not [name for name in names if name not in text]


def test_four_lines_run(capsys: pytest.CaptureFixture[str]) -> None:
    shown = code(ROOT / "README.md")
    assert shown == code(DOCS / "quickstart.md")
    exec(compile(shown, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    assert printed == "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37"
    assert printed in (DOCS / "quickstart.md").read_text()


def test_the_drafter_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    wanted = plain.generate(prompts, params)
    found = drafting.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    assert sum(o.metrics.num_accepted_tokens for o in found) > 0


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    """docs/plots.py."""
    found = spec_from_file_location("plots", DOCS / "plots.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_plot_shows_the_results(plots: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure of RESULTS.md is a label of the committed plot, and no other is."""
    pairs = plots.pairs(plots.RESULTS.read_text())
    assert len(pairs) == 9
    wanted = sorted(speed.label for pair in pairs for speed in (pair.ours, pair.theirs))
    texts = re.findall(r"<text[^>]*fill: #1f2328[^>]*>([^<]+)<", plots.PLOT.read_text())
    assert sorted(texts) == wanted


@pytest.mark.parametrize("image", sorted((DOCS / "images").glob("*.svg")), ids=relative)
def test_images_read_on_any_background(image: Path) -> None:
    """A picture has a ground of its own, and no text below 12 px at its own size."""
    text = image.read_text()
    width = re.search(r'<svg[^>]* width="([\d.]+)(pt)?"', text, re.DOTALL)
    assert width is not None
    scale = 4 / 3 if width[2] else 1
    sizes = [float(size) * scale for size in re.findall(r"font-size: ([\d.]+)px", text)]
    assert sizes and min(sizes) >= IMAGE_TEXT_PX
    assert re.search(r'fill[=:]\s?"?#(fcfcfa|16191d)', text)
