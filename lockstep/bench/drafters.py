"""Benchmark of a model's drafters: acceptance by position, cost of a step, speed.

All engines run the same prompts. A drafter that learns from outputs has the outputs of the warm-up
prompts, but none of the measured ones.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.offline import Figures, measure
from lockstep.bench.serving import need_plots
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.example_prompts import short_prompts
from lockstep.llm import LLM
from lockstep.progress import Progress, ignore_progress
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.draft_length import FixedDraftLength
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks

NO_DRAFTS = "none"
"""Name of the run without drafts."""


@dataclass
class CountedDraftLength(FixedDraftLength):
    """Draft length policy with K drafts per step.

    reached[i]: number of rows that accepted at least i drafts.
    """

    reached: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset the counters."""
        self.reached = [0] * (self.num_drafts + 1)

    def observe(
        self, rows: int, num_drafts: int, num_drafted: int, accepted: list[int], ms: float | None
    ) -> None:
        """Count the rows of a step that had drafts."""
        for num_accepted in accepted if num_drafted else ():
            for position in range(num_accepted + 1):
                self.reached[position] += 1

    @property
    def shares(self) -> list[float]:
        """Return, for each of the K positions, the share of steps that accepted its draft."""
        num_steps = max(self.reached[0], 1)
        return [count / num_steps for count in self.reached[1:]]


@dataclass(frozen=True)
class DrafterLine:
    """Figures of one drafter.

    accepted_at: share of steps that accepted the draft at each position. extra_ms: additional time
    of a step over one without drafts. speedup: of decoding. agrees: the tokens equal those without
    drafts.
    """

    name: str
    num_speculative_tokens: int
    accepted_at: list[float]
    acceptance_length: float
    ms_per_step: float
    extra_ms: float
    decode_tokens_per_s: float
    speedup: float
    agrees: bool


def compare_drafters(
    settings: dict[str, Any],
    drafters: Sequence[dict[str, Any]],
    rows: int,
    params: SamplingParams,
    runs: int,
    progress: Progress = ignore_progress,
) -> list[DrafterLine]:
    """Return the figures without drafts, then those of each speculative_config.

    settings: LLM arguments for all engines. drafters: speculative_configs, each with its K. rows:
    concurrent requests. Raises what LLM raises.
    """
    lines: list[DrafterLine] = []
    expected_tokens: list[list[int]] = []
    plain: Figures | None = None
    for index, drafting in enumerate([None, *drafters]):
        name = drafting["method"] if drafting else NO_DRAFTS
        progress(name, index, len(drafters) + 1)
        # Objects of an engine refer to each other: only a collection frees its memory.
        gc.collect()
        torch.cuda.empty_cache()
        figures, policy, tokens = _measured(settings, drafting, rows, params, runs)
        plain = plain or figures
        expected_tokens = expected_tokens or tokens
        line = DrafterLine(
            name=name,
            num_speculative_tokens=policy.num_drafts,
            accepted_at=policy.shares,
            acceptance_length=figures.acceptance_length,
            ms_per_step=figures.ms_per_step,
            extra_ms=figures.ms_per_step - plain.ms_per_step,
            decode_tokens_per_s=figures.decode_tokens_per_s,
            speedup=figures.decode_tokens_per_s / plain.decode_tokens_per_s,
            agrees=tokens == expected_tokens,
        )
        lines.append(line)
    return lines


def _measured(
    settings: dict[str, Any],
    drafting: dict[str, Any] | None,
    rows: int,
    params: SamplingParams,
    runs: int,
) -> tuple[Figures, CountedDraftLength, list[list[int]]]:
    """Return the figures of an engine, its acceptance and its tokens."""
    # An adaptive K would try positions different numbers of times.
    fixed_config = None if drafting is None else {**drafting, "adaptive": False}
    engine_settings = {
        **settings,
        "speculative_config": fixed_config,
        "enable_prefix_caching": False,
        "max_num_seqs": rows,
    }
    policies: list[CountedDraftLength] = []

    def make_policy(counts: tuple[int, ...]) -> CountedDraftLength:
        policies.append(CountedDraftLength(counts[-1]))
        return policies[0]

    engine = build_engine(
        EngineConfig.read(**engine_settings), hooks=CheckHooks(draft_policy=make_policy)
    )
    llm = LLM.from_engine(engine)
    prompts = short_prompts(llm)
    half = (len(prompts) + 1) // 2
    measured_prompts = [{"prompt_token_ids": prompts[i % half]} for i in range(rows)]
    warm_up_prompts = [{"prompt_token_ids": ids} for ids in prompts[half:]] or measured_prompts
    llm.generate(warm_up_prompts, params, use_tqdm=False)
    # A drafter learns from finished outputs: all runs are of the same prompts, so it would look up
    # the output of the run before.
    worker_of(engine).program.on_answer = ()
    policies[0].clear()
    figures, outputs = measure(llm, measured_prompts, params, 0, runs)
    return figures, policies[0], [output.outputs[0].token_ids for output in outputs]


def plot(lines: Sequence[DrafterLine], path: Path, title: str) -> None:
    """Write a PNG of acceptance by position, cost and speed of every drafter."""
    need_plots()
    draw(lines, title).savefig(path, dpi=120)


def draw(lines: Sequence[DrafterLine], title: str) -> Any:
    """Return the plot as a matplotlib Figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    acceptance, costs, speeds = figure.subplots(1, 3)
    for line in lines:
        if line.accepted_at:
            positions = range(1, len(line.accepted_at) + 1)
            acceptance.plot(positions, line.accepted_at, marker="o", label=line.name, clip_on=False)
    acceptance.set_title("acceptance by position")
    acceptance.set_xlabel("position of the draft")
    acceptance.set_xticks(range(1, max(len(line.accepted_at) for line in lines) + 1))
    acceptance.set_ylim(0, 1)
    acceptance.grid(alpha=0.3)
    if acceptance.lines:
        acceptance.legend()
    names = [line.name for line in lines]
    costs.bar(names, [line.extra_ms for line in lines])
    costs.set_title("step time minus that without drafts, ms")
    speeds.bar(names, [line.decode_tokens_per_s for line in lines])
    speeds.set_title("decode tokens/s")
    for bars in (costs, speeds):
        bars.tick_params(axis="x", rotation=20)
    return figure
