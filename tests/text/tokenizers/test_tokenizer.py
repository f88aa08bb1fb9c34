"""Tokenizer, detokenizer and marker scanning."""

import json
import random
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.errors import CheckpointError
from lockstep.text.grammars.compiler import Compiler
from lockstep.text.scan import Markers, Scan
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import masks_of
from tests.text.model_families import FAMILIES

TEXT = "naïve 日本語 🦊🦊 <think> fox\r\n\t<|im_end|> end\u0301 \ufffd"


def test_round_trip_and_eos(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT), skip_special_tokens=False) == TEXT
    assert "<|im_end|>" not in tokenizer.decode(tokenizer.encode(TEXT))
    names = {tokenizer.token(i) for i in tokenizer.eos_ids}
    assert names == {"<|endoftext|>", "<|im_end|>"}
    assert {tokenizer.token(i) for i in tokenizer.special_ids} == names | {"<|im_start|>"}


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer(tmp_path)


def test_config_tokens_are_added(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    entry = {"content": "<|new|>", "special": True}
    config = {"added_tokens_decoder": {"999": entry}, "eos_token": {"content": "<|new|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    (eos,) = tokenizer.eos_ids
    assert tokenizer.encode("a<|new|>")[-1] == eos
    assert eos in tokenizer.special_ids


@pytest.mark.parametrize("skip", [True, False])
def test_streamed_parts_equal_the_decoded_text(tokenizer, skip):
    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    def check(ids):
        text = Detokenizer(tokenizer, skip_special_tokens=skip)
        joined = "".join(text.push(i) for i in ids) + text.flush()
        assert joined == tokenizer.decode(ids, skip_special_tokens=skip)

    check()
    check.hypothesis.inner_test(tokenizer.encode(TEXT))


@pytest.fixture(scope="module", params=["mistral", "mistral, always"])
def spaced(request, tmp_path_factory):
    """Return a SentencePiece tokenizer, with leading spaces and byte tokens."""
    folder = tmp_path_factory.mktemp("spaced")
    FAMILIES[request.param].tokenizer().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_streamed_parts_with_spaces_and_byte_tokens(spaced):
    @given(st.text())
    @example(TEXT)
    @example("a  b \n the fox")
    @example("  ")
    def check(text):
        ids = spaced.encode(text, False)
        parts = Detokenizer(spaced, skip_special_tokens=False)
        joined = "".join(parts.push(i) for i in ids) + parts.flush()
        assert joined == spaced.decode(ids, skip_special_tokens=False)

    check()


def test_token_bytes_include_the_leading_space(spaced):
    """The tokenizer adds and removes the first space of a text itself."""
    assert spaced.token_bytes(spaced.fast.token_to_id("▁")) == b" "

    @given(st.text())
    @example("a  b \n the fox")
    @example("  ")
    def check(text):
        ids = spaced.encode(text, False)
        joined = b"".join(map(spaced.token_bytes, ids)).decode()
        assert spaced.decode(ids, False) in (joined, joined.removeprefix(" "))

    check()


@pytest.mark.parametrize("regex", ["[a-z]+", "[a-z]+ [a-z]+", '"[a-z ]{0,3}"'])
def test_grammar_includes_leading_spaces(spaced, regex):
    """The text of all allowed tokens matches."""
    (end,) = spaced.fast.encode("</s>", add_special_tokens=False).ids
    compiler = Compiler(spaced, len(spaced), frozenset({end}))
    rng = random.Random(1)
    ended = 0
    for _ in range(40):
        matcher = compiler.matcher(f"start: /{regex}/")
        text = Detokenizer(spaced)
        message = ""
        for _ in range(12):
            mask = masks_of(matcher)[0]
            may = [i for i in range(len(spaced)) if mask[i // 8] >> i % 8 & 1]
            chosen = end if end in may and rng.random() < 0.3 else rng.choice(may)
            if chosen == end:
                assert re.fullmatch(regex, message + text.flush()), message
                ended += 1
                break
            matcher.accept([chosen])
            message += text.push(chosen)
    assert ended > 20


def test_any_order_of_tokens_is_decoded(spaced):
    @given(st.lists(st.integers(0, len(spaced) + 3), max_size=40))
    def check(ids):
        text = Detokenizer(spaced, skip_special_tokens=False)
        joined = "".join(text.push(i) for i in ids) + text.flush()
        complete = spaced.decode(ids, skip_special_tokens=False)
        remaining = iter(joined)
        kept = [char for char in complete if char != "\ufffd"]
        assert all(char in remaining for char in kept), "only bytes are told better"

    check()
    assert spaced.token_bytes(spaced.fast.token_to_id("<0xE2>")) == b"\xe2"
    text = Detokenizer(spaced)
    parts = [text.push(spaced.fast.token_to_id(t)) for t in ("<0xC3>", "<0xA9>", "<0xA9>", "a")]
    assert parts == ["", "é", "\ufffd", "a"]


def test_no_part_ends_within_a_character(tokenizer):
    text = Detokenizer(tokenizer)
    parts = [text.push(i) for i in tokenizer.encode("日本語🦊")]
    assert "".join(parts) == "日本語🦊" and "\ufffd" not in "".join(parts)
    assert "" in parts


@given(
    st.lists(st.sampled_from(["a", "b", "ab", ",", " "]), max_size=12),
    st.lists(st.text("ab, ", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 6),
)
@example(["a", " ", "b"], ["a b"], False, 0)  # a stop string in two tokens
def test_stop_strings_end_the_text_at_the_first_match(tokenizer, words, stop, include, min_tokens):
    ids = tokenizer.encode("".join(words))
    text = Detokenizer(tokenizer, tuple(stop), include, min_tokens=min_tokens)
    shown = "".join(text.push(i) for i in ids) + text.flush()
    free = tokenizer.decode(ids[:min_tokens])
    searched = tokenizer.decode(ids[min_tokens:])
    ends = [(n, -len(s), s) for n in range(len(searched) + 1) for s in stop]
    result = min((e for e in ends if searched[: e[0]].endswith(e[2])), default=None)
    if result is None:
        assert (shown, text.stopped) == (free + searched, None)
    else:
        assert text.stopped == result[2]
        assert shown == free + searched[: result[0] if include else result[0] - len(result[2])]


@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        (("over",), False, "the quick brown fox jumps "),
        (("over",), True, "the quick brown fox jumps over"),
        (("zzz", "ck br"), False, "the qui"),
        (("dogs",), False, "the quick brown fox jumps over the lazy dog"),
    ],
)
def test_stop_strings(tokenizer, stop, include, expected):
    text = Detokenizer(tokenizer, stop, include)
    shown = ""
    for token in tokenizer.encode("the quick brown fox jumps over the lazy dog"):
        shown += text.push(token)
        assert expected.startswith(shown)
        if text.stopped:
            break
    shown += text.flush()
    assert shown == expected
    assert text.stopped == (None if stop == ("dogs",) else stop[-1])


def test_stop_strings_wait_for_min_tokens(tokenizer):
    ids = tokenizer.encode("a,a,a,")
    text = Detokenizer(tokenizer, (",",), min_tokens=3)
    shown = "".join(text.push(i) for i in ids)
    assert shown == "a,a" and text.stopped == ","


def scan(markers, parts):
    """Return the characters and marker names that a scan finds, in order. written: the text of a
    marker."""
    result = []
    read = []
    one = Scan(markers)
    for part in parts:
        index = 0
        while index < len(part):
            plain, marker, index, written = one.take(part, index)
            result += [*plain, *([marker] if marker else [])]
            read += [plain, written]
    pending = one.flush()
    assert "".join([*read, pending]) == "".join(parts)
    return result + [*pending]


@given(st.text("ab<>/ \n", max_size=30), st.lists(st.integers(1, 4), min_size=30, max_size=30))
@example("< a", [1] * 30)
@example("<\n \n<\n a", [1] * 30)
@example("abab", [1] * 30)
def test_markers_are_independent_of_cuts(text, cuts):
    markers = [
        Markers({"open": "< a", "close": "</a>"}, loose=True),
        Markers({"long": "abab<", "short": "bab", "same": "bab", "blank": "a \n"}),
    ]
    parts = []
    rest = text
    for cut in cuts:
        parts.append(rest[:cut])
        rest = rest[cut:]
    for item in markers:
        assert scan(item, parts + [rest]) == scan(item, [text])


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1))
def test_scan_finds_the_first_marker_and_withholds_least(text, stops):
    one = Scan(Markers({stop: stop for stop in stops}))
    shown = ""
    for i, char in enumerate(text, 1):
        plain, marker, *_ = one.take(char)
        shown += plain
        ends = [stop for stop in stops if text[:i].endswith(stop)]
        if ends:
            assert marker == max(ends, key=len)
            assert shown == text[: i - len(marker)]
            return
        assert marker is None
        pending = [k for k in range(i + 1) if any(s.startswith(text[k:i]) for s in stops)]
        assert shown == text[: min(pending)]
    assert shown + one.flush() == text


def test_long_stop_strings_take_linear_time(tokenizer):
    stops = tuple("a" * (240 + i) + "b" for i in range(16))
    markers = Markers({stop: stop for stop in stops})
    began = time.process_time()
    assert scan(markers, ["a"] * 20_000) == ["a"] * 20_000
    assert scan(markers, ["a" * 100_000 + "b"])[-1] == stops[-1]
    assert time.process_time() - began < 3
