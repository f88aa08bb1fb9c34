"""Tables of lockstep bench: figures, floors, kernels and layers."""

from operator import attrgetter
from typing import TYPE_CHECKING

from rich.table import Column, Table

if TYPE_CHECKING:
    from lockstep.bench import Figures
    from lockstep.bench.drafters import DrafterLine
    from lockstep.bench.kernels import KernelLine
    from lockstep.bench.serving import ServingFigures
    from lockstep.bench.trace import LayerTime
    from lockstep.worker.roofline import Floor, StepFloor


def over_floor(figures: "Figures", step: "StepFloor") -> float:
    """Return the ratio of the measured step to its floor."""
    return round(figures.ms_per_step / step.ms, 4)


def digits(value: float) -> str:
    """Format with three significant digits: 1,053, 12.6, 0.0126; 0 for zero."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):.10f}".rstrip("0").rstrip(".")


def figures_table(figures: "Figures", step: "StepFloor | None", prompt: "Floor | None") -> Table:
    """Return the table of offline runs, with their floors if requested."""
    spread = ("deviation", "CV") if figures.runs > 1 else ()
    table = Table("", *(Column(name, justify="right") for name in ("mean", *spread)))
    wall = (figures.wall_tokens_per_s, figures.wall_deviation, figures.wall_cv)
    decode = (figures.decode_tokens_per_s, figures.decode_deviation, figures.decode_cv)
    for name, (mean, deviation, cv) in (("decode tokens/s", decode), ("wall tokens/s", wall)):
        spread_cells = (f"{deviation:.1f}", f"{100 * cv:.1f} %") if spread else ()
        table.add_row(name, f"{mean:.1f}", *spread_cells)
    table.add_row("ms per step", f"{figures.ms_per_step:.2f}")
    if step:
        table.add_row("  floor on an H200, ms", digits(step.ms))
        table.add_row("  measured / floor", digits(over_floor(figures, step)))
    if len(figures.rank_step_ms) > 1:
        fastest, slowest = (digits(f(figures.rank_step_ms)) for f in (min, max))
        table.add_row("ms per step on the ranks, min / max", f"{fastest} / {slowest}")
    table.add_row("time to first token, ms", f"{figures.ttft_ms:.1f}")
    if prompt and figures.requests == 1:
        table.add_row("  floor on an H200, ms", digits(prompt.ms))
        table.add_row("  measured / floor", digits(figures.ttft_ms / prompt.ms))
    table.add_row("acceptance length", f"{figures.acceptance_length:.2f}")
    table.add_row("acceptance rate", f"{100 * figures.acceptance_rate:.1f} %")
    table.caption = (
        f"{figures.requests} requests, {figures.prompt_tokens} prompt tokens,\n"
        f"{figures.tokens} tokens, {figures.runs} runs"
    )
    if len(figures.rank_step_ms) > 1:
        table.caption += f",\n{len(figures.rank_step_ms)} ranks; the floor is that of one rank"
    return table


def drafters_table(lines: "list[DrafterLine]") -> Table:
    """Return a table with one row per drafter, with acceptance by draft position."""
    table = Table(
        Column("drafter", no_wrap=True), "accepted at position 1, 2, ...", title="Drafters"
    )
    for name in ("length", "ms/step", "extra ms", "tokens/s", "speedup"):
        table.add_column(name, justify="right")
    table.add_column("tokens")
    for line in lines:
        table.add_row(
            f"{line.name} K={line.num_speculative_tokens}" if line.accepted_at else line.name,
            " ".join(f"{100 * share:.0f}" for share in line.accepted_at),
            f"{line.acceptance_length:.2f}",
            f"{line.ms_per_step:.2f}",
            f"{line.extra_ms:.2f}",
            f"{line.decode_tokens_per_s:.1f}",
            f"{line.speedup:.2f}",
            "equal" if line.agrees else "differ",
        )
    table.caption = "accepted: % of steps; extra ms: step time minus that without drafts"
    return table


def floor_table(step: "StepFloor", prompt: "Floor | None") -> Table:
    """Return the parts of each pass, and whether bandwidth or compute limits it."""
    from lockstep.worker.device_rates import H200

    names = ("GB", "memory ms", "TFLOP", "compute ms")
    table = Table(
        "part", *(Column(name, justify="right") for name in names), title="Floor of a step"
    )
    for name, floor in (("verify", step.verify), ("drafts", step.drafts), ("prompt", prompt)):
        if floor is None or not floor.total.bytes:
            continue
        for part in (*floor.parts, floor.total):
            table.add_row(
                f"{name}: {part.name}",
                f"{part.bytes / 1e9:.3f}",
                f"{part.memory_ms:.3f}",
                f"{part.flops / 1e12:.3f}" if part.flops else "",
                f"{part.matrix_ms:.3f}" if part.flops else "",
                end_section=part.name == "total",
            )
        if floor.exchanged.count:
            received = f"{floor.exchanged.bytes / 1e9:.3f}"
            ms = f"{floor.exchanged.ms(H200.exchange):.3f}"
            table.add_row(f"{name}: {floor.exchanged.count} exchanges", received, ms, "", "")
        table.add_row(f"floor of {name}", "", f"{floor.ms:.3f}", "", "", end_section=True)
    table.caption = (
        f"{step.rows} rows x {step.query_len} tokens, context {step.context}; "
        f"an H200's {H200.memory / 1e12} TB/s and {H200.matrix / 1e12:.0f} TFLOP/s"
    )
    return table


def kernel_table(lines: "list[KernelLine]") -> Table:
    """Return a table with one row per measurement; repeated names are left blank."""
    table = Table(Column("op", ratio=1), title="Kernels", expand=True)
    for name in ("rows", "us", "MB", "TB/s", "floor"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bits", no_wrap=True)
    previous = None
    for line in lines:
        key = (line.model, line.op, line.size)
        bits = "differ: " + ",".join(map(str, line.differing)) if line.differing else "equal"
        table.add_row(
            "" if key == previous else f"{line.model} {line.op} {line.size}",
            f"{line.rows} x {line.query_len}",
            f"{line.us:.1f}",
            f"{line.bytes / 1e6:.2f}",
            f"{line.tb_per_s:.2f}",
            f"{100 * line.of_floor:.1f} %",
            bits,
        )
        previous = key
    backends = ", ".join(sorted({line.backend for line in lines}))
    compared = ", ".join(map(str, lines[0].compared)) if lines else ""
    table.caption = f"backend: {backends}; bits: {compared} rows compared with the largest batch"
    return table


def trace_table(lines: "list[LayerTime]", on_gpu: bool) -> Table:
    """Return the time of one step by name, of GPU kernels or else of host functions."""
    from lockstep.bench.trace import CAPTURED

    table = Table(
        "layer or stage", Column("calls", justify="right"), title="Time of a step by name"
    )
    for name in ("GPU us", "share", "kernels", "host us") if on_gpu else ("host us", "share"):
        table.add_column(name, justify="right")
    us = attrgetter("device_us" if on_gpu else "host_us")
    named_lines = [line for line in lines if line.name != CAPTURED]
    total = sum(map(us, named_lines)) or 1.0
    for line in named_lines:
        share = f"{100 * us(line) / total:.1f} %"
        cells = [f"{line.host_us:.0f}", share]
        if on_gpu:
            cells = [f"{line.device_us:.1f}", share, f"{line.kernels:g}", f"{line.host_us:.0f}"]
        table.add_row(line.name, f"{line.calls:g}", *cells)
    table.caption = f"{total:.0f} us per step; host times include the profiler's overhead"
    for line in lines:
        if line.name == CAPTURED:
            table.caption += (
                f"; in CUDA graphs: {line.device_us:.0f} us in {line.kernels:g} kernels"
            )
    return table


def serving_table(runs: "list[ServingFigures]") -> Table:
    """Return a table with one row per load; latencies are p50 / p90 / p99 in ms."""
    table = Table("load", title="Serving: latencies in ms, p50 / p90 / p99")
    for name in ("TTFT", "TPOT", "ITL", "tokens/s", "failed"):
        table.add_column(name, justify="right")
    for run in runs:
        latencies = (run.ttft_ms, run.tpot_ms, run.itl_ms)
        table.add_row(
            f"{run.rate:g}/s" if run.rate else f"{run.concurrency} at once",
            *(" / ".join(digits(value) for value in values) for values in latencies),
            f"{run.tokens_per_s:.1f}",
            str(run.failed),
        )
    return table
