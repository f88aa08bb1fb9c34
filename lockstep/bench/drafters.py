"""What every drafter of a model is worth: acceptance by position, cost of a step, speed.

Every engine answers the same prompts. Drafters that learn from answers have seen those of other
prompts, from the warm-up, and none of the measured ones.
"""

import gc
from collections.abc import Callable, Sequence
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
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.draft_length import FixedDraftLength
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks

NO_DRAFTS = "none"
"""What the run without drafts is called."""
Progress = Callable[[str, int, int], None]


@dataclass
class CountedDraftLength(FixedDraftLength):
    """K drafts in every step. reached[i]: how often a row of a step accepted i drafts or more."""

    reached: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begins to count anew."""
        self.reached = [0] * (self.num_drafts + 1)

    def observe(self, rows: int, count: int, made: int, accepted: list[int], ms: float) -> None:
        """Counts the rows of a step that drafts were made for."""
        for taken in accepted if made else ():
            for place in range(taken + 1):
                self.reached[place] += 1

    @property
    def shares(self) -> list[float]:
        """For each of the K places, the share of steps whose draft there was accepted."""
        whole = max(self.reached[0], 1)
        return [count / whole for count in self.reached[1:]]


@dataclass(frozen=True)
class DrafterLine:
    """One drafter. accepted_at: by place of the draft, the share of steps that accepted it;
    extra_ms: what a step takes beyond one without drafts; speedup: of decoding, over none;
    agrees: whether its tokens are those without drafts."""

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
    progress: Progress = lambda what, done, of: None,
) -> list[DrafterLine]:
    """A line without drafts, and one for each speculative_config, K drafts in every step.

    settings: LLM's, for all engines; rows: requests at once. Raises what LLM raises.
    """
    lines: list[DrafterLine] = []
    due: list[list[int]] = []
    plain: Figures | None = None
    for turn, drafting in enumerate([None, *drafters]):
        name = drafting["method"] if drafting else NO_DRAFTS
        progress(name, turn, len(drafters) + 1)
        gc.collect()
        torch.cuda.empty_cache()
        figures, counted, tokens = _measured(settings, drafting, rows, params, runs)
        plain = plain or figures
        due = due or tokens
        line = DrafterLine(
            name=name,
            num_speculative_tokens=counted.num_drafts,
            accepted_at=counted.shares,
            acceptance_length=figures.acceptance_length,
            ms_per_step=figures.ms_per_step,
            extra_ms=figures.ms_per_step - plain.ms_per_step,
            decode_tokens_per_s=figures.decode_tokens_per_s,
            speedup=figures.decode_tokens_per_s / plain.decode_tokens_per_s,
            agrees=tokens == due,
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
    """The figures of an engine, its acceptance, and its tokens."""
    fixed = None if drafting is None else {**drafting, "adaptive": False}
    own = {
        **settings,
        "speculative_config": fixed,
        "enable_prefix_caching": False,
        "max_num_seqs": rows,
    }
    policies: list[CountedDraftLength] = []

    def policy(counts: tuple[int, ...]) -> CountedDraftLength:
        policies.append(CountedDraftLength(counts[-1]))
        return policies[0]

    engine = build_engine(EngineConfig.read(**own), hooks=CheckHooks(draft_policy=policy))
    llm = LLM.over(engine)
    asked = short_prompts(llm)
    half = (len(asked) + 1) // 2
    measured = [{"prompt_token_ids": asked[i % half]} for i in range(rows)]
    others = [{"prompt_token_ids": ids} for ids in asked[half:]] or measured
    llm.generate(others, params, use_tqdm=False)
    worker_of(engine).program.on_answer = ()
    policies[0].clear()
    figures, outputs = measure(llm, measured, params, 0, runs)
    return figures, policies[0], [o.outputs[0].token_ids for o in outputs]


def plot(lines: Sequence[DrafterLine], path: Path, title: str) -> None:
    """A PNG: acceptance by position, cost and speed of every drafter."""
    need_plots()
    draw(lines, title).savefig(path, dpi=120)


def draw(lines: Sequence[DrafterLine], title: str) -> Any:
    """The picture of it, a Figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    by_place, costs, speeds = figure.subplots(1, 3)
    for line in lines:
        if line.accepted_at:
            places = range(1, len(line.accepted_at) + 1)
            by_place.plot(places, line.accepted_at, marker="o", label=line.name, clip_on=False)
    by_place.set_title("share of steps whose draft is accepted")
    by_place.set_xlabel("place of the draft")
    by_place.set_xticks(range(1, max(len(line.accepted_at) for line in lines) + 1))
    by_place.set_ylim(0, 1)
    by_place.grid(alpha=0.3)
    if by_place.lines:
        by_place.legend()
    names = [line.name for line in lines]
    costs.bar(names, [line.extra_ms for line in lines])
    costs.set_title("ms of a step beyond one without drafts")
    speeds.bar(names, [line.decode_tokens_per_s for line in lines])
    speeds.set_title("decode tokens/s")
    for bars in (costs, speeds):
        bars.tick_params(axis="x", rotation=20)
    return figure
