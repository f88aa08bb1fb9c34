"""Matrix of engine settings: drafter, K, cache phase and graph mode."""

from dataclasses import dataclass
from itertools import product
from typing import Any

from lockstep.check.drafters import NO_DRAFTER, hooks_of, speculative_config
from lockstep.kernels.attention import KV_SPLIT
from lockstep.spec.config import AUTO_DRAFTS
from lockstep.worker.hooks import CheckHooks

DRAFT_COUNTS = (1, 2, 3, 5, 7, 15)
"""K of the full matrix."""
DEFAULT_COUNTS = (1, 3, 15)
"""K of the default matrix."""
MAX_DRAFTS = 15
"""K of engines whose number of drafts varies per step."""
COLD = "cold"
PREFIX_HIT = "prefix hit"
PREEMPTED = "preempted"
PHASES = (COLD, PREFIX_HIT, PREEMPTED)
SAMPLING = "sampling"
TRANSFORMERS = "transformers"
KERNEL = "kernel"
LOGITS = "logits"
"""Phase of outputs whose logits alone are compared, cold and after prefix hits."""
SCENARIO = "scenario"
"""Phase of a random scenario, whose rows are cold, prefix hits or preempted as scheduled."""
TESTS = (SAMPLING, TRANSFORMERS)
"""Phases whose cases are tests of logits and distributions, not outputs."""
BATCHES = ("alone", "batch of 7", "long prompt")


@dataclass(frozen=True)
class Size:
    """Size of a check.

    max_tokens: output tokens per request. alone: number of the 8 cases that an engine runs alone;
    engines take different ones. companions: number of the 7 short cases that share a batch with the
    long one. scenarios: number of random scenarios. num_samples: sampled tokens of each test of a
    distribution. strength: number of feature values whose combinations scenarios meet. covers: more
    scenarios until every such combination was met. requests: requests per scenario. twins: share of
    those requests that come again without a disturbance.
    """

    max_tokens: int
    alone: int
    companions: int
    scenarios: int = 0
    num_samples: int = 0
    strength: int = 2
    covers: bool = False
    requests: int = 4
    twins: float = 0.15


SIZES = {
    "quick": Size(8, 1, 2, scenarios=12, num_samples=64, twins=0.6),
    "default": Size(24, 2, 2, scenarios=60, num_samples=256, covers=True),
    "full": Size(32, 8, 7, scenarios=240, num_samples=1024, strength=3, covers=True),
}

ROWS = 8
"""Rows of an engine: the short cases and the long one."""
SMALL_CHUNK = 128
"""max_num_batched_tokens, smaller than most prompts."""
LONG_PROMPT = 1300
"""Approximate length of the long prompt. From about 1,000 tokens, GPU kernels split work
differently."""
CPU_LONG_PROMPT = 3 * KV_SPLIT + 32
"""Approximate length of the long prompt on a CPU. It has four KV splits, the last one in part.
CPU kernels run a longer prompt by the same code."""
MAX_MODEL_LEN = 1536
PAGES = 256
PAGES_PER_ROW = 8
"""Pages of a short prompt and its answer, at least."""
SNAPSHOTS = 64
PREEMPT_EVERY = 3
"""Steps between forced preemptions."""


@dataclass(frozen=True)
class Setup:
    """Settings of an engine, none of which may change an output.

    phase: cache state of the prompts. changing: the number of drafts varies per step, up to k.
    rows: max_num_seqs.
    """

    drafter: str
    k: int
    phase: str
    graph: str
    changing: bool = False
    rows: int = ROWS

    @property
    def drafting(self) -> str:
        """Return "none", "drafter K=n", or "drafter K=0..n" where the number changes."""
        k = f"0..{self.k}" if self.changing else self.k
        return f"{self.drafter} K={k}" if self.k else NO_DRAFTER

    def settings(self, small_chunks: bool = True) -> dict[str, Any]:
        """Return the LLM arguments of this engine."""
        chunk = SMALL_CHUNK if small_chunks else 2 * MAX_MODEL_LEN
        if self.rows > ROWS:
            # With small chunks the first answers would end before the last prompt is read.
            chunk = max(2 * MAX_MODEL_LEN, self.rows * SMALL_CHUNK)
        return {
            "speculative_config": speculative_config(self.drafter, self.k, self.changing),
            "cuda_graph_mode": self.graph,
            "max_num_seqs": self.rows,
            # Other numbers of rows have the buckets that a server would choose.
            "row_buckets": (1, 2, 4, ROWS) if self.rows == ROWS else None,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": chunk,
            "num_gpu_blocks": max(PAGES, self.rows * PAGES_PER_ROW),
            "num_snapshots": SNAPSHOTS if self.phase == PREFIX_HIT else 0,
            "enable_prefix_caching": self.phase == PREFIX_HIT,
        }

    def hooks(self) -> CheckHooks:
        """Return the hooks that a check adds to this engine."""
        preempt_every = PREEMPT_EVERY if self.phase == PREEMPTED else 0
        return hooks_of(self.drafter, self.changing, preempt_every)


def long_prompt_length(device: str, on_gpu: int = LONG_PROMPT) -> int:
    """Return the length of the long prompt on a device. on_gpu: its length on a GPU."""
    return min(on_gpu, CPU_LONG_PROMPT) if device == "cpu" else on_gpu


def num_outputs(size: Size, setup: Setup) -> int:
    """Return the outputs of an engine: single cases, the batch of 7, the long prompt's batch, and
    one that fills more rows."""
    return size.alone + ROWS + size.companions + (setup.rows if setup.rows > ROWS else 0)


def requested_setup(
    drafting: dict[str, Any] | None, rows: int | None, graphs: tuple[str, ...]
) -> Setup | None:
    """Return the engine with the user's drafter, K and max_num_seqs; None if none is set.

    drafting: the user's speculative_config with its method. graphs: as in setups().
    """
    if drafting is None and rows is None:
        return None
    num_rows = rows or ROWS
    if drafting is None:
        return Setup(NO_DRAFTER, 0, COLD, graphs[0], rows=num_rows)
    num_drafts = drafting.get("num_speculative_tokens", AUTO_DRAFTS)
    return Setup(drafting["method"], num_drafts, COLD, graphs[0], rows=num_rows)


PLAIN = Setup(NO_DRAFTER, 0, COLD, "none")
"""Plain run, which all others must equal: no drafts, alone, cold, eager, no chunked prefill."""


def setups(size: str, drafters: tuple[str, ...], graphs: tuple[str, ...]) -> list[Setup]:
    """Return the engines of a check. graphs: graph modes of this device, the default first.

    full: every combination. default: every drafter and phase at three K and a changing one, all
    graph modes at K 0, 3 and changing, and the first mode elsewhere. quick: every drafter, phase
    and graph mode. Scenarios cover the remaining combinations.
    """
    drafting = [(NO_DRAFTER, 0, False), *product(drafters, DRAFT_COUNTS, (False,))]
    drafting += [(drafter, MAX_DRAFTS, True) for drafter in drafters]
    combinations = [Setup(d, k, p, g, c) for (d, k, c), p, g in product(drafting, PHASES, graphs)]
    if size == "full":
        return combinations
    if size == "default":
        chosen = [s for s in combinations if s.k in (0, *DEFAULT_COUNTS)]
        return [s for s in chosen if s.graph == graphs[0] or s.k in (0, 3) or s.changing]
    sample = [(NO_DRAFTER, 0, False), (drafters[0], 3, False), (drafters[-1], MAX_DRAFTS, True)]
    sample += [(drafter, 3, False) for drafter in drafters[1:-1]]
    return [
        Setup(d, k, PHASES[index % len(PHASES)], graphs[index % len(graphs)], changing)
        for index, (d, k, changing) in enumerate(sample)
    ]
