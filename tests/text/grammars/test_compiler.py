"""Matchers against Python's re: every token that may come, at every place, and nothing else."""

import ctypes
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits

from lockstep.sampling_params import StructuredOutputsParams
from lockstep.scheduling.grammar import Grammar, Wanted
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
"""Ids of the model that the tokenizer lacks: no grammar lets them come."""


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = Tokenizer(MODEL)
    return Compiler(tokenizer, len(tokenizer) + EXTRA, tokenizer.eos_ids)


def allowed(mask: bytes) -> set[int]:
    return {at * 8 + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def matcher(compiler: Compiler, **wanted: object) -> Matcher:
    return compile_structured_output(StructuredOutputsParams(**wanted), compiler)  # type: ignore[arg-type]


def due(compiler: Compiler, texts: list[str], before: bytes) -> set[int]:
    """The tokens that lead from what is said towards one of the texts, or end there."""
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
def test_a_choice_allows_what_leads_to_one_of_them(compiler: Compiler, text: str) -> None:
    following = matcher(compiler, choice=CHOICES)
    before = b""
    for token in compiler.tokenizer.encode(text, add_special_tokens=False):
        assert allowed(masks_of(following)[0]) == due(compiler, CHOICES, before)
        following.accept([token])
        before += compiler.tokenizer.token_bytes(token)
    assert before.decode() == text
    assert allowed(masks_of(following)[0]) == due(compiler, CHOICES, before)


PATTERN = r"(ab|[0-9]{1,3}x?)+;"
ALPHABET = "ab0189x;"


def test_a_regex_allows_what_leads_to_a_full_match(compiler: Compiler) -> None:
    """Compare with re, by trying all short continuations of a text."""
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


def test_masks_behind_drafts_are_those_of_the_tokens(compiler: Compiler) -> None:
    """Masks along drafts, illegal ones among them, and ends; nothing of the drafts is kept."""
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
def test_random_answers_along_random_drafts(compiler: Compiler, source: str) -> None:
    """Masks depend neither on drafts tried before nor on other answers of the step."""
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
            due = dues[i][index : index + 1 + len(right[i])]
            assert result[i][: len(due)] == due
            following.accept(line[index : index + 1])
    assert all(following.fault is None for following in copy_ahead)


def random_answer(
    compiler: Compiler, source: str, draw: random.Random
) -> tuple[list[int], list[bytes]]:
    """Tokens that may come, up to 8, and the masks in front of each and behind them."""
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


def test_nothing_matters_behind_the_end(compiler: Compiler) -> None:
    following = matcher(compiler, choice=["-"])
    following.accept(compiler.tokenizer.encode("-", add_special_tokens=False))
    assert allowed(masks_of(following, [7, 8])[0]) == compiler.ends
    following.accept([min(compiler.ends), 5, 6])
    assert masks_of(following, [1]) == [every_token(compiler)] * 2
    assert following.fault is None
    assert following.accepted == 4


def test_a_token_that_is_not_allowed_is_a_fault(compiler: Compiler) -> None:
    following = matcher(compiler, choice=["yes"])
    following.accept([5])
    assert following.fault is not None
    assert "too complex" in following.fault
    assert not any(masks_of(following)[0])


def test_ids_beyond_the_tokenizer_never_come(compiler: Compiler) -> None:
    result = allowed(masks_of(matcher(compiler, regex="(.|\n)*"))[0])
    assert max(result) < len(compiler.tokenizer)
    assert len(result) > 4000
    assert not result & (compiler.tokenizer.special_ids - compiler.ends)


def test_two_answers_of_one_grammar_are_apart(compiler: Compiler) -> None:
    first = matcher(compiler, choice=["ab", "cd"])
    second = matcher(compiler, choice=["ab", "cd"])
    before = masks_of(second)
    first.accept(compiler.tokenizer.encode("a", add_special_tokens=False))
    assert masks_of(second) == before
    assert masks_of(first) != before


class Breaking:
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

    def deep_copy(self) -> "Breaking":
        copied = Breaking(self._inner.deep_copy())
        copied._taken = self._taken
        return copied

    def is_error(self) -> bool:
        return self._taken >= 3

    def get_error(self) -> str:
        return "a panic\n<backtrace>\nat line 7"


class OneByOne:
    """LLExecutor's part for matchers that are not llguidance's own."""

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


def test_a_matcher_that_breaks_leaves_others_alone(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "start: /[a-z ]+/"
    spelled = [compiler.tokenizer.token_bytes(token) for token in range(4000)]
    line = [spelled.index(text) for text in (b"label", b"turtle", b"    ")]
    other = compiler.matcher(source)
    due = masks_of(other)
    compiled = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda given: Breaking(compiled(given)))
    monkeypatch.setitem(vars(compiler), "_threads", OneByOne())
    breaks = compiler.matcher(source)
    drafted = masks_of(breaks, line)
    assert len(drafted) == 4
    assert any(drafted[-2]) and not any(drafted[-1])
    assert breaks.fault is None, "a draft may never be accepted"
    assert masks_of(breaks) == masks_of(other) == due
    breaks.accept(line)
    assert not any(masks_of(breaks)[0])
    assert breaks.fault is not None
    assert "panic" in breaks.fault
    assert "backtrace" not in breaks.fault
    assert masks_of(other) == due


def test_a_grammar_that_is_known_is_compiled_when_it_is_needed(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = 'start: "known"'
    first = compiler.matcher(source)
    due = masks_of(first)
    created = []
    compiled = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda given: created.append(given) or compiled(given)
    )
    second = compiler.matcher(source)
    assert masks_of(second) == due
    assert created == []
    tokens = compiler.tokenizer.encode("known", add_special_tokens=False)
    assert masks_of(second, tokens) == masks_of(first, tokens)
    recipe = GrammarRecipe(source)
    assert created == [recipe] * 2, "each for itself, and none of them before"
    compiler.grammar(recipe).prepare()
    assert created == [recipe] * 3
    compiler.matcher(source, ROW_ITEMS - 1)
    assert created[3:] == [GrammarRecipe(source, ROW_ITEMS - 1)]


def test_what_is_known_is_bounded() -> None:
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


def test_drafts_bring_an_answer_to_no_limit(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lexer that was led along drafts has more states; where that is too many, a fresh one goes
    on, so that the answer alone comes to the limit or does not."""
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
def test_what_is_too_large_is_refused_or_ends(compiler: Compiler, regex: str) -> None:
    try:
        following = compiler.matcher(f"start: /{regex}/")
    except GrammarFault:
        return
    masks_of(following)
    assert following.fault is None


def test_masks_are_written_nowhere_else(compiler: Compiler) -> None:
    """llguidance writes to an address, and looks at no bounds."""
    size = compiler.mask_bytes
    following = matcher(compiler, regex="[a-z]+")
    following.accept(compiler.tokenizer.encode("a", add_special_tokens=False))
    memory = bytearray(3 * size)
    for shape, first in (([3, size], 1), ([3, size], 3), ([6, size // 2], 0)):
        view = memoryview(memory)[: shape[0] * shape[1]].cast("B", shape=shape)
        with pytest.raises(ValueError, match="allowed: "):
            compiler.fill([Wanted(following, [5, 6], first)], view)
    assert not any(memory)


END = 3000
BEGIN = 3001


@pytest.mark.parametrize("opened", [True, False], ids=["by the prompt", "by the answer"])
def test_the_grammar_begins_behind_the_reasoning(compiler: Compiler, opened: bool) -> None:
    bound = matcher(compiler, choice=["yes"])
    content = compiler.tokenizer.encode("yes", add_special_tokens=False)
    masks = masks_of(bound, content)
    everything = every_token(compiler)
    begin = None if opened else BEGIN
    kept = AfterReasoning(matcher(compiler, choice=["yes"]), END, begin)
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


def test_an_answer_may_leave_reasoning_out(compiler: Compiler) -> None:
    kept = AfterReasoning(matcher(compiler, choice=["yes"]), END, BEGIN)
    content = compiler.tokenizer.encode("yes", add_special_tokens=False)
    masks = masks_of(matcher(compiler, choice=["yes"]), content)
    assert masks_of(kept, content)[1:] == masks[1:]
    kept.accept(content[:1])
    assert masks_of(kept, content[1:]) == masks[1:]


@pytest.mark.parametrize("reasons", [False, True])
def test_a_recipe_makes_the_grammar_anew(compiler: Compiler, reasons: bool) -> None:
    """In another process too: the recipe is pickled, and what was accepted is not part of it."""
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


def test_a_draft_that_did_not_come_leaves_no_trace(compiler: Compiler) -> None:
    """llguidance 1.9.1 caches results of rolled-back tokens, here an object's next key for an
    array."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    encode = compiler.tokenizer.encode
    answer = encode('{"n": 12, "-18-19"                             : [0')
    (after,) = encode("]\n")
    (comma,) = encode(",\n")
    (blanks,) = encode("       ")
    given = matcher(compiler, json=schema)
    given.accept(answer)
    masks_of(given, [comma])
    given.accept([after])
    result = masks_of(given, [blanks])
    fresh = matcher(compiler, json=schema)
    fresh.accept([*answer, after])
    assert result[0] == masks_of(fresh)[0]
    fresh.accept([blanks])
    assert result[1] == masks_of(fresh)[0]
