"""On a GPU, a start launches the kernels that dry runs recorded, and finds them in the cache."""

from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM
from lockstep.worker import compile_ahead

pytestmark = pytest.mark.gpu

UNRECORDED = {"reduce_partials_kernel"}
"""Kernels of the probe of cuBLAS, which no step launches."""


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_start_compiles_what_was_recorded(
    drafter: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.runtime.jit import JITFunction

    recorded: set[tuple[str, str]] = set()
    launched: set[tuple[str, str]] = set()
    record = compile_ahead.record_kernels
    compile = JITFunction._do_compile

    def keep(*arguments: Any) -> Any:
        compilations = record(*arguments)
        recorded.update((one.kernel, one.source.hash()) for one in compilations)
        return compilations

    def count(kernel: Any, key: str, signature: Any, device: Any, *rest: Any) -> Any:
        constants, _, attributes, _ = rest
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        launched.add((kernel.__name__, source.hash()))
        return compile(kernel, key, signature, device, *rest)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "record_kernels", keep)
    monkeypatch.setattr(JITFunction, "_do_compile", count)
    spec = {"method": drafter, "num_speculative_tokens": 3} if drafter != "none" else None
    llm = LLM(device="cuda", max_model_len=1024, max_num_seqs=4, speculative_config=spec)
    missing = {kernel for kernel, _ in launched - recorded}
    assert recorded and missing <= UNRECORDED
    assert list(tmp_path.glob("lockstep-*")), "the mark of a full cache"
    llm.close()
