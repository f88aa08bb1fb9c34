"""Choice of the schedules whose decode step and prompt step share one forward pass.

A decode step reads all weights for few tokens: 13 of the 21 ms of 64 rows of Qwen3.6-27B on an
H200. In the pass of a prompt step these reads cost nothing more. No answer depends on the choice.
"""

from collections import Counter
from collections.abc import Sequence

from lockstep.config import PADDED_PROMPTS, StepLimits
from lockstep.step import StepShape
from lockstep.worker.step_shapes import padded_prompt_step, prompt_step

TILE = 128
"""Tokens of a joint graph are a multiple of it: rows of a tile of the linears of many tokens."""
USES_BEFORE_CAPTURE = 16
"""Uses of a pair of shapes before a graph of it is captured.

H200, Qwen3.6-27B: a capture takes 0.35 s with 512 tokens and 0.75 s with 2,048, and each later use
saves 16 ms. So a capture pays after 47 further uses at most; 16 is an estimate of when they follow.
"""
GRAPHS_PER_LARGEST = 5
"""Maximum graphs of joint steps for each largest one whose results memory is planned for."""

Pair = tuple[StepShape, StepShape]
"""Shapes of the decode step and of the prompt step of a forward pass."""


def max_graphs(limits: StepLimits) -> int:
    """Return the maximum graphs of joint steps."""
    return GRAPHS_PER_LARGEST * limits.joint_graphs


class JointSteps:
    """Joint steps of a worker. All ranks of a model choose the same ones.

    On a CPU a decode step always joins the prompt step of its schedule. On a GPU they join as
    graphs, which are captured once a pair of shapes was used several times. Without a graph, the
    kernels of a pass take the host longer to launch than the weights take to read.

    row_buckets: rows of decode steps in graphs. graphs: captured pairs. uses: of each pair before
    its capture. uses_before_capture: number of these; a check sets it to 0. may_capture: false
    after a capture that failed.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.row_buckets = _halved(limits.row_buckets)
        self.max_prompt_tokens = 0
        if limits.graph_mode == "full" and limits.joint_graphs:
            self.max_prompt_tokens = max(limits.prompt_buckets, default=0)
        self.max_decode_tokens = limits.row_buckets[-1] * limits.query_len
        self.graphs: set[Pair] = set()
        self.uses: Counter[Pair] = Counter()
        self.uses_before_capture = USES_BEFORE_CAPTURE
        self.may_capture = True

    def join(self, decode: StepShape, lengths: Sequence[int]) -> Pair | None:
        """Return the shapes of a decode step and of a step of these prompt chunks that join.

        None: the steps run apart.
        """
        limits = self.limits
        if limits.device == "cpu":
            return decode, prompt_step(limits, lengths, limits.prompt_buckets)
        rows = next(rows for rows in self.row_buckets if rows >= decode.rows)
        decode = StepShape.uniform(rows, decode.query_len)
        tokens = -(-(decode.tokens + sum(lengths)) // TILE) * TILE
        prompt = padded_prompt_step(limits, tokens - decode.tokens)
        if prompt.tokens > self.max_prompt_tokens or len(lengths) > PADDED_PROMPTS:
            return None
        pair = (decode, prompt)
        if pair in self.graphs:
            return pair
        self.uses[pair] += 1
        return pair if self._may_get_graph(pair) else None

    def needs_capture(self, shapes: tuple[StepShape, ...]) -> bool:
        """Return whether a forward pass is a joint one that runs as a graph and has none yet."""
        return len(shapes) > 1 and self.max_prompt_tokens > 0 and shapes not in self.graphs

    def _may_get_graph(self, pair: Pair) -> bool:
        """Return whether a pair was used often enough for a graph, and memory for it is left.

        A graph keeps the logits of each token of its decode step and of each row of its prompts.
        """
        passes = [*self.graphs, pair]
        logit_rows = sum(decode.tokens + prompt.rows for decode, prompt in passes)
        prompt_tokens = sum(prompt.tokens for _, prompt in passes)
        max_logit_rows = self.max_decode_tokens + pair[1].rows
        largest = self.limits.joint_graphs
        return (
            self.may_capture
            and self.uses[pair] > self.uses_before_capture
            and len(passes) <= max_graphs(self.limits)
            and logit_rows <= largest * max_logit_rows
            and prompt_tokens <= largest * self.max_prompt_tokens
        )


def _halved(buckets: Sequence[int]) -> list[int]:
    """Return the largest bucket and smaller ones, each at most half of the next, ascending.

    Each pair of shapes needs a graph, so that decode steps of joint ones have few row counts.
    """
    kept = [buckets[-1]]
    for bucket in reversed(buckets):
        if 2 * bucket <= kept[0]:
            kept.insert(0, bucket)
    return kept
