"""Without a GPU, run Triton's kernels under its interpreter, with the speed-ups of
interpreter.py."""

from importlib import import_module
from importlib.util import find_spec

import torch

IN_FLIGHT = 2
"""Split-KV partials that attention's combine kernel loads at once under the interpreter.

With a GPU's 8, most would be empty in the tests' short contexts, and the loop would run once.
"""


def _prepare() -> None:
    torch.set_num_threads(1)
    if find_spec("triton") and not torch.cuda.is_available():
        import_module("tests.kernels.interpreter").speed_up()
        import_module("lockstep.kernels.attention.triton").IN_FLIGHT = IN_FLIGHT
    import_module("lockstep.kernels.backends").load()


_prepare()
