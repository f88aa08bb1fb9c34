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
from lockstep.settings import check_writable, path_fault

if TYPE_CHECKING:
    from lockstep.bench.cache_quality import CacheDtypes, Quality

DEFAULT_TOKENS = 8192
DEFAULT_WINDOW = 1024
MAX_TOKENS = 1 << 20
MIN_WIDTH = 120
"""Minimum width of the table: a pipe reports 80 columns, which would cut its lines."""


@engine_options
def quality(
    model: Annotated[str | None, typer.Argument(help="model folder or hub id")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text that resembles your use")] = None,
    tokens: Annotated[
        int, typer.Option(min=2, max=MAX_TOKENS, help="maximum tokens of the text to score")
    ] = DEFAULT_TOKENS,
    window: Annotated[
        int, typer.Option(min=2, max=MAX_TOKENS, help="tokens per prompt")
    ] = DEFAULT_WINDOW,
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
    pairs = requested_pairs(settings)
    with sigterm_interrupts():
        qualities = _run(pairs, settings, text, (tokens, window), json)
    if plot is not None:
        _draw(plot, qualities, window)
    if json:
        baseline = qualities[0].measured.scores
        print_json(
            {
                "check": "quality",
                "text": str(text),
                "tokens": len(baseline.logprobs),
                "window": window,
                "lines": [result.to_json() for result in qualities],
            }
        )
        return
    console = Console(highlight=False)
    # Rich assumes 80 columns for a pipe and would cut the lines.
    console.width = max(console.width, MIN_WIDTH)
    console.print(table(qualities))
    about = f"{len(qualities[0].differences):,} tokens predicted, in windows of {window:,}"
    console.print(f"{about}; {qualities[0].measured.numerics}", soft_wrap=True)


def requested_pairs(settings: dict[str, Any]) -> "list[CacheDtypes]":
    """Remove both cache dtypes from the settings, and return the requested pairs of them.

    Raises ConfigError for an unknown name.
    """
    from lockstep.bench.cache_quality import CacheDtypes

    lists = [
        [part.strip() for part in settings.pop(name).split(",")]
        for name in ("kv_cache_dtype", "mamba_ssm_cache_dtype")
    ]
    pairs = [CacheDtypes(kv, state) for kv in lists[0] for state in lists[1]]
    for pair in pairs:
        # The constructor checks the names; the config itself is not used.
        EngineConfig(kv_cache_dtype=pair.kv_cache_dtype,
                     mamba_ssm_cache_dtype=pair.mamba_ssm_cache_dtype)  # type: ignore[arg-type]  # fmt: skip
    return [_canonical(pair) for pair in pairs]


def _canonical(pair: "CacheDtypes") -> "CacheDtypes":
    """Replace the state dtype float32 by "auto", which means the same."""
    is_default = pair.mamba_ssm_cache_dtype == "float32"
    return replace(pair, mamba_ssm_cache_dtype="auto") if is_default else pair


def _run(
    pairs: "list[CacheDtypes]",
    settings: dict[str, Any],
    path: Path,
    sizes: tuple[int, int],
    quiet: bool,
) -> "list[Quality]":
    from lockstep.bench.cache_quality import CacheDtypes, read_text, run_quality

    if not any(pair != CacheDtypes() for pair in pairs):
        raise ConfigError(
            "check quality needs a cache dtype other than the model's. Name one: --kv-cache-dtype "
            "fp8, or --mamba-ssm-cache-dtype bfloat16."
        )
    text = read_text(path, sizes[0])
    if quiet:
        return run_quality(pairs, settings, text, *sizes)
    with progress_bar() as show:
        return run_quality(pairs, settings, text, *sizes, show)


def _draw(path: Path, qualities: "list[Quality]", window: int) -> None:
    from lockstep.bench.cache_quality_plot import plot

    longest = max(qualities[0].measured.scores.positions)
    try:
        path.write_text(plot(qualities, min(window, longest + 1)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--plot {path} cannot be written: {path_fault(error)}. Name a file."
        ) from None


def table(qualities: "list[Quality]") -> Table:
    """Return a table with a row per pair of cache dtypes, the model's dtypes first.

    ratio: ratio of perplexities. top-1 %: share of positions with the same best token. mean, max:
    absolute difference of the log-probabilities of the text's tokens, in nats.
    """
    table = Table(box=SIMPLE_HEAD)
    for name in ("KV", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("perplexity", "ratio", "top-1 %", "mean", "max", "bytes/page", "bytes/state"):
        table.add_column(name, justify="right", no_wrap=True)
    for quality in qualities:
        line = quality.to_json()
        table.add_row(
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
    return table
