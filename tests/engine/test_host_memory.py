"""Conversations that exceed device memory are restored from host memory bit for bit."""

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
CONVERSATIONS = 3
TURNS = 3
FIRST_TURN_TOKENS = 140
"""Tokens of a conversation's first turn; each later turn adds TOKENS_PER_TURN."""
TOKENS_PER_TURN = 50
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
FAST_CASES = ("hybrid, bf16 state, mtp", "latents, fp8")
SMALL_DEVICE = {"num_gpu_blocks": 8, "num_snapshots": 1, "max_num_seqs": 2}
"""Settings of a device with memory for one and a half conversations."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models' folders, and that of a draft model of the dense one."""
    result = {}
    for name, (base, changes) in MODELS.items():
        arguments = (base,) if base else ()
        result[name] = make_model(tmp_path_factory.mktemp(name), *arguments, **changes)
    result["draft"] = make_model(tmp_path_factory.mktemp("draft"), QWEN3, num_hidden_layers=1)
    return result


def engine_of(folders: dict[str, Path], model: str, **settings: Any) -> LLM:
    """Return an engine over one of the models."""
    if settings.get("method") == "draft_model":
        settings["drafts_with"] = folders["draft"]
    return engine_over(folders[model], **settings)


def run_conversations(llm: LLM, at_once: int = 1) -> list[Any]:
    """Run conversations turn by turn, `at_once` concurrently; the user's text does not depend on
    the answers."""
    rng = random.Random(5)
    texts = [
        [rng.randrange(200) for _ in range(FIRST_TURN_TOKENS + TOKENS_PER_TURN * TURNS)]
        for _ in range(CONVERSATIONS)
    ]
    results = []
    for turn in range(TURNS):
        for first in range(0, CONVERSATIONS, at_once):
            requested = [
                text[: FIRST_TURN_TOKENS + TOKENS_PER_TURN * turn]
                for text in texts[first : first + at_once]
            ]
            results += answers(llm, requested, PARAMS)
            llm.engine.scheduler.cache.check()
    return results


@pytest.mark.default_cases("hybrid, bf16 state, mtp")
@pytest.mark.parametrize(
    "case",
    [case if case in FAST_CASES else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_host_memory_changes_no_bit(folders: dict[str, Path], case: str) -> None:
    model, settings = CASES[case]
    plain = {name: value for name, value in settings.items() if name != "method"}
    expected = run_conversations(engine_of(folders, model, enable_prefix_caching=False, **plain))
    for size, at_once, preempt in ((1.0, 1, 0), (1.0, 2, 3), (0.0, 2, 3)):
        small = {**SMALL_DEVICE, "kv_offloading_size": size, "preempt_every": preempt}
        llm = engine_of(folders, model, **small, **settings)
        assert run_conversations(llm, at_once) == expected
        stats = llm.engine.refresh_stats()
        assert (stats.host_hits_total > 0) == (stats.fetched_total > 0) == (size > 0)
        assert (stats.preemptions_total > 0) == (preempt > 0)


def test_host_hits_and_transfers_are_counted(folders: dict[str, Path]) -> None:
    """Every later turn hits the previous turn in host memory, except for its last, partial page."""
    llm = engine_of(folders, "hybrid", kv_offloading_size=1.0, **SMALL_DEVICE)
    run_conversations(llm)
    cache = llm.engine.scheduler.cache
    stats = llm.engine.refresh_stats()
    full = [
        (FIRST_TURN_TOKENS + TOKENS_PER_TURN * turn) // PAGE_SIZE * PAGE_SIZE
        for turn in range(TURNS - 1)
    ]
    assert stats.prefix_hits_total == CONVERSATIONS * sum(full)
    assert 0 < stats.host_hits_total <= stats.prefix_hits_total
    missed = stats.prefix_queries_total - stats.prefix_hits_total
    assert stats.host_queries_total == missed + stats.host_hits_total
    plan = llm.engine.plan
    stores = [group.pool.host for group in cache.groups]
    sizes = [plan.page_bytes, plan.slot_bytes]
    moved = [(store.num_evicted, store.num_fetched) for store in stores]
    assert all(evicted and fetched for evicted, fetched in moved)
    assert stats.offloaded_total == sum(evicted for evicted, _ in moved)
    assert stats.fetched_bytes_total == sum(s * b for s, (_, b) in zip(sizes, moved, strict=True))
    assert stats.host_pages_used == cache.host.used > 0
    assert stats.host_pages == plan.host_pages == (1 << 30) // plan.page_bytes


def test_ended_requests_and_clear_free_all_pages(
    folders: dict[str, Path],
) -> None:
    llm = engine_of(folders, "hybrid", kv_offloading_size=1.0, preempt_every=2, **SMALL_DEVICE)
    run_conversations(llm, 2)
    engine = llm.engine
    cache = engine.scheduler.cache
    assert not cache.seqs and not cache.paged.pool.used and not cache.host.pinned
    assert not worker_of(engine).saved
    assert cache.host.used
    engine.clear()
    cache.check()
    assert not cache.host.used
    assert cache.paged.pool.available == cache.paged.pool.total


def min_host_bytes(llm: LLM) -> int:
    """Return the bytes of one page, and of a snapshot if layers are recurrent."""
    plan = llm.engine.plan
    return plan.page_bytes * (1 + plan.slot_host_pages)


@pytest.mark.default_cases("hybrid")
@pytest.mark.parametrize("model", ["dense", "hybrid"])
def test_minimum_host_memory(folders: dict[str, Path], model: str) -> None:
    plain = run_conversations(engine_of(folders, model))
    minimum = min_host_bytes(engine_of(folders, model)) / memory.GIB
    llm = engine_of(folders, model, kv_offloading_size=minimum, **SMALL_DEVICE)
    assert llm.engine.plan.host_pages == 1 + llm.engine.plan.slot_host_pages
    assert run_conversations(llm) == plain
    with pytest.raises(CapacityError, match=r"kv_offloading_size=.* allowed: 0, or .* Raise it"):
        engine_of(folders, model, kv_offloading_size=minimum * 0.99)


def test_host_memory_above_machine_memory_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(CapacityError, match=r"the host's part of the cache .*500000.* Lower it"):
        engine_of(folders, "dense", kv_offloading_size=500_000)


def test_no_host_memory_without_prefix_caching(folders: dict[str, Path]) -> None:
    llm = engine_of(folders, "dense", kv_offloading_size=500_000, enable_prefix_caching=False)
    assert llm.engine.plan.host_pages == 0


def test_failed_step_clears_host_memory(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies in flight may not have arrived."""
    plain = run_conversations(engine_of(folders, "hybrid"))
    llm = engine_of(folders, "hybrid", kv_offloading_size=1.0, **SMALL_DEVICE)
    run_conversations(llm)
    engine = llm.engine

    evict = worker_of(engine).transfers.evict
    recover = engine.recover
    used: list[int] = []

    def fail_once(moves: Any) -> None:
        if not used:
            used.append(engine.scheduler.cache.host.used)
            raise RuntimeError("no copy")
        evict(moves)

    def watched() -> Any:
        ended = recover()
        used.append(engine.scheduler.cache.host.used)
        return ended

    monkeypatch.setattr(worker_of(engine).transfers, "evict", fail_once)
    monkeypatch.setattr(engine, "recover", watched)
    assert run_conversations(llm) == plain
    assert used[0] > used[1] == 0
