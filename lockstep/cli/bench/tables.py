"""What lockstep bench prints: tables of figures, floors, kernels and layers."""

from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

if TYPE_CHECKING:
    from lockstep.bench import Figures
    from lockstep.bench.drafters import DrafterLine
    from lockstep.bench.kernels import KernelLine
    from lockstep.bench.serving import ServingFigures
    from lockstep.bench.trace import Line
    from lockstep.worker.roofline import Floor, StepFloor


def over_floor(f: "Figures", least: "StepFloor") -> float:
    """The measured step over its floor."""
    return round(f.ms_per_step / least.ms, 4)


def digits(value: float) -> str:
    """Three digits, or all those in front of the point: 1,053, 12.6, 0.0126; 0 for nothing."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):.10f}".rstrip("0").rstrip(".")


def figures_table(f: "Figures", least: "StepFloor | None", prompt: "Floor | None") -> Table:
    """The figures of offline runs, with their floors where those were asked for."""
    spread = ("deviation", "CV") if f.runs > 1 else ()
    right: dict[str, Any] = {"justify": "right"}
    table = Table("", *(Column(name, **right) for name in ("mean", *spread)))
    wall = (f.wall_tokens_per_s, f.wall_deviation, f.wall_cv)
    decode = (f.decode_tokens_per_s, f.decode_deviation, f.decode_cv)
    for name, (mean, deviation, cv) in (("decode tokens/s", decode), ("wall tokens/s", wall)):
        shown = (f"{deviation:.1f}", f"{100 * cv:.1f} %") if spread else ()
        table.add_row(name, f"{mean:.1f}", *shown)
    table.add_row("ms per step", f"{f.ms_per_step:.2f}")
    if least:
        table.add_row("  floor on an H200, ms", digits(least.ms))
        table.add_row("  measured / floor", digits(over_floor(f, least)))
    table.add_row("time to first token, ms", f"{f.ttft_ms:.1f}")
    if prompt and f.requests == 1:
        table.add_row("  floor on an H200, ms", digits(prompt.ms))
        table.add_row("  measured / floor", digits(f.ttft_ms / prompt.ms))
    table.add_row("acceptance length", f"{f.acceptance_length:.2f}")
    table.add_row("acceptance rate", f"{100 * f.acceptance_rate:.1f} %")
    table.caption = (
        f"{f.requests} requests, {f.prompt_tokens} prompt tokens,\n{f.tokens} tokens, {f.runs} runs"
    )
    return table


def drafters_table(lines: "list[DrafterLine]") -> Table:
    """One line per drafter; acceptance by the place of the draft in its step."""
    right: dict[str, Any] = {"justify": "right"}
    table = Table(Column("drafter", no_wrap=True), "accepted at place 1, 2, ...", title="Drafters")
    for name in ("length", "ms/step", "extra ms", "tokens/s", "speed"):
        table.add_column(name, **right)
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
    table.caption = "acceptance in % of steps; extra ms: a step's time beyond one without drafts"
    return table


def floor_table(least: "StepFloor", prompt: "Floor | None") -> Table:
    """The parts of each pass, and which of both rates decides."""
    from lockstep.worker.device_rates import H200

    right: dict[str, Any] = {"justify": "right"}
    names = ("GB", "ms to move", "Tflop", "ms to compute")
    table = Table("part", *(Column(name, **right) for name in names), title="Floor of a step")
    for name, floor in (("verify", least.verify), ("drafts", least.drafts), ("prompt", prompt)):
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
        table.add_row(f"floor of {name}", "", f"{floor.ms:.3f}", "", "", end_section=True)
    table.caption = (
        f"{least.rows} rows x {least.query_len} tokens, context {least.context}; "
        f"an H200's {H200.memory / 1e12} TB/s and {H200.matrix / 1e12:.0f} TFLOP/s"
    )
    return table


def kernel_table(lines: "list[KernelLine]") -> Table:
    """One line per measurement; model, op and size stand in the first of a kind only."""
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    table = Table(Column("op", ratio=1), title="Kernels", expand=True)
    for name in ("rows", "us", "MB", "TB/s", "floor"):
        table.add_column(name, **right)
    table.add_column("bits", no_wrap=True)
    above = None
    for line in lines:
        named = (line.model, line.op, line.size)
        bits = "differ: " + ",".join(map(str, line.differing)) if line.differing else "equal"
        table.add_row(
            "" if named == above else f"{line.model} {line.op} {line.size}",
            f"{line.rows} x {line.query_len}",
            f"{line.us:.1f}",
            f"{line.bytes / 1e6:.2f}",
            f"{line.tb_per_s:.2f}",
            f"{100 * line.of_floor:.1f} %",
            bits,
        )
        above = named
    backends = ", ".join(sorted({line.backend for line in lines}))
    compared = ", ".join(map(str, lines[0].compared)) if lines else ""
    table.caption = f"backend: {backends}; bits at rows {compared} against the largest batch"
    return table


def trace_table(lines: "list[Line]", on_gpu: bool) -> Table:
    """The time by name of one step; on a GPU its kernels decide, else the host."""
    from lockstep.bench.trace import CAPTURED

    right: dict[str, Any] = {"justify": "right"}
    table = Table("layer or stage", Column("calls", **right), title="Time of a step by name")
    for name in ("GPU us", "share", "kernels", "host us") if on_gpu else ("host us", "share"):
        table.add_column(name, **right)
    named = [line for line in lines if line.name != CAPTURED]
    whole = sum(line.device_us if on_gpu else line.host_us for line in named) or 1.0
    for line in named:
        share = f"{100 * (line.device_us if on_gpu else line.host_us) / whole:.1f} %"
        gpu = (f"{line.device_us:.1f}", share, f"{line.kernels:g}", f"{line.host_us:.0f}")
        shown = gpu if on_gpu else (f"{line.host_us:.0f}", share)
        table.add_row(line.name, f"{line.calls:g}", *shown)
    table.caption = f"{whole:.0f} us a step; host times include the profiler's own"
    for line in lines:
        if line.name == CAPTURED:
            table.caption += f"; captured: {line.device_us:.0f} us in {line.kernels:g} kernels"
    return table


def serving_table(runs: "list[ServingFigures]") -> Table:
    """One line per load; latencies are p50 / p90 / p99 in ms."""
    right: dict[str, Any] = {"justify": "right"}
    table = Table("load", title="Serving, latencies p50 / p90 / p99 in ms")
    for name in ("first token", "per token", "between pieces", "tokens/s", "failed"):
        table.add_column(name, **right)
    for run in runs:
        latencies = (run.ttft_ms, run.tpot_ms, run.itl_ms)
        table.add_row(
            f"{run.rate:g}/s" if run.rate else f"{run.concurrency} at once",
            *(" / ".join(digits(value) for value in values) for values in latencies),
            f"{run.tokens_per_s:.1f}",
            str(run.failed),
        )
    return table
