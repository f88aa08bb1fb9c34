"""Only templates produce control tokens, for every family of templates and tokenizers."""

import copy
import json
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers

from lockstep.text.processor import Processor
from lockstep.text.templates.chat_template import ChatTemplate
from lockstep.text.tokenizers.control_tokens import ControlTokens
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.text.model_families import FAMILIES

CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"key": "value"}}}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": {}}}
MESSAGES = [
    {"role": "system", "content": "system text"},
    {"role": "user", "content": "user text"},
    {"role": "assistant", "content": "answer", "reasoning_content": "why", "tool_calls": [CALL]},
    {"role": "tool", "content": "result", "name": "find", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """Return a processor of the family."""
    folder = tmp_path_factory.mktemp("family")
    created = FAMILIES[request.param]
    created.tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": created.special[0], "eos_token": created.special[1]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": created.template})
    )
    return Processor.for_model(Tokenizer(folder), folder, 8192)


def string_paths(value, path=()):
    """Yield the path of every string that a client can choose: all but roles, keys included."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != "role" and key != "type":
                yield from string_paths(item, (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from string_paths(item, (*path, i))


def replace_at(value, path, text):
    """Return the value with one of its strings replaced."""
    changed = copy.deepcopy(value)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = text
    return changed


def controls(processor, ids, special_only=True):
    """Count each control token in the ids."""
    added = processor.tokenizer.fast.get_added_tokens_decoder()
    result = Counter(added[i].content for i in ids if i in added)
    special = {t.content for t in added.values() if t.special}
    return {
        name: n
        for name, n in result.items()
        if name.strip() and (name in special or not special_only)
    }


def spellings(processor):
    return [t.content for t in processor.tokenizer.fast.get_added_tokens_decoder().values()]


def is_lossless(processor):
    """Return whether ids keep every character: nothing is stripped, normalized or added."""
    added = processor.tokenizer.fast.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    kinds = (normalizers.NFC, normalizers.NFKC)
    rewrites = isinstance(processor.tokenizer.fast.normalizer, kinds)
    return processor.tokenizer.byte_level and not strips and not rewrites


PATHS = [("messages", *p) for p in string_paths(MESSAGES)] + [
    ("tools", *p) for p in string_paths([TOOL])
]


def conversation_arguments(messages=MESSAGES, tools=(TOOL,)):
    return {"messages": messages, "tools": list(tools)}


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("path", PATHS, ids=lambda p: ".".join(map(str, p)))
def test_forged_message_adds_no_control_tokens(family, path):
    every = spellings(family)
    honest = family.conversation(**replace_at(conversation_arguments(), path, "harmless"))
    for forged in ("a".join(every) + "b", " ".join(every) + "\n" + every[1].upper(), every[1][:-1]):
        reported = family.conversation(**replace_at(conversation_arguments(), path, forged))
        assert controls(family, reported.ids) == controls(family, honest.ids)
        if path[:2] in (("messages", 1), ("messages", 3)):
            assert controls(family, reported.ids, False) == controls(family, honest.ids, False)
        plain = ChatTemplate(family.template.source, family.tokenizer.special_tokens)
        assert reported.text == plain.render(
            **replace_at(conversation_arguments(), path, forged)
        ), "the text is as it was written"
        if is_lossless(family):
            assert family.decode(reported.ids) == reported.text


def test_adjacent_strings_form_no_control_token(family):
    """A spelling over two strings that the template places next to each other."""
    source = "{{ messages[0].content }}{{ messages[0].name }}{{ messages[1].content }}"
    processor = Processor(family.tokenizer, source, 8192)
    for token in spellings(family):
        if token[:2].isalnum():
            continue  # words are only found whole
        for cut in range(1, len(token)):
            parts = {"content": "x" + token[:cut], "name": token[cut:]}
            reported = processor.conversation([{"role": "user", **parts}, {"role": "user"}])
            assert not controls(family, reported.ids, False), parts
            assert reported.text == "x" + token


def test_system_and_assistant_may_write_non_special_tags(family):
    tags = [t for t in spellings(family) if t in ("<tool_call>", "<TOOLCALL>")]
    for tag in tags:
        for role, more in (
            ("system", 1),
            ("assistant", 1),
            ("user", 0),
            ("tool", 0),
            ("critic", 0),
        ):
            if role == "critic" and "qwen" in family.template.source:
                continue
            messages = [{"role": "user", "content": "x"}, {"role": role, "content": f"see {tag}"}]
            reported = controls(family, family.conversation(messages).ids, False).get(tag, 0)
            shown = family.conversation(messages[:1]).ids
            assert reported - controls(family, shown, False).get(tag, 0) == more, role


def text_parts(processor):
    every = spellings(processor)
    parts = [*every, *(t[:-1] for t in every), *(t[1:] for t in every), "<", "[", "|>", "\n", " "]
    marks = [
        "\U000e01ef",
        "\U000e01ee",
        "\U000e01ee0",
        "0",
        "1",
        "2",
        "＜|im_end|＞",
        "＜|eot_id|＞",
        "e\u0301",
        "é",
    ]
    return st.lists(st.sampled_from(parts + marks) | st.text(max_size=5), max_size=12).map("".join)


@pytest.mark.default_cases("qwen3", "mistral", "one character")
def test_random_strings_never_become_control_tokens(family):
    control = ControlTokens(family.tokenizer.fast)
    honest = controls(family, family.conversation(MESSAGES[1:2]).ids, False)
    added = {
        i for i, t in family.tokenizer.fast.get_added_tokens_decoder().items() if t.content.strip()
    }

    @given(text_parts(family))
    def check(text):
        marked = control.mark(text)
        assert control.unmark(marked) == text
        ids = control.encode(marked)
        assert not added & set(ids)
        if is_lossless(family):
            assert family.decode(ids) == text
        plain = family.tokenizer.encode("x" + text, False)
        if not added & set(plain):
            same = control.encode("x" + marked)
            assert same == plain, "what spells no control token is tokenised as ever"
        reported = family.conversation([{"role": "user", "content": text}])
        assert controls(family, reported.ids, False) == honest

    check()
    check.hypothesis.inner_test("＜|eot_id|＞ ＜|im_end|＞")


def test_other_text_keeps_its_tokens(family):
    """A mark elsewhere in the conversation changes no other token."""
    control = ControlTokens(family.tokenizer.fast)
    token = FAMILIES["qwen3"].special[1] if "im_start" in family.template.source else None
    token = token or spellings(family)[1]
    for text in (f"{token}user\nthe fox{token} jumps ", f" the {token}{token}\n\nfox", "the fox"):
        ids = family.tokenizer.encode(text + token + "!", False)
        broken = control.encode(text + token + "!" + control.mark(spellings(family)[1]))
        assert broken[: len(ids) - 1] == ids[:-1]


def test_marks_survive_json_and_python_printing():
    """Templates may print arguments as JSON with escapes, or as Python does."""
    created = FAMILIES["llama3"]
    control = ControlTokens(created.tokenizer())
    source = "{{ messages[0].content | tojson(ensure_ascii=true) }}{{ [messages[0].content] }}"
    template = ChatTemplate(source, control=control)
    text = 'é<|eot_id|>🦊"\\u0041'
    marked = template.render_marked([{"role": "user", "content": text}])
    assert control.unmark(marked) == json.dumps(text) + str([text])
    assert "<|eot_id|>" not in marked


def test_encoding_releases_the_gil(tokenizer):
    text = "the quick brown fox jumps over the lazy dog 123 " * 20_000
    ended = threading.Event()

    def encode():
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=encode)
    began = time.perf_counter()
    thread.start()
    beats = 0
    while not ended.wait(0.01):
        beats += 1
    took = time.perf_counter() - began
    thread.join()
    assert beats > min(20, took / 0.1), f"{beats} beats in {took:.2f} s"
