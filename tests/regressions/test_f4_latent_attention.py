"""F4 (TokenSpeed #260) on latent attention: causal bounds per token, padded rows, pools of two
pages."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import LLM, EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.kernels.latent_attention import cpu
from tests.regressions.conftest import PARAMS, answers, poison_latents_behind, run_null_rows
from tests.selection import some_slow
from tests.tiny_model import DEEPSEEK, make_model

SHORT = [[3, 1, 4, 1, 5, i] for i in range(2)]
"""Prompts for a pool of one page and the null page, one at a time."""
FEW = replace(PARAMS, max_tokens=6)
LONG = [[(7 * i + i * i) % 250 for i in range(n)] for n in (250, 5, 65, 130)]
WINDOW = 4
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes an engine of a tiny DeepSeek-V3."""
    folder: Path = make_model(tmp_path_factory.mktemp("latent") / "model", DEEPSEEK)

    def build(drafting: bool = False, **settings: Any) -> LLM:
        if drafting:
            spec = {"method": "mtp", "num_speculative_tokens": WINDOW - 1, "adaptive": False}
            settings["speculative_config"] = spec
        settings = {"max_model_len": 512, "max_num_seqs": 8, **settings}
        config = EngineConfig.read(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, **settings
        )
        return LLM.from_engine(build_engine(config))

    return build


@pytest.fixture(scope="module")
def alone(latent: Make) -> list[Any]:
    """Return the plain engine's answers to SHORT, one at a time."""
    llm = latent()
    return [answers(llm, [prompt], FEW) for prompt in SHORT]


@pytest.fixture(scope="module")
def plain(latent: Make) -> list[Any]:
    """Return the plain engine's answers to LONG."""
    return answers(latent(), LONG)


@pytest.mark.default_cases("8")
@pytest.mark.parametrize("bucket", some_slow(range(1, 9), (1, 8)))
def test_every_bucket_runs_null_rows_with_two_pages(
    latent: Make, alone: list[Any], bucket: int
) -> None:
    """Every request runs afterwards, one at a time."""
    llm = latent(True, num_gpu_blocks=2, row_buckets=(bucket, 8))
    run_null_rows(llm, bucket, WINDOW)
    assert [answers(llm, [prompt], FEW) for prompt in SHORT] == alone


@pytest.mark.parametrize("bucket", some_slow((1, 3, 8), (3,)))
def test_padded_rows_do_not_change_real_rows(latent: Make, plain: list[Any], bucket: int) -> None:
    assert answers(latent(True, row_buckets=(bucket, 8)), LONG) == plain


def test_chunks_prefixes_and_small_pools_keep_the_answers(latent: Make, plain: list[Any]) -> None:
    """Chunks with ends within pages; a second run from the cache; preempted rows."""
    chunked = latent(True, max_num_batched_tokens=70, enable_prefix_caching=False)
    assert answers(chunked, LONG) == plain
    warm = latent(True)
    assert answers(warm, LONG) == answers(warm, LONG) == plain
    assert answers(latent(True, num_gpu_blocks=8), LONG) == plain


def test_later_keys_are_never_read(
    latent: Make, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every step each row's slots from its first written one are poisoned, in every layer
    and the draft module's: rejected drafts leave no trace."""
    poisoned = poison_latents_behind(monkeypatch)
    assert answers(latent(True, enable_prefix_caching=False), LONG) == plain
    assert poisoned


def test_window_without_causal_bounds_is_detected(
    latent: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the tests above can fail: one bound for all tokens of a window, as in the
    report."""
    attend = cpu._attend

    def together(q: Any, keys: Any, values: Any, start: int) -> Any:
        if not 1 < len(q) <= WINDOW:
            return attend(q, keys, values, start)
        item = [attend(one[None], keys, values, start + len(q) - 1) for one in q]
        return torch.cat(item)

    monkeypatch.setattr(cpu, "_attend", together)
    spec = {"method": "ngram", "num_speculative_tokens": WINDOW - 1, "adaptive": False}
    repeating = [[5, 6, 7, 8] * 20, *LONG[1:]]
    assert answers(latent(speculative_config=spec), repeating) != answers(latent(), repeating)
