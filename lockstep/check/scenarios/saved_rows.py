"""Check of preempted rows: a row that returns has every value of its line in the row table."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.check.scenarios.invariants import InvariantError
from lockstep.check.scenarios.inventory import poison, tensors_of
from lockstep.engine.engine import Engine
from lockstep.scheduling.schedule import Schedule
from lockstep.worker.executor import executor_of
from lockstep.worker.worker import Worker


def line_tensors(worker: Worker) -> list[Tensor]:
    """Return the tensors of a worker's row table with one line per row that belongs to its request.

    They come from a walk over the table, not from its own list. Pages and state slot are left out,
    since a row that returns has new ones, and so are the inputs of steps.
    """
    table = worker.table
    excluded = {t.untyped_storage().data_ptr() for t in (table.page_table, table.state_slots)}
    excluded |= {i.storage.untyped_storage().data_ptr() for i in table.pass_inputs}
    num_rows = table.page_table.shape[0]
    return [
        tensor
        for tensor in tensors_of(table)
        if tensor.dim()
        and tensor.shape[0] == num_rows
        and tensor.untyped_storage().data_ptr() not in excluded
    ]


@contextmanager
def checked_returns(engine: Engine) -> Iterator[None]:
    """Compare the line of each row that returns in the context with the line that it left.

    The line of a row that leaves is poisoned. All ranks do so, since their tables must be equal.
    Raises InvariantError from the worker's launch. On a GPU nothing is compared: reading a line
    waits for the device, which would hide races of asynchronous launches.
    """
    if engine.plan.device != "cpu":
        yield
        return
    executor = executor_of(engine)
    executor.collective_rpc(_start)
    try:
        yield
    finally:
        executor.collective_rpc(_stop)


def _start(worker: Worker) -> None:
    """Compare the lines of one rank's rows from now on."""
    tensors = line_tensors(worker)
    update_rows = worker._update_rows
    lines: dict[str, list[Tensor]] = {}
    # All ranks get the same values.
    generator = torch.Generator().manual_seed(0)

    def update(schedule: Schedule) -> None:
        for swap in schedule.swap_out:
            lines[swap.request_id] = [tensor[swap.row].clone() for tensor in tensors]
        update_rows(replace(schedule, swap_in=[], admissions=[], grants=[]))
        # Without this, a value that is not moved would still be there in an unused row.
        for swap in schedule.swap_out:
            for tensor in tensors:
                poison(tensor[swap.row], generator)
        update_rows(replace(schedule, swap_out=[]))
        for swap in schedule.swap_in:
            for tensor, line in zip(tensors, lines.pop(swap.request_id), strict=True):
                if not torch.equal(tensor[swap.row], line):
                    shape = tuple(tensor.shape)
                    raise InvariantError(
                        f"request {swap.request_id} returns to row {swap.row} without its line of "
                        f"a {tensor.dtype} tensor of shape {shape} of the row table"
                    )

    worker._update_rows = update  # type: ignore[method-assign]


def _stop(worker: Worker) -> None:
    """Undo _start()."""
    del worker._update_rows
