"""Measures every op by itself: time against the floor of its bytes and flops, and its bits.

A call is timed in a chain over many distinct inputs, since a step finds none of its
weights, pages and states in the cache either. (The activations of a few rows are smaller than that:
they stay in the cache, as they do in a step.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lockstep.bench.dimensions import MODELS, MOST_CALLS, Model, Setting, Subject
from lockstep.bench.subjects import OPS, subjects
from lockstep.bench.timing import REPEATS, seconds_per_call
from lockstep.errors import ConfigError, choice_error
from lockstep.kernels.backends import load as load_backends

FEWEST_CALLS = {"cuda": 20, "cpu": 2}
OTHER_ROWS = (1, 2, 3, 7, 8, 33)
"""Row counts at which an op is compared with itself, besides those that are timed."""


@dataclass(frozen=True)
class KernelLine:
    """One op at one size and number of rows. of_floor: the floor over the time; compared: row
    counts whose bits were compared with the largest batch's; differing: those that differed."""

    model: str
    op: str
    size: str
    backend: str
    rows: int
    query_len: int
    us: float
    bytes: int
    tb_per_s: float
    of_floor: float
    compared: tuple[int, ...]
    differing: tuple[int, ...]


def pick_models(names: Sequence[str], device: str) -> list[Model]:
    """The named models; if none is named, those that fit the device. Raises ConfigError."""
    chosen = list(names) or (["small"] if device == "cpu" else [n for n in MODELS if n != "small"])
    for name in chosen:
        if name not in MODELS:
            raise choice_error(ConfigError, "model", name, ", ".join(MODELS), "Choose one of them.")
    return [MODELS[name] for name in chosen]


def check_ops(names: Sequence[str]) -> Sequence[str]:
    """The names, if they are all ops that are measured. Raises ConfigError."""
    for name in names:
        if name not in OPS:
            raise choice_error(ConfigError, "op", name, ", ".join(OPS), "Choose one of them.")
    return names


@torch.inference_mode()
def measure_kernels(
    models: Sequence[Model],
    device: str,
    dtype: torch.dtype,
    rows: Sequence[int] = (1, 8, 64),
    query_lens: Sequence[int] = (1, 4),
    only: Sequence[str] = (),
    repeats: int | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Iterator[KernelLine]:
    """A line per op, size, query length and number of rows; `only` names ops, none all."""
    check_ops(only)
    load_backends()
    repeats = repeats or REPEATS[device]
    setting = Setting(device, dtype, max(rows))
    for model in models:
        for query_len in query_lens:
            for subject in subjects(model, setting, query_len, only):
                progress(f"{model.name} {subject.op} {subject.size}")
                bits = compare_rows(subject, sorted({*rows, *OTHER_ROWS}), setting.most)
                for count in rows:
                    yield _line(model, subject, count, setting, repeats, *bits)


def _line(
    model: Model,
    subject: Subject,
    rows: int,
    setting: Setting,
    repeats: int,
    compared: tuple[int, ...],
    differing: tuple[int, ...],
) -> KernelLine:
    seconds = seconds_per_call(_chain(subject, rows, setting), setting.device, repeats)
    cost = subject.cost(rows)
    floor = max(cost.memory_ms, cost.matrix_ms) / 1e3
    return KernelLine(
        model=model.name,
        op=subject.op,
        size=subject.size,
        backend=subject.backend,
        rows=rows,
        query_len=subject.query_len,
        us=1e6 * seconds,
        bytes=cost.bytes,
        tb_per_s=cost.bytes / seconds / 1e12,
        of_floor=floor / seconds,
        compared=compared,
        differing=differing,
    )


def _chain(subject: Subject, rows: int, setting: Setting) -> list[Callable[[], object]]:
    """Calls on rows and weights that differ, until they have walked through enough bytes."""
    groups = max(subject.rows // rows, 1)
    needed = -(-setting.rotate // subject.cost(rows).bytes)
    most = min(max(groups, subject.variants), MOST_CALLS[setting.device])
    calls = max(min(needed, most), FEWEST_CALLS[setting.device])
    begins = [turn % groups * rows for turn in range(calls)]
    return [subject.call(begin, begin + rows, turn) for turn, begin in enumerate(begins)]


def compare_rows(
    subject: Subject, counts: Sequence[int], most: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(row counts compared, those whose bits differ) against the same rows in a batch of `most`.

    Each count is tried at the front and at the back of the batch.
    """
    whole = _results(subject, 0, most)
    compared = tuple(count for count in counts if count < most)
    differing = []
    for count in compared:
        for begin in (0, most - count):
            found = _results(subject, begin, begin + count)
            wanted = [part[begin : begin + count] for part in whole]
            if not all(_same(a, b) for a, b in zip(found, wanted, strict=True)):
                differing.append(count)
                break
    return compared, tuple(differing)


def _results(subject: Subject, begin: int, end: int) -> list[torch.Tensor]:
    """What a call on these rows leaves, each part [rows, anything]."""
    subject.reset()
    parts = subject.seen(begin, end, subject.call(begin, end, 0)())
    return [part.reshape(end - begin, -1).clone() for part in parts]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal element for element, NaN where NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
