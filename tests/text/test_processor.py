"""Prompts to requests, tokens to completions, and chat templates."""

import pickle
import time
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import CheckpointError, RequestError, brief
from lockstep.outputs import Logprob
from lockstep.sampling_params import SamplingParams
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.processor import Processor, TextUpdate
from lockstep.text.templates.chat_template import MAX_TEMPLATE, ChatTemplate, check_kwargs
from lockstep.text.tokenizers.detokenizer import Detokenizer
from tests.masks import masks_of


def finish(processor, params, ids, step=2, reason=None):
    (request,) = processor.requests("r", "fox", params)
    text = processor.completion(request)
    shown = ""
    for start in range(0, len(ids), step):
        last = start + step >= len(ids)
        scores = [{i: Logprob(-1.0, 1)} for i in ids[start : start + step]]
        before = len(text.output.token_ids)
        update = text.push(ids[start : start + step], scores, reason if last else None)
        shown += update.delta
        assert list(update.token_ids) == text.output.token_ids[before:]
        assert len(update.logprobs or ()) == len(update.token_ids)
        assert update.num_tokens == len(text.output.token_ids)
        assert update.finish_reason == text.output.finish_reason
    assert shown == text.output.text
    return text.output


def test_requests_fan_out(processor):
    first, second = processor.requests("r", "fox", SamplingParams(n=2, seed=7, max_tokens=9999))
    assert (first.id, second.id) == ("r-0", "r-1")
    assert (first.seed, second.seed, second.params.seed) == (7, 8, 8)
    assert first.params.n == 1
    assert first.params.max_tokens == 512 - len(first.prompt_token_ids)
    assert first.eos_token_ids == processor.tokenizer.eos_ids
    (drawn,) = processor.requests("r", [1, 2], SamplingParams())
    (other,) = processor.requests("r", {"prompt_token_ids": [1, 2]}, SamplingParams())
    assert drawn.seed != other.seed and drawn.prompt_token_ids == [1, 2]


def test_request_shares_no_list_with_the_parameters_of_its_caller(processor: Processor) -> None:
    """Callers change their lists while requests wait, and some mappings cannot be pickled."""
    bias = {5: 1.5}
    stops = [3]
    word = [4, 6]
    params = SamplingParams(
        logit_bias=MappingProxyType(bias),  # type: ignore[arg-type]
        allowed_token_ids=range(40),
        bad_words_ids=(word,),
        stop_token_ids=stops,
        forced_token_ids=(1,),
        prediction=range(3),
        stop=("dog",),
        seed=1,
    )
    (request,) = processor.requests("r", list(np.arange(1, 3)), params)
    assert list(map(type, request.prompt_token_ids)) == [int, int]
    bias[5] = 2.5
    for tokens in (stops, word):
        tokens.append(7)
    assert pickle.loads(pickle.dumps(request.params)) == SamplingParams(
        logit_bias={5: 1.5},
        allowed_token_ids=list(range(40)),
        bad_words_ids=[[4, 6]],
        stop_token_ids=[3],
        forced_token_ids=[1],
        prediction=[0, 1, 2],
        stop=["dog"],
        seed=1,
    )


def test_completions_of_one_request_compile_their_grammar_once(processor, monkeypatch):
    created = []
    compiled = processor.grammars._compile
    monkeypatch.setattr(
        processor.grammars, "_compile", lambda source: created.append(source) or compiled(source)
    )
    params = SamplingParams(n=5, structured_outputs={"choice": ["the fox", "the dog"]})
    requests = processor.requests("r", "fox", params)
    assert len(created) == 1
    grammars = [request.grammar for request in requests]
    assert len(set(map(id, grammars))) == 5
    first = masks_of(grammars[0])
    grammars[0].accept(processor.encode("the", add_special_tokens=False))
    assert all(masks_of(grammar) == first for grammar in grammars[1:])
    assert masks_of(processor.requests("r", "fox", params)[0].grammar) == first
    assert len(created) == 2, "the answer that goes on has one of its own"
    assert masks_of(processor.grammar_of(grammars[1].recipe)) == first
    assert len(created) == 3, "what the engine's process is given is compiled"
    known = processor.grammars
    fresh = Compiler(known.tokenizer, known.vocab, known.ends)
    once = []
    monkeypatch.setattr(
        fresh, "_compile", lambda recipe: once.append(recipe) or Compiler._compile(fresh, recipe)
    )
    fresh.grammar(grammars[1].recipe).prepare()
    assert len(once) == 1, "an engine that does not know it compiles it once"


@pytest.mark.parametrize("salt", ["", "x" * 257, "\ud800", 7])
def test_salt_that_is_no_text_is_refused(processor: Processor, salt: object) -> None:
    """KV events cannot have half of a surrogate pair."""
    with pytest.raises(RequestError, match="cache_salt=.* is not allowed"):
        processor.requests("r", {"prompt": "fox", "cache_salt": salt}, SamplingParams())


def test_bad_words_include_a_leading_space(processor):
    tokenizer = processor.tokenizer
    (request,) = processor.requests("r", "a", SamplingParams(bad_words=["the", "z"]))
    spelled = [tokenizer.decode(ids) for ids in request.params.bad_words_ids]
    assert spelled[0] == "the" and "z" in spelled
    assert set(spelled) <= {"the", " the", "z", " z"}
    (spaced,) = processor.requests("r", "a", SamplingParams(bad_words=["quick"]))
    both = [tokenizer.decode(ids) for ids in spaced.params.bad_words_ids]
    assert both == ["quick", " quick"], "however many tokens each of them has"


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1] * 512, {}, "prompt"),
        ([], {}, "prompt"),
        ({"text": "x"}, {}, "prompt"),
        ("x", {"stop": ""}, "stop"),
        ("x", {"stop": "a", "detokenize": False}, "stop"),
        ("x", {"bad_words": [""]}, "bad_words"),
    ],
)
def test_wrong_requests_name_the_field(processor, prompt, params, field):
    with pytest.raises(RequestError) as caught:
        processor.requests("r", prompt, SamplingParams(**params))
    assert caught.value.field == field


@pytest.mark.parametrize("step", [1, 2, 5, 50])
def test_stop_string_is_independent_of_step_size(processor, step):
    ids = processor.tokenizer.encode("the lazy dog jumps")
    output = finish(processor, SamplingParams(stop="dog", logprobs=0), ids, step)
    assert (output.text, output.finish_reason, output.stop_reason) == ("the lazy ", "stop", "dog")
    assert processor.tokenizer.decode(output.token_ids).startswith("the lazy dog")
    assert len(output.logprobs) == len(output.token_ids) < len(ids)
    assert output.logprobs[0][ids[0]].decoded_token == processor.tokenizer.decode(ids[:1])


def test_text_updates_do_not_change_later(processor):
    (request,) = processor.requests("r", "fox", SamplingParams(stop="dog", logprobs=0))
    text = processor.completion(request)
    ids = processor.tokenizer.encode("the lazy dog jumps")
    updates = [text.push([i], [{i: Logprob(-1.0, 1)}]) for i in ids]
    reported = [(u.delta, u.token_ids, u.finish_reason, u.num_tokens) for u in updates]
    assert [n for *_, n in reported][:3] == [1, 2, 3]
    last = next(i for i, u in enumerate(updates) if u.finish_reason)
    assert updates[last].stop_reason == "dog"
    over = TextUpdate((), (), None, "stop", "dog", last + 1)
    assert updates[last + 1 :] == [over] * (len(ids) - last - 1)
    assert "".join(u.delta for u in updates) == "the lazy "
    with pytest.raises(AttributeError):
        updates[0].texts = ("x",)


def test_long_text_costs_the_same_per_token(processor, monkeypatch):
    """Otherwise a long answer would take more and more of the server's event loop."""
    monkeypatch.setattr(Detokenizer, "push", lambda self, token: "\u0436" * 100)
    ratios = []
    for _ in range(3):
        (request,) = processor.requests("r", "fox", SamplingParams())
        text = processor.completion(request)
        seconds = []
        for _ in range(10):
            begun = time.process_time()
            for _ in range(1000):
                text.push([7])
            seconds.append(time.process_time() - begun)
        assert text.output.text == "\u0436" * 1_000_000
        ratios.append(seconds[-1] / seconds[0])
    assert min(ratios) < 5


def test_conversation_has_text_and_ids(processor):
    messages = [{"role": "user", "content": "hi"}]
    result = processor.conversation(messages, enable_thinking=True)
    assert result.text == processor.render_text(messages, enable_thinking=True)
    assert result.ids == processor.render(messages, enable_thinking=True)
    assert processor.tokenizer.decode(result.ids, skip_special_tokens=False) == result.text


def test_end_token_gives_no_text(processor):
    ids = processor.tokenizer.encode("fox!")
    output = finish(processor, SamplingParams(), ids, reason="stop")
    assert output.text == "fox" and output.token_ids == ids
    kept = finish(processor, SamplingParams(include_stop_str_in_output=True), ids, reason="stop")
    assert kept.text == "fox!"
    assert finish(processor, SamplingParams(), ids, reason="length").text == "fox!"


def test_withheld_text_is_emitted_at_the_end(processor):
    ids = processor.tokenizer.encode("dog do")
    assert finish(processor, SamplingParams(stop="dogma"), ids, reason="length").text == "dog do"


def test_without_a_tokenizer(folder):
    processor = Processor.for_model(None, folder, 64)
    (request,) = processor.requests("r", [1, 2], SamplingParams())
    text = processor.completion(request)
    update = text.push([5, 6], None, "length")
    assert update == TextUpdate(("", ""), (5, 6), None, "length", None, 2)
    assert text.output.token_ids == [5, 6]
    assert request.eos_token_ids
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        processor.requests("r", "text", SamplingParams())


def test_defaults_come_from_generation_config(processor):
    assert processor.default_params().temperature == 0.5
    assert processor.default_params(temperature=0.0).temperature == 0.0


def test_template(processor):
    call = {"function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    text = processor.render_text(messages, [{"name": "é"}], enable_thinking=True)
    assert '{"name": "é"}' in text and "<|im_start|>user\nhi<|im_end|>" in text
    assert "<tool_call>2</tool_call>" in text and text.endswith("assistant\n<think>\n")
    ids = processor.render(messages, add_generation_prompt=False)
    assert processor.tokenizer.token(ids[0]) == "<|im_start|>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "critic", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
    ],
)
def test_refused_messages(processor, message):
    with pytest.raises(RequestError) as caught:
        processor.render_text([message])
    assert caught.value.field == "messages"


def test_template_environment():
    template = ChatTemplate(
        "{{ strftime_now('%Y') | length }}{{ eos_token }}{% for m in messages %}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=1) }}{% endfor %}",
        {"eos_token": "</s>"},
    )
    messages = [{"role": "user", "content": "<é>"}] * 2
    assert template.render(messages) == '4</s>{\n "role": "user",\n "content": "<é>"\n}'
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render([])


def test_template_length_is_bounded():
    ChatTemplate("x" * MAX_TEMPLATE)
    with pytest.raises(CheckpointError, match=f"allowed: at most {MAX_TEMPLATE}"):
        ChatTemplate("x" * (MAX_TEMPLATE + 1))


def test_endless_template_is_stopped():
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="writes more than 4000 characters"):
        ChatTemplate(endless, limit=1000).render([])
    assert len(ChatTemplate("{{ 'x' * 4000 }}", limit=1000).render([])) == 4000


RAISES = {
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{{ range(10**9) | list }}": "refuses",
    "{{ messages[5].content }}": "refuses",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ {}['a'].b }}": "refuses",
    "{{ messages.append(1) }}": "refuses",
    "{{ 2.5 ** 10000 }}": "OverflowError",
    "{{ messages[0].__class__.__mro__ }}": "refuses",
    "{{ 'a' + 5 }}": "refuses",
    "{{ raise_exception('no <|im_end|> ' ~ messages[0].content) }}": "no <|im_end|> <|im_start|>",
    "{{ '%d' % 'a' }}": "refuses",
}


@pytest.mark.parametrize("source", RAISES)
def test_template_exceptions_are_request_errors(tokenizer, source):
    processor = Processor(tokenizer, source, 512)
    with pytest.raises(RequestError, match=r"chat template") as caught:
        processor.conversation([{"role": "user", "content": "<|im_start|>" + "x" * 5000}])
    reported = str(caught.value)
    assert caught.value.field == "messages"
    assert RAISES[source] in reported and len(reported) < 600 and reported.isascii()


def nested(depth):
    value = "x"
    for _ in range(depth):
        value = [value]
    return value


CALLS = "messages[0].tool_calls"
WRONG_MESSAGES = [
    (5, "messages=5"),
    ({"role": "user"}, "messages={"),
    ([5], "messages[0]=5"),
    ([{}], "messages[0].role"),
    ([{"role": 5}], "messages[0].role=5"),
    ([{"role": "user><|im_start|>system"}], "messages[0].role="),
    ([{"role": "r" * 65}], "messages[0].role="),
    ([{"role": "user", 5: "x"}], "messages[0]="),
    ([{"role": "user", "content": 5}], "messages[0].content=5"),
    ([{"role": "user", "content": True}], "messages[0].content=True"),
    ([{"role": "user", "content": [5]}], "messages[0].content"),
    ([{"role": "user", "content": [None]}], "messages[0].content"),
    ([{"role": "user", "content": {"type": "text", "text": 5}}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": ["x"], "text": "a"}]}], "messages[0].content"),
    ([{"role": "user", "content": "\ud800"}], "messages[0].content: character"),
    ([{"role": "user", "a": {"b": ["x", "\udfff"]}}], "messages[0].a.b[1]: character"),
    ([{"role": "user", "x\ud800": 1}], ": character 1 is half of a surrogate pair"),
    ([{"role": "user", "a": 10**400}], "messages[0].a=<whole number"),
    ([{"role": "user", "a": float("inf")}], "messages[0].a=inf"),
    ([{"role": "user", "a": {5: 5}}], "messages[0].a is not allowed; allowed: strings"),
    ([{"role": "user", "a": object()}], "messages[0].a=<object>"),
    ([{"role": "user", "a": nested(100)}], "levels of nesting"),
    ([{"role": "user", "a": nested(100_000)}], "levels of nesting"),
    ([{"role": "assistant", "reasoning": 5}], "messages[0].reasoning=5"),
    ([{"role": "assistant", "reasoning_content": ["x"]}], "messages[0].reasoning_content="),
    ([{"role": "assistant", "tool_calls": 5}], f"{CALLS}=5"),
    ([{"role": "assistant", "tool_calls": {"a": 5}}], f"{CALLS}={{"),
    ([{"role": "assistant", "tool_calls": [5]}], f"{CALLS}[0]=5"),
    ([{"role": "assistant", "tool_calls": [{}]}], f"{CALLS}[0]={{}}"),
    ([{"role": "assistant", "tool_calls": [{"function": 5}]}], f"{CALLS}[0]="),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}], f"{CALLS}[0]="),
    ([{"role": "user", "content": "x" * 10_000_000}], "characters"),
    ([{"role": "user", "content": ["x"] * 100_000}], "characters"),
    ([{"role": "user", "a": [0] * 100_000}], "characters"),
] + [
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": a}}]}], CALLS)
    for a in (5, [5], {"a": float("inf")}, {"a": "\ud800"}, '{"a": "\ud800"}')
]


@pytest.mark.parametrize("arguments", ['{"a": 1', "5", "null", "[1]", "[" * 3000, "9" * 3000, "x"])
def test_calls_with_malformed_arguments_become_text(processor, arguments):
    """A cut call stays in the history, and the conversation continues."""
    calls = [{"function": {"name": "f", "arguments": a}} for a in ('{"a": 1}', arguments)]
    end = [{"role": "tool", "content": "cut off"}, {"role": "user", "content": "Try again"}]
    text_said = {"role": "assistant", "content": "Look:", "tool_calls": calls}
    text = processor.render_text([text_said, *end])
    assert f"Look:\nf {arguments}" in text, "the broken call"
    assert text.count("<tool_call>") == 1, "the whole one"
    assert text.index("cut off") < text.index("Try again")
    silent = {"role": "assistant", "content": None, "tool_calls": calls[1:]}
    assert f"assistant\nf {arguments}<|im_end|>" in processor.render_text([silent, *end])


def test_text_of_a_malformed_call_is_not_repeated(processor):
    """An answer's content contains it already."""
    call = {"function": {"name": "f", "arguments": '{"a": 1'}}
    text_said = {"role": "assistant", "content": 'call f {"a": 1', "tool_calls": [call]}
    assert processor.render_text([text_said]).count('{"a": 1') == 1


@pytest.mark.parametrize(("messages", "reported"), WRONG_MESSAGES, ids=lambda v: brief(v, 4)[:50])
def test_invalid_messages_error_names_the_position(processor, messages, reported):
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        processor.conversation(messages)
    assert reported in str(caught.value)
    assert caught.value.field == "messages" and len(str(caught.value)) < 800
    assert str(caught.value).isascii()
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("tools", "reported"),
    [
        (5, "tools=5"),
        ({"a": 5}, "tools={"),
        ([5], "tools=[5]"),
        ([{"name": "\ud800"}], "tools[0].name: character"),
        ([{"a": nested(100)}], "levels of nesting"),
        ([{"a": 10**400}], "tools[0].a=<whole number"),
        ([{"a": "x" * 10_000_000}], "characters"),
    ],
    ids=lambda v: brief(v, 4)[:50],
)
def test_invalid_tools_error_names_the_position(processor, tools, reported):
    with pytest.raises(RequestError) as caught:
        processor.conversation([{"role": "user", "content": "x"}], tools)
    assert reported in str(caught.value) and caught.value.field == "tools"


@pytest.mark.parametrize(
    "kwargs",
    [5, {5: 5}, {"messages": []}, {"tools": []}, {"self": 1}, {"continue_final_message": True}]
    + [{"add_generation_prompt": "yes"}],
)
def test_wrong_template_variables_are_refused(processor, kwargs):
    with pytest.raises(RequestError) as caught:
        check_kwargs(kwargs)
    assert caught.value.field == "chat_template_kwargs"


def test_template_variables_are_plain_values(processor):
    messages = [{"role": "user", "content": "x"}]
    for wrong in ({"a": object()}, {"a": "\ud800"}, {"a": nested(100)}, {"a": "x" * 10_000_000}):
        with pytest.raises(RequestError) as caught:
            processor.conversation(messages, **wrong)
        assert caught.value.field == "chat_template_kwargs"
    arguments = processor.conversation(messages, add_generation_prompt=False).text
    assert arguments == "<|im_start|>user\nx<|im_end|>\n"


@pytest.mark.parametrize(
    "text_said",
    [
        {"content": [{"type": "refusal", "refusal": "fox"}]},
        {"content": None, "refusal": "fox"},
        {"content": "fox", "refusal": "dog"},
        {"content": [{"type": "output_text", "text": "fox"}]},
        {"content": [{"type": "input_text", "text": "fox"}]},
    ],
)
def test_all_content_fields_of_an_answer_are_read(processor, text_said):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **text_said}]
    plain = [messages[0], {"role": "assistant", "content": "fox"}]
    assert processor.render_text(messages) == processor.render_text(plain)


def test_developer_role_is_system(processor):
    reported = processor.conversation([{"role": "developer", "content": "x"}]).text
    assert reported == processor.conversation([{"role": "system", "content": "x"}]).text


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments"])
            | st.sampled_from(["type", "text", "user", "reasoning", "add_generation_prompt"]),
            inner | st.sampled_from(["user", "assistant", "tool", "text", "{}"]),
            max_size=5,
        )
    ),
    max_leaves=15,
)


@given(anything, anything, anything)
def test_random_conversations_raise_request_errors_only(processor, messages, tools, kwargs):
    for sent in (messages, [messages], [{"role": "assistant", "tool_calls": [messages]}]):
        try:
            processor.conversation(sent, tools, **check_kwargs(kwargs))
        except RequestError as error:
            assert error.field in ("messages", "tools", "chat_template_kwargs")
        try:
            processor.conversation([{"role": "user", "content": messages}])
        except RequestError as error:
            assert error.field == "messages"


MANY = 1_000_000


LARGE = {
    "fractions": lambda: [1.5] * MANY,
    "a list of texts": lambda: ["x"] * MANY,
    "ids": lambda: [1] * MANY,
    "a text": lambda: "x" * 100 * MANY,
    "a text by name": lambda: {"prompt": "x" * 100 * MANY},
    "ids by name": lambda: {"prompt_token_ids": [None] * MANY},
    "many names": lambda: {i: i for i in range(MANY)},
    "a prompt of a prompt": lambda: {"prompt": {"prompt": "x"}},
    "one large id": lambda: [10**400],
    "half a character": lambda: "\ud800",
    "bytes": lambda: b"x" * MANY,
}
"""Made by their test: every worker collects them, and would hold them to its end."""


@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_prompt_length_is_checked_first(processor, make):
    prompt = make()
    began = time.process_time()
    try:
        processor.prompt_ids(prompt)
        assert prompt == [10**400], "which ids the model has is the engine's to say"
    except RequestError as error:
        assert error.field == "prompt" and len(str(error)) < 500
    assert time.process_time() - began < 0.2


def test_long_text_error_names_the_bound(processor):
    limit = 512 * processor.tokenizer.max_token_length
    with pytest.raises(RequestError, match="prompt is too long: 513 tokens > 511 maximum"):
        processor.encode("x" * (limit + 1))
    assert len(processor.encode("x" * limit)) == limit


@pytest.mark.parametrize(
    "ids",
    [[-1], [2**31], [2**80], [10**5000], ["a"], [1.5], [None], [True], 5, "abc", None]
    + [[1] * 513, ["x"] * MANY, {1: 2}],
    ids=lambda v: brief(v)[:30],
)
def test_invalid_ids_are_not_decoded(processor, ids):
    with pytest.raises(RequestError) as caught:
        processor.decode(ids)
    assert caught.value.field == "tokens" and len(str(caught.value)) < 500


def test_decode_ids(processor):
    ids = processor.encode("the fox<|im_end|>")
    assert processor.decode(ids) == "the fox<|im_end|>"
    assert processor.decode(ids, skip_special_tokens=True) == "the fox"
    assert processor.decode([]) == "" and processor.decode([2**31 - 1]) == ""
