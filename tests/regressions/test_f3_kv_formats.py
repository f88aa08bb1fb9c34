"""F3 (vLLM #40880, #40914): a quantized KV cache, drafts and chunks, on a hybrid.

In vLLM a verification step attended only to its own chunk; other engines attend to the current
chunk before quantization, and to the rest after it. Here attention reads the cache only, so chunks,
drafts and preemption change no bit; each injected fault must change the answer.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from lockstep import LLM
from lockstep.kernels.attention import paged_attention
from lockstep.kernels.attention.cases import paged
from lockstep.kernels.formats.kv import cases
from lockstep.kernels.formats.kv.cases import KERNEL_FORMATS
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.layers.attention import Attention
from lockstep.step import StepContext
from tests.kernels.backends import same_bits
from tests.regressions.conftest import PROMPTS, answers
from tests.selection import some_slow

KINDS = sorted({format.name for format in KV_FORMATS.values()})
FORMAT = pytest.mark.parametrize(
    "kind", some_slow(KINDS, ("bfloat16", "int8_per_token_head", "turboquant_k3v4_nc"))
)
"""By default one format of each way of storing: a cast, scales, codebooks of two sizes."""
GROUPS = (1, 2, 4, 5, 6, 7, 8, 16)
"""Query heads per KV head."""


@pytest.fixture(scope="module")
def plain_of(make: Callable[..., LLM]) -> Callable[[str], list[Any]]:
    """Return a function that gives a format's answers without drafts, computed once."""
    return cache(lambda kind: answers(make(kv_cache_dtype=kind)))


@pytest.mark.default_cases("int8_per_token_head")
@FORMAT
def test_chunks_drafts_and_preemption_keep_the_answer(
    make: Callable[..., LLM], plain: list[Any], plain_of: Callable[[str], list[Any]], kind: str
) -> None:
    expected = plain_of(kind)
    assert expected != plain, "the format changes no bit"
    texts = [p + tokens for p, (tokens, _) in zip(PROMPTS, expected, strict=True)]
    drafting = dict(method="ngram", k=7, changing=True, known=texts)
    assert answers(make(kv_cache_dtype=kind, max_num_batched_tokens=64, **drafting)) == expected
    llm = make("mtp", 3, preempt_every=4, kv_cache_dtype=kind, max_num_batched_tokens=128)
    assert answers(llm) == expected
    assert answers(llm) == expected, "with what is cached"
    assert llm.engine.refresh_stats().preemptions_total > 0
    assert llm.engine.scheduler.cache.hit_tokens > 0


def unquantized_chunk(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attention to a prompt's current chunk before quantization."""

    def forward(self: Attention, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        packed = self.k_cache, self.v_cache
        self._rotate_and_cache(self.qkv(x, step), step)
        self.k_cache, self.v_cache = (
            cases.dequantized_copy(side, x.dtype) for side in copy.deepcopy(packed)
        )
        try:
            return attend(self, x, step)
        finally:
            self.k_cache, self.v_cache = packed

    return lambda self, x, step: (forward if step.shape.prompt else attend)(self, x, step)


def own_window(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Verification that ignores the row's earlier tokens."""

    def forward(self: Attention, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        def mistaken(q: Any, k: Any, v: Any, pages: Any, bounds: Any, starts: Any, *rest: Any):  # type: ignore[no-untyped-def]
            alone = torch.zeros_like(starts) if step.shape.query_len > 1 else starts
            return sound(q, k, v, pages, bounds, alone, *rest)

        sound = self.attend
        self.attend = mistaken
        try:
            return attend(self, x, step)
        finally:
            self.attend = sound

    return lambda self, x, step: (attend if step.shape.prompt else forward)(self, x, step)


@pytest.mark.covering(strength=1)
@FORMAT
@pytest.mark.parametrize(
    ("fault", "settings"),
    [(unquantized_chunk, dict(max_num_batched_tokens=64)), (own_window, dict(method="mtp", k=3))],
)
def test_attention_to_only_the_chunk_is_detected(
    make: Callable[..., LLM],
    plain_of: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fault: Callable[..., Any],
    settings: dict[str, Any],
) -> None:
    expected = plain_of(kind)
    monkeypatch.setattr(Attention, "forward", fault(Attention.forward))
    assert answers(make(kv_cache_dtype=kind, **settings)) != expected


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("format", KERNEL_FORMATS.values(), ids=list(KERNEL_FORMATS))
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_verified_token_attends_as_a_single_token(group: int, format: Any, backend: str) -> None:
    """Each of K + 1 tokens attends to all earlier tokens and itself, and no later one; across a
    segment's end."""
    attend = paged_attention.backends[backend].run
    batch = paged(((253, 4), (3, 4)), 2 * group, 2, 16, 16, torch.float32, format=format)
    full = attend(**batch)
    for token in range(4):
        one = batch | dict(
            q=batch["q"].unflatten(0, (2, 4))[:, token].contiguous(),
            cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32),
            starts=batch["starts"] + token,
            query_len=1,
        )
        assert same_bits(attend(**one), full.unflatten(0, (2, 4))[:, token])
