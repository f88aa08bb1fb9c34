"""check quality: figures on a text, figures computed by hand, and refused options."""

import json
from math import exp, log
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lockstep.bench.cache_quality import CacheDtypes, CacheScores, Scores, compare, read_text
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
    arguments = ["check", "quality", model, "--load-format", "dummy", *arguments]
    return CliRunner().invoke(app, arguments, catch_exceptions=False).stdout


def test_one_line_per_pair_of_dtypes(model: str, text: str, tmp_path: Path) -> None:
    picture = tmp_path / "a.svg"
    arguments = ("--kv-cache-dtype", "auto,fp8", "--mamba-ssm-cache-dtype", "float32, bfloat16",
             "--text", text, "--tokens", "300", "--window", "128")  # fmt: skip
    result = json.loads(run(*arguments, "--json", "--plot", str(picture), model=model))
    assert result["tokens"] == 300 - 3
    lines = result["lines"]
    names = [(line["kv_cache_dtype"], line["mamba_ssm_cache_dtype"]) for line in lines]
    assert names == [(kv, state) for kv in ("auto", "fp8") for state in ("auto", "bfloat16")]
    baseline = lines[0]
    assert (
        baseline["perplexity_ratio"] == baseline["top1_agreement"] == 1
        and baseline["max_difference"] == 0
    )
    for line in lines[1:]:
        assert 0 < line["mean_difference"] < line["max_difference"] < 1
        assert line["perplexity_ratio"] == pytest.approx(
            line["perplexity"] / baseline["perplexity"]
        )
        assert line["top1_agreement"] > 0.5
    assert "/state-bfloat16/" in lines[1]["numerics"] and "/kv-fp8" in lines[2]["numerics"]
    assert lines[2]["page_bytes"] < baseline["page_bytes"]
    svg = ElementTree.parse(picture).getroot()
    assert len([e for e in svg if e.tag.endswith("polyline")]) == 3
    shown = run(*arguments, model=model).splitlines()
    rows = [line for line in shown if line.lstrip().startswith(("KV", "auto", "fp8"))]
    assert len(rows) == 5 and len({len(row.rstrip()) for row in rows}) == 1, "it does not line up"


def scores(*logprobs: float, best: tuple[int, ...]) -> Scores:
    return Scores(logprobs, best, tuple(range(1, len(best) + 1)))


def test_figures_by_hand() -> None:
    first = CacheScores(CacheDtypes(), scores(log(0.5), log(0.25), best=(1, 2)), "", 1, 1)
    compared = CacheScores(CacheDtypes("fp8"), scores(log(0.25), log(0.25), best=(1, 3)), "", 1, 1)
    quality = compare(first, compared)
    assert first.scores.perplexity == pytest.approx(exp((log(2) + log(4)) / 2))
    assert quality.ratio == pytest.approx(4 / 8**0.5)
    assert quality.agreement == 0.5
    assert quality.differences == pytest.approx((log(2), 0.0))
    assert [y for _, y in points_of(quality, 2)] == pytest.approx([log(2), 0.0])
    identical = compare(first, first)
    assert identical.agreement == identical.ratio == 1 and not any(identical.differences)
    ElementTree.fromstring(plot([identical, quality], 2))
    ElementTree.fromstring(plot([identical, identical], 2))


def test_file_is_read_up_to_the_needed_bytes(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" + "é" * 1000, encoding="utf-8")
    assert read_text(path, 2) == "x" + "é" * 15
    path.write_bytes(b"abc\xff" + b"a" * 100)
    with pytest.raises(ConfigError, match="not UTF-8 at byte 3"):
        read_text(path, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs a text"),
        (("--text", "/nowhere/a.txt"), "cannot be read"),
        (("--text", "TEXT", "--window", "5000"), "--window 5000 is not allowed"),
        (("--text", "TEXT", "--plot", "a.png"), "ends in .svg"),
        (("--text", "TEXT", "--kv-cache-dtype", "fp9"), "kv_cache_dtype='fp9'"),
        (("--text", "TEXT", "--mamba-ssm-cache-dtype", "int8"), "mamba_ssm_cache_dtype='int8'"),
        (
            ("--text", "TEXT", "--kv-cache-dtype", "auto"),
            "needs a cache dtype other than the model's",
        ),
        (("--text", "TEXT", "--skip-tokenizer-init"), "needs a tokenizer"),
        (("--text", "EMPTY"), "allowed: 2 or more"),
    ],
    ids=str,
)
def test_invalid_options_are_refused(
    model: str, text: str, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    paths = {"TEXT": text, "EMPTY": str(empty)}
    arguments = [paths.get(word, word) for word in arguments]
    if "--kv-cache-dtype" not in arguments:
        arguments = ["--kv-cache-dtype", "fp8", *arguments]
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        run(*arguments, model=model)
