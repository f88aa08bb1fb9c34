"""Choice of linear's backend by number of rows: compared and timed once, before any capture.

A backend that is fast but promises no reduction tree (cuBLAS) may serve a weight's shape at a
number of rows where it gave the bits of the exact backend on inputs made to distinguish trees, on
this very GPU, eagerly and from a graph. Where nothing was probed the exact backend serves.
docs/kernels/linear.md says what a probe proves and what it does not.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lockstep.kernels.linear.tuning import LAUNCHES, seconds
from lockstep.kernels.timing import record_graph

RunLinear = Callable[..., Tensor]
MAX_TIME_RATIO = 0.98
"""The fast backend serves where it takes at most this share of the exact one's time."""
MIN_ROWS = 33
"""Rows. With fewer, reading the weights is the bound, and the exact backend reads at full speed."""
MIN_NUMEL = 4 << 20
"""Elements of a weight. Smaller ones take as long as a launch."""
ALIGNMENT = 256
"""Bytes. cuBLAS may choose a kernel by its operands' alignment; fresh tensors of torch have
this."""
SPREADS = {torch.bfloat16: (0, 8, 40), torch.float16: (0, 2, 4)}
"""Exponent ranges of the trials: normal numbers times 2^-spread .. 2^spread."""
MIN_PROMPT_ROWS = 1024
"""Rows from which on each weight is timed once, since a launch takes long enough."""
SLICE = 4096
"""Rows of a trial's operands that are drawn at once."""


class Probed:
    """linear for weights of one shape: `exact`, or `fast` at numbers of rows that passed a probe.

    verdicts: rows -> None where `fast` serves, else the reason why not.
    """

    def __init__(self, exact: RunLinear, fast: RunLinear) -> None:
        self.exact = exact
        self.fast = fast
        self.verdicts: dict[int, str | None] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        split_k: int = 1,
        allow_partials: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """See lockstep.kernels.linear.contract.linear. Both backends agree in every bit."""
        if out is not None:
            return self.exact(x, weight, split_k, allow_partials, out)
        fast = self.verdicts.get(x.shape[0], "") is None and _is_aligned(x) and _is_aligned(weight)
        return (self.fast if fast else self.exact)(x, weight, split_k, allow_partials)

    def probe(
        self,
        rows: Sequence[int],
        weights: Sequence[Tensor],
        split_k: int,
        allow_partials: bool = False,
    ) -> None:
        """Decide which backend serves at these numbers of rows, on the model's own weights [N, K].

        All weights have one shape; a few are enough to keep L2 from serving the timing.
        allow_partials: as the layers call it, which counts for the time.
        """
        if weights[0].numel() < MIN_NUMEL or weights[0].dtype not in SPREADS:
            return
        fresh = [count for count in rows if count >= MIN_ROWS and count not in self.verdicts]
        try:
            verdicts = {
                count: self._time_backends(count, weights, split_k, allow_partials)
                for count in fresh
            }
            self._compare(verdicts, weights[0], split_k)
        except torch.OutOfMemoryError:
            verdicts = dict.fromkeys(fresh, "too little memory to probe")
        self.verdicts.update(verdicts)

    def _time_backends(
        self, count: int, weights: Sequence[Tensor], split_k: int, allow_partials: bool
    ) -> str | None:
        x = _fill_random(weights[0].new_empty(count, weights[0].shape[1]), 0, 0)
        min_launches = LAUNCHES if count < MIN_PROMPT_ROWS else 1

        def microseconds(run: RunLinear) -> float:
            def call(weight: Tensor) -> Tensor:
                y = run(x, weight, split_k, allow_partials)
                # Partials have four times the bytes of rounded outputs, and a consumer reads them.
                return y.sum() if allow_partials else y

            return 1e6 * seconds(call, weights, min_launches)

        rounds = [(microseconds(self.fast), microseconds(self.exact)) for _ in range(2)]
        fast, exact = map(min, zip(*rounds, strict=True))
        return (
            None if fast <= MAX_TIME_RATIO * exact else f"slower, {fast:.0f} us against {exact:.0f}"
        )

    def _compare(self, verdicts: dict[int, str | None], weight: Tensor, split_k: int) -> None:
        """Reject each number of rows at which a trial distinguishes the backends."""
        max_rows = max((count for count, why in verdicts.items() if why is None), default=0)
        for name, x, w in trials(max_rows, weight, split_k):
            for count in [count for count, why in verdicts.items() if why is None]:
                arguments = (x[:count], w, split_k)
                expected = self.exact(*arguments)
                outputs = (self.fast(*arguments), _run_captured(self.fast, *arguments))
                wrong = max(_count_differences(output, expected) for output in outputs)
                if wrong:
                    verdicts[count] = (
                        f"other bits in {wrong} of {expected.numel()} outputs ({name})"
                    )


def trials(rows: int, weight: Tensor, split_k: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, x [rows, K], weight [N, K]) on which another order of addition shows.

    Halves of each partition cancel, so that only the rounding of partial sums is left, which no
    other order repeats; products span more and more magnitudes; then the model's own weight. With
    no rows there are no trials.
    """
    if not rows:
        return
    x = weight.new_empty(rows, weight.shape[1])
    other = torch.empty_like(weight)
    spreads = SPREADS[weight.dtype]
    for seed, operand in enumerate((x, other)):
        halves = _fill_random(operand, spreads[1], seed).unflatten(1, (split_k, 2, -1))
        halves[:, :, 1] = (2 * seed - 1) * halves[:, :, 0]
    yield "cancelling", x, other
    for seed, spread in enumerate(spreads, 2):
        yield (
            f"exponents to {spread}",
            _fill_random(x, spread, seed),
            _fill_random(other, spread, seed + 8),
        )
    yield "the model's weight", _fill_random(x, 0, 1), weight


def _fill_random(out: Tensor, spread: int, seed: int) -> Tensor:
    """Fill out [R, K] with normal numbers times 2^-spread .. 2^spread, equal for equal seeds."""
    generator = torch.Generator(out.device).manual_seed(seed)
    for part in out.split(SLICE):
        scales = torch.empty(part.shape, device=out.device)
        scales.random_(-spread, spread + 1, generator=generator).exp2_()
        part.copy_(scales.mul_(torch.randn(part.shape, generator=generator, device=out.device)))
    return out


def _is_aligned(x: Tensor) -> bool:
    """Return whether x is laid out like a probe's operands."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def _count_differences(a: Tensor, b: Tensor) -> int:
    """Return how many 16-bit numbers differ in their bits."""
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def _run_captured(run: RunLinear, *arguments: object) -> Tensor:
    """Run a backend from a captured graph: a capture has its own stream and workspace."""
    graph, out = record_graph(lambda: run(*arguments))
    graph.replay()
    return out
