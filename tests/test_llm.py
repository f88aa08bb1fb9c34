"""LLM on the bundled model: what is asked for is what comes, and a bad request harms nobody."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM, SamplingParams
from lockstep.errors import RequestError
from lockstep.outputs import CompletionOutput, Logprob, RequestOutput

TEXT = "def read(path):"
PROMPTS = [TEXT, "import os\n\n\ndef main(", "3, 6, 9, 12, 15, 18, 21,", "The clock on the square"]
QUESTION = [
    {"role": "user", "content": "My name is Tavoli."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "What is my name?"},
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, seed=0)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=7)
DRAFTERS = {"none": None, "mtp": ("mtp", 3), "ngram": ("ngram", 3)}


@pytest.fixture(scope="module")
def engines() -> dict[str, LLM]:
    """The bundled model with each drafter."""
    found = {}
    for name, choice in DRAFTERS.items():
        spec = choice and {"method": choice[0], "num_speculative_tokens": choice[1]}
        found[name] = LLM(max_model_len=512, max_num_seqs=4, speculative_config=spec)
    return found


@pytest.fixture
def llm(engines: dict[str, LLM]) -> Any:
    """The engine that drafts with MTP; afterwards nothing of a request is left in it."""
    yield engines["mtp"]
    assert_idle(engines["mtp"])


def assert_idle(llm: LLM) -> None:
    """No work, no row, no page held but by the prefix cache, nothing in host memory."""
    scheduler = llm.engine.scheduler
    assert not llm.engine.has_work() and not scheduler.running and not scheduler.queue
    assert len(scheduler.free_rows) == llm.engine.plan.max_num_seqs
    assert not scheduler.cache.seqs and not llm.engine.runner.saved
    scheduler.cache.check()


def one(llm: LLM, prompt: Any = TEXT, params: SamplingParams = GREEDY, **changes: Any) -> Any:
    """The one completion of one prompt."""
    return llm.generate(prompt, replace(params, **changes))[0].outputs[0]


def bits(entries: Any) -> list[list[tuple[int, str, int]] | None]:
    """Log-probabilities as bits."""
    return [e and [(t, x.logprob.hex(), x.rank) for t, x in e.items()] for e in entries or ()]


def answer(out: RequestOutput) -> list[Any]:
    """All that may not depend on how it was computed."""
    told = [
        (o.index, o.text, o.token_ids, o.finish_reason, o.stop_reason, o.seed, bits(o.logprobs))
        for o in out.outputs
    ]
    return [told, bits(out.prompt_logprobs)]


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)  # type: ignore[union-attr]
    forms: list[Any] = [TEXT, ids, {"prompt": TEXT}, {"prompt_token_ids": ids}]
    params = replace(GREEDY, max_tokens=8)
    alone = [llm.generate(form, params) for form in forms]
    together = llm.generate(forms, params)
    assert all(len(outs) == 1 for outs in alone) and len(together) == len(forms)
    for (out,), other in zip(alone, together, strict=True):
        assert out.prompt_token_ids == ids and out.finished
        (completion,) = out.outputs
        assert completion.finish_reason == "length" and len(completion.token_ids) == 8
        assert completion.text == llm.tokenizer.decode(completion.token_ids)  # type: ignore
        assert answer(out) == answer(alone[0][0]) == answer(other)
    assert alone[0][0].prompt == TEXT and alone[1][0].prompt is None
    assert len({out.request_id for out in together}) == len(forms)


def test_outputs_come_in_order_each_with_its_own_parameters(llm: LLM) -> None:
    params = [replace(GREEDY, max_tokens=n, seed=n) for n in (5, 9, 1, 3)]
    outs = llm.generate(PROMPTS, params)
    assert [len(o.outputs[0].token_ids) for o in outs] == [5, 9, 1, 3]
    assert [o.prompt for o in outs] == PROMPTS
    assert [answer(o) for o in outs] == [
        answer(llm.generate(p, q)[0]) for p, q in zip(PROMPTS, params, strict=True)
    ]
    assert llm.generate([], GREEDY) == []
    for name, lists in (("sampling_params", (params[:3], 0)), ("priority", (GREEDY, [1, 2]))):
        with pytest.raises(RequestError, match=f"{name} has . entries for 4 prompts") as caught:
            llm.generate(PROMPTS, lists[0], priority=lists[1])
        assert caught.value.field == name


def test_n_completions_are_the_seeds_in_a_row(llm: LLM) -> None:
    outs = llm.generate(PROMPTS[:2], replace(SEEDED, n=2, max_tokens=8))
    for prompt, out in zip(PROMPTS[:2], outs, strict=True):
        assert [(o.index, o.seed) for o in out.outputs] == [(0, 7), (1, 8)]
        assert out.outputs[0].token_ids != out.outputs[1].token_ids
        for completion in out.outputs:
            alone = one(llm, prompt, SEEDED, seed=completion.seed, max_tokens=8)
            assert alone.token_ids == completion.token_ids


def test_a_drawn_seed_is_returned_and_gives_the_answer_again(llm: LLM) -> None:
    first, second = (one(llm, params=SEEDED, seed=None, max_tokens=8) for _ in range(2))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    for drawn in (first, second):
        assert one(llm, params=SEEDED, seed=drawn.seed, max_tokens=8).token_ids == drawn.token_ids


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_where_it_begins(llm: LLM, include: bool) -> None:
    whole = one(llm).text
    stop = whole[9:13]
    cut = one(llm, stop=["never there", stop], include_stop_str_in_output=include)
    place = whole.index(stop) + (len(stop) if include else 0)
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[:place], "stop", stop)
    assert len(cut.token_ids) < 16
    assert stop in llm.tokenizer.decode(cut.token_ids)  # type: ignore[union-attr]
    assert stop not in llm.tokenizer.decode(cut.token_ids[:-1])  # type: ignore[union-attr]
    assert one(llm, stop="never there").text == whole


def test_a_stop_string_of_one_leaves_the_others_running(llm: LLM) -> None:
    whole = [o.outputs[0] for o in llm.generate(PROMPTS[:3], GREEDY)]
    stop = whole[1].text[5:8]
    params = [GREEDY, replace(GREEDY, stop=stop), GREEDY]
    outs = [o.outputs[0] for o in llm.generate(PROMPTS[:3], params)]
    assert [o.text for o in outs[::2]] == [o.text for o in whole[::2]]
    assert [o.token_ids for o in outs[::2]] == [o.token_ids for o in whole[::2]]
    assert outs[1].text == whole[1].text[: whole[1].text.index(stop)]


def test_a_stop_token_ends_the_answer_and_gives_no_text(llm: LLM) -> None:
    ids = one(llm).token_ids
    place = 6
    stop = ids[place]
    cut = one(llm, stop_token_ids=[4000, stop])
    first = ids.index(stop)
    assert cut.token_ids == ids[: first + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == llm.tokenizer.decode(ids[:first])  # type: ignore[union-attr]
    shown = one(llm, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown.text == llm.tokenizer.decode(ids[: first + 1])  # type: ignore[union-attr]


def test_the_end_token_ends_unless_it_is_ignored_or_too_early(llm: LLM) -> None:
    ends = replace(GREEDY, max_tokens=40, ignore_eos=False)
    ended = llm.chat(QUESTION, ends)[0].outputs[0]
    assert ended.finish_reason == "stop" and ended.stop_reason is None
    assert ended.token_ids[-1] in llm.processor.eos_ids and "<|im_end|>" not in ended.text
    on = llm.chat(QUESTION, replace(ends, ignore_eos=True))[0].outputs[0]
    assert on.finish_reason == "length" and len(on.token_ids) == 40
    assert on.token_ids[: len(ended.token_ids)] == ended.token_ids
    least = len(ended.token_ids) + 7
    late = llm.chat(QUESTION, replace(ends, min_tokens=least))[0].outputs[0]
    assert not set(late.token_ids[:least]) & llm.processor.eos_ids
    assert late.token_ids[: len(ended.token_ids) - 1] == ended.token_ids[:-1]
    assert len(late.token_ids) > least or late.finish_reason == "length"


def test_min_tokens_holds_stop_tokens_back(llm: LLM) -> None:
    stop = one(llm).token_ids[0]
    held = one(llm, stop_token_ids=[stop], min_tokens=10)
    assert stop not in held.token_ids[:10] and len(held.token_ids) > 10
    assert one(llm, stop_token_ids=[stop]).token_ids == [stop]


def test_logprobs_hold_the_token_and_the_likeliest(llm: LLM) -> None:
    for params in (GREEDY, SEEDED):
        out = one(llm, params=params, logprobs=4)
        assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
        for token, entry in zip(out.token_ids, out.logprobs, strict=True):
            chosen: Logprob = entry[token]
            ranks = sorted(x.rank for x in entry.values())
            assert ranks == sorted({*range(1, 5), chosen.rank}), "the four likeliest and its own"
            assert chosen.decoded_token == llm.tokenizer.decode([token])  # type: ignore
            assert sum(math.exp(x.logprob) for x in entry.values()) < 1 + 1e-5
            assert params is not GREEDY or chosen.rank == 1
    assert all(len(entry) == 1 for entry in one(llm, logprobs=0).logprobs)
    assert one(llm).logprobs is None


def test_prompt_logprobs_are_the_models_own(llm: LLM) -> None:
    out = one(llm, logprobs=2)
    ids = llm.tokenizer.encode(TEXT) + out.token_ids  # type: ignore[union-attr]
    scored = llm.generate(ids, replace(GREEDY, max_tokens=1, prompt_logprobs=2))[0]
    scores = scored.prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(ids)
    for token, entry in zip(ids[1:], scores[1:], strict=True):
        assert entry is not None and token in entry
        assert {1, 2} <= {x.rank for x in entry.values()}
    for token, entry, told in zip(out.token_ids, scores[-16:], out.logprobs, strict=True):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(told[token].logprob, abs=2e-3)
    assert one(llm, ids).logprobs is None
    assert llm.generate(ids, GREEDY)[0].prompt_logprobs is None


def test_prompt_logprobs_do_not_see_chunks_or_the_prefix_cache(engines: dict[str, LLM]) -> None:
    ids = (engines["none"].tokenizer.encode(TEXT) * 80)[:300]  # type: ignore[union-attr]
    ask = replace(GREEDY, max_tokens=3, prompt_logprobs=1, logprobs=1)
    chunked = LLM(max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64)
    whole = answer(engines["none"].generate(ids, ask)[0])
    assert len(whole[1]) == 300
    assert answer(chunked.generate(ids, ask)[0]) == whole
    again = chunked.generate(ids, GREEDY)[0], chunked.generate(ids, GREEDY)[0]
    assert again[1].metrics.num_cached_tokens >= 64
    assert answer(again[0]) == answer(again[1])
    assert answer(chunked.generate(ids, ask)[0]) == whole


def test_only_allowed_tokens_come(llm: LLM) -> None:
    allowed = [11, 200, 1000, 3000]
    for params in (GREEDY, SEEDED):
        out = one(llm, params=params, allowed_token_ids=allowed)
        assert set(out.token_ids) <= set(allowed) and len(out.token_ids) == 16
    assert one(llm, allowed_token_ids=[3000]).token_ids == [3000] * 16


def test_bad_words_never_come(llm: LLM) -> None:
    tokens = one(llm).token_ids
    pair = tokens[2:4]
    clean = one(llm, bad_words_ids=[pair]).token_ids
    pairs = list(zip(clean, clean[1:], strict=False))
    first = next(i for i in range(16) if tokens[i : i + 2] == pair)
    assert tuple(pair) not in pairs
    assert clean[: first + 1] == tokens[: first + 1], "its first token alone is no bad word"
    assert clean[first + 1] != pair[1]
    whole = one(llm, PROMPTS[1])
    word = next(w for w in whole.text.split() if w.isidentifier())
    assert word not in one(llm, PROMPTS[1], bad_words=[word]).text.split()


def test_logit_bias_moves_tokens(llm: LLM) -> None:
    tokens = one(llm).token_ids
    assert one(llm, logit_bias={77: 100.0}).token_ids == [77] * 16
    assert tokens[0] not in one(llm, logit_bias={tokens[0]: -100.0}).token_ids
    assert one(llm, logit_bias={tokens[0]: 0.0}).token_ids == tokens
    told = one(llm, logprobs=0, logit_bias={77: 100.0}).logprobs
    assert told[0][77].logprob < -1, "log-probabilities are of the raw logits"


def test_a_conversation_and_several(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {}}}
    single = llm.chat(QUESTION, GREEDY)
    several = llm.chat([QUESTION, QUESTION[:1]], GREEDY)
    assert len(single) == 1 and len(several) == 2
    assert answer(single[0]) == answer(several[0])
    told = [llm.tokenizer.decode(o.prompt_token_ids, False) for o in several]  # type: ignore
    assert [t.count("<|im_start|>") for t in told] == [4, 2]
    tooled = llm.chat(QUESTION, GREEDY, tools=[tool])[0]
    assert "get_time" in llm.tokenizer.decode(tooled.prompt_token_ids)  # type: ignore
    thinking = llm.chat(QUESTION, GREEDY, chat_template_kwargs={"enable_thinking": True})[0]
    assert thinking.prompt_token_ids != single[0].prompt_token_ids


BAD_PARAMS: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", "from 1 to 128"),
    ({"n": True}, "n", "from 1 to 128"),
    ({"temperature": -0.1}, "temperature", "from 0.0 to 100.0"),
    ({"temperature": math.nan}, "temperature", "from 0.0 to 100.0"),
    ({"temperature": None}, "temperature", "from 0.0 to 100.0"),
    ({"top_p": 0.0}, "top_p", "to 1.0"),
    ({"top_k": -2}, "top_k", "from -1"),
    ({"top_k": 1.5}, "top_k", "whole number"),
    ({"min_p": 1.1}, "min_p", "from 0.0 to 1.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.001 to 100.0"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2.0 to 2.0"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "from -2.0 to 2.0"),
    ({"seed": 2**63}, "seed", "whole number"),
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"min_tokens": -1}, "min_tokens", "from 0"),
    ({"min_tokens": 17, "max_tokens": 16}, "min_tokens", "max_tokens=16"),
    ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
    ({"logit_bias": {5: "x"}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {5: math.nan}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {5: math.inf}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": [5]}, "logit_bias", "token ids to finite numbers"),
    ({"logit_bias": {4096: 1.0}}, "logit_bias", "0 to 4095"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "0 to 4095"),
    ({"stop_token_ids": 5}, "stop_token_ids", "a list of token ids"),
    ({"stop_token_ids": [4096]}, "stop_token_ids", "0 to 4095"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids", "at most 16"),
    ({"stop": 5}, "stop", "a string or a list of strings"),
    ({"stop": [5]}, "stop", "a string or a list of strings"),
    ({"stop": [""]}, "stop", "would end every answer"),
    ({"stop": "x", "detokenize": False}, "stop", "detokenize"),
    ({"bad_words": "fox"}, "bad_words", "a list of strings"),
    ({"bad_words": [5]}, "bad_words", "a list of strings"),
    ({"bad_words": [""]}, "bad_words", "has no tokens"),
    ({"bad_words": ["fox"] * 33}, "bad_words", "at most 32"),
    ({"bad_words": [TEXT * 3]}, "bad_words", "1 to 8 tokens"),
    ({"bad_words_ids": [5]}, "bad_words_ids", "a list of lists of token ids"),
    ({"bad_words_ids": [["a"]]}, "bad_words_ids", "a list of lists of token ids"),
    ({"bad_words_ids": [[4096]]}, "bad_words", "0 to 4095"),
    ({"ignore_eos": "no"}, "ignore_eos", "True or False"),
    ({"detokenize": None}, "detokenize", "True or False"),
]


@pytest.mark.parametrize(("wrong", "field", "allowed"), BAD_PARAMS, ids=lambda v: str(v)[:40])
def test_bad_parameters_are_refused_and_the_engine_lives_on(
    llm: LLM, wrong: dict[str, Any], field: str, allowed: str
) -> None:
    with pytest.raises(RequestError) as caught:
        params = replace(GREEDY, **wrong)
        llm.generate([TEXT, TEXT, TEXT], [GREEDY, params, GREEDY])
    message = str(caught.value)
    assert caught.value.field == field and field in message
    assert allowed in message, message
    assert message.endswith(".") and message.count(". ") + message.count("; ") >= 1, message
    assert_idle(llm)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("", "the prompt has 0 tokens; allowed: 1 to 511"),
        ([[]], "the prompt has 0 tokens; allowed: 1 to 511"),
        ([[5] * 512], "the prompt has 512 tokens; allowed: 1 to 511"),
        ("path " * 600, "max_model_len=512"),
        ({"text": "x"}, "the keys ['text']; allowed: prompt (text) or prompt_token_ids"),
        ([[4096]], "token id 4096; allowed: 0 to 4095"),
        ([[-1]], "token id -1; allowed: 0 to 4095"),
        ([[1.5]], "a text, or a list of token ids"),
        ([[True]], "a text, or a list of token ids"),
        ([["a"]], "a text, or a list of token ids"),
        ([None], "a text, or a list of token ids"),
        ({"prompt_token_ids": 5}, "a text, or a list of token ids"),
        (None, "a text, or a list of token ids"),
        (5, "a text, or a list of token ids"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_bad_prompts_are_refused_and_the_engine_lives_on(llm: LLM, wrong: Any, told: str) -> None:
    many = [TEXT, *wrong, TEXT] if isinstance(wrong, list) else wrong  # the bad one in the middle
    with pytest.raises(RequestError) as caught:
        llm.generate(many, GREEDY)
    assert told in str(caught.value)
    assert caught.value.field in ("prompt", "prompt_token_ids")
    assert_idle(llm)
    assert len(one(llm, max_tokens=3).token_ids) == 3


def test_the_answer_ends_where_the_model_does(llm: LLM) -> None:
    for length, room in ((511, 1), (505, 7)):
        out = one(llm, [5] * length, max_tokens=None)
        assert (len(out.token_ids), out.finish_reason) == (room, "length")


EVERYTHING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3, "logprobs": 3},
    "filters": {"temperature": 1.1, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "bias": {"temperature": 0.7, "seed": 5, "logit_bias": {10: 3.0, 273: -5.0}},
    "allowed": {"temperature": 0.7, "seed": 6, "allowed_token_ids": list(range(0, 4087, 3))},
    "bad words": {"bad_words": ["path", "return", "def"], "temperature": 0.5, "seed": 8},
    "n": {"n": 2, "temperature": 0.9, "seed": 9},
    "stop": {"stop": ["e", "in"], "min_tokens": 9},
    "stop tokens": {"stop_token_ids": [10, 11, 273, 331], "min_tokens": 5},
    "eos": {"ignore_eos": False, "prompt_logprobs": 1, "logprobs": 0},
}


@pytest.fixture(scope="module")
def plain(engines: dict[str, LLM]) -> dict[str, RequestOutput]:
    """What the model says without drafts to every kind of request."""
    return ask_everything(engines["none"])


def ask_everything(llm: LLM) -> dict[str, RequestOutput]:
    """One request of each kind, in company, its prompt chosen by its place."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(EVERYTHING))]
    params = [replace(GREEDY, max_tokens=18, **changes) for changes in EVERYTHING.values()]
    return dict(zip(EVERYTHING, llm.generate(prompts, params), strict=True))


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_drafts_change_nothing_and_are_counted(
    engines: dict[str, LLM], plain: dict[str, RequestOutput], drafter: str
) -> None:
    outs = ask_everything(engines[drafter])
    for kind, out in outs.items():
        assert answer(out) == answer(plain[kind]), kind
        check_counts(out, 3)
        check_counts(plain[kind], 0)
    assert sum(out.metrics.num_accepted_tokens for out in outs.values()) > 0


def check_counts(out: RequestOutput, k: int) -> None:
    """A request's counts agree with its tokens: the prompt gives one, each step 1 + accepted."""
    m, first = out.metrics, out.outputs[0]
    assert 0 <= m.num_accepted_tokens <= m.num_draft_tokens <= k * m.num_steps
    made = 1 + m.num_steps + m.num_accepted_tokens
    assert len(first.token_ids) <= made
    if first.finish_reason == "length":
        assert made <= len(first.token_ids) + k, "only the last step may overshoot"
    if k == 0 and first.finish_reason == "length":
        assert m.num_steps == len(first.token_ids) - 1
    if m.num_steps:
        assert m.acceptance_length == pytest.approx((made - 1) / m.num_steps)
    assert m.first_token_time is not None
    assert m.arrival_time <= m.first_token_time


def test_the_engine_counts_what_its_requests_do(engines: dict[str, LLM]) -> None:
    llm = engines["ngram"]
    before = vars(llm.engine.refresh_stats()).copy()
    before["requests_success_total"] = before["requests_success_total"].copy()
    outs = llm.generate(PROMPTS[:2], replace(GREEDY, n=2))
    outs += llm.generate(PROMPTS[:1], GREEDY)
    now = llm.engine.refresh_stats()
    grown = {name: getattr(now, name) - before[name] for name in vars(now) if "_total" in name}
    written = sum(len(c.token_ids) for o in outs for c in o.outputs)
    assert written == 16 * 5 == grown["generation_tokens_total"]
    assert grown["requests_success_total"] == {"length": 5}
    lengths = [len(out.prompt_token_ids) for out in outs]
    assert grown["prompt_tokens_total"] == 2 * lengths[0] + 2 * lengths[1] + lengths[2]
    assert 0 < grown["accepted_tokens_total"] <= grown["draft_tokens_total"]
    assert 0 < grown["steps_total"] < written
    assert now.num_running == now.num_waiting == now.num_swapped == 0


def test_abort_ends_one_and_leaves_the_others(engines: dict[str, LLM]) -> None:
    llm, engine = engines["mtp"], engines["mtp"].engine
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
    assert kept == expected[1][: len(kept)] and 3 <= len(kept) < 16
    for i in (0, 2):
        assert requests[i].output_token_ids == expected[i]
    assert_idle(llm)


@pytest.mark.parametrize("phase", ["waiting", "in its prompt", "running"])
def test_abort_in_any_phase_gives_all_back(phase: str) -> None:
    llm = LLM(max_model_len=512, max_num_seqs=1, max_num_batched_tokens=64)
    ahead, mine = (llm.processor.requests(n, [5] * 300, GREEDY)[0] for n in ("ahead", "mine"))
    if phase == "waiting":
        llm.engine.add(ahead)
    llm.engine.add(mine)
    steps = 8 if phase == "running" else 2
    for _ in range(steps):
        llm.engine.step()
    assert bool(mine.output_token_ids) == (phase == "running")
    llm.engine.abort("mine")
    while llm.engine.has_work():
        llm.engine.step()
    assert len(ahead.output_token_ids) == (16 if phase == "waiting" else 0)
    assert_idle(llm)


def test_a_caller_that_fails_midway_leaves_nothing_behind(llm: LLM) -> None:
    expected = one(llm).token_ids

    def fail(out: RequestOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:3] * 2, GREEDY, on_progress=fail)
    assert_idle(llm)
    assert one(llm).token_ids == expected


def test_a_step_that_fails_leaves_no_cached_page_that_was_never_written(
    engines: dict[str, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, ids = engines["mtp"], list(range(900, 1100))
    expected = one(engines["none"], ids, max_tokens=4, logprobs=1)

    def fail(schedule: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate([ids, TEXT], GREEDY)
    assert_idle(llm)
    out = llm.generate(ids, replace(GREEDY, max_tokens=4, logprobs=1))[0]
    assert out.metrics.num_cached_tokens == 0
    assert out.outputs[0].token_ids == expected.token_ids
    assert bits(out.outputs[0].logprobs) == bits(expected.logprobs)


def test_progress_shows_growing_answers(llm: LLM) -> None:
    seen: dict[str, list[CompletionOutput]] = {}
    grow: Callable[[RequestOutput], None] = lambda out: seen.setdefault(  # noqa: E731
        out.request_id, []
    ).append(replace(out.outputs[0], token_ids=list(out.outputs[0].token_ids)))
    outs = llm.generate(PROMPTS[:2], GREEDY, on_progress=grow)
    for out in outs:
        steps = seen[out.request_id]
        assert len(steps) > 3
        for earlier, later in zip(steps, steps[1:], strict=False):
            assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
            assert later.text.startswith(earlier.text)
        assert steps[-1].token_ids == out.outputs[0].token_ids


def test_without_a_tokenizer_ids_go_in_and_out(engines: dict[str, LLM]) -> None:
    bare = LLM(max_model_len=512, max_num_seqs=2, skip_tokenizer_init=True)
    ids = engines["none"].tokenizer.encode(TEXT)  # type: ignore[union-attr]
    out = one(bare, ids)
    assert out.text == "" and out.token_ids == one(engines["none"]).token_ids
    for wrong, changes in ((TEXT, {}), (ids, {"stop": "x"}), (ids, {"bad_words": ["x"]})):
        with pytest.raises(RequestError, match=r"tokenizer|stop needs text"):
            one(bare, wrong, **changes)
    with pytest.raises(RequestError, match="chat template"):
        bare.chat(QUESTION, GREEDY)
    assert_idle(bare)
