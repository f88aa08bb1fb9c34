"""F4 (TokenSpeed #260): causal bounds per token, and padded rows that are always valid rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.kernels.attention import paged_attention
from lockstep.step import StepShape
from lockstep.worker.row_table import RowTable
from tests.regressions.conftest import PARAMS, answers, run_null_rows

SHORT = [[3, 1, 4, 1, 5, i] for i in range(2)]
"""Prompts for a pool of one page and the null page, one at a time."""
FEW = replace(PARAMS, max_tokens=4)


@pytest.fixture(scope="module")
def alone(make: Callable[..., LLM]) -> list[Any]:
    """Return the plain engine's answers to SHORT, one at a time."""
    llm = make()
    return [answers(llm, [prompt], FEW) for prompt in SHORT]


@pytest.mark.default_cases("1", "3", "8")
@pytest.mark.parametrize("bucket", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_bucket_runs_null_rows_with_two_pages(
    make: Callable[..., LLM], alone: list[Any], bucket: int
) -> None:
    llm = make("mtp", 3, num_gpu_blocks=2, row_buckets=(bucket, 8), num_snapshots=0)
    run_null_rows(llm, bucket, 4)
    assert [answers(llm, [prompt], FEW) for prompt in SHORT] == alone


def test_padded_rows_do_not_change_real_rows(make: Callable[..., LLM], plain: list[Any]) -> None:
    assert answers(make("mtp", 3, row_buckets=(8,))) == plain


def test_lengths_shifted_by_drafts_are_detected(
    make: Callable[..., LLM],
    plain: list[Any],
    known: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = RowTable.prepare

    def shifted(self: RowTable, shape: StepShape, index: int = 0) -> Any:
        step = prepare(self, shape, index)
        if not shape.prompt:
            step.starts = (step.starts - (shape.query_len - 1)).clamp_min(0)
        return step

    monkeypatch.setattr(RowTable, "prepare", shifted)
    llm = make("ngram", 3, known=known)
    assert answers(llm) != plain


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 7, 8, 16])
def test_verified_token_attends_only_to_its_prefix(group: int) -> None:
    """Four tokens at once equal four single steps, bit for bit; later tokens may be NaN."""
    generator = torch.Generator().manual_seed(group)
    dim = 32
    start = 261
    window = 4
    k = torch.randn(8, 64, 1, dim, generator=generator)
    v = torch.randn(8, 64, 1, dim, generator=generator)
    pages = torch.tensor([[5, 2, 7, 1, 6]], dtype=torch.int32)
    q = torch.randn(window, group, dim, generator=generator)

    def attend(begin: int, n: int) -> torch.Tensor:
        bounds = torch.tensor([0, n], dtype=torch.int32)
        at = torch.tensor([start + begin], dtype=torch.int32)
        return paged_attention(q[begin : begin + n], k, v, pages, bounds, at, n, dim**-0.5)

    together = attend(0, window)
    for t in reversed(range(window)):
        assert torch.equal(attend(t, 1)[0], together[t])
        page = int(pages[0, (start + t) // 64])
        slot = (start + t) % 64
        k[page, slot] = torch.nan
        v[page, slot] = torch.nan
