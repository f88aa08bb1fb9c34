"""LLM on the bundled model: outputs match requests, and invalid ones do not affect others."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep import LLM, TextPrompt, TokensPrompt, progress
from lockstep.errors import RequestError
from lockstep.outputs import CompletionOutput, RequestOutput
from lockstep.sampling_params import SamplingParams, StructuredOutputsParams
from lockstep.worker.build import find_model
from tests.bundled_model import (
    GREEDY,
    NUM_TOKENS,
    PROMPTS,
    QUESTION,
    SEEDED,
    TEXT,
    answer,
    assert_idle,
    make_engine,
    one,
)


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


def test_outputs_are_in_order_with_their_parameters(llm: LLM) -> None:
    params = [replace(GREEDY, max_tokens=n, seed=n) for n in (5, 9, 1, 3)]
    outs = llm.generate(PROMPTS, params)
    assert [len(o.outputs[0].token_ids) for o in outs] == [5, 9, 1, 3]
    assert [o.prompt for o in outs] == PROMPTS
    assert [answer(o) for o in outs] == [
        answer(llm.generate(p, q)[0]) for p, q in zip(PROMPTS, params, strict=True)
    ]
    assert llm.generate([], GREEDY) == []
    for wrong in ({"max_tokens": 2}, [GREEDY, None, GREEDY, GREEDY], "greedy"):
        with pytest.raises(RequestError, match="allowed: SamplingParams, or a list") as caught:
            llm.generate(PROMPTS, wrong)  # type: ignore[arg-type]
        assert caught.value.field == "sampling_params"
    for low in ("x", [1, 2, "x", 4], 1.5, True, [1, 2, False, 4]):
        with pytest.raises(RequestError, match="allowed: a whole number") as caught:
            llm.generate(PROMPTS, GREEDY, priority=low)  # type: ignore[arg-type]
        assert caught.value.field == "priority"
    for name, lists in (("sampling_params", (params[:3], 0)), ("priority", (GREEDY, [1, 2]))):
        with pytest.raises(RequestError, match=f"{name} has . entries for 4 prompts") as caught:
            llm.generate(PROMPTS, lists[0], priority=lists[1])
        assert caught.value.field == name


def test_n_completions_use_consecutive_seeds(llm: LLM) -> None:
    outs = llm.generate(PROMPTS[:2], replace(SEEDED, n=2, max_tokens=8))
    for prompt, out in zip(PROMPTS[:2], outs, strict=True):
        assert [(o.index, o.seed) for o in out.outputs] == [(0, 7), (1, 8)]
        assert out.outputs[0].token_ids != out.outputs[1].token_ids
        for completion in out.outputs:
            alone = one(llm, prompt, SEEDED, seed=completion.seed, max_tokens=8)
            assert alone.token_ids == completion.token_ids


def test_returned_random_seed_reproduces_the_answer(llm: LLM) -> None:
    free = replace(SEEDED, seed=None, temperature=2.0, ignore_eos=True, max_tokens=32)
    first, second = (one(llm, params=free) for _ in range(2))
    assert first.seed != second.seed and first.token_ids != second.token_ids
    for drawn in (first, second):
        assert one(llm, params=free, seed=drawn.seed).token_ids == drawn.token_ids


def test_one_and_several_conversations(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "get_time", "parameters": {}}}
    single = llm.chat(QUESTION, GREEDY)
    multiple = llm.chat([QUESTION, QUESTION[:1]], GREEDY)
    assert len(single) == 1 and len(multiple) == 2
    assert answer(single[0]) == answer(multiple[0])
    reported = [llm.tokenizer.decode(o.prompt_token_ids, False) for o in multiple]  # type: ignore
    assert [t.count("<|im_start|>") for t in reported] == [4, 2]
    tooled = llm.chat(QUESTION, GREEDY, tools=[tool])[0]
    assert "get_time" in llm.tokenizer.decode(tooled.prompt_token_ids)  # type: ignore
    thinking = llm.chat(QUESTION, GREEDY, chat_template_kwargs={"enable_thinking": True})[0]
    assert thinking.prompt_token_ids != single[0].prompt_token_ids


PLACES = {"type": "object", "properties": {"city": {"enum": ["Rio", "Rome"]}}, "required": ["city"]}
ENDS = SamplingParams(temperature=0, max_tokens=150)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACES}},
    {"type": "function", "function": {"name": "ping"}},
]


def calls_of(llm: LLM, out: RequestOutput) -> list[tuple[str, Any]]:
    """Return the calls that the model's own parser reads in an answer."""
    reply = llm.processor.reply_parser("</think>", TOOLS).parse(out.outputs[0].text)
    assert reply.errors == []
    return [(call.name, json.loads(call.arguments)) for call in reply.tool_calls]


def test_required_tool_calls(llm: LLM) -> None:
    params = replace(ENDS, temperature=1, seed=3)
    (must,) = llm.chat(QUESTION, params, tools=TOOLS, tool_choice="required")
    assert calls_of(llm, must)
    named = {"type": "function", "function": {"name": "ping"}}
    multiple = llm.chat(
        [QUESTION, QUESTION[:1]], params, tools=TOOLS, tool_choice=named, parallel_tool_calls=False
    )
    assert [calls_of(llm, out) for out in multiple] == [[("ping", {})]] * 2
    plain = replace(ENDS, seed=0)
    (none,) = llm.chat(QUESTION, plain, tools=TOOLS, tool_choice="none")
    assert answer(none) == answer(llm.chat(QUESTION, plain)[0])


def test_calls_with_special_token_tags(tmp_path: Path) -> None:
    """With tools they are part of the text, and single tokens."""
    copy = tmp_path / "model"
    shutil.copytree(find_model(None), copy)
    path = copy / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tags = [token for token in tokenizer["added_tokens"] if "tool_call" in token["content"]]
    for tag in tags:
        tag["special"] = True
    path.write_text(json.dumps(tokenizer))
    llm = LLM(str(copy), max_model_len=512, max_num_seqs=2)
    (out,) = llm.chat(QUESTION, ENDS, tools=TOOLS, tool_choice="required")
    assert calls_of(llm, out)
    assert {tag["id"] for tag in tags} <= set(out.outputs[0].token_ids)


def test_invalid_tools_are_named(llm: LLM) -> None:
    expected = replace(ENDS, structured_outputs=StructuredOutputsParams(choice=["a"]))
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    for params, options, field in (
        (ENDS, {"tool_choice": "required"}, "tool_choice"),
        (ENDS, {"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        (ENDS, {"tools": [{"name": "f"}], "tool_choice": "required"}, "tools"),
        (ENDS, {"tools": TOOLS, "tool_choice": np.array([1, 2])}, "tool_choice"),
        (ENDS, {"tools": TOOLS, "tool_choice": None}, "tool_choice"),
        (ENDS, {"tools": range(10**12)}, "tools"),
        (ENDS, {"tools": 5, "tool_choice": "required"}, "tools"),
        (ENDS, {"tools": TOOLS, "parallel_tool_calls": "false"}, "parallel_tool_calls"),
        (ENDS, {"chat_template_kwargs": ""}, "chat_template_kwargs"),
        (expected, {"tools": strict}, "tools"),
    ):
        with pytest.raises(RequestError) as caught:
            llm.chat(QUESTION, params, **options)
        assert caught.value.field == field
    assert_idle(llm)


@pytest.mark.parametrize("kind", [np.array([1, 2]), np.array([]), torch.tensor([1, 2])])
def test_array_is_no_content_part_type(llm: LLM, kind: Any) -> None:
    """A comparison with it has no truth value."""
    with pytest.raises(RequestError, match="has a part of type"):
        llm.chat([{"role": "user", "content": [{"type": kind, "text": "x"}]}])
    assert_idle(llm)


def test_errors_abbreviate_long_values(llm: LLM) -> None:
    for params, options in (("x" * 100_000, {}), (GREEDY, {"priority": "x" * 100_000})):
        with pytest.raises(RequestError) as caught:
            llm.generate(TEXT, params, **options)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300
    assert_idle(llm)


def test_answer_ends_at_max_model_len(llm: LLM) -> None:
    for length, space in ((511, 1), (505, 7)):
        out = one(llm, [5] * length, max_tokens=None)
        assert (len(out.token_ids), out.finish_reason) == (space, "length")


def test_failed_caller_leaves_no_request(llm: LLM) -> None:
    expected = one(llm).token_ids

    def fail(out: RequestOutput) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:3] * 2, GREEDY, on_progress=fail)
    assert_idle(llm)
    assert one(llm).token_ids == expected


def test_on_progress_gets_growing_answers(llm: LLM) -> None:
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


def test_progress_bar_counts_answers_on_a_terminal(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = replace(GREEDY, max_tokens=2, n=2)
    quiet = llm.generate(PROMPTS[:3], short)
    assert not capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal then
    reported: list[tuple[str, int, int]] = []
    sound = progress.progress_bar

    @contextmanager
    def watched() -> Iterator[progress.Progress]:
        with sound() as show:
            yield lambda *one: (reported.append(one), show(*one))  # type: ignore[func-returns-value]

    monkeypatch.setattr("lockstep.llm.progress_bar", watched)
    shown = llm.generate(PROMPTS[:3], short)
    assert "answers" in capsys.readouterr().err
    assert reported[0] == ("answers", 0, 3) and reported[-1] == ("answers", 3, 3)
    assert [answer(out) for out in shown] == [answer(out) for out in quiet]
    reported.clear()
    llm.generate(PROMPTS[:3], short, use_tqdm=False)
    assert not reported and not capsys.readouterr().err
    with pytest.raises(RequestError, match="use_tqdm=3 is not allowed; allowed: True or False"):
        llm.generate(TEXT, short, use_tqdm=3)  # type: ignore[arg-type]


def test_ids_without_a_tokenizer(plain: LLM) -> None:
    bare = make_engine(None, skip_tokenizer_init=True)
    ids = plain.tokenizer.encode(TEXT)  # type: ignore[union-attr]
    out = one(bare, ids)
    assert out.text == "" and out.token_ids == one(plain).token_ids
    for wrong, changes in ((TEXT, {}), (ids, {"stop": "x"}), (ids, {"bad_words": ["x"]})):
        with pytest.raises(RequestError, match=r"tokenizer|stop needs text"):
            one(bare, wrong, **changes)
    with pytest.raises(RequestError, match="chat template"):
        bare.chat(QUESTION, GREEDY)
    assert_idle(bare)


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ("", "the prompt has 0 tokens; allowed: 1 to 511"),
        ([[]], "the prompt has 0 tokens; allowed: 1 to 511"),
        ([[5] * 512], "prompt is too long: 512 tokens > 511 maximum"),
        ("path " * 600, "context length is 512"),
        ({"text": "x"}, "the keys ['text']; allowed: prompt (text) or prompt_token_ids"),
        ([[4096]], "token id 4096; allowed: 0 to 4095"),
        ([[-1]], "token id -1; allowed: 0 to 4095"),
        ([[1.5]], "a text, or a list of token ids"),
        ([[True]], "a text, or a list of token ids"),
        ([["a"]], "a text, or a list of token ids"),
        ([None], "a text, or a list of token ids"),
        ({"prompt_token_ids": 5}, "a text, or a list of token ids"),
        (["x\ud800y"], "character 1 of the text is half of a surrogate pair"),
        (None, "a text, or a list of token ids"),
        (5, "a text, or a list of token ids"),
        ({"prompt_token_ids": {1, 2}}, "a text, or a list of token ids"),
        ({"prompt_token_ids": bytearray(b"ab")}, "a text, or a list of token ids"),
        (torch.tensor(3), "a text, or a list of token ids"),
    ],
    ids=lambda v: str(v)[:24],
)
def test_invalid_prompts_leave_the_engine_running(llm: LLM, wrong: Any, reported: str) -> None:
    many = [TEXT, *wrong, TEXT] if isinstance(wrong, list) else wrong  # the bad one in the middle
    with pytest.raises(RequestError) as caught:
        llm.generate(many, GREEDY)
    assert reported in str(caught.value)
    assert caught.value.field == "prompt"
    assert_idle(llm)
    assert len(one(llm, max_tokens=3).token_ids) == 3


def test_logprobs_have_text_and_a_sum(llm: LLM) -> None:
    (out,) = llm.generate(TEXT, replace(GREEDY, logprobs=1, prompt_logprobs=1))
    done = out.outputs[0]
    assert done.logprobs is not None and out.prompt_logprobs is not None
    chosen = [entry[i].logprob for i, entry in zip(done.token_ids, done.logprobs, strict=True)]
    assert done.cumulative_logprob == sum(chosen) and done.finished()
    spelled = [entry for entry in (*done.logprobs, *out.prompt_logprobs) if entry is not None]
    assert all(isinstance(one.decoded_token, str) for entry in spelled for one in entry.values())
    assert one(llm).cumulative_logprob is None


def test_chat_outputs_are_parsed_as_over_http(llm: LLM) -> None:
    (must,) = llm.chat(QUESTION, ENDS, tools=TOOLS, tool_choice="required")
    done = must.outputs[0]
    assert [(c.name, json.loads(c.arguments)) for c in done.tool_calls] == calls_of(llm, must)
    assert all(call.id for call in done.tool_calls) and not done.parser_errors
    assert llm.generate(TEXT, GREEDY)[0].outputs[0].content is None


def test_tokenizer_renders_chats(llm: LLM) -> None:
    """The rendered ids are those of chat(); the text as a prompt gives the same answer."""
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(
        QUESTION, TOOLS, tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer.apply_chat_template(QUESTION, TOOLS, add_generation_prompt=True)
    (out,) = llm.chat(QUESTION, GREEDY, tools=TOOLS)
    assert (out.prompt, out.prompt_token_ids) == (text, ids)
    assert llm.generate(text, GREEDY)[0].outputs[0].token_ids == out.outputs[0].token_ids
    begun = tokenizer.apply_chat_template(QUESTION, TOOLS, tokenize=False)
    assert isinstance(text, str) and text.startswith(begun) and text != begun
    spelled = [{"role": "user", "content": tokenizer.eos_token}]
    assert tokenizer.eos_token_id not in tokenizer.apply_chat_template(spelled)[:-2]
    thinking = {"enable_thinking": True, "add_generation_prompt": True, "tokenize": False}
    assert tokenizer.apply_chat_template(QUESTION, **thinking).endswith("<think>\n")
    for wrong in ({"chat_template": "x"}, {"return_tensors": "pt"}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            tokenizer.apply_chat_template(QUESTION, **wrong)


def test_tokenizer_has_the_transformers_methods(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(TEXT)
    assert tokenizer(TEXT) == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert (
        tokenizer.decode(ids) == TEXT
        and tokenizer.decode(ids[0]) + tokenizer.decode(ids[1:]) == TEXT
    )
    eos = tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens(eos) == tokenizer.eos_token
    assert tokenizer.convert_tokens_to_ids([tokenizer.eos_token, "no token"]) == [eos, None]
    assert eos in tokenizer.all_special_ids and tokenizer.decode([eos]) == tokenizer.eos_token
    assert tokenizer.decode([eos], skip_special_tokens=True) == ""
    assert tokenizer.vocab_size <= len(tokenizer) == len(tokenizer.get_vocab())
    assert tokenizer.bos_token_id is None or tokenizer.bos_token is not None
    assert "messages" in (tokenizer.chat_template or "")
    with pytest.raises(RequestError, match="half of a surrogate"):
        tokenizer.encode("\ud800")


@pytest.mark.parametrize(("name", "message"), [("embed", "generate text"), ("sleep", "close()")])
def test_missing_vllm_methods_suggest_a_remedy(llm: LLM, name: str, message: str) -> None:
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=f"LLM has no {name}: .*{re.escape(message)}"):
        getattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'embeds'"):
        llm.embeds  # type: ignore[attr-defined]  # noqa: B018


def test_old_generate_keywords_are_explained(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt_token_ids=.* is not supported: send \["):
        llm.generate(prompt_token_ids=[[1, 2]])
    with pytest.raises(RequestError, match="prompt=None is not allowed"):
        llm.generate()


def test_vllm_prompt_types(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXT)
    for prompt in (TokensPrompt(prompt_token_ids=ids, prompt=TEXT), TextPrompt(prompt=TEXT)):
        (out,) = llm.generate(prompt, GREEDY)
        assert answer(out) == answer(llm.generate(TEXT, GREEDY)[0]) and out.prompt == TEXT
    salted = TextPrompt(prompt="path " * 100, cache_salt="a")
    hits = [llm.generate(p, GREEDY)[0].num_cached_tokens for p in (salted, salted)]
    assert hits[0] == 0 and hits[1] > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(salted, GREEDY)[0].num_cached_tokens == 0
    for wrong in ({"prompt": TEXT, "prompt_embeds": [1.0]}, {"prompt": TEXT, "salt": "a"}):
        with pytest.raises(RequestError) as caught:
            llm.generate(wrong, GREEDY)
        assert caught.value.field == "prompt" and next(iter(set(wrong) - {"prompt"})) in str(
            caught.value
        )
    with pytest.raises(RequestError, match="cache_salt=''"):
        llm.generate({"prompt": TEXT, "cache_salt": ""}, GREEDY)


def test_truncate_prompt_tokens_keeps_the_end(llm: LLM) -> None:
    ids = [5 + i % 90 for i in range(700)]
    for messages, remaining in ((7, 7), (-1, 512 - NUM_TOKENS)):
        (out,) = llm.generate([ids], replace(GREEDY, truncate_prompt_tokens=messages))
        assert out.prompt_token_ids == ids[-remaining:]
        assert answer(out) == answer(llm.generate([ids[-remaining:]], GREEDY)[0])


def test_unknown_keywords_are_explained(llm: LLM) -> None:
    for call, message, name in (
        (lambda: llm.generate(TEXT, lora_request=3), "a name in lora_modules", "lora_request"),
        (lambda: llm.generate(TEXT, lora_request="x"), "adapter='x' is not allowed", "adapter"),
        (lambda: llm.generate(TEXT, priorty=1), "Did you mean priority", "priorty"),
        (lambda: llm.chat(QUESTION, chat_template="x"), r"give chat_template to LLM", None),
        (lambda: llm.chat(QUESTION, continue_final_message=True), "set it", None),
        (lambda: llm.beam_search(TEXT, beam_width=2), "temperature=0", None),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            call()
        assert "_answer" not in str(caught.value) and name in (None, caught.value.field)
    assert llm.generate(TEXT, GREEDY, lora_request=None, priority=None)[0].finished
    assert llm.llm_engine is llm.engine


def test_changed_parameters_are_checked_on_use(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature = 0
    assert llm.generate(TEXT, params)[0].finished
    params.temperature = -1
    with pytest.raises(RequestError, match="temperature=-1"):
        llm.generate(TEXT, params)
