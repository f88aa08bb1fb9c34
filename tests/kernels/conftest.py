"""Where there is no GPU, Triton's kernels run under its interpreter, made fast."""

from importlib import import_module
from importlib.util import find_spec

import torch

IN_FLIGHT = 2
"""Entries of attention that its second kernel loads at once, under the interpreter: of a GPU's 8,
most would hold nothing in the tests' short contexts, and the loop over them would run once."""


def _prepare() -> None:
    torch.set_num_threads(1)
    if find_spec("triton") and not torch.cuda.is_available():
        import_module("tests.kernels.interpreter").speed_up()
        import_module("lockstep.kernels.attention.triton").IN_FLIGHT = IN_FLIGHT
    import_module("lockstep.kernels.backends").load()


_prepare()
