"""Grammars of answers, by llguidance: one matcher per answer.

Everything that is known of llguidance stands here. Masks are a function of the answer's tokens
alone, but for llguidance's own limits (LLParserLimits), at which an answer ends with an error.
"""

import ctypes
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, Protocol

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from lockstep.scheduling.grammar import Fill, Grammar, Wanted
from lockstep.text.json_numbers import JsonReader, JsonState, NumberLimit
from lockstep.text.tokenizer import Tokenizer

LEXER_FUEL = 200_000
"""llguidance's steps to build a lexer: about 0.1 s."""
ROW_ITEMS = 2000
"""llguidance's default of the items that its parser may have at a place of the answer."""
WRITTEN_ROW_ITEMS = 500
"""Of grammars that a client has written, which may be ambiguous: the work for an answer grows with
the cube of this, 0.4 s where it is 500 and 27 s where it is 2,000."""
WORD_BITS = 32
"""Tokens of a word of a mask."""
UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""Where one text alone may come, llguidance lets only one spelling of it in tokens come, unless it
is told not to. So every token may come that leads to a text of the grammar, and no other."""
MOST_THREADS = 16
"""Answers whose masks are made at the same time."""
MOST_KNOWN = 256
"""Grammars that are remembered as ones that can be compiled."""
MOST_KNOWN_BYTES = 16 << 20
"""Of their texts and their first masks."""
SLICES = ("[a-z]+", "[A-Za-z]+", "[a-z ]+", "[A-Za-z ]+")
"""Beside llguidance's own: tokens that come together where a grammar allows all text of them. Words
of most vocabularies begin with a blank."""
MAX_READERS = 16
"""Readers of JSON that are kept: one for each set of texts that introduce it."""
EXCERPT = re.compile(r"\s*(\d+ \||\^)")
"""Lines of a grammar that llguidance shows, and the mark under one."""
OF_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
"""Where a schema stands in a grammar, which its sender has not written."""
TOO_COMPLEX = (
    "the grammar is too complex to go on with: {reason}. Earlier tokens are kept. Simplify the "
    "grammar."
)


class GrammarFault(ValueError):
    """A grammar that cannot be compiled, or that no text matches."""


@dataclass(frozen=True)
class GrammarRecipe:
    """Plain data of which Compiler.grammar makes a grammar, in another process too.

    source: in llguidance's Lark. row_items: maximum items that its parser may have at a place.
    json_after: texts that introduce JSON, whose numbers are limited (lockstep.text.json_numbers);
    empty where the whole answer is JSON, None where no part of it is known to be. reasoning_end and
    reasoning_begin: AfterReasoning's tokens, None where the grammar binds the answer from its first
    token on.
    """

    source: str
    row_items: int = ROW_ITEMS
    json_after: tuple[str, ...] | None = None
    reasoning_end: int | None = None
    reasoning_begin: int | None = None


class _Vocabulary:
    """A tokenizer as llguidance wants it: the bytes of every token of the model."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int]) -> None:
        known = min(len(tokenizer), vocab)
        self.tokens = [tokenizer.token_bytes(token) for token in range(known)]
        self.tokens += [b""] * (vocab - known)
        self.eos_token_id = ends[0]
        self.bos_token_id = None
        special = {token for token in tokenizer.special_ids if token < vocab}
        self.special_token_ids = sorted(special.union(ends))
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        spelled = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(spelled, add_special_tokens=False)


class Compiler:
    """Makes grammars over the tokens of one model; may be called from any thread.

    vocab: tokens that the model knows, at least the tokenizer's; ends: those that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.ends = ends
        self._building = threading.Lock()
        self._tree: LLTokenizer | None = None
        # Of the whole vocabulary once the first grammar is compiled, which every mask follows.
        self.numbers = NumberLimit(())
        self.json_reader = lru_cache(MAX_READERS)(JsonReader)
        self._known = FirstMasks(MOST_KNOWN, MOST_KNOWN_BYTES)

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask: a bit per token, in whole words."""
        return -(-self.vocab // WORD_BITS) * WORD_BITS // 8

    def matcher(
        self,
        source: str,
        row_items: int = ROW_ITEMS,
        json_after: tuple[str, ...] | None = None,
    ) -> "Matcher":
        """Return the matcher of a grammar; the arguments are those of a GrammarRecipe.

        Raises GrammarFault.

        Each answer has a compiled grammar of its own, made when it is first needed, about 1 ms:
        copies of one share its lexer and the lock around it, so that answers would wait for each
        other, and one would feel the limits that another met. What a first mask shows, that it can
        be compiled and that some text matches, is looked at once, and what was compiled for that is
        not kept: what only waits, such as a server's side of a request, would hold up to 10 MB.
        """
        recipe = GrammarRecipe(source, row_items, json_after)
        first, _ = self._first_mask(recipe)
        return Matcher(recipe, first, lambda: self._compile(recipe), self)

    def grammar(self, recipe: GrammarRecipe) -> "Matcher | AfterReasoning":
        """A fresh grammar by its recipe, for an answer that is to be made. Raises GrammarFault."""
        plain = replace(recipe, reasoning_end=None, reasoning_begin=None)
        first, made = self._first_mask(plain)
        matcher = Matcher(plain, first, lambda: self._compile(plain), self, made)
        if recipe.reasoning_end is None:
            return matcher
        return AfterReasoning(matcher, recipe.reasoning_end, recipe.reasoning_begin)

    def _first_mask(self, recipe: GrammarRecipe) -> tuple[bytes, LLMatcher | None]:
        """The mask of an answer's first token; the compiled grammar, where that took one."""
        first = self._known.get(recipe)
        if first is not None:
            return first, None
        made = self._compile(recipe)
        first = made.compute_bitmask()[: self.mask_bytes]
        if made.is_error() or not any(first):
            reason = first_line(made.get_error())
            never = reason in ("", "NoExtensionBias")
            raise GrammarFault("no text matches it" if never else reason)
        self._known.put(recipe, first)
        return first, made

    def prepare(self) -> None:
        """Build now what the first grammar would have to wait for: a second for 250,000 tokens."""
        self._tokens()

    def fill(self, wanted: Sequence[Wanted["Compiled"]], memory: memoryview) -> None:
        """Writes the masks of answers held to grammars of this compiler: see Fill. Raises
        ValueError where the memory is not for masks of this vocabulary, or has not as many."""
        masks = Masks(memory, self.mask_bytes)
        jobs = [job for one in wanted for job in one.grammar.begin(one.drafts, one.first, masks)]
        self._compute(jobs, masks)
        for job in jobs:
            job.matcher.finish(job, masks)

    def _compute(self, jobs: Sequence["Job"], masks: "Masks") -> None:
        """Leads each along its drafts, and writes a mask in front of each and behind them."""
        alone = [(job.ahead, job.first) for job in jobs if not job.drafts]
        along = [(job.ahead, job.first, job.drafts) for job in jobs if job.drafts]
        masks.require(max((job.first + len(job.drafts) for job in jobs), default=0))
        if alone:
            self._threads.unsafe_compute_mask_ptr(alone, *masks.place)
        if along:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(along, *masks.place)

    @cached_property
    def _threads(self) -> LLExecutor:
        return LLExecutor(min(MOST_THREADS, os.cpu_count() or 1))

    def fault_of(self, source: str) -> str | None:
        """Why a grammar in llguidance's Lark cannot be compiled; None if it can."""
        return first_line(self._compile(GrammarRecipe(source)).get_error()) or None

    def _compile(self, recipe: GrammarRecipe) -> LLMatcher:
        limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            max_items_in_row=recipe.row_items,
            verbose_errors=False,
        )
        grammar = LLMatcher.grammar_from_lark(recipe.source + UNFORCED)
        return LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)

    def _tokens(self) -> LLTokenizer:
        """Return the vocabulary's tree, built with its NumberLimit at the first call."""
        with self._building:
            if self._tree is None:
                ends = sorted(self.ends)
                vocabulary = _Vocabulary(self.tokenizer, self.vocab, ends)
                self.numbers = NumberLimit(vocabulary.tokens)
                wrapped = TokenizerWrapper(vocabulary)
                blanks, *others = LLTokenizer.general_slices()
                slices = [blanks, *SLICES, *others]
                self._tree = LLTokenizer(wrapped, self.vocab, ends, slices)
            return self._tree


class FirstMasks:
    """Grammars that could be compiled, by their recipe, and the mask of an answer's first token.

    Bounded in number and in bytes; the one that was asked for longest ago goes first.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.size = 0
        self._most = most
        self._most_bytes = most_bytes
        self._masks: OrderedDict[GrammarRecipe, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._masks)

    def get(self, recipe: GrammarRecipe) -> bytes | None:
        """The mask; None where the grammar is not known."""
        with self._lock:
            if recipe in self._masks:
                self._masks.move_to_end(recipe)
            return self._masks.get(recipe)

    def put(self, recipe: GrammarRecipe, mask: bytes) -> None:
        """Remembers a grammar; others make room."""
        with self._lock:
            if self._masks.setdefault(recipe, mask) is not mask:
                return
            self.size += len(recipe.source) + len(mask)
            while len(self._masks) > self._most or self.size > self._most_bytes:
                recipe, mask = self._masks.popitem(last=False)
                self.size -= len(recipe.source) + len(mask)


def first_line(reason: str) -> str:
    """What a message of llguidance says, in one line that is not long."""
    said = reason.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    lines = [line.strip() for line in said.splitlines() if not EXCERPT.match(line)]
    told = " ".join(line for line in lines if line)
    return OF_SCHEMA.sub("", told)[:300]


class Masks:
    """The masks of a step. memory [N, size / itemsize], which can be written; size: bytes of a
    mask. Raises ValueError."""

    def __init__(self, memory: memoryview, size: int) -> None:
        strides = memory.strides or ()
        if strides[:1] != (size,):
            raise ValueError(f"masks of {strides} bytes; allowed: of {size}, as the vocabulary has")
        self.size = size
        self.count = len(memory)
        self._memory = memory.cast("B")

    def require(self, place: int) -> None:
        """Raises ValueError where there is no such place: what writes there checks no bounds."""
        if place >= self.count:
            raise ValueError(f"mask {place} of a step; allowed: 0 to {self.count - 1}")

    @property
    def place(self) -> tuple[int, int, int]:
        """The address of the first, bytes of one, and how many there are."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return address, self.size, self.count

    def put(self, place: int, mask: bytes) -> None:
        """Writes a mask."""
        self._memory[place * self.size : (place + 1) * self.size] = mask[: self.size]

    def allow(self, place: int, token: int) -> None:
        """Lets a token come in a mask that is written."""
        self._memory[place * self.size + token // 8] |= 1 << token % 8

    def only(self, place: int, token: int) -> None:
        """Write a mask that allows one token."""
        self.put(place, bytes(self.size))
        self.allow(place, token)

    def forbid(self, index: int, tokens: int) -> None:
        """Remove tokens from a mask, unless it would become empty. tokens: bit i for token i.

        Text that the grammar requires, such as the digits of a bound, comes in spite of a limit.
        """
        part = self._memory[index * self.size : (index + 1) * self.size]
        rest = int.from_bytes(part, "little") & ~tokens
        if rest:
            part[:] = rest.to_bytes(self.size, "little")

    def all(self, places: Sequence[int]) -> None:
        """Lets every token come in each of these masks."""
        for place in places:
            self.put(place, b"\xff" * self.size)


@dataclass(frozen=True)
class Job:
    """Masks that are to be computed: behind what `ahead` was led along, then behind each of the
    drafts. ahead: a copy that nobody else has; before: drafts that it was led along behind the
    answer; first: the first mask's place."""

    matcher: "Matcher"
    ahead: LLMatcher
    before: list[int]
    drafts: list[int]
    first: int


def _mask(inner: LLMatcher, tokens: list[int]) -> bytes | None:
    """The mask behind these tokens; None where one of them may not come; b"" where the grammar
    fails."""
    if inner.try_consume_tokens(tokens) < len(tokens) and not inner.is_error():
        return None
    mask = inner.compute_bitmask()
    return b"" if inner.is_error() else mask


class Matcher:
    """Follows one answer through a grammar: lockstep.scheduling.grammar.Grammar. first: the mask of
    its first token; make: compiles it, which is done when it is first needed; made: compiled.

    An end token is allowed where the grammar may end. Whatever comes behind it is of no matter.
    Drafts are tried on copies, and nothing is taken back: llguidance 1.9.1 keeps what it found
    behind tokens that were taken back, and may give it for others.
    """

    def __init__(
        self,
        recipe: GrammarRecipe,
        first: bytes,
        make: Callable[[], LLMatcher],
        compiler: Compiler,
        made: LLMatcher | None = None,
    ) -> None:
        self.fault: str | None = None
        self.recipe = recipe
        self.fill: Fill = compiler.fill
        self._first = first
        self._make = make
        self._ends = compiler.ends
        self._made = made
        self._taken = 0  # tokens of the answer that the compiled grammar was led along
        self._tokens: list[int] = []
        self._over = False
        self.is_free = False
        self._json = compiler.json_reader(recipe.json_after)
        self._state = self._json.start
        self._token_bytes = compiler.tokenizer.token_bytes
        self._compiler = compiler

    def prepare(self) -> LLMatcher:
        """Compiles the grammar now, if it is not."""
        self._made = self._made or self._make()
        return self._made

    @property
    def accepted(self) -> int:
        """Tokens of the answer that it has taken."""
        return len(self._tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        for token in tokens:
            self._tokens.append(token)
            self._over = self._over or token in self._ends
            if not self._over and self.fault is None:
                self._lead()
                self._state = self._read(self._state, token)

    def begin(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """Writes the masks that are known, from the place `first` on, and says which are to be
        computed. Where the grammar fails no token is allowed."""
        real = list(takewhile(lambda token: token not in self._ends, drafts))
        bound = 0 if self._over else 1 + len(real)
        masks.all(range(first + bound, first + 1 + len(drafts)))
        if self._over:
            return []
        if self.fault is not None:
            masks.put(first, bytes(masks.size))
            return []
        known = 0 if self._tokens else 1
        if known:
            masks.put(first, self._first)
            self._limit_numbers(first, self._state, masks)
        if known > len(real):
            return []
        ahead = self.prepare().deep_copy()
        if ahead.try_consume_tokens(real[:known]) < known and not ahead.is_error():
            return []
        return [Job(self, ahead, real[:known], real[known:], first + known)]

    def finish(self, job: Job, masks: Masks) -> None:
        """Complete the masks that were computed: limit their numbers."""
        if job.ahead.is_error():
            self._compute_alone(job, masks)
        state = self._state
        for token in job.before:
            state = self._read(state, token)
        self._limit_numbers(job.first, state, masks)
        for index, token in enumerate(job.drafts, job.first + 1):
            state = self._read(state, token)
            self._limit_numbers(index, state, masks)

    def _read(self, state: JsonState, token: int) -> JsonState:
        """Return the position in the answer's JSON after a token."""
        return self._json.read(state, self._token_bytes(token))

    def _limit_numbers(self, index: int, state: JsonState, masks: Masks) -> None:
        """Remove from a mask the tokens that would make a number of JSON too long."""
        tokens = self._compiler.numbers.forbidden(state)
        if tokens:
            masks.forbid(index, tokens)

    def _compute_alone(self, job: Job, masks: Masks) -> None:
        """Compute the masks of a job by fresh grammars, which have read nothing else.

        A limit of llguidance that a grammar met along other drafts is not this answer's.
        """
        for count in range(1 + len(job.drafts)):
            fresh = self._make()
            drafts = [*job.before, *job.drafts[:count]]
            mask = _mask(fresh, [*self._tokens, *drafts])
            if mask is None:
                break
            masks.put(job.first + count, mask or bytes(masks.size))
            if mask == b"" and not drafts:
                self._fail(fresh)
            if mask == b"":
                break

    def _lead(self) -> None:
        """Leads the compiled grammar along the answer; where it fails, a fresh one, once."""
        for _ in range(2):
            inner = self.prepare()
            if not inner.is_error() and inner.consume_tokens(self._tokens[self._taken :]):
                self._taken = len(self._tokens)
                return
            self._made = None
            self._taken = 0
        self._fail(inner)

    def _fail(self, failed: LLMatcher) -> None:
        self.fault = TOO_COMPLEX.format(reason=first_line(failed.get_error()))


class AfterReasoning:
    """A grammar that binds what comes behind the reasoning, which is free text.

    end: the token that ends reasoning. begin: the token that begins it, where the answer itself may
    say so with its first token; None where the prompt has begun it.
    """

    def __init__(self, inner: Matcher, end: int, begin: int | None) -> None:
        self.accepted = 0
        self.is_free = False
        self.recipe = replace(inner.recipe, reasoning_end=end, reasoning_begin=begin)
        self.fill = inner.fill
        self._inner = inner
        self._end = end
        self._begin = begin
        self._reasons = begin is None

    def prepare(self) -> None:
        """Compiles the grammar now, if it is not."""
        self._inner.prepare()

    @property
    def fault(self) -> str | None:
        """Why no token is allowed any more."""
        return self._inner.fault

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        for token in tokens:
            first = self.accepted == 0
            self.accepted += 1
            if self._reasons:
                self._reasons = token != self._end
            elif first and token == self._begin:
                self._reasons = True
            else:
                self._inner.accept([token])

    def begin(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """See Matcher."""
        if self._reasons:
            return self._reasoning(drafts, first, masks)
        if self.accepted or self._begin is None:
            return self._inner.begin(drafts, first, masks)
        begins = list(drafts[:1]) == [self._begin]
        jobs = self._inner.begin([] if begins else drafts, first, masks)
        masks.allow(first, self._begin)
        if begins:
            jobs += self._reasoning(drafts[1:], first + 1, masks)
        return jobs

    def _reasoning(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """The masks from a place inside of reasoning on."""
        free = 1 + sum(1 for _ in takewhile(lambda token: token != self._end, drafts))
        masks.all(range(first, first + free))
        if free > len(drafts):
            return []
        return self._inner.begin(drafts[free:], first + free, masks)


class Compiled(Grammar, Protocol):
    """A grammar whose masks Compiler.fill writes."""

    @property
    def recipe(self) -> Any: ...

    def prepare(self) -> object:
        """Compile what is not compiled yet."""
        ...

    def begin(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """See Matcher."""
        ...
