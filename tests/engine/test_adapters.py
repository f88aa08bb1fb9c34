"""LoRA adapters: a row with an adapter has the answer that it has alone, however it runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.answer import Answer
from lockstep.check.engines import CheckEngine
from lockstep.check.random_adapters import write_random_adapter
from lockstep.errors import LockstepError, RequestError
from lockstep.outputs import RequestMetrics
from lockstep.worker import executor
from lockstep.worker.executor import executor_of, worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.rows import restore_row, save_row
from lockstep.worker.worker import Worker
from tests.bundled_model import GREEDY, SEEDED, assert_idle, make_engine
from tests.thread_ranks import ThreadRanks

TEXT = "The clock on the square had stopped, and nobody in the town could say when. " * 3
"""More than one page, so that its prefix can be cached."""
ADAPTERS = ("", "first", "second")
PARAMS = [replace(params, max_tokens=5, logprobs=1) for params in (GREEDY, SEEDED, GREEDY)]
Requests = list[tuple[str, SamplingParams, str]]


@pytest.fixture(scope="module")
def adapters(plain: LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folders of a rank-1 and a rank-3 adapter of the bundled model."""
    folder = tmp_path_factory.mktemp("adapters")
    model = worker_of(plain.engine).model
    first = write_random_adapter(model, folder / "first", seed=1)
    second = write_random_adapter(model, folder / "second", seed=2, rank=3)
    return {"first": str(first), "second": str(second)}


@pytest.fixture(scope="module")
def adapted(adapters: dict[str, str]) -> LLM:
    """Return the bundled model with two adapters, and neither drafts nor a prefix cache."""
    return make_engine(None, lora_modules=adapters, enable_prefix_caching=False)


def run(llm: LLM, requests: Requests) -> list[Answer]:
    """Serve requests together: prompt, parameters and adapter of each."""
    engine = CheckEngine(llm)
    completions = []
    for index, (prompt, params, adapter) in enumerate(requests):
        (completion,) = engine.completions(f"r{index}", llm.processor.prompt_ids(prompt), params)
        completion.request.adapter = adapter
        completions.append(completion)
    engine.serve(completions)
    assert_idle(llm)
    return [bare(completion.answer()) for completion in completions]


def bare(answer: Answer) -> Answer:
    """Return an answer without what may differ between runs."""
    return replace(answer, metrics=RequestMetrics())


@pytest.fixture(scope="module")
def requests() -> Requests:
    """Return prompts that share a page, each with every adapter and other parameters."""
    prompts = (TEXT, TEXT + "It was", "import os\n\n\ndef main(")
    return [
        (prompt, params, adapter)
        for prompt, params in zip(prompts, PARAMS, strict=True)
        for adapter in ADAPTERS
    ]


@pytest.fixture(scope="module")
def expected(adapted: LLM, requests: Requests) -> list[Answer]:
    """Return the answer of each request alone."""
    return [run(adapted, [request])[0] for request in requests]


def test_adapters_change_answers_and_the_base_model_keeps_its_own(
    plain: LLM, requests: Requests, expected: list[Answer]
) -> None:
    for index in range(0, len(requests), len(ADAPTERS)):
        base, *changed = expected[index : index + len(ADAPTERS)]
        assert [base] == run(plain, [requests[index]])
        assert base != changed[0] != changed[1] != base


def test_batch_of_adapters_equals_single_rows(
    adapted: LLM, requests: Requests, expected: list[Answer]
) -> None:
    assert run(adapted, requests[::-1]) == expected[::-1]


ENGINES: dict[str, Callable[..., LLM]] = {
    "chunks": lambda **s: make_engine(None, max_num_batched_tokens=64, **s),
    "drafts": lambda **s: make_engine(
        "mtp", CheckHooks(preempt_every=3), max_num_batched_tokens=64, **s
    ),
    "host memory": lambda **s: make_engine(
        "ngram", steps_in_flight=2, num_gpu_blocks=4, kv_offloading_size=0.01, **s
    ),
}


@pytest.mark.default_cases("drafts", "host memory")
@pytest.mark.parametrize("name", ENGINES)
def test_adapters_equal_single_rows_on_every_engine(
    name: str, adapters: dict[str, str], requests: Requests, expected: list[Answer]
) -> None:
    """Prompts share a page, so that prefixes are cached."""
    llm = ENGINES[name](lora_modules=adapters)
    assert run(llm, requests) == expected
    if name == "host memory":
        assert run(llm, requests) == expected
    stats = llm.engine.refresh_stats()
    assert stats.prefix_hits_total > 0
    if name == "drafts":
        assert stats.preemptions_total > 0 and stats.accepted_tokens_total > 0
    if name == "host memory":
        assert stats.fetched_total > 0


def test_no_prefix_is_shared_between_adapters(
    adapters: dict[str, str], requests: Requests, expected: list[Answer]
) -> None:
    """The pages of one adapter, and of the base model, serve no other."""
    llm = make_engine(None, lora_modules=adapters)
    hits = []
    for request in requests[:3] * 2:
        before = llm.engine.refresh_stats().prefix_hits_total
        run(llm, [request])
        hits.append(llm.engine.refresh_stats().prefix_hits_total - before)
    assert hits[:3] == [0, 0, 0] and all(hits[3:])


def test_ranks_of_a_group_give_the_answers_of_one(
    adapters: dict[str, str],
    requests: Requests,
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    llm = make_engine("mtp", tensor_parallel_size=2, lora_modules=adapters)
    assert run(llm, requests) == expected


@torch.inference_mode()
def change_adapters(worker: Worker) -> None:
    """Give the rows of the second rank another adapter."""
    if worker.group.index == 1:
        worker.table.adapters.tensors()[0][1:] += 1


def test_audit_names_a_rank_with_other_adapters(
    adapters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "start_ranks", ThreadRanks)
    monkeypatch.setattr(executor, "AUDIT_EVERY", 1)
    llm = make_engine(None, lora_modules=adapters, tensor_parallel_size=2, audit=0.001)
    llm.generate("The", replace(GREEDY, max_tokens=2), lora_request="first")
    executor_of(llm.engine).collective_rpc(change_adapters)
    with pytest.raises(LockstepError, match=r"rank 1 has another row table than rank 0 \(adapters"):
        llm.generate(TEXT, GREEDY)


def test_order_and_ranks_of_other_adapters_do_not_matter(
    adapters: dict[str, str], requests: Requests, expected: list[Answer]
) -> None:
    for names in (["second", "first"], ["first"]):
        llm = make_engine(None, lora_modules={name: adapters[name] for name in names})
        known = [i for i, request in enumerate(requests[:3]) if request[2] in ("", *names)]
        assert run(llm, [requests[i] for i in known]) == [expected[i] for i in known]


def test_unknown_adapter_is_refused(adapted: LLM, plain: LLM) -> None:
    with pytest.raises(RequestError, match="adapter='third' is not allowed; allowed: 'first', "):
        run(adapted, [(TEXT, GREEDY, "third")])
    with pytest.raises(RequestError, match="allowed: none"):
        run(plain, [(TEXT, GREEDY, "first")])


def test_fingerprint_names_adapters_and_nothing_changes_without(
    adapters: dict[str, str], plain: LLM, adapted: LLM, tmp_path: Path
) -> None:
    assert "adapters" not in plain.engine.numerics
    base, _, suffix = adapted.engine.numerics.partition("/adapters-")
    assert base == plain.engine.numerics and len(suffix) == 8
    launched = {choice["op"] for choice in plain.engine.explain()["layers"]}
    assert "lora" not in launched
    assert "lora" in {choice["op"] for choice in adapted.engine.explain()["layers"]}
    assert adapted.engine.fingerprint != plain.engine.fingerprint


def test_adapters_do_not_raise_the_floor_of_a_step(plain: LLM, adapted: LLM) -> None:
    """Rows of the base model read none of them."""
    floors = [llm.engine.facts.costs.step(2, 0, 100) for llm in (plain, adapted)]
    assert floors[0] == floors[1]


@torch.inference_mode()
def test_preempted_row_moves_with_its_adapter(adapted: LLM) -> None:
    worker = worker_of(adapted.engine)
    table = worker.table
    for row, name in ((1, "second"), (2, "first")):
        table.adapters.write(row, name)
    saved = save_row(table, 1, [], 0, worker.transfers)
    restore_row(table, 2, saved, [], 0, worker.transfers)
    row_ids = torch.tensor([2, 0, 1])
    adapter_ids = table.adapters.of_tokens(row_ids, torch.tensor([0, 0, 1, 2]))
    assert adapter_ids is not None and adapter_ids.tolist() == [2, 2, 0, 2]


def test_llm_names_an_adapter_per_prompt(adapted: LLM) -> None:
    params = replace(GREEDY, max_tokens=3)
    together = adapted.generate([TEXT] * 3, params, lora_request=ADAPTERS)
    for name, output in zip(ADAPTERS, together, strict=True):
        (alone,) = run(adapted, [(TEXT, params, name)])
        assert output.outputs[0].token_ids == list(alone.tokens)
    assert adapted.generate(TEXT, params, lora_request="first")[0].outputs[0].text == (
        together[1].outputs[0].text
    )
