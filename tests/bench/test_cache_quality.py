"""check quality: figures on a text, against numbers made by hand; what it refuses."""

import json
from math import exp, log
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lockstep.bench.cache_quality import Kept, Measured, Scores, compare, read_text
from lockstep.bench.cache_quality_plot import plot, points_of
from lockstep.cli import app
from lockstep.errors import ConfigError
from tests.tiny_model import TWO_LAYERS, make_model

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model"), **TWO_LAYERS))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def run(*arguments: str, model: str) -> str:
    asked = ["check", "quality", model, "--load-format", "dummy", *arguments]
    return CliRunner().invoke(app, asked, catch_exceptions=False).stdout


def test_a_line_for_each_pair(model: str, text: str, tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    asked = ("--kv-cache-dtype", "auto,fp8", "--mamba-ssm-cache-dtype", "float32, bfloat16",
             "--text", text, "--tokens", "300", "--window", "128")  # fmt: skip
    found = json.loads(run(*asked, "--json", "--plot", str(picture), model=model))
    assert found["tokens"] == 300 - 3
    lines = found["lines"]
    names = [(line["kv_cache_dtype"], line["mamba_ssm_cache_dtype"]) for line in lines]
    assert names == [(kv, state) for kv in ("auto", "fp8") for state in ("auto", "bfloat16")]
    own = lines[0]
    assert own["perplexity_ratio"] == own["top1_agreement"] == 1 and own["max_difference"] == 0
    for line in lines[1:]:
        assert 0 < line["mean_difference"] < line["max_difference"] < 1
        assert line["perplexity_ratio"] == pytest.approx(line["perplexity"] / own["perplexity"])
        assert line["top1_agreement"] > 0.5
    assert "/state-bfloat16/" in lines[1]["numerics"] and "/kv-fp8" in lines[2]["numerics"]
    assert lines[2]["page_bytes"] < own["page_bytes"]
    svg = ElementTree.parse(picture).getroot()
    assert len([e for e in svg if e.tag.endswith("polyline")]) == 3
    shown = run(*asked, model=model).splitlines()
    rows = [line for line in shown if line.lstrip().startswith(("KV", "auto", "fp8"))]
    assert len(rows) == 5 and len({len(row.rstrip()) for row in rows}) == 1, "it does not line up"


def scores(*logprobs: float, best: tuple[int, ...]) -> Scores:
    return Scores(logprobs, best, tuple(range(1, len(best) + 1)))


def test_figures_by_hand() -> None:
    first = Measured(Kept(), scores(log(0.5), log(0.25), best=(1, 2)), "", 1, 1)
    other = Measured(Kept("fp8"), scores(log(0.25), log(0.25), best=(1, 3)), "", 1, 1)
    found = compare(first, other)
    assert first.scores.perplexity == pytest.approx(exp((log(2) + log(4)) / 2))
    assert found.ratio == pytest.approx(4 / 8**0.5)
    assert found.agreement == 0.5
    assert found.differences == pytest.approx((log(2), 0.0))
    assert [y for _, y in points_of(found, 2)] == pytest.approx([log(2), 0.0])
    same = compare(first, first)
    assert same.agreement == same.ratio == 1 and not any(same.differences)
    ElementTree.fromstring(plot([same, found], 2))
    ElementTree.fromstring(plot([same, same], 2))


def test_the_file_is_read_as_far_as_it_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" + "é" * 1000, encoding="utf-8")
    assert read_text(path, 2) == "x" + "é" * 15
    path.write_bytes(b"abc\xff" + b"a" * 100)
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        read_text(path, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs a text"),
        (("--text", "/nowhere/a.txt"), "cannot be read"),
        (("--text", "TEXT", "--window", "5000"), "--window 5000 is not allowed"),
        (("--text", "TEXT", "--plot", "a.png"), "ends in .svg"),
        (("--text", "TEXT", "--kv-cache-dtype", "fp9"), "kv_cache_dtype='fp9'"),
        (("--text", "TEXT", "--mamba-ssm-cache-dtype", "int8"), "mamba_ssm_cache_dtype='int8'"),
        (("--text", "TEXT", "--kv-cache-dtype", "auto"), "all that were named are the model's own"),
        (("--text", "TEXT", "--skip-tokenizer-init"), "needs a tokenizer"),
        (("--text", "EMPTY"), "allowed: 2 or more"),
    ],
    ids=str,
)
def test_what_it_refuses(
    model: str, text: str, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    named = {"TEXT": text, "EMPTY": str(empty)}
    asked = [named.get(word, word) for word in arguments]
    if "--kv-cache-dtype" not in asked:
        asked = ["--kv-cache-dtype", "fp8", *asked]
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        run(*asked, model=model)
