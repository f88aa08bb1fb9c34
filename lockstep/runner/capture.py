"""capture(fn): something called just like fn that replays CUDA graphs.

The first call with a key runs eagerly, so that every kernel is compiled and every lazy buffer
exists, then records; later calls replay. Tensor arguments are copied into the graph's own, and the
results are the graph's own tensors, overwritten by its next call.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import CaptureError


@dataclass
class Recording:
    """One recorded call: its graph, the tensors it reads, and what it returns."""

    graph: torch.cuda.CUDAGraph
    arguments: tuple[Any, ...]
    result: Any


class Captured:
    """A function with a graph per key. Calls whose key `wanted` refuses run eagerly."""

    def __init__(
        self, fn: Callable[..., Any], pool: Any, wanted: Callable[[Hashable], bool]
    ) -> None:
        self.fn, self.pool, self.wanted = fn, pool, wanted
        self.recordings: dict[Hashable, Recording] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple(tuple(a.shape) if isinstance(a, Tensor) else a for a in arguments)
        if not self.wanted(key):
            return self.fn(*arguments)
        recording = self.recordings.get(key)
        if recording is None:
            recording = self.recordings[key] = self._record(key, arguments)
        for mine, given in zip(recording.arguments, arguments, strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(given)
        recording.graph.replay()
        return recording.result

    def _record(self, key: Hashable, arguments: tuple[Any, ...]) -> Recording:
        mine = tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.fn(*mine)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = self.fn(*mine)
        except RuntimeError as error:
            raise CaptureError(
                f"capture of {getattr(self.fn, '__qualname__', self.fn)} at {key} failed: {error}. "
                "Run with cuda_graph_mode='none' to serve meanwhile, and report this."
            ) from error
        return Recording(graph, mine, result)


def capture_program(run_step: Callable[..., Any], pool: Any) -> Callable[..., Any]:
    """run_step with one graph per uniform shape; prompt steps run eagerly."""
    return Captured(run_step, pool, lambda key: not key[0].prompt)  # type: ignore[index]


def capture_pieces(model: nn.Module, pool: Any, token_counts: Iterable[int]) -> None:
    """Everything in the blocks but their mixers becomes graphs, at these numbers of tokens."""
    counts = frozenset(token_counts)

    def wanted(key: Any) -> bool:
        return key[0][0] in counts

    for block in model.modules():
        if hasattr(block, "before") and hasattr(block, "after"):
            block.before = Captured(block.before, pool, wanted)
            block.after = Captured(block.after, pool, wanted)
