"""Choice of the schedules whose decode step and prompt step share one forward pass.

A decode step reads all weights for few tokens: 13 of the 21 ms of 64 rows of Qwen3.6-27B on an
H200. In the pass of a prompt step these reads cost nothing more. No answer depends on the choice.
"""

from collections.abc import Sequence

from torch import nn

from lockstep.config import StepLimits
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
"""Token counts of prompts in joint graphs are multiples of it. Computing as many tokens takes less
time than reading the weights, which the joint step saves: for 16-bit weights on an H200, 170."""
GRAPHS_PER_LARGEST = 5
"""Maximum graphs of joint steps for each largest one whose results memory is planned for. The host
launches all kernels of a step twice to capture it."""


def max_graphs(limits: StepLimits) -> int:
    """Return the maximum graphs of joint steps."""
    return GRAPHS_PER_LARGEST * limits.joint_graphs


def joint_buckets(limits: StepLimits) -> tuple[int, ...]:
    """Return the token counts that the prompts of joint graphs are padded to, ascending."""
    if not limits.joint_graphs:
        return ()
    largest = max(limits.prompt_buckets, default=0)
    return tuple(sorted({*limits.prompt_buckets, *range(PADDING, largest + 1, PADDING)}))


class JointSteps:
    """Joint steps of a worker. All ranks of a model choose the same ones.

    On a CPU all steps join that can. On a GPU they join as a graph, which is captured when it is
    first needed, or where the prompts are so long that the launches of an eager pass cost no time.

    graphs: shapes of the captured passes. min_eager_tokens: prompt tokens from which eager steps
    join. may_capture: false after a capture that failed.
    """

    def __init__(self, limits: StepLimits, model: nn.Module) -> None:
        self.limits = limits
        self.buckets = joint_buckets(limits) if limits.graph_mode == "full" else ()
        self.graphs: set[tuple[StepShape, ...]] = set()
        self.min_eager_tokens = 0
        self.may_capture = True
        if limits.device != "cpu":
            self.min_eager_tokens = eager_tokens(model)

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
        decoded = decode.tokens + sum(shapes[0].tokens for shapes in self.graphs)
        prompts = prompt.tokens + sum(shapes[1].tokens for shapes in self.graphs)
        return (
            self.may_capture
            and len(self.graphs) < max_graphs(limits)
            and decoded <= limits.joint_graphs * limits.max_num_seqs * limits.query_len
            and prompts <= limits.joint_graphs * self.buckets[-1]
        )


def eager_tokens(model: nn.Module) -> int:
    """Return the prompt tokens from which an eager joint step binds the device."""
    layers = len(model.get_submodule("blocks"))  # type: ignore[arg-type]
    flops = PassCosts.of(model).floor(1, GRID, 1, 0).total.flops / (layers * GRID)
    return int(EAGER_LAYER_FLOPS / flops)
