"""lockstep check quality: accuracy of quantized KV caches on a text."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lockstep.cli.interrupt import sigterm_interrupts
from lockstep.cli.options import engine_options
from lockstep.cli.show import print_json
from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.progress import progress_bar
from lockstep.settings import check_writable, why_unread

if TYPE_CHECKING:
    from lockstep.bench.cache_quality import CacheDtypes, Quality

TOKENS = 8192
WINDOW = 1024
MOST_TOKENS = 1 << 20
WIDTH = 120
"""Columns of the table at least, so that its lines are not cut where nobody looks."""


@engine_options
def quality(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text that resembles your use")] = None,
    tokens: Annotated[
        int, typer.Option(min=2, max=MOST_TOKENS, help="maximum tokens of the text to score")
    ] = TOKENS,
    window: Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="tokens per prompt")] = WINDOW,
    plot: Annotated[
        Path | None, typer.Option(help="write a plot of the difference by position, .svg")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Measure how much cache formats change perplexity and top-1 tokens of a text.

    --kv-cache-dtype and --mamba-ssm-cache-dtype take several names, separated by commas; each pair
    of them is compared with the model's own dtype. Drafts, batching and chunked prefill change no
    bit, so they are not varied.
    """
    if text is None:
        raise ConfigError("check quality needs a text. Name it: --text FILE.")
    if plot is not None and plot.suffix.lower() != ".svg":
        raise ConfigError(f"--plot {plot} is not allowed; allowed: a name that ends in .svg.")
    if plot is not None:
        check_writable("plot", plot)
    ways = ways_of(settings)
    with sigterm_interrupts():
        found = _run(ways, settings, text, (tokens, window), json)
    if plot is not None:
        _draw(plot, found, window)
    if json:
        first = found[0].measured.scores
        print_json(
            {"check": "quality", "text": str(text), "tokens": len(first.logprobs), "window": window,
             "lines": [one.to_json() for one in found]}
        )  # fmt: skip
        return
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(table(found))
    about = f"{len(found[0].differences):,} tokens predicted, in windows of {window:,}"
    console.print(f"{about}; {found[0].measured.numerics}", soft_wrap=True)


def ways_of(settings: dict[str, Any]) -> "list[CacheDtypes]":
    """The pairs of both settings, which are taken out. Raises ConfigError on an unknown name."""
    from lockstep.bench.cache_quality import CacheDtypes

    lists = [
        [part.strip() for part in settings.pop(name).split(",")]
        for name in ("kv_cache_dtype", "mamba_ssm_cache_dtype")
    ]
    ways = [CacheDtypes(kv, state) for kv in lists[0] for state in lists[1]]
    for way in ways:
        EngineConfig(kv_cache_dtype=way.kv_cache_dtype,
                     mamba_ssm_cache_dtype=way.mamba_ssm_cache_dtype)  # type: ignore[arg-type]  # fmt: skip
    return [_usual(way) for way in ways]


def _usual(way: "CacheDtypes") -> "CacheDtypes":
    """float32 by its other name: it is the state's own dtype."""
    usual = way.mamba_ssm_cache_dtype == "float32"
    return replace(way, mamba_ssm_cache_dtype="auto") if usual else way


def _run(
    ways: "list[CacheDtypes]",
    settings: dict[str, Any],
    path: Path,
    sizes: tuple[int, int],
    quiet: bool,
) -> "list[Quality]":
    from lockstep.bench.cache_quality import CacheDtypes, read_text, run_quality

    if not any(way != CacheDtypes() for way in ways):
        raise ConfigError(
            "check quality compares caches, and all that were named are the model's own. Name "
            "another: --kv-cache-dtype fp8, or --mamba-ssm-cache-dtype bfloat16."
        )
    text = read_text(path, sizes[0])
    if quiet:
        return run_quality(ways, settings, text, *sizes)
    with progress_bar() as show:
        return run_quality(ways, settings, text, *sizes, show)


def _draw(path: Path, found: "list[Quality]", window: int) -> None:
    from lockstep.bench.cache_quality_plot import plot

    longest = max(found[0].measured.scores.positions)
    try:
        path.write_text(plot(found, min(window, longest + 1)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--plot {path} cannot be written: {why_unread(error)}. Name a file."
        ) from None


def table(found: "list[Quality]") -> Table:
    """A line for each way to keep caches, the model's own first. ratio: of perplexities; top-1:
    places with the same best token; mean, max: |difference of log-probability| of the text's tokens
    in nats."""
    shown = Table(box=SIMPLE_HEAD)
    for name in ("KV", "state"):
        shown.add_column(name, no_wrap=True)
    for name in ("perplexity", "ratio", "top-1 %", "mean", "max", "bytes a page", "bytes a state"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in found:
        line = one.to_json()
        shown.add_row(
            line["kv_cache_dtype"],
            line["mamba_ssm_cache_dtype"],
            f"{line['perplexity']:.3f}",
            f"{line['perplexity_ratio']:.5f}",
            f"{100 * line['top1_agreement']:.2f}",
            f"{line['mean_difference']:.5f}",
            f"{line['max_difference']:.3f}",
            f"{line['page_bytes']:,}",
            f"{line['slot_bytes']:,}",
        )
    return shown
