"""What is varied: drafter, K, phase and graph mode make an engine; sampling and batch, its runs."""

from dataclasses import dataclass
from itertools import product
from typing import Any

from lockstep.check.drafters import NONE, hooks_of, speculative_config
from lockstep.worker.hooks import CheckHooks

DRAFT_COUNTS = (1, 2, 3, 5, 7, 15)
"""K, of the full matrix."""
DEFAULT_COUNTS = (1, 3, 15)
"""K, of the default matrix."""
MOST_DRAFTS = 15
"""The most drafts of a step whose number changes."""
COLD = "cold"
PREFIX_HIT = "prefix hit"
PREEMPTED = "preempted"
PHASES = (COLD, PREFIX_HIT, PREEMPTED)
SAMPLING = "sampling"
ORACLE = "oracle"
WORLD = "world"
"""The phase of a world's setup: cold, hit and preempted as it comes."""
TESTS = (SAMPLING, ORACLE)
"""Sections whose cases are tests, not answers: they stand where a setup has its phase."""
BATCHES = ("alone", "batch of 7", "long prompt")


@dataclass(frozen=True)
class Size:
    """How much of the matrix. alone: cases that each engine runs alone, in turn over the engines
    (8 are all). company: short cases that run beside the long one (7 are all). worlds: how many are
    drawn beside it; draws: seeds of each test of a distribution."""

    max_tokens: int
    alone: int
    company: int
    worlds: int = 0
    draws: int = 0

    @property
    def answers(self) -> int:
        """Of each engine: those of the cases alone, of the short ones at once, and of the long one
        beside some."""
        return self.alone + ROWS + self.company


SIZES = {
    "quick": Size(8, 1, 2, worlds=10, draws=64),
    "default": Size(24, 2, 2, worlds=60, draws=256),
    "full": Size(32, 8, 7, worlds=240, draws=1024),
}

ROWS = 8
"""Rows of an engine: all short cases and the long one."""
SMALL_CHUNK = 128
"""Prompt tokens of a step, fewer than most prompts have."""
LONG_PROMPT = 1300
"""Tokens of the long prompt, about. From some 1,000 on, steps of a GPU are divided otherwise."""
MAX_MODEL_LEN = 1536
PAGES = 256
SNAPSHOTS = 64
PREEMPT_EVERY = 3
"""Steps between preemptions where they are forced."""


@dataclass(frozen=True)
class Setup:
    """One engine: what may not change an answer. phase: which cache state its requests meet;
    changing: whether every step brings another number of drafts, up to k."""

    drafter: str
    k: int
    phase: str
    graph: str
    changing: bool = False

    @property
    def drafting(self) -> str:
        """none, drafter K=n, or K=0..n where it changes."""
        k = f"0..{self.k}" if self.changing else self.k
        return f"{self.drafter} K={k}" if self.k else NONE

    def settings(self, small_chunks: bool = True) -> dict[str, Any]:
        """The LLM arguments of this engine."""
        return {
            "speculative_config": speculative_config(self.drafter, self.k, self.changing),
            "cuda_graph_mode": self.graph,
            "max_num_seqs": ROWS,
            "row_buckets": (1, 2, 4, ROWS),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": SMALL_CHUNK if small_chunks else 2 * MAX_MODEL_LEN,
            "num_gpu_blocks": PAGES,
            "num_snapshots": SNAPSHOTS if self.phase == PREFIX_HIT else 0,
            "enable_prefix_caching": self.phase == PREFIX_HIT,
        }

    def hooks(self) -> CheckHooks:
        """What only a check puts into this engine."""
        every = PREEMPT_EVERY if self.phase == PREEMPTED else 0
        return hooks_of(self.drafter, self.changing, every)


PLAIN = Setup(NONE, 0, COLD, "none")
"""The run that all others must equal: no drafts, alone, cold, eager, whole prompts at once."""


def setups(size: str, drafters: tuple[str, ...], graphs: tuple[str, ...]) -> list[Setup]:
    """The engines of a check. `graphs`: the modes this device has, the product's default first.

    full: every combination. default: every drafter and phase at three K and a changing one, all
    graph modes at K 0, 3 and changing, and the first mode elsewhere. quick: every drafter, phase
    and graph mode. What they leave out, worlds hold.
    """
    drafting = [(NONE, 0, False), *product(drafters, DRAFT_COUNTS, (False,))]
    drafting += [(drafter, MOST_DRAFTS, True) for drafter in drafters]
    every = [Setup(d, k, p, g, c) for (d, k, c), p, g in product(drafting, PHASES, graphs)]
    if size == "full":
        return every
    if size == "default":
        chosen = [s for s in every if s.k in (0, *DEFAULT_COUNTS)]
        return [s for s in chosen if s.graph == graphs[0] or s.k in (0, 3) or s.changing]
    sample = [(NONE, 0, False), (drafters[0], 3, False), (drafters[-1], MOST_DRAFTS, True)]
    sample += [(drafter, 3, False) for drafter in drafters[1:-1]]
    return [
        Setup(d, k, PHASES[turn % len(PHASES)], graphs[turn % len(graphs)], changing)
        for turn, (d, k, changing) in enumerate(sample)
    ]
