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
USES_BEFORE_CAPTURE = 4
"""Uses of a pair of shapes before a graph of it is captured. The host launches all kernels of a
step twice to capture it."""
MAX_GRAPHS = 32
"""Maximum graphs of joint steps."""
LARGEST_GRAPHS = 6
"""Results of as many of the largest joint steps fit into the memory that is planned for graphs."""

Pair = tuple[StepShape, StepShape]
"""Shapes of the decode step and of the prompt step of a forward pass."""


class JointSteps:
    """Joint steps of a worker. All ranks of a model choose the same ones.

    On a CPU all steps join that can. On a GPU they join as graphs, which are captured once a pair
    of shapes was used several times. Without a graph, the kernels of a pass take the host longer to
    launch than the weights take to read.

    graphs: pairs that are captured. uses: of each pair, captured or not. may_capture: false after a
    capture that failed.
    """

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self.max_tokens = 0
        if limits.graph_mode == "full":
            self.max_tokens = max(limits.prompt_buckets, default=0)
        self.graphs: set[Pair] = set()
        self.uses: Counter[Pair] = Counter()
        self.may_capture = True

    def prompt_shape(self, decode: StepShape, lengths: Sequence[int]) -> StepShape | None:
        """Return the shape of a step of these prompt chunks that joins the decode step.

        None: the steps run apart.
        """
        if self.limits.device == "cpu":
            return prompt_step(self.limits, lengths, self.limits.prompt_buckets)
        tokens = -(-(decode.tokens + sum(lengths)) // TILE) * TILE
        if tokens > self.max_tokens or len(lengths) > PADDED_PROMPTS:
            return None
        prompt = padded_prompt_step(self.limits, tokens - decode.tokens)
        self.uses[decode, prompt] += 1
        return prompt if self._may_run((decode, prompt)) else None

    def needs_capture(self, pair: tuple[StepShape, ...]) -> bool:
        """Return whether a forward pass is a joint one that runs as a graph and has none yet."""
        return len(pair) > 1 and self.max_tokens > 0 and pair not in self.graphs

    def _may_run(self, pair: Pair) -> bool:
        """Return whether a pair has a graph, or may get one: it was used and memory is left."""
        if pair in self.graphs:
            return True
        limits = self.limits
        decoded = sum(decode.tokens for decode, _ in (*self.graphs, pair))
        prompts = sum(prompt.tokens for _, prompt in (*self.graphs, pair))
        return (
            self.may_capture
            and self.uses[pair] > USES_BEFORE_CAPTURE
            and len(self.graphs) < MAX_GRAPHS
            and decoded <= LARGEST_GRAPHS * limits.max_num_seqs * limits.query_len
            and prompts <= LARGEST_GRAPHS * self.max_tokens
        )
