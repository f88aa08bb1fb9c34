"""Where there is no GPU, Triton's kernels run under its interpreter (set before they are made)."""

import os
from importlib import import_module
from importlib.util import find_spec

import torch


def _interpret() -> None:
    """Loop bounds for the interpreter: numpy 2.4 refuses int() of a one-element array."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _prepare() -> None:
    torch.set_num_threads(1)
    if find_spec("triton") and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        _interpret()
    import_module("lockstep.kernels.backends").load()


_prepare()
