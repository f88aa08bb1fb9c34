"""Choice of the schedules whose decode step and prompt step share one forward pass.

A decode step reads all weights for few tokens: 13 of the 21 ms of 64 rows of Qwen3.6-27B on an
H200. In the pass of a prompt step these reads cost nothing more. No answer depends on the choice.
"""

from collections.abc import Sequence

from torch import nn

from lockstep.config import StepLimits
from lockstep.kernels.exchange import RankGroup
from lockstep.step import GRID, StepShape
from lockstep.worker.roofline import PassCosts
from lockstep.worker.step_shapes import prompt_step

EAGER_LAYER_FLOPS = 1.2e12
"""FLOPs per layer from which an eager joint step binds the device.

Launching the kernels of a prompt step takes the host up to 96 ms for 64 layers. A joint step has a
third more launches: 2 ms per layer. In that time an H200 computes 1.2e12 FLOPs (2,048 tokens of
Qwen3.6-27B take 183 ms). Below, a captured decode step next to an eager prompt step is faster.
"""
PADDING = 128
"""Tokens of prompts between two padded lengths of joint graphs.

Computing 170 tokens takes an H200 as long as reading 16-bit weights, which a joint step saves.
"""
MAX_GRAPHS = 32
"""Maximum graphs of joint steps. The host launches all kernels of a step twice to capture it."""
LARGEST_GRAPHS = 6
"""Number of largest joint steps whose results fit into the memory that is planned for graphs."""


def joint_buckets(limits: StepLimits) -> tuple[int, ...]:
    """Return the token counts that the prompts of joint graphs are padded to, ascending."""
    largest = max(limits.prompt_buckets, default=0)
    return tuple(sorted({*limits.prompt_buckets, *range(PADDING, largest + 1, PADDING)}))


class JointSteps:
    """Joint steps of a worker. All ranks of a model choose the same ones.

    On a CPU a decode step always joins the prompt step of its schedule. On a GPU they join as a
    graph, which is captured when it is first needed, or where the prompts are so long that the
    launches of an eager pass cost no time.

    graphs: shapes of the captured passes. min_eager_tokens: prompt tokens from which eager steps
    join. may_capture: false after a capture that failed.
    """

    def __init__(self, limits: StepLimits, min_eager_tokens: int) -> None:
        self.limits = limits
        self.min_eager_tokens = min_eager_tokens
        self.buckets = joint_buckets(limits) if limits.graph_mode == "full" else ()
        self.graphs: set[tuple[StepShape, ...]] = set()
        self.may_capture = True

    def prompt_shape(self, decode: StepShape, lengths: Sequence[int]) -> StepShape | None:
        """Return the shape of a step of these prompt chunks that joins the decode step.

        None: the steps run apart.
        """
        if self.limits.device == "cpu":
            return prompt_step(self.limits, lengths, self.limits.prompt_buckets)
        padded = prompt_step(self.limits, lengths, self.buckets)
        if padded.padded and self._has_graph(decode, padded):
            return padded
        eager = prompt_step(self.limits, lengths, ())
        return eager if eager.tokens >= self.min_eager_tokens else None

    def needs_capture(self, shapes: tuple[StepShape, ...]) -> bool:
        """Return whether a forward pass is a joint one that runs as a graph and has none yet."""
        is_graph = len(shapes) > 1 and bool(self.buckets) and shapes[-1].padded
        return is_graph and shapes not in self.graphs

    def _has_graph(self, decode: StepShape, prompt: StepShape) -> bool:
        """Return whether a joint step has a graph, or memory is left for its results."""
        if (decode, prompt) in self.graphs:
            return True
        limits = self.limits
        passes = [*self.graphs, (decode, prompt)]
        # A graph keeps the logits of each token of its decode step and of each row of its prompts.
        logit_rows = sum(first.tokens + second.rows for first, second in passes)
        prompt_tokens = sum(second.tokens for _, second in passes)
        max_logit_rows = limits.max_num_seqs * limits.query_len + prompt.rows
        return (
            self.may_capture
            and len(passes) <= MAX_GRAPHS
            and logit_rows <= LARGEST_GRAPHS * max_logit_rows
            and prompt_tokens <= LARGEST_GRAPHS * self.buckets[-1]
        )


def min_eager_tokens(model: nn.Module, group: RankGroup, device: str) -> int:
    """Return the prompt tokens from which an eager joint step binds a rank's device.

    model: of this rank. group, device: of its ranks. All ranks return the same number.
    """
    # FLOPs per token differ between ranks where columns do not divide evenly. Ranks that choose
    # other steps would wait for each other forever.
    return group.smallest(eager_tokens(model), device)


def eager_tokens(model: nn.Module) -> int:
    """Return the prompt tokens from which an eager joint step binds this rank's device."""
    layers = len(model.get_submodule("blocks"))  # type: ignore[arg-type]
    flops = PassCosts.of(model).floor(1, GRID, 1, 0).total.flops / (layers * GRID)
    return int(EAGER_LAYER_FLOPS / flops)
