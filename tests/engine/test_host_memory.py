"""Conversations that the device has no room for: host memory brings them back, bit for bit."""

import random
from pathlib import Path
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.errors import CapacityError
from lockstep.step import PAGE_SIZE
from lockstep.worker import memory
from lockstep.worker.executor import worker_of
from tests.regressions.conftest import answers, engine_over
from tests.tiny_model import DEEPSEEK, NEMOTRON_H, QWEN3, THREE_LAYERS, make_model

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, detokenize=False)
TALKS = 3
TURNS = 3
FIRST = 140
"""Tokens of a conversation's first turn, and how many more each turn brings."""
MORE = 50
MODELS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "hybrid": ({}, dict(THREE_LAYERS)),
    "dense": (QWEN3, {}),
    "latents": (DEEPSEEK, {"kv_lora_rank": 32}),
    "mamba": (NEMOTRON_H, {"hybrid_override_pattern": "MM*EM"}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("hybrid", {}),
    "hybrid, bf16 state, mtp": ("hybrid", {"method": "mtp", "mamba_ssm_cache_dtype": "bfloat16"}),
    "hybrid, 3 bits, ngram": (
        "hybrid",
        {"method": "ngram", "kv_cache_dtype": "turboquant_3bit_nc"},
    ),
    "dense, int8": ("dense", {"kv_cache_dtype": "int8_per_token_head"}),
    "dense, k8v4, a draft model": (
        "dense",
        {"method": "draft_model", "kv_cache_dtype": "turboquant_k8v4"},
    ),
    "latents, mtp": ("latents", {"method": "mtp"}),
    "latents, fp8": ("latents", {"kv_cache_dtype": "fp8"}),
    "mamba": ("mamba", {"snapshot_every": 1}),
}
FAST = ("hybrid, bf16 state, mtp", "latents, fp8")
SMALL = {"num_gpu_blocks": 8, "num_snapshots": 1, "max_num_seqs": 2}
"""A device that holds one conversation and a half."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models' folders, and that of a draft model of the dense one."""
    made = {}
    for name, (base, changes) in MODELS.items():
        given = (base,) if base else ()
        made[name] = make_model(tmp_path_factory.mktemp(name), *given, **changes)
    made["draft"] = make_model(tmp_path_factory.mktemp("draft"), QWEN3, num_hidden_layers=1)
    return made


def engine_of(folders: dict[str, Path], model: str, **settings: Any) -> LLM:
    """An engine over one of the models."""
    if settings.get("method") == "draft_model":
        settings["drafts_with"] = folders["draft"]
    return engine_over(folders[model], **settings)


def talk(llm: LLM, at_once: int = 1) -> list[Any]:
    """Conversations in turn, so many at once; what they say is made up, not what was answered."""
    rng = random.Random(5)
    texts = [[rng.randrange(200) for _ in range(FIRST + MORE * TURNS)] for _ in range(TALKS)]
    found = []
    for turn in range(TURNS):
        for first in range(0, TALKS, at_once):
            asked = [text[: FIRST + MORE * turn] for text in texts[first : first + at_once]]
            found += answers(llm, asked, PARAMS)
            llm.engine.scheduler.cache.check()
    return found


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_no_bit_depends_on_host_memory(folders: dict[str, Path], case: str) -> None:
    model, settings = CASES[case]
    plain = {name: value for name, value in settings.items() if name != "method"}
    wanted = talk(engine_of(folders, model, enable_prefix_caching=False, **plain))
    for size, at_once, preempt in ((1.0, 1, 0), (1.0, 2, 3), (0.0, 2, 3)):
        small = {**SMALL, "kv_offloading_size": size, "preempt_every": preempt}
        llm = engine_of(folders, model, **small, **settings)
        assert talk(llm, at_once) == wanted
        stats = llm.engine.refresh_stats()
        assert (stats.host_hits_total > 0) == (stats.fetched_total > 0) == (size > 0)
        assert (stats.preemptions_total > 0) == (preempt > 0)


def test_hits_and_moves_are_counted(folders: dict[str, Path]) -> None:
    """Every later turn finds the turn before in host memory, but for its last, unfinished page."""
    llm = engine_of(folders, "hybrid", kv_offloading_size=1.0, **SMALL)
    talk(llm)
    cache = llm.engine.scheduler.cache
    stats = llm.engine.refresh_stats()
    whole = [(FIRST + MORE * turn) // PAGE_SIZE * PAGE_SIZE for turn in range(TURNS - 1)]
    assert stats.prefix_hits_total == TALKS * sum(whole)
    assert 0 < stats.host_hits_total <= stats.prefix_hits_total
    missed = stats.prefix_queries_total - stats.prefix_hits_total
    assert stats.host_queries_total == missed + stats.host_hits_total
    plan = llm.engine.plan
    shelves = [group.pool.host for group in cache.groups]
    sizes = [plan.page_bytes, plan.slot_bytes]
    moved = [(shelf.num_out, shelf.num_back) for shelf in shelves]
    assert all(out and back for out, back in moved)
    assert stats.offloaded_total == sum(out for out, _ in moved)
    assert stats.fetched_bytes_total == sum(s * b for s, (_, b) in zip(sizes, moved, strict=True))
    assert stats.host_pages_used == cache.host.used > 0
    assert stats.host_pages == plan.host_pages == (1 << 30) // plan.page_bytes


def test_what_ends_leaves_no_page_and_what_is_forgotten_no_host_page(
    folders: dict[str, Path],
) -> None:
    llm = engine_of(folders, "hybrid", kv_offloading_size=1.0, preempt_every=2, **SMALL)
    talk(llm, 2)
    engine = llm.engine
    cache = engine.scheduler.cache
    assert not cache.seqs and not cache.paged.pool.used and not cache.host.pinned
    assert not worker_of(engine).saved
    assert cache.host.used
    engine.clear()
    cache.check()
    assert not cache.host.used
    assert cache.paged.pool.available == cache.paged.pool.total


def least_bytes(llm: LLM) -> int:
    """What one page takes, and a snapshot where layers recur."""
    plan = llm.engine.plan
    return plan.page_bytes * (1 + plan.slot_host_pages)


@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_host_memory_of_the_least_size_and_of_less(folders: dict[str, Path], model: str) -> None:
    plain = talk(engine_of(folders, model))
    least = least_bytes(engine_of(folders, model)) / memory.GIB
    llm = engine_of(folders, model, kv_offloading_size=least, **SMALL)
    assert llm.engine.plan.host_pages == 1 + llm.engine.plan.slot_host_pages
    assert talk(llm) == plain
    with pytest.raises(CapacityError, match=r"kv_offloading_size=.* allowed: 0, or .* Raise it"):
        engine_of(folders, model, kv_offloading_size=least * 0.99)


def test_more_than_the_machine_has_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(CapacityError, match=r"the host's part of the cache .*500000.* Lower it"):
        engine_of(folders, "dense", kv_offloading_size=500_000)


def test_without_prefix_caching_no_host_memory_is_taken(folders: dict[str, Path]) -> None:
    llm = engine_of(folders, "dense", kv_offloading_size=500_000, enable_prefix_caching=False)
    assert llm.engine.plan.host_pages == 0


def test_a_step_that_fails_forgets_host_memory(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way may not have come."""
    plain = talk(engine_of(folders, "hybrid"))
    llm = engine_of(folders, "hybrid", kv_offloading_size=1.0, **SMALL)
    talk(llm)
    engine = llm.engine

    def fails(moves: Any) -> None:
        raise RuntimeError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(worker_of(engine).transfers, "evict", fails)
        with pytest.raises(RuntimeError, match="the engine failed in a step"):
            talk(llm)
    assert not engine.scheduler.cache.host.used
    assert talk(llm) == plain
