"""Preemption moves quantized pages to host memory and back without dequantizing them; pages of a
shared prefix are not moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lockstep import LLM, EngineConfig, SamplingParams
from lockstep.engine_builder import build_engine
from lockstep.kernels.formats.kv.table import KV_FORMATS
from lockstep.step import PAGE_SIZE
from lockstep.worker import rows
from lockstep.worker.hooks import CheckHooks
from tests.tiny_model import THREE_LAYERS, make_model

DIM = 128
HEADS = 1
LAYERS = 1
TOKEN_BYTES = {
    "auto": 4 * 2 * DIM,
    "bfloat16": 2 * 2 * DIM,
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "int8_per_token_head": 264,
    "turboquant_k8v4": 196,
    "turboquant_4bit_nc": 134,
    "turboquant_k3v4_nc": 118,
    "turboquant_3bit_nc": 102,
}
"""Bytes of a token's key and value in one head of DIM values, as documented in docs/cache.md; the
tiny model's own dtype is fp32."""
PROMPT = [7 * i % 250 for i in range(200)]
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a hybrid model with one attention layer."""
    return make_model(tmp_path_factory.mktemp("tiny"), **THREE_LAYERS, head_dim=DIM)


def engine_of(folder: Path, kind: str, preempt_every: int) -> LLM:
    """Return an engine that preempts its rows every `preempt_every` steps; 0: never."""
    config = EngineConfig.read(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=2,
        kv_cache_dtype=kind,
    )
    return LLM.from_engine(build_engine(config, hooks=CheckHooks(preempt_every=preempt_every)))


class Moves:
    """Recorder of the page bytes that save_row copies out and restore_row copies back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out: list[tuple[int, int]] = []
        self.back: list[int] = []
        monkeypatch.setattr(rows, "save_row", self._counted(rows.save_row))
        monkeypatch.setattr(rows, "restore_row", self._restored(rows.restore_row))

    def _counted(self, save: Callable[..., rows.HostRow]) -> Callable[..., rows.HostRow]:
        def counted(table: Any, row: int, pages: list[int], *rest: Any) -> rows.HostRow:
            saved = save(table, row, pages, *rest)
            self.out.append((len(pages), _bytes(saved.pages)))
            return saved

        return counted

    def _restored(self, restore: Callable[..., None]) -> Callable[..., None]:
        def restored(table: Any, row: int, saved: rows.HostRow, *rest: Any) -> None:
            self.back.append(_bytes(saved.pages))
            restore(table, row, saved, *rest)

        return restored


def _bytes(indices: list[list[Tensor]]) -> int:
    """Return the bytes of the distinct storages."""
    storages = [tensor.untyped_storage() for index in indices for tensor in index]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def answers(llm: LLM, *prompts: list[int]) -> list[list[int]]:
    """Return the tokens of each prompt's answer."""
    result = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    return [one.outputs[0].token_ids for one in result]


def test_every_format_has_token_bytes() -> None:
    assert {format.name for format in KV_FORMATS.values()} <= set(TOKEN_BYTES)


@pytest.mark.default_cases("bfloat16", "int8_per_token_head", "turboquant_k3v4_nc")
@pytest.mark.parametrize("kind", TOKEN_BYTES)
def test_preemption_moves_quantized_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    expected = answers(engine_of(folder, kind, 0), PROMPT, PROMPT[:70])
    moves = Moves(monkeypatch)
    llm = engine_of(folder, kind, 3)
    assert answers(llm, PROMPT, PROMPT[:70]) == expected
    page = TOKEN_BYTES[kind] * HEADS * LAYERS * PAGE_SIZE
    assert llm.engine.facts.plan.page_bytes == page
    assert moves.out
    assert [size for _, size in moves.out] == [count * page for count, _ in moves.out]
    assert sorted(moves.back) == sorted(size for _, size in moves.out)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "turboquant_3bit_nc"])
def test_shared_prefix_is_not_moved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    moves = Moves(monkeypatch)
    llm = engine_of(folder, kind, 0)
    first = answers(llm, PROMPT)
    assert answers(llm, PROMPT) == first
    assert llm.engine.scheduler.cache.hit_tokens > 0
    assert not moves.out
    assert not moves.back
