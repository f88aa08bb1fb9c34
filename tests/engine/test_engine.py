"""The engine with the bundled model: drafts change no bit, counters agree, aborts free
everything."""

import random
from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.errors import ComputeError
from lockstep.outputs import RequestOutput
from lockstep.scheduling.request import Request
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.worker import PROMPT_LOGPROB_TILE
from tests.bundled_model import (
    DRAFTS,
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    TEXT,
    answer,
    assert_idle,
    bits,
    make_engine,
    one,
)
from tests.selection import some_slow
from tests.tiny_model import TWO_LAYERS, make_model


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    """Return the bundled model with each drafter."""
    return {name or "none": make_engine(name, max_num_seqs=8) for name in ("mtp", "ngram", None)}


PARAMETER_SETS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3, "logprobs": 3},
    "frequency": {"frequency_penalty": 1.0},
    "filters": {"temperature": 1.1, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "bias": {"temperature": 0.7, "seed": 5, "logit_bias": {10: 3.0, 273: -5.0}},
    "allowed": {"temperature": 0.7, "seed": 6, "allowed_token_ids": list(range(0, 4087, 3))},
    "repetition": {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    "bad words": {"bad_words": ["path", "return", "def"], "temperature": 0.5, "seed": 8},
    "n": {"n": 2, "temperature": 0.9, "seed": 9},
    "stop": {"stop": ["e", "in"], "min_tokens": 9},
    "stop tokens": {"stop_token_ids": [10, 11, 273, 331], "min_tokens": 5},
    "eos": {"ignore_eos": False, "prompt_logprobs": 1, "logprobs": 0},
}


@pytest.fixture(scope="module")
def expected_outputs(engines: dict[str, LLM]) -> dict[str, RequestOutput]:
    """Return the model's answers without drafts to every kind of request."""
    return generate_all_kinds(engines["none"])


def generate_all_kinds(llm: LLM) -> dict[str, RequestOutput]:
    """Run one request of each kind in one batch, over alternating prompts."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(PARAMETER_SETS))]
    params = [replace(GREEDY, max_tokens=12, **changes) for changes in PARAMETER_SETS.values()]
    return dict(zip(PARAMETER_SETS, llm.generate(prompts, params), strict=True))


@pytest.mark.default_cases("ngram")
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_drafts_change_no_answer_and_are_counted(
    engines: dict[str, LLM], expected_outputs: dict[str, RequestOutput], drafter: str
) -> None:
    outs = generate_all_kinds(engines[drafter])
    for kind, out in outs.items():
        assert answer(out) == answer(expected_outputs[kind]), kind
        check_counts(out, DRAFTS)
        check_counts(expected_outputs[kind], 0)
    steps, drafted, accepted = (
        sum(getattr(out.metrics, f"num_{name}") for out in outs.values())
        for name in ("steps", "draft_tokens", "accepted_tokens")
    )
    assert 0 < accepted < drafted
    assert drafted == DRAFTS * steps if drafter == "mtp" else drafted < DRAFTS * steps


def check_counts(out: RequestOutput, k: int) -> None:
    """Assert that a request's counters agree with its tokens: the prompt gives one token, each step
    1 + accepted."""
    m = out.metrics
    first = out.outputs[0]
    assert 0 <= m.num_accepted_tokens <= m.num_draft_tokens <= k * m.num_steps
    result = 1 + m.num_steps + m.num_accepted_tokens
    assert len(first.token_ids) <= result
    if first.finish_reason == "length":
        assert result <= len(first.token_ids) + k, "only the last step may overshoot"
    if k == 0 and first.finish_reason == "length":
        assert m.num_steps == len(first.token_ids) - 1
    if m.num_steps:
        assert m.acceptance_length == pytest.approx((result - 1) / m.num_steps)
    assert m.first_token_time is not None
    assert m.arrival_time <= m.first_token_time


def test_engine_counters_equal_request_counters(engines: dict[str, LLM]) -> None:
    llm = engines["ngram"]
    before = vars(llm.engine.refresh_stats()).copy()
    before["requests_success_total"] = before["requests_success_total"].copy()
    outs = llm.generate(PROMPTS[:2], replace(GREEDY, n=2))
    outs += llm.generate(PROMPTS[2:3], GREEDY)
    now = llm.engine.refresh_stats()
    grown = {name: getattr(now, name) - before[name] for name in vars(now) if "_total" in name}
    written = sum(len(c.token_ids) for o in outs for c in o.outputs)
    assert written == NUM_TOKENS * 5 == grown["generation_tokens_total"]
    assert grown["requests_success_total"] == {"length": 5}
    lengths = [len(out.prompt_token_ids) for out in outs]
    assert grown["prompt_tokens_total"] == 2 * lengths[0] + 2 * lengths[1] + lengths[2]
    assert 0 < grown["accepted_tokens_total"] <= grown["draft_tokens_total"]
    assert 0 < grown["steps_total"] < written
    indices = zip(now.accepted_at, before["accepted_at"], strict=True)
    assert sum(after - earlier for after, earlier in indices) == grown["accepted_tokens_total"]
    assert 0 < grown["drafts_total"] <= grown["draft_tokens_total"]
    assert now.num_running == now.num_waiting == now.num_swapped == 0


def test_decode_step_stats(engines: dict[str, LLM]) -> None:
    """For two rows with drafts, with their cached context lengths."""
    llm = engines["ngram"]
    llm.engine.drain_stats()
    outs = llm.generate([PROMPTS[0], PROMPTS[0]], GREEDY)
    steps = llm.engine.drain_stats().decode_steps
    together = [step for step in steps if step.rows == 2]
    assert together and min(step.seconds for step in steps) > 0
    assert {step.drafts for step in steps} == {DRAFTS}
    prompts = sum(len(out.prompt_token_ids) for out in outs)
    contexts = [step.context for step in together]
    assert contexts[0] == prompts and contexts == sorted(set(contexts))
    assert contexts[-1] < prompts + 2 * NUM_TOKENS


def test_abort_ends_one_request(engines: dict[str, LLM]) -> None:
    llm = engines["mtp"]
    engine = engines["mtp"].engine
    expected = [out.outputs[0].token_ids for out in llm.generate(PROMPTS[:3], GREEDY)]
    requests = [llm.processor.requests(f"r{i}", PROMPTS[i], GREEDY)[0] for i in range(3)]
    for request in requests:
        engine.add(request)
    while len(requests[1].output_token_ids) < 3:
        engine.step()
    assert engine.abort("r1") is requests[1]
    assert engine.abort("r1") is None and engine.abort("nobody") is None
    kept = list(requests[1].output_token_ids)
    while engine.has_work():
        assert requests[1] not in engine.step()
    assert requests[1].finish_reason == "abort" and requests[1].output_token_ids == kept
    assert kept == expected[1][: len(kept)] and 3 <= len(kept) < NUM_TOKENS
    for i in (0, 2):
        assert requests[i].output_token_ids == expected[i]
    assert_idle(llm)


@pytest.mark.parametrize("phase", ["waiting", "in its prompt", "running"])
def test_abort_in_any_phase_frees_everything(phase: str) -> None:
    llm = make_engine(None, max_num_seqs=1, max_num_batched_tokens=64)
    earlier, aborted = (
        llm.processor.requests(n, [5] * 300, GREEDY)[0] for n in ("earlier", "aborted")
    )
    if phase == "waiting":
        llm.engine.add(earlier)
    llm.engine.add(aborted)
    steps = 8 if phase == "running" else 2
    for _ in range(steps):
        llm.engine.step()
    assert bool(aborted.output_token_ids) == (phase == "running")
    llm.engine.abort("aborted")
    while llm.engine.has_work():
        llm.engine.step()
    assert len(earlier.output_token_ids) == (NUM_TOKENS if phase == "waiting" else 0)
    assert_idle(llm)


def test_id_of_an_aborted_request_is_counted_anew(engines: dict[str, LLM]) -> None:
    llm = engines["none"]
    counted = []
    for max_tokens in (5, None):
        before = llm.engine.refresh_stats().generation_tokens_total
        (request,) = llm.processor.requests("again", TEXT, GREEDY)
        llm.engine.add(request)
        while llm.engine.has_work() and len(request.output_token_ids) != max_tokens:
            llm.engine.step()
        llm.engine.abort("again")
        counted.append(llm.engine.refresh_stats().generation_tokens_total - before)
        assert request.metrics.first_token_time is not None
    assert counted == [5, NUM_TOKENS]
    assert_idle(llm)


def test_failed_step_caches_no_unwritten_page(
    engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines["mtp"]
    ids = list(range(900, 1100))
    expected = one(engines["none"], ids, max_tokens=4, logprobs=1)

    def fail(schedule: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(worker_of(llm.engine), "launch", fail)
        with pytest.raises(ComputeError, match="the engine stopped 4 times while it ran"):
            llm.generate(ids, GREEDY)
    assert_idle(llm)
    out = llm.generate(ids, replace(GREEDY, max_tokens=4, logprobs=1))[0]
    assert out.metrics.num_cached_tokens == 0
    assert out.outputs[0].token_ids == expected.token_ids
    assert bits(out.outputs[0].logprobs) == bits(expected.logprobs)


SAMPLINGS = (
    SamplingParams(temperature=0, ignore_eos=True, max_tokens=14),
    SamplingParams(temperature=0.8, ignore_eos=True, max_tokens=22, logprobs=1),
    SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.3, prompt_logprobs=0),
)


def make_requests() -> list[Request]:
    """Return requests of every length and sampling, some with a common prefix."""
    draw = random.Random(7)
    common = draw.choices(range(200), k=150)
    results = []
    for i in range(24):
        mine = draw.choices(range(200), k=draw.choice([1, 5, 64, 65, 130, 200]))
        prompt = common[: draw.choice([0, 64, 128, 150])] + mine
        params = replace(SAMPLINGS[i % len(SAMPLINGS)], seed=i)
        results.append(Request(f"r{i}", prompt, params, seed=i))
    return results


def answer_bits(request: Request) -> list[Any]:
    """Return a request's answer as bits."""
    return [request.output_token_ids, bits(request.logprobs), bits(request.prompt_logprobs)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return settings of a tiny model with random weights."""
    folder = str(make_model(tmp_path_factory.mktemp("tiny"), **TWO_LAYERS))
    return {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def expected(tiny: dict[str, Any]) -> dict[str, list[Any]]:
    """Return each request's answer when it runs alone."""
    engine = make_engine(None, **tiny).engine
    requests = make_requests()
    for request in requests:
        engine.run([request], lambda r: None)
    return {request.id: answer_bits(request) for request in requests}


@pytest.mark.default_cases("mtp")
@pytest.mark.parametrize("drafter", some_slow([None, "ngram", "mtp"], (None, "mtp")))
def test_random_arrivals_and_aborts_change_no_answer(
    tiny: dict[str, Any], expected: dict[str, list[Any]], drafter: str | None
) -> None:
    """Few pages, forced preemption, two steps in flight and aborts at any time change no bit."""
    tight_settings = {"num_gpu_blocks": 14, "num_snapshots": 3, "steps_in_flight": 2}
    hooks = CheckHooks(preempt_every=5)
    engine = make_engine(
        drafter, hooks, max_num_batched_tokens=128, **tight_settings, **tiny
    ).engine
    waiting = make_requests()
    requests = {}
    draw = random.Random(3)
    ended: list[str] = []
    while waiting or engine.has_work():
        if waiting and draw.random() < 0.3:
            request = waiting.pop()
            requests[request.id] = request
            engine.add(request)
        if draw.random() < 0.02:
            engine.abort(draw.choice(list(engine.scheduler.entries) or ["nobody"]))
        ended += [r.id for r in engine.step() if r.finish_reason]
        engine.scheduler.cache.check()
    for name, request in requests.items():
        if request.finish_reason == "abort":
            length = len(request.output_token_ids)
            assert request.output_token_ids == expected[name][0][:length]
        else:
            assert answer_bits(request) == expected[name]
    assert len(ended) == len(set(ended)) > 18 and len(requests) == 24
    assert engine.scheduler.preemptions > 10 and engine.scheduler.cache.hit_tokens > 0
    assert not worker_of(engine).saved and not engine.has_work()


def scored_prompt(seed: int, priority: int = 0) -> Request:
    """Return a request of two pages that asks for its prompt's log-probabilities.

    Those of seed 0 are one more than a tile of logits.
    """
    prompt = random.Random(seed).choices(range(200), k=PROMPT_LOGPROB_TILE + 2 + seed)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    return Request(f"scored {seed}", prompt, params, priority)


@pytest.fixture(scope="module")
def expected_scores(tiny: dict[str, Any]) -> list[list[Any]]:
    """Return the answers of scored_prompt() 0, 1 and 2, each computed alone."""
    engine = make_engine(None, **tiny).engine
    requests = [scored_prompt(seed) for seed in range(3)]
    for request in requests:
        engine.run([request], lambda r: None)
    return list(map(answer_bits, requests))


def test_prompts_of_one_step_keep_their_logprobs(
    tiny: dict[str, Any], expected_scores: list[list[Any]]
) -> None:
    engine = make_engine(None, **tiny).engine
    requests = [scored_prompt(seed) for seed in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    assert all(r.output_token_ids for r in requests), "the prompts are one step"
    for request, answer_alone in zip(requests, expected_scores, strict=True):
        assert len(request.prompt_logprobs) == len(request.prompt_token_ids) - 1
        assert bits(request.prompt_logprobs) == answer_alone[2]


def test_row_of_a_preempted_prompt_is_used_before_its_logprobs_are_read(
    tiny: dict[str, Any], expected_scores: list[list[Any]]
) -> None:
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "steps_in_flight": 2}
    engine = make_engine(None, scheduling_policy="priority", **settings, **tiny).engine
    request = scored_prompt(0, priority=1)
    engine.add(request)
    engine.step()
    engine.add(Request("urgent", [5] * 10, SamplingParams(max_tokens=2)))
    while engine.has_work():
        engine.step()
    assert request.metrics.num_preemptions == 1
    assert answer_bits(request) == expected_scores[0]


def test_counters_grow_with_each_step(engines: dict[str, LLM]) -> None:
    engine = engines["ngram"].engine
    (request,) = engines["ngram"].processor.requests("counted", PROMPTS[2], GREEDY)
    before = replace(engine.refresh_stats())
    engine.add(request)
    while engine.has_work():
        engine.step()
        now = engine.refresh_stats()
        metrics = request.metrics
        counted = now.generation_tokens_total - before.generation_tokens_total
        assert counted == len(request.output_token_ids)
        drafted = now.draft_tokens_total - before.draft_tokens_total
        assert drafted == metrics.num_draft_tokens
        accepted = now.accepted_tokens_total - before.accepted_tokens_total
        assert accepted == metrics.num_accepted_tokens
    assert len(request.output_token_ids) == NUM_TOKENS
