# mypy: ignore-errors
"""Programmatic dependent launch (PDL): a kernel starts while the previous one of its graph ends.

Every kernel of a step calls pdl_start() before its first access to memory that kernels write. No
kernel of a step writes quantized words and their scales, so a kernel may read them earlier. Which
edges of a graph use it: worker/dependent_edges.py. Kernels that are launched otherwise start when
the previous one has ended, so that both instructions do nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.kernels.architecture import HOPPER


def _has_griddepcontrol(_semantic):
    """Return whether a kernel is compiled for an architecture with griddepcontrol.

    _semantic: the compiler's state; None under Triton's interpreter.
    """
    if _semantic is None:
        return False
    arch = _semantic.builder.options.arch
    return int("".join(filter(str.isdigit, arch))) >= HOPPER


def pdl_wait(_semantic=None):
    """Wait until the previous kernel has ended and its writes are visible."""
    if _has_griddepcontrol(_semantic):
        gdc_wait(_semantic=_semantic)


def pdl_release(_semantic=None):
    """Let the next kernel of the graph start once every CTA has called this or has ended."""
    if _has_griddepcontrol(_semantic):
        gdc_launch_dependents(_semantic=_semantic)


def prefetch_line(pointers, _semantic=None):
    """Prefetch the 128 bytes at each pointer into L2, where kernels start early."""
    if _has_griddepcontrol(_semantic):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
            _semantic=_semantic,
        )


# Triton calls such functions while it compiles, and passes _semantic.
for function in (pdl_wait, pdl_release, prefetch_line):
    function.__triton_builtin__ = True


@triton.jit
def pdl_start():
    """Wait for the previous kernel, then let the next one start.

    A JIT function, since Triton's cache keys have the source of these and not that of builtins.

    The order matters. Released before the wait, the kernel after the next one also starts early.
    Its CTAs fill the multiprocessors that become free first, and the others stay idle.
    """
    pdl_wait()
    pdl_release()
