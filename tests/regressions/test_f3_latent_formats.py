"""F3 (vLLM #40880, #40914) on packed latents: drafts, chunks and preemption over latent attention.

What test_f3_kv_formats.py holds for keys and values; a latent is both.
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
"""Of a latent; the turned key beside it is of the model's dtype, fp32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 whose latents are a power of two wide."""
    path = tmp_path_factory.mktemp("latents") / "model"
    return make_model(path, DEEPSEEK, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Any]:
    """The answers over latents in the model's dtype."""
    return answers(engine_over(folder))


@pytest.fixture(scope="module")
def plain_of(folder: Path) -> Callable[[str], list[Any]]:
    """The answers over a format of an engine without drafts, asked once."""
    return cache(lambda kind: answers(engine_over(folder, kv_cache_dtype=kind)))


@KINDS
def test_chunks_drafts_and_preemption_leave_the_answer_alone(
    folder: Path, plain: list[Any], plain_of: Callable[[str], list[Any]], kind: str
) -> None:
    wanted = plain_of(kind)
    assert wanted != plain, "the format changes no bit"
    texts = [p + tokens for p, (tokens, _) in zip(PROMPTS, wanted, strict=True)]
    drafting: Any = dict(method="ngram", k=7, changing=True, known=texts)
    small = engine_over(folder, kv_cache_dtype=kind, max_num_batched_tokens=70, **drafting)
    assert answers(small) == wanted
    settings = dict(preempt_every=4, max_num_batched_tokens=128)
    llm = engine_over(folder, "mtp", 3, kv_cache_dtype=kind, **settings)
    assert answers(llm) == wanted
    assert answers(llm) == wanted, "with what is cached"
    assert llm.engine.refresh_stats().preemptions_total > 0
    assert llm.engine.scheduler.cache.hit_tokens > 0


@KINDS
def test_attention_to_the_chunk_as_it_was_is_caught(
    folder: Path,
    plain_of: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The test above can fail: a prompt's current chunk as it is, the rest as it was packed."""
    wanted = plain_of(kind)
    attend = LatentAttention.forward

    def forward(self: LatentAttention, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        if not step.shape.prompt:
            return attend(self, x, step)
        packed = self.latents
        self.keep(x, step)
        self.latents = cases.dequantized_copy(copy.deepcopy(packed), x.dtype)
        try:
            return attend(self, x, step)
        finally:
            self.latents = packed

    monkeypatch.setattr(LatentAttention, "forward", forward)
    assert answers(engine_over(folder, kv_cache_dtype=kind, max_num_batched_tokens=70)) != wanted


@KINDS
def test_rejected_drafts_leave_nothing(
    folder: Path,
    plain_of: Callable[[str], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Before every step, each of its rows' slots from the first that it writes on is poisoned."""
    wanted = plain_of(kind)
    place = LatentAttention._place
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
        return place(self, q, kv, step)

    monkeypatch.setattr(LatentAttention, "_place", poisoning)
    settings = dict(kv_cache_dtype=kind, enable_prefix_caching=False)
    assert answers(engine_over(folder, "mtp", 3, **settings)) == wanted
    assert poisoned


def test_pages_cost_what_their_parts_do(folder: Path) -> None:
    """And hold nothing else: what is moved to the host is what is packed."""
    for kind, size in BYTES.items():
        engine = engine_over(folder, "mtp", 3, kv_cache_dtype=kind).engine
        assert engine.plan.page_bytes == LAYERS * PAGE_SIZE * (size + 4 * ROPE), kind
        tensors = [t for m in worker_of(engine).layers.values() for t in m.cache_tensors()]
        assert sum(t[0].nbytes for t in tensors) == engine.plan.page_bytes


def test_layers_rotate_differently_and_some_may_be_left_out(folder: Path) -> None:
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
