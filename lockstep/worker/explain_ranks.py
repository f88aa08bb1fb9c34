"""Explanation of tensor-parallel ranks: bytes of each, exchanges of a pass, floors of a step."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import StepLimits
from lockstep.worker.device_rates import EXCHANGE_RATES
from lockstep.worker.roofline import ExchangeCost, PassCosts, StepCosts

ROWS = (1, 8, 64)
"""Rows of the steps whose floors are shown, next to the largest step."""
CONTEXT = 2048
"""Cached tokens of each row of these steps."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank's memory. buffers: everything but weights and cache, None if unknown."""

    weights: int
    pages: int
    state: int
    buffers: int | None

    def report(self, rank: int) -> dict[str, Any]:
        """Return the bytes as plain data."""
        total = self.weights + self.pages + self.state + (self.buffers or 0)
        sizes = vars(self) | {"total": total}
        return {"rank": rank} | {f"{name}_bytes": size for name, size in sizes.items()}


def explain_ranks(
    ranks: Sequence[RankBytes],
    costs: StepCosts,
    limits: StepLimits,
    backend: str,
) -> dict[str, Any]:
    """Return bytes, exchanges and floors of the ranks of a model as plain data.

    Args:
        costs: of the first rank, which has the most columns.
        backend: of their exchanges, "" for a single rank.
    """
    return {
        "exchange_backend": backend,
        "bytes": [rank_bytes.report(rank) for rank, rank_bytes in enumerate(ranks)],
        "exchanges": [*_by_layer("verify", costs.target), *_by_layer("drafts", costs.draft)],
        "steps": list(_steps(costs, limits)),
    }


def _by_layer(name: str, costs: PassCosts | None) -> Iterator[dict[str, Any]]:
    """Yield the exchanges of a pass, one entry for layers with equal ones.

    token_bytes: bytes that a rank receives per token (per row of logits, in the head), by exchange.
    """
    layers: dict[str, list[ExchangeCost]] = defaultdict(list)
    for cost in costs.exchanges if costs is not None else ():
        layers[cost.layer].append(cost)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for layer, exchanges in layers.items():
        groups[tuple(cost.token_bytes for cost in exchanges)].append(layer)
    for token_bytes, names in groups.items():
        yield {"pass": name, "layers": names, "token_bytes": list(token_bytes)}


def _steps(costs: StepCosts, limits: StepLimits) -> Iterator[dict[str, Any]]:
    """Yield the floors of decode steps on H200s, by each backend that was measured there."""
    counts = {rows for rows in ROWS if rows < limits.max_num_seqs} | {limits.max_num_seqs}
    context = min(CONTEXT, limits.max_model_len)
    for rows in sorted(counts):
        step = costs.step(rows, limits.query_len - 1, context)
        device_ms = step.verify.device_ms + step.drafts.device_ms
        exchange_ms = {name: step.exchanged.ms(rate) for name, rate in EXCHANGE_RATES.items()}
        yield {
            "rows": rows,
            "query_len": step.query_len,
            "context": context,
            "exchanges": step.exchanged.count,
            "received_bytes": step.exchanged.bytes,
            "device_ms": round(device_ms, 6),
            "exchange_ms": {name: round(ms, 6) for name, ms in exchange_ms.items()},
            "floor_ms": {name: round(device_ms + ms, 6) for name, ms in exchange_ms.items()},
        }
