"""Memory plans of command lines that users reported, as a table for docs/models.md.

    python benchmarks/memory_plans.py

Prints Markdown from the plans of `lockstep explain --arch`. No weights are needed.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # so that it runs from any folder
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.models import folders
from lockstep.config import EngineConfig
from lockstep.worker.explain import explain_architecture

GB = 1e9


@dataclass(frozen=True)
class Report:
    """Command line that a user reported, and the cards it ran on.

    cards: number of cards. memory: bytes of one card.
    """

    title: str
    folder: str
    card: str
    arch: str
    memory: float
    cards: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


def mtp(num_drafts: int) -> dict[str, Any]:
    """Return the speculative_config of num_drafts drafts from the checkpoint's MTP module."""
    return {"method": "mtp", "num_speculative_tokens": num_drafts}


REPORTS = (
    Report(
        "Qwen3.5-35B-A3B GPTQ int4, MTP K=2, utilization 0.85",
        *("35b-a3b-int4", "A100 80 GB", "sm_80", 85e9),
        settings=dict(gpu_memory_utilization=0.85, speculative_config=mtp(2)),
    ),
    Report(
        "Qwen3.6-27B int4 AutoRound, float16, 125,000 tokens, `turboquant_3bit_nc`, MTP K=3, "
        "utilization 0.92",
        *("27b-auto-round", "RTX 3090 24 GB", "sm_86", 25.3e9),
        settings=dict(
            dtype="float16",
            max_model_len=125_000,
            kv_cache_dtype="turboquant_3bit_nc",
            gpu_memory_utilization=0.92,
            speculative_config=mtp(3),
        ),
    ),
    Report(
        "Qwen3.6-35B-A3B FP8, `turboquant_k8v4`",
        *("35b-a3b-fp8", "24 GB", "sm_86", 25.3e9),
        cards=2,
        settings=dict(kv_cache_dtype="turboquant_k8v4"),
    ),
    Report(
        "Nemotron-3-Super AWQ int4",
        *("nemotron-3-super-awq", "16 GB", "sm_89", 16.9e9),
        cards=8,
    ),
    Report(
        "Nemotron-3-Super NVFP4",
        *("nemotron-3-super-nvfp4", "GB10 128 GB", "sm_121", 128e9),
    ),
    Report(
        "Kimi-K2 NVFP4, without its EAGLE-3 head",
        *("kimi-k2-nvfp4", "GB200 192 GB", "sm_100", 192e9),
    ),
)
HEAD = """| command line | cards | weights per card, GB | needed per card, GB | plan |
|---|---|---|---|---|
"""
"""Header of the table."""


def table() -> str:
    """Return the table as Markdown."""
    models = folders()
    lines = []
    with TemporaryDirectory() as root:
        for report in REPORTS:
            folder = Path(root) / report.folder
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(models[report.folder]))
            lines.append(line_of(report, folder))
    return HEAD + "\n".join(lines) + "\n"


def line_of(report: Report, folder: Path) -> str:
    """Return the table row of a report."""
    settings = {"tensor_parallel_size": report.cards, **report.settings}
    config = EngineConfig.read(model=str(folder), load_format="dummy", **settings)
    plan = explain_architecture(config, report.arch, int(report.memory))["plan"]
    card = report.card if report.cards == 1 else f"{report.cards} x {report.card}"
    sizes = (f"{plan[name] / GB:.1f}" for name in ("weights_bytes", "needed_bytes"))
    return f"| {' | '.join((report.title, card, *sizes, summary_of(report, plan)))} |"


def summary_of(report: Report, plan: dict[str, Any]) -> str:
    """Return a summary of the plan."""
    if plan["fits"]:
        limits = (
            f"{plan['max_num_seqs']} requests at once, {plan['max_num_batched_tokens']:,} prompt "
            f"tokens a step, a cache of {plan['cache_tokens']:,} tokens"
        )
        notes = [note for note in plan["notes"] if " more would allow " in note]
        return ". ".join((limits, *notes))
    return "does not fit"


if __name__ == "__main__":
    sys.stdout.write(table())
