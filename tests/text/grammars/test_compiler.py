"""Grammar matchers equal Python's re: every allowed token at every position, and no other."""

import ctypes
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from lockstep.sampling_params import StructuredOutputsParams
from lockstep.scheduling.grammar import Grammar, GrammarMasks
from lockstep.text.grammars.compiler import (
    ROW_ITEMS,
    AfterReasoning,
    Compiler,
    FirstMasks,
    GrammarFault,
    GrammarRecipe,
    Matcher,
)
from lockstep.text.grammars.structured_output import compile_structured_output
from lockstep.text.tokenizers.tokenizer import Tokenizer
from tests.masks import every_token, masks_of, together

MODEL = Path(__file__).parents[3] / "lockstep" / "assets" / "model"
EXTRA = 40
"""Ids of the model without tokens: grammars never allow them."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer) + EXTRA, tokenizer.eos_ids)


def allowed(mask: bytes) -> set[int]:
    return {at * 8 + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def matcher(compiler: Compiler, **kwargs: object) -> Matcher:
    return compile_structured_output(StructuredOutputsParams(**kwargs), compiler)  # type: ignore[arg-type]


def expected_tokens(compiler: Compiler, texts: list[str], before: bytes) -> set[int]:
    """Return the tokens that continue the text towards one of the texts, or end there."""
    tokenizer = compiler.tokenizer
    wholes = [text.encode() for text in texts]
    result = set()
    for token in set(range(len(tokenizer))) - tokenizer.special_ids:
        message = before + tokenizer.token_bytes(token)
        if message != before and any(complete.startswith(message) for complete in wholes):
            result.add(token)
    return result | (compiler.ends if before in wholes else set())


CHOICES = ["yes", "yes, sir", 'no "quotes" \\ or / lines\n', "é€😀", "\x01", "  two", "-"]


@pytest.mark.parametrize("text", CHOICES)
def test_choice_allows_prefixes_of_the_choices(compiler: Compiler, text: str) -> None:
    following = matcher(compiler, choice=CHOICES)
    before = b""
    for token in compiler.tokenizer.encode(text, add_special_tokens=False):
        assert allowed(masks_of(following)[0]) == expected_tokens(compiler, CHOICES, before)
        following.accept([token])
        before += compiler.tokenizer.token_bytes(token)
    assert before.decode() == text
    assert allowed(masks_of(following)[0]) == expected_tokens(compiler, CHOICES, before)


PATTERN = r"(ab|[0-9]{1,3}x?)+;"
ALPHABET = "ab0189x;"


def test_regex_allows_prefixes_of_full_matches(compiler: Compiler) -> None:
    """Compare with re on all short continuations of a text."""
    ends = ["", ";", "b;", "x;", "0;", "b0;"]
    tokenizer = compiler.tokenizer
    one = {c: tokenizer.encode(c, add_special_tokens=False) for c in ALPHABET}

    def leads(text: str) -> bool:
        return any(re.fullmatch(PATTERN, text + end) for end in ends)

    for text in ("", "a", "ab", "ab01", "ab018", "9x", "9xab;", "001x0"):
        following = matcher(compiler, regex=PATTERN)
        following.accept([token for c in text for token in one[c]])
        result = allowed(masks_of(following)[0])
        assert following.fault is None
        for token in range(len(tokenizer)):
            message = tokenizer.token_bytes(token)
            fits = message.isascii() and bool(message) and leads(text + message.decode())
            assert (token in result) == (fits and token not in tokenizer.special_ids) or (
                token in compiler.ends
            )
        assert (compiler.ends <= result) == bool(re.fullmatch(PATTERN, text))


def test_masks_after_drafts_equal_masks_of_accepted_tokens(compiler: Compiler) -> None:
    """Forbidden drafts and ends are among them; the matcher keeps no draft."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "number"}}}
    text = '{"name": "a b", "n": -12.5}'
    tokens = compiler.tokenizer.encode(text, add_special_tokens=False)
    stepped = matcher(compiler, json=schema)
    masks = []
    for token in tokens:
        masks += masks_of(stepped)
        stepped.accept([token])
    end = min(compiler.ends)
    line = [*tokens, end, 5]
    masks += masks_of(stepped)
    masks += [every_token(compiler)] * 2
    for at in range(len(tokens)):
        copy_ahead = matcher(compiler, json=schema)
        copy_ahead.accept(tokens[:at])
        wrong = next(t for t in range(4000) if t not in allowed(masks[at + 1]))
        lost = next(t for t in range(4000) if t not in allowed(masks[at]))
        for drafts in (line[at : at + 4], [tokens[at], wrong, *tokens[at + 2 :]], [lost], []):
            result = masks_of(copy_ahead, drafts)
            legal = 1 + sum(1 for _ in result[1:])
            assert result == masks[at : at + legal]
            assert legal - 1 <= len(drafts)
        assert len(masks_of(copy_ahead, line[at : at + 3])) == 4
        assert copy_ahead.accepted == at


SOURCES = {
    "suffix": 'start: a b\na[suffix="; "]: /[a-z ]*/\nb: /[0-9]+/',
    "lazy": "start: a b\na[lazy]: /[a-z ]*end/\nb: /[0-9]+/",
    "and not": "start: A\nA: /[a-z]{3,9}/ & ~/.*ab.*/",
    "ambiguous": 'start: e\ne: e "+" e | e "*" e | /[0-9]+/ | "(" e ")"\n%ignore / +/',
    "schema": 'start: %json {"type": "object", "additionalProperties": {"type": "number"}}',
    "special": 'start: "a" <|im_start|> "b"+',
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_masks_are_independent_of_drafts_and_neighbours(compiler: Compiler, source: str) -> None:
    """Masks depend neither on earlier drafts nor on other answers of the step."""
    draw = random.Random(0)
    lines = []
    dues = []
    for _ in range(8):
        line, masks = random_answer(compiler, source, draw)
        lines.append(line)
        dues.append(masks)
    copy_ahead = [compiler.matcher(source) for _ in lines]
    for index in range(8):
        right = [line[index : index + draw.randrange(5)] for line in lines]
        drafts = [line + draw.choices(range(4000), k=draw.choice([0, 1])) for line in right]
        result = together(copy_ahead, drafts)
        for i, (following, line) in enumerate(zip(copy_ahead, lines, strict=True)):
            expected_tokens = dues[i][index : index + 1 + len(right[i])]
            assert result[i][: len(expected_tokens)] == expected_tokens
            following.accept(line[index : index + 1])
    assert all(following.fault is None for following in copy_ahead)


def random_answer(
    compiler: Compiler, source: str, draw: random.Random
) -> tuple[list[int], list[bytes]]:
    """Return up to 8 allowed tokens, and the masks before each and after them."""
    stepped = compiler.matcher(source)
    line: list[int] = []
    masks = masks_of(stepped)
    while len(line) < 8:
        fit = sorted(allowed(masks[-1]) - compiler.ends)
        if not fit:
            break
        line.append(draw.choice(fit))
        stepped.accept(line[-1:])
        masks += masks_of(stepped)
    return line, masks


def test_masks_after_the_end_allow_every_token(compiler: Compiler) -> None:
    following = matcher(compiler, choice=["-"])
    following.accept(compiler.tokenizer.encode("-", add_special_tokens=False))
    assert allowed(masks_of(following, [7, 8])[0]) == compiler.ends
    following.accept([min(compiler.ends), 5, 6])
    assert masks_of(following, [1]) == [every_token(compiler)] * 2
    assert following.fault is None
    assert following.accepted == 4


def test_forbidden_token_is_a_fault(compiler: Compiler) -> None:
    following = matcher(compiler, choice=["yes"])
    following.accept([5])
    assert following.fault is not None
    assert "too complex" in following.fault
    assert not any(masks_of(following)[0])


def test_ids_beyond_the_tokenizer_are_forbidden(compiler: Compiler) -> None:
    result = allowed(masks_of(matcher(compiler, regex="(.|\n)*"))[0])
    assert max(result) < len(compiler.tokenizer)
    assert len(result) > 4000
    assert not result & (compiler.tokenizer.special_ids - compiler.ends)


def test_answers_of_one_grammar_are_independent(compiler: Compiler) -> None:
    first = matcher(compiler, choice=["ab", "cd"])
    second = matcher(compiler, choice=["ab", "cd"])
    before = masks_of(second)
    first.accept(compiler.tokenizer.encode("a", add_special_tokens=False))
    assert masks_of(second) == before
    assert masks_of(first) != before


class PanickingMatcher:
    """Matcher that panics after three tokens, as llguidance 1.9.1 does for some grammars."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def consume_token(self, token: int) -> bool:
        self._taken += 1
        return not self.is_error() and bool(self._inner.consume_token(token))

    def consume_tokens(self, tokens: list[int]) -> bool:
        return all(self.consume_token(token) for token in tokens)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return len(tokens) if self.consume_tokens(tokens) else 0

    def deep_copy(self) -> "PanickingMatcher":
        copied = PanickingMatcher(self._inner.deep_copy())
        copied._taken = self._taken
        return copied

    def is_error(self) -> bool:
        return self._taken >= 3

    def get_error(self) -> str:
        return "a panic\n<backtrace>\nat line 7"


class SequentialExecutor:
    """LLExecutor for matchers that are not llguidance's own."""

    def unsafe_compute_mask_ptr(
        self, jobs: list[tuple[Any, int]], address: int, size: int, count: int
    ) -> None:
        drafted = [(matcher, index, []) for matcher, index in jobs]
        self.unsafe_compute_mask_ptr_with_draft_token(drafted, address, size, count)

    def unsafe_compute_mask_ptr_with_draft_token(
        self, jobs: list[tuple[Any, int, list[int]]], address: int, size: int, count: int
    ) -> None:
        memory = (ctypes.c_char * (size * count)).from_address(address)
        for matcher, index, drafts in jobs:
            for at in range(index, index + 1 + len(drafts)):
                memory[at * size : (at + 1) * size] = matcher.compute_bitmask()[:size]
                if at < index + len(drafts) and not matcher.try_consume_tokens(
                    [drafts[at - index]]
                ):
                    break


def test_panicking_matcher_does_not_affect_others(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "start: /[a-z ]+/"
    spelled = [compiler.tokenizer.token_bytes(token) for token in range(4000)]
    line = [spelled.index(text) for text in (b"label", b"turtle", b"    ")]
    other = compiler.matcher(source)
    expected_tokens = masks_of(other)
    compiled = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda arguments: PanickingMatcher(compiled(arguments))
    )
    monkeypatch.setitem(vars(compiler), "_threads", SequentialExecutor())
    breaks = compiler.matcher(source)
    drafted = masks_of(breaks, line)
    assert len(drafted) == 4
    assert any(drafted[-2]) and not any(drafted[-1])
    assert breaks.fault is None, "a draft may never be accepted"
    assert masks_of(breaks) == masks_of(other) == expected_tokens
    breaks.accept(line)
    assert not any(masks_of(breaks)[0])
    assert breaks.fault is not None
    assert "panic" in breaks.fault
    assert "backtrace" not in breaks.fault
    assert masks_of(other) == expected_tokens


def test_known_grammar_is_compiled_lazily(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = 'start: "known"'
    first = compiler.matcher(source)
    expected_tokens = masks_of(first)
    created = []
    compiled = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda arguments: created.append(arguments) or compiled(arguments)
    )
    second = compiler.matcher(source)
    assert masks_of(second) == expected_tokens
    assert created == []
    tokens = compiler.tokenizer.encode("known", add_special_tokens=False)
    assert masks_of(second, tokens) == masks_of(first, tokens)
    recipe = GrammarRecipe(source)
    assert created == [recipe] * 2, "each for itself, and none of them before"
    compiler.grammar(recipe).prepare()
    assert created == [recipe] * 3
    compiler.matcher(source, ROW_ITEMS - 1)
    assert created[3:] == [GrammarRecipe(source, ROW_ITEMS - 1)]


def test_first_masks_cache_is_bounded() -> None:
    known = FirstMasks(3, 1000)
    for number in range(5):
        known.put(GrammarRecipe(f"grammar {number}"), bytes(10))
        assert known.get(GrammarRecipe("grammar 0")) is not None or number > 3
        known.get(GrammarRecipe("grammar 1"))
    assert len(known) == 3
    assert known.get(GrammarRecipe("grammar 1")) is not None
    known.put(GrammarRecipe("x" * 920), bytes(50))
    assert known.get(GrammarRecipe("grammar 1")) is not None
    assert len(known) == 2
    assert known.size == 970 + 19
    known.put(GrammarRecipe("y" * 2000), bytes(50))
    assert (len(known), known.size) == (0, 0)


def test_drafts_do_not_use_up_lexer_states(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts add states to a lexer. At its limit a fresh lexer replaces it, so only the answer
    itself can reach the limit."""
    states = 60
    created = []

    def limited(recipe: GrammarRecipe) -> LLMatcher:
        created.append(recipe)
        limits = LLParserLimits(max_lexer_states=states, verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(recipe.source)
        return LLMatcher(compiler._tokens(), grammar, log_level=0, limits=limits)

    monkeypatch.setattr(compiler, "_compile", limited)
    source = "start: /(a|b)*a(a|b){9}x/"
    one = {text: compiler.tokenizer.encode(text, add_special_tokens=False)[0] for text in "ab"}
    line = [one[text] for text in "abba"]
    alone = compiler.matcher(source)
    led = compiler.matcher(source)
    compiled = len(created)
    draw = random.Random(0)
    for token in line:
        for _ in range(12):
            masks_of(led, [one[draw.choice("ab")] for _ in range(7)])
        assert masks_of(led) == masks_of(alone)
        led.accept([token])
        alone.accept([token])
    assert led.fault is None
    assert alone.fault is None
    assert len(created) > compiled + 2, "the lexer that was led along drafts was given up"


@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "((a{100}){100}){100}", "(.*a){900}.*"])
def test_too_large_regex_is_refused_or_ends(compiler: Compiler, regex: str) -> None:
    try:
        following = compiler.matcher(f"start: /{regex}/")
    except GrammarFault:
        return
    masks_of(following)
    assert following.fault is None


def test_masks_are_written_within_bounds(compiler: Compiler) -> None:
    """llguidance writes to an address without bounds checks."""
    size = compiler.mask_bytes
    following = matcher(compiler, regex="[a-z]+")
    following.accept(compiler.tokenizer.encode("a", add_special_tokens=False))
    memory = bytearray(3 * size)
    for shape, first in (([3, size], 1), ([3, size], 3), ([6, size // 2], 0)):
        view = memoryview(memory)[: shape[0] * shape[1]].cast("B", shape=shape)
        with pytest.raises(ValueError, match="allowed: "):
            compiler.fill([GrammarMasks(following, [5, 6], first)], view)
    assert not any(memory)


END = 3000
BEGIN = 3001


@pytest.mark.parametrize("opened", [True, False], ids=["by the prompt", "by the answer"])
def test_grammar_starts_after_reasoning(compiler: Compiler, opened: bool) -> None:
    bound = matcher(compiler, choice=["yes", ""])
    content = compiler.tokenizer.encode("yes", add_special_tokens=False)
    masks = masks_of(bound, content)
    everything = every_token(compiler)
    begin = None if opened else BEGIN
    kept = AfterReasoning(matcher(compiler, choice=["yes", ""]), END, begin)
    if not opened:
        assert allowed(masks_of(kept)[0]) == allowed(masks[0]) | {BEGIN}
        drafted = masks_of(kept, [BEGIN, 5, END, *content])
        assert allowed(drafted[0]) == allowed(masks[0]) | {BEGIN}
        assert drafted[1:] == [everything, everything, *masks]
        kept.accept([BEGIN])
    assert masks_of(kept, [5, 6]) == [everything] * 3
    assert masks_of(kept, [5, END]) == [everything, everything, masks[0]]
    assert masks_of(kept, [5, END, *content]) == [everything, everything, *masks]
    kept.accept([5, END])
    assert masks_of(kept, content) == masks
    kept.accept(content)
    assert masks_of(kept) == masks[-1:]
    assert kept.accepted == len(content) + 2 + (not opened)


def test_answer_does_not_end_inside_of_reasoning(compiler: Compiler) -> None:
    """An answer that ended there had no content, although a form was required.

    https://github.com/sgl-project/sglang/issues/37645
    https://github.com/vllm-project/vllm/issues/53255
    """
    kept = AfterReasoning(matcher(compiler, choice=["yes"]), END, None)
    goes_on = set(range(compiler.mask_bytes * 8)) - compiler.ends
    masks = masks_of(kept, [5, END])
    assert [allowed(mask) for mask in masks[:2]] == [goes_on, goes_on]
    assert masks[2] == masks_of(matcher(compiler, choice=["yes"]))[0]
    kept.accept([5])
    assert allowed(masks_of(kept)[0]) == goes_on


def test_answer_may_omit_reasoning(compiler: Compiler) -> None:
    kept = AfterReasoning(matcher(compiler, choice=["yes"]), END, BEGIN)
    content = compiler.tokenizer.encode("yes", add_special_tokens=False)
    masks = masks_of(matcher(compiler, choice=["yes"]), content)
    assert masks_of(kept, content)[1:] == masks[1:]
    kept.accept(content[:1])
    assert masks_of(kept, content[1:]) == masks[1:]


@pytest.mark.parametrize("reasons", [False, True])
def test_recipe_recreates_the_grammar(compiler: Compiler, reasons: bool) -> None:
    """A pickled recipe works in another process, and has no accepted tokens."""
    first: Grammar = matcher(compiler, regex="[a-c]{2,5}x")
    if reasons:
        first = AfterReasoning(matcher(compiler, choice=["yes"]), END, BEGIN)
    masks = masks_of(first)
    first.accept(compiler.tokenizer.encode("a", add_special_tokens=False))
    other = Compiler(compiler.tokenizer, compiler.vocab, compiler.ends)
    other.prepare()
    again = other.grammar(pickle.loads(pickle.dumps(first.recipe)))
    assert again.accepted == 0 and masks_of(again) == masks
    assert again.recipe == first.recipe and type(again) is type(first)
    fresh = first.fresh()
    assert fresh.accepted == 0 and masks_of(fresh) == masks
    assert first.accepted == 1, "the first one keeps its tokens"


def test_rolled_back_draft_leaves_no_trace(compiler: Compiler) -> None:
    """llguidance 1.9.1 caches results of rolled-back tokens, here an object's next key for an
    array."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    encode = compiler.tokenizer.encode
    answer = encode('{"n": 12, "-18-19"                             : [0')
    (after,) = encode("]\n")
    (comma,) = encode(",\n")
    (blanks,) = encode("       ")
    form = {"json": schema, "whitespace_pattern": r"[\x20\x0A\x0D\x09]+"}
    arguments = matcher(compiler, **form)
    arguments.accept(answer)
    masks_of(arguments, [comma])
    arguments.accept([after])
    result = masks_of(arguments, [blanks])
    fresh = matcher(compiler, **form)
    fresh.accept([*answer, after])
    assert result[0] == masks_of(fresh)[0]
    fresh.accept([blanks])
    assert result[1] == masks_of(fresh)[0]
