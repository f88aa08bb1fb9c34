"""Prompts to requests, tokens to completions, and chat templates."""

import pytest

from lockstep.errors import RequestError
from lockstep.outputs import Logprob
from lockstep.sampling_params import SamplingParams
from lockstep.text.processor import Processor, TextUpdate
from lockstep.text.template import ChatTemplate


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


def test_bad_words_come_with_and_without_a_blank(processor):
    tokenizer = processor.tokenizer
    (request,) = processor.requests("r", "a", SamplingParams(bad_words=["the", "z"]))
    spelled = [tokenizer.decode(ids) for ids in request.params.bad_words_ids]
    assert spelled[0] == "the" and "z" in spelled
    assert set(spelled) <= {"the", " the", "z", " z"}
    (spaced,) = processor.requests("r", "a", SamplingParams(bad_words=["quick"]))
    same = len(tokenizer.encode("quick")) == len(tokenizer.encode(" quick"))
    assert len(spaced.params.bad_words_ids) == 1 + same


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
def test_stop_string_cuts_tokens_whatever_the_step(processor, step):
    ids = processor.tokenizer.encode("the lazy dog jumps")
    output = finish(processor, SamplingParams(stop="dog", logprobs=0), ids, step)
    assert (output.text, output.finish_reason, output.stop_reason) == ("the lazy ", "stop", "dog")
    assert processor.tokenizer.decode(output.token_ids).startswith("the lazy dog")
    assert len(output.logprobs) == len(output.token_ids) < len(ids)
    assert output.logprobs[0][ids[0]].decoded_token == processor.tokenizer.decode(ids[:1])


def test_an_update_stays_as_it_was(processor):
    (request,) = processor.requests("r", "fox", SamplingParams(stop="dog", logprobs=0))
    text = processor.completion(request)
    ids = processor.tokenizer.encode("the lazy dog jumps")
    updates = [text.push([i], [{i: Logprob(-1.0, 1)}]) for i in ids]
    told = [(u.delta, u.token_ids, u.finish_reason, u.num_tokens) for u in updates]
    assert [n for *_, n in told][:3] == [1, 2, 3]
    last = next(i for i, u in enumerate(updates) if u.finish_reason)
    assert updates[last].stop_reason == "dog"
    over = TextUpdate("", (), None, "stop", "dog", last + 1)
    assert updates[last + 1 :] == [over] * (len(ids) - last - 1)
    assert "".join(u.delta for u in updates) == "the lazy "
    with pytest.raises(AttributeError):
        updates[0].delta = "x"


def test_a_conversation_is_its_text_and_its_ids(processor):
    messages = [{"role": "user", "content": "hi"}]
    found = processor.conversation(messages, enable_thinking=True)
    assert found.text == processor.render_text(messages, enable_thinking=True)
    assert found.ids == processor.render(messages, enable_thinking=True)
    assert processor.tokenizer.decode(found.ids, skip_special_tokens=False) == found.text


def test_the_ending_token_gives_no_text(processor):
    ids = processor.tokenizer.encode("fox!")
    output = finish(processor, SamplingParams(), ids, reason="stop")
    assert output.text == "fox" and output.token_ids == ids
    kept = finish(processor, SamplingParams(include_stop_str_in_output=True), ids, reason="stop")
    assert kept.text == "fox!"
    assert finish(processor, SamplingParams(), ids, reason="length").text == "fox!"


def test_held_text_comes_at_the_end(processor):
    ids = processor.tokenizer.encode("dog do")
    assert finish(processor, SamplingParams(stop="dogma"), ids, reason="length").text == "dog do"


def test_without_a_tokenizer(folder):
    processor = Processor.for_model(None, folder, 64)
    (request,) = processor.requests("r", [1, 2], SamplingParams())
    text = processor.completion(request)
    update = text.push([5, 6], None, "length")
    assert update == TextUpdate("", (5, 6), None, "length", None, 2)
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
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
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
