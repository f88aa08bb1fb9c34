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


def _patch_once() -> None:
    """Puts the interpreter's functions into triton.language once a launch, not at every call of a
    device function: there it finds nothing to do, after looking at every name of the language."""
    from triton import language
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang
    modules = (language, language.core)

    def patch(fn):
        seen = [m for m in modules if any(value is m for value in fn.__globals__.values())]
        if any(language.core.is_builtin(module.load) for module in seen):
            return patch_lang(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def _prepare() -> None:
    torch.set_num_threads(1)
    if find_spec("triton") and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        _interpret()
        _patch_once()
    import_module("lockstep.kernels.backends").load()


_prepare()
