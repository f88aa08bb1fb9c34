"""F3 (vLLM #40880, #40914) on quantized latents: drafts, chunks and preemption over latent
attention.

The same as test_f3_kv_formats.py for keys and values; a latent is both.
"""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.kernels.formats.kv import QuantizedKV, cases
from lockstep.kernels.formats.kv.cases import LATENT_QUANTIZERS, UNWRITTEN_BYTE
from lockstep.layers.latent_attention import LatentAttention
from lockstep.step import PAGE_SIZE, StepContext
from lockstep.worker.executor import worker_of
from tests.regressions.conftest import PROMPTS, answers, engine_over
from tests.selection import some_slow
from tests.tiny_model import DEEPSEEK, make_model

KINDS = pytest.mark.parametrize(
    "kind", some_slow(LATENT_QUANTIZERS, ("fp8_e4m3", "turboquant_3bit_nc"))
)
"""By default a format with scales and the one whose codes cross bytes."""
LATENT = 32
ROPE = 12
LAYERS = 4
"""Three and the draft module's."""
BYTES = {
    "auto": 4 * LATENT,
    "bfloat16": 2 * LATENT,
    "fp8_e4m3": LATENT + 4,
    "int8_per_token_head": LATENT + 4,
    "turboquant_4bit_nc": LATENT // 2 + 2,
    "turboquant_3bit_nc": 3 * LATENT // 8 + 2,
}
"""Bytes per latent; its rotary key has the model's dtype, fp32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny DeepSeek-V3 whose latent width is a power of two."""
    path = tmp_path_factory.mktemp("latents") / "model"
    return make_model(path, DEEPSEEK, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    """Return the answers with latents in the model's dtype."""
    return answers(engine_over(folder))


@pytest.fixture(scope="module")
def plain_of(folder: Path) -> Callable[[str], list[Any]]:
    """Return a function that gives a format's answers without drafts, computed once."""
    return cache(lambda kind: answers(engine_over(folder, kv_cache_dtype=kind)))


@pytest.mark.default_cases("turboquant_3bit_nc")
@KINDS
def test_chunks_drafts_and_preemption_keep_the_answer(
    folder: Path, plain: list[Any], plain_of: Callable[[str], list[Any]], kind: str
) -> None:
    expected = plain_of(kind)
    assert expected != plain, "the format changes no bit"
    texts = [p + tokens for p, (tokens, _) in zip(PROMPTS, expected, strict=True)]
    drafting: Any = dict(method="ngram", k=7, changing=True, known=texts)
    small = engine_over(folder, kv_cache_dtype=kind, max_num_batched_tokens=70, **drafting)
    assert answers(small) == expected
    settings = dict(preempt_every=4, max_num_batched_tokens=128)
    llm = engine_over(folder, "mtp", 3, kv_cache_dtype=kind, **settings)
    assert answers(llm) == expected
    assert answers(llm) == expected, "with what is cached"
    assert llm.engine.refresh_stats().preemptions_total > 0
    assert llm.engine.scheduler.cache.hit_tokens > 0


@pytest.mark.default_cases("fp8_e4m3")
@KINDS
def test_attention_to_an_unquantized_chunk_is_detected(
    folder: Path,
    plain_of: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Shows that the test above can fail: only tokens before the prompt's current chunk are
    quantized."""
    expected = plain_of(kind)
    attend = LatentAttention.forward

    def forward(self: LatentAttention, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        if not step.shape.prompt:
            return attend(self, x, step)
        packed = self.latents
        self.write_cache(x, step)
        self.latents = cases.dequantized_copy(copy.deepcopy(packed), x.dtype)
        try:
            return attend(self, x, step)
        finally:
            self.latents = packed

    monkeypatch.setattr(LatentAttention, "forward", forward)
    assert answers(engine_over(folder, kv_cache_dtype=kind, max_num_batched_tokens=70)) != expected


@pytest.mark.default_cases("fp8_e4m3")
@KINDS
def test_rejected_drafts_leave_no_trace(
    folder: Path,
    plain_of: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Before every step each row's slots from its first written one are poisoned."""
    expected = plain_of(kind)
    index = LatentAttention._rotate_and_cache
    poisoned = 0

    def poisoning(self: LatentAttention, q: Any, kv: Any, step: Any) -> Any:
        nonlocal poisoned
        for s, start in enumerate(step.starts.tolist()):
            for j, page in enumerate(step.page_table[s].tolist()):
                if page and (j + 1) * PAGE_SIZE > start:
                    first = max(start - j * PAGE_SIZE, 0)
                    for part in self.cache_tensors():
                        part[page, first:] = (
                            torch.nan if part.is_floating_point() else UNWRITTEN_BYTE
                        )
                    poisoned += 1
        return index(self, q, kv, step)

    monkeypatch.setattr(LatentAttention, "_rotate_and_cache", poisoning)
    settings = dict(kv_cache_dtype=kind, enable_prefix_caching=False)
    assert answers(engine_over(folder, "mtp", 3, **settings)) == expected
    assert poisoned


def test_page_bytes_are_those_of_their_tensors(folder: Path) -> None:
    """Pages contain only quantized data, so that is what is swapped to the host."""
    for kind, size in BYTES.items():
        engine = engine_over(folder, "mtp", 3, kv_cache_dtype=kind).engine
        assert engine.plan.page_bytes == LAYERS * PAGE_SIZE * (size + 4 * ROPE), kind
        tensors = [t for m in worker_of(engine).layers.values() for t in m.cache_tensors()]
        assert sum(t[0].nbytes for t in tensors) == engine.plan.page_bytes


def test_rotations_differ_by_layer_and_layers_may_be_skipped(folder: Path) -> None:
    settings = dict(kv_cache_dtype="turboquant_4bit_nc", kv_cache_dtype_skip_layers=["first"])
    layers = worker_of(engine_over(folder, "mtp", 3, **settings).engine).layers.values()
    quantizers = [m.latents.quantizer for m in layers if isinstance(m.latents, QuantizedKV)]
    assert len(quantizers) == LAYERS - 1 == len({quantizer.seed for quantizer in quantizers})


def test_formats_without_a_codec_for_latents_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'turboquant_k8v4' is not allowed; allowed: auto, bflo"):
        engine_over(folder, kv_cache_dtype="turboquant_k8v4")
    with pytest.raises(ConfigError, match="int8_per_token_head, since TurboQuant rotates .* 40"):
        odd = make_model(folder.parent / "odd", DEEPSEEK, kv_lora_rank=40)
        engine_over(odd, kv_cache_dtype="turboquant_4bit_nc")
