"""Which backend serves a linear at a number of rows: compared and timed once, before any capture.

A backend that is fast but promises no tree (cuBLAS) may serve a weight's shape at a number of rows
where it gave the bits of the exact one on inputs made to tell trees apart, on this very GPU,
eagerly and from a graph. Where nothing was probed the exact one serves. docs/kernels/linear.md
says what a probe shows and what it does not.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.kernels.linear.tuning import seconds
from lockstep.kernels.timing import record_graph

Run = Callable[..., Tensor]
FASTER = 0.98
"""The fast one serves where it takes at most this share of the exact one's time."""
FEWEST = 33
"""Rows. Below, only the weights' bytes count, and the exact one reads them at full speed."""
SMALLEST = 4 << 20
"""Numbers in a weight. Smaller ones take as long as a launch."""
ALIGNED = 256
"""Bytes. A library may read the alignment of its operands; a fresh tensor of torch has more."""
SPREADS = {torch.bfloat16: (0, 8, 40), torch.float16: (0, 2, 4)}
"""Trials take normal numbers times 2^-spread .. 2^spread."""
SLICE = 4096
"""Rows of a trial's operands that are made at once."""


class Probed:
    """linear for weights of one shape: `exact`, or `fast` at rows where a probe let it.

    found: rows -> None where `fast` serves, else why not.
    """

    def __init__(self, exact: Run, fast: Run) -> None:
        self.exact = exact
        self.fast = fast
        self.found: dict[int, str | None] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        split_k: int = 1,
        allow_partials: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See lockstep.kernels.linear.linear. The backends agree in every bit, so this is speed."""
        if out is not None:
            return self.exact(x, weight, split_k, allow_partials, out)
        fast = self.found.get(x.shape[0], "") is None and _placed(x) and _placed(weight)
        return (self.fast if fast else self.exact)(x, weight, split_k, allow_partials)

    def probe(
        self,
        rows: Sequence[int],
        weights: Sequence[Tensor],
        split_k: int,
        allow_partials: bool = False,
    ) -> None:
        """Finds who serves at these numbers of rows, by the model's own weights [N, K].

        All have one shape; a few are enough, so that the L2 cache does not serve the timing.
        partial: as the layers call it, which counts for the time.
        """
        if weights[0].numel() < SMALLEST or weights[0].dtype not in SPREADS:
            return
        fresh = [count for count in rows if count >= FEWEST and count not in self.found]
        try:
            found = {
                count: self._slower(count, weights, split_k, allow_partials) for count in fresh
            }
            self._compare(found, weights[0], split_k)
        except torch.OutOfMemoryError:
            found = dict.fromkeys(fresh, "too little memory to probe")
        self.found.update(found)

    def _slower(
        self, count: int, weights: Sequence[Tensor], split_k: int, allow_partials: bool
    ) -> str | None:
        x = _spread(weights[0].new_empty(count, weights[0].shape[1]), 0, 0)

        def took(run: Run) -> float:
            return 1e6 * seconds(lambda weight: run(x, weight, split_k, allow_partials), weights)

        rounds = [(took(self.fast), took(self.exact)) for _ in range(2)]
        fast, exact = map(min, zip(*rounds, strict=True))
        return None if fast <= FASTER * exact else f"slower, {fast:.0f} us against {exact:.0f}"

    def _compare(self, found: dict[int, str | None], weight: Tensor, split_k: int) -> None:
        """Refuses each number of rows at which any trial tells the backends apart."""
        most = max((count for count, why in found.items() if why is None), default=0)
        for name, x, w in trials(most, weight, split_k):
            for count in [count for count, why in found.items() if why is None]:
                arguments = (x[:count], w, split_k)
                want = self.exact(*arguments)
                gots = (self.fast(*arguments), _replayed(self.fast, *arguments))
                wrong = max(_differing(got, want) for got in gots)
                if wrong:
                    found[count] = f"other bits in {wrong} of {want.numel()} outputs ({name})"


def trials(rows: int, weight: Tensor, split_k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(what it is, x [rows, K], a weight [N, K]) on which another order of addition shows.

    Halves of each segment that cancel, so that only the rounding of the partial sums is left, which
    no other order repeats; products of ever more magnitudes; the model's own weight. No trials of
    no rows.
    """
    if not rows:
        return
    x = weight.new_empty(rows, weight.shape[1])
    other = torch.empty_like(weight)
    spreads = SPREADS[weight.dtype]
    for seed, operand in enumerate((x, other)):
        halves = _spread(operand, spreads[1], seed).unflatten(1, (split_k, 2, -1))
        halves[:, :, 1] = (2 * seed - 1) * halves[:, :, 0]
    yield "cancelling", x, other
    for seed, spread in enumerate(spreads, 2):
        yield f"exponents to {spread}", _spread(x, spread, seed), _spread(other, spread, seed + 8)
    yield "the model's weight", _spread(x, 0, 1), weight


def _spread(out: Tensor, spread: int, seed: int) -> Tensor:
    """Fills out [R, K]: normal numbers times 2^-spread .. 2^spread, the same ones per seed."""
    generator = torch.Generator(out.device).manual_seed(seed)
    for part in out.split(SLICE):
        scales = torch.empty(part.shape, device=out.device)
        scales.random_(-spread, spread + 1, generator=generator).exp2_()
        part.copy_(scales.mul_(torch.randn(part.shape, generator=generator, device=out.device)))
    return out


def _placed(x: Tensor) -> bool:
    """Whether x lies as a probe's operands do."""
    return x.is_contiguous() and x.data_ptr() % ALIGNED == 0


def _differing(a: Tensor, b: Tensor) -> int:
    """How many numbers of 16 bits differ in their bits."""
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def _replayed(run: Run, *arguments: object) -> Tensor:
    """What a backend leaves when captured: a capture has its own stream and workspace."""
    graph, out = record_graph(lambda: run(*arguments))
    graph.replay()
    return out
