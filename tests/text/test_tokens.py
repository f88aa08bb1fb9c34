"""Tokenizer, detokenizer and scanning."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import CheckpointError
from lockstep.text.detokenizer import Detokenizer
from lockstep.text.scan import Markers
from lockstep.text.tokenizer import Tokenizer

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


def test_tokens_of_the_config_are_added(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    entry = {"content": "<|new|>", "special": True}
    config = {"added_tokens_decoder": {"999": entry}, "eos_token": {"content": "<|new|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    (eos,) = tokenizer.eos_ids
    assert tokenizer.encode("a<|new|>")[-1] == eos
    assert eos in tokenizer.special_ids


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_whole(tokenizer, skip):
    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    def check(ids):
        text = Detokenizer(tokenizer, skip_special_tokens=skip)
        joined = "".join(text.push(i) for i in ids) + text.flush()
        assert joined == tokenizer.decode(ids, skip_special_tokens=skip)

    check()
    check.hypothesis.inner_test(tokenizer.encode(TEXT))


def test_no_piece_holds_half_a_character(tokenizer):
    text = Detokenizer(tokenizer)
    pieces = [text.push(i) for i in tokenizer.encode("日本語🦊")]
    assert "".join(pieces) == "日本語🦊" and "\ufffd" not in "".join(pieces)
    assert "" in pieces


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


@given(st.text("ab<>/", max_size=30), st.lists(st.integers(1, 4), min_size=30, max_size=30))
def test_markers_do_not_depend_on_the_cut(text, cuts):
    markers = Markers({"open": "< a", "close": "</a>"}, loose=True)

    def scan(pieces):
        found, buffer = [], ""
        for piece in [*pieces, None]:
            buffer += piece or ""
            while True:
                plain, marker, buffer = markers.take(buffer, final=piece is None)
                found += [*plain, *([marker] if marker else [])]
                if marker is None:
                    break
        return found

    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert scan(pieces + [rest]) == scan([text])
