"""Compile sample on shards of real vocabularies for Hopper, without a GPU.

Every sum must have the bits of a single rank, so its layout must be that of a single rank.

    python -m tests.kernels.compile_shards [--quick]

--quick: only two vocabularies, in bf16, and only to the layouts. compile_launches compiles the
kernels to machine code.
"""

import re
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from lockstep.kernels.backends import load
from lockstep.kernels.sampling import LogitShard, SamplingState, sample
from lockstep.layers.sharding import Columns, Rank, count_columns
from tests.kernels import compile_launches
from tests.kernels.layouts import stop_after

VOCABULARIES = ((248_320, 2), (32_768, 8), (50_257, 2), (50_260, 3))
"""Tokens of Qwen3.6, of a reduced draft head, and of rows that begin at no multiple of 16 bytes;
and ranks."""
KERNELS = {
    "score_kernel": "score_kernel",
    "choose_kernel": "choose_proposed_kernel",
    "whole_kernel": "whole_kernel",
}
"""Kernel of a single rank -> the kernel with the same sums where ranks share a row."""
SUM = re.compile(
    r'"tt\.reduce"\([^)]*\) <\{axis = (\d) : i32\}> \(\{\s*\^bb0[^\n]*\n'
    r"\s*%\S+ = arith\.addf[^\n]*\n"
    r"\s*tt\.reduce\.return[^\n]*\n\s*\}\) : \(tensor<([^,>]*), (#[^>]*(?:>\}>)?)>",
)
"""A sum of floats: its axis, and the shape and layout of its operand."""


def float_sums(ttgir: str) -> Counter[tuple[str, str, str]]:
    """Count the sums of floats by axis, shape and layout of their operands."""
    layouts = dict(re.findall(r"^(#\w+) = (.*?)(?: loc.*)?$", ttgir, re.MULTILINE))
    return Counter(
        (axis, shape, re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), layout))
        for axis, shape, layout in SUM.findall(ttgir)
    )


def send(local: Tensor, widths: tuple[int, ...], needed: Tensor | None = None) -> Tensor:
    """Return unfilled columns of all ranks."""
    return local.new_empty(len(local), sum(widths))


def arguments(vocab: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return unfilled arguments of sample, with `width` of the logits."""
    state = SamplingState.empty(2, vocab, 16, (32, 8), "cpu")
    return dict(
        logits=torch.empty(1, 1, width, dtype=dtype),
        positions=torch.zeros(1, 1, dtype=torch.int64),
        drafts=torch.empty(1, 0, dtype=torch.int64),
        row_ids=torch.ones(1, dtype=torch.int64),
        history=torch.zeros(2, 64, dtype=torch.int64),
        state=state,
        allowed=torch.zeros(1, 1, -(-vocab // 32), dtype=torch.int32),
    )


class Sums(compile_launches.Launches):
    """Launches that record the sums of each kernel by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Counter[tuple[str, str, str]]] = {}

    def record(self, name: str, result: Any) -> None:
        """Record a compiled kernel."""
        self.sums[name] = float_sums(result.asm["ttgir"])


def main(quick: bool) -> None:
    """Compile all kernels of a single rank and of shards; compare their sums."""
    load()
    knobs.runtime.add_stages_inspection_hook = stop_after("ttgir") if quick else None
    launches = Sums()
    JITFunction.run = lambda kernel, *args, **kwargs: launches.compile(kernel, *args, **kwargs)
    for vocab, ranks in VOCABULARIES[::2] if quick else VOCABULARIES:
        columns = Columns.vocabulary(vocab)
        widths = tuple(count_columns(columns, Rank(i, ranks)) for i in range(ranks))
        for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
            sample.backends["triton"].run(**arguments(vocab, vocab, dtype))
            alone = dict(launches.sums)
            for index in (0, ranks - 1):
                shard = LogitShard(widths, index, send)
                local = arguments(vocab, widths[index], dtype)
                sample.backends["triton"].run(**local, shard=shard)
                for name, of_shards in KERNELS.items():
                    sums = launches.sums[of_shards]
                    assert sums and sums == alone[name], (vocab, dtype, name, sums, alone[name])
            print(vocab, ranks, dtype)


if __name__ == "__main__":
    main("--quick" in sys.argv)
