"""Compiled grammars of answers, on llguidance: one matcher per answer.

All knowledge of llguidance is in this file. Masks are a function of the answer's tokens alone,
except for llguidance's own limits (LLParserLimits): an answer that reaches one ends with an error.
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

from lockstep.scheduling.grammar import Fill, Grammar, GrammarMasks
from lockstep.text.grammars.number_limits import JsonReader, JsonState, NumberLimit
from lockstep.text.tokenizers.tokenizer import Tokenizer

LEXER_FUEL = 200_000
"""Maximum steps of llguidance to build a lexer, about 0.1 s."""
ROW_ITEMS = 2000
"""llguidance's default limit of parser items per position."""
WRITTEN_ROW_ITEMS = 500
"""Limit of parser items for grammars written by clients, which may be ambiguous. The time of an
answer grows with its cube: 0.4 s at 500, 27 s at 2,000."""
WORD_BITS = 32
"""Tokens per 32-bit word of a mask."""
UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""Option that turns off forced tokens. By default, if only one text may follow, llguidance allows
only one of its token spellings. With the option, every token is allowed that leads to a text of the
grammar."""
MAX_THREADS = 16
"""Maximum threads that compute masks."""
MAX_KNOWN = 256
"""Maximum grammars whose first mask is cached."""
MAX_KNOWN_BYTES = 16 << 20
"""Maximum bytes of the cached grammars' sources and first masks."""
SLICES = ("[a-z]+", "[A-Za-z]+", "[a-z ]+", "[A-Za-z ]+")
"""Token sets that llguidance treats as one where a grammar allows all of their text, in addition to
its own sets. Most words of a vocabulary begin with a blank."""
MAX_READERS = 16
"""Maximum cached JSON readers: one per set of texts that introduce JSON."""
EXCERPT = re.compile(r"\s*(\d+ \||\^)")
"""Source lines of a grammar in llguidance's messages, and the marker line below."""
OF_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
"""Prefix of llguidance's message that names a position in the generated grammar, which the client
has not written."""
TOO_COMPLEX = (
    "the grammar became too complex at this token: {reason}. The answer so far is valid. Simplify "
    "the grammar."
)


class GrammarFault(ValueError):
    """Error of a grammar that cannot be compiled, or that no text matches."""


@dataclass(frozen=True)
class GrammarRecipe:
    """Plain data from which Compiler.grammar builds a grammar, in any process.

    source: grammar in llguidance's Lark.
    row_items: maximum parser items per position.
    json_after: texts that introduce JSON, whose numbers are limited (see number_limits.py). Empty
    if the whole answer is JSON, None if no part of it is known to be.
    reasoning_end, reasoning_begin: tokens of AfterReasoning; None if the grammar binds the answer
    from its first token.
    """

    source: str
    row_items: int = ROW_ITEMS
    json_after: tuple[str, ...] | None = None
    reasoning_end: int | None = None
    reasoning_begin: int | None = None


class _Vocabulary:
    """Adapter of a tokenizer for llguidance: the bytes of every token of the model."""

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
    """Compiler of grammars for the vocabulary of one model. It is thread-safe.

    vocab: vocabulary size of the model, at least the tokenizer's.
    ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.ends = ends
        self._building = threading.Lock()
        self._tree: LLTokenizer | None = None
        # Replaced by the vocabulary's limits when the first grammar is compiled, before any mask.
        self.numbers = NumberLimit(())
        self.json_reader = lru_cache(MAX_READERS)(JsonReader)
        self._known = FirstMasks(MAX_KNOWN, MAX_KNOWN_BYTES)

    @property
    def mask_bytes(self) -> int:
        """Return the bytes of a mask: one bit per token, in whole 32-bit words."""
        return -(-self.vocab // WORD_BITS) * WORD_BITS // 8

    def matcher(
        self,
        source: str,
        row_items: int = ROW_ITEMS,
        json_after: tuple[str, ...] | None = None,
    ) -> "Matcher":
        """Return the matcher of a grammar. The arguments are those of a GrammarRecipe.

        Each answer gets its own compiled grammar, built at first use in about 1 ms: copies share a
        lexer and its lock, so that answers would wait for each other and would count towards each
        other's limits. The first mask shows that the grammar compiles and matches some text. It is
        computed once and cached. The compiled grammar is dropped, as a waiting request
        would keep up to 10 MB.

        Raises: GrammarFault.
        """
        recipe = GrammarRecipe(source, row_items, json_after)
        first, _ = self._first_mask(recipe)
        return Matcher(recipe, first, lambda: self._compile(recipe), self)

    def grammar(self, recipe: GrammarRecipe) -> "Matcher | AfterReasoning":
        """Return a new grammar from its recipe, for one answer. Raises GrammarFault."""
        plain = replace(recipe, reasoning_end=None, reasoning_begin=None)
        first, compiled = self._first_mask(plain)
        matcher = Matcher(plain, first, lambda: self._compile(plain), self, compiled)
        if recipe.reasoning_end is None:
            return matcher
        return AfterReasoning(matcher, recipe.reasoning_end, recipe.reasoning_begin)

    def _first_mask(self, recipe: GrammarRecipe) -> tuple[bytes, LLMatcher | None]:
        """Return the mask of the first token, and the grammar if it was compiled for it."""
        first = self._known.get(recipe)
        if first is not None:
            return first, None
        compiled = self._compile(recipe)
        first = compiled.compute_bitmask()[: self.mask_bytes]
        if compiled.is_error() or not any(first):
            reason = first_line(compiled.get_error())
            is_empty = reason in ("", "NoExtensionBias")
            raise GrammarFault("no text matches it" if is_empty else reason)
        self._known.put(recipe, first)
        return first, compiled

    def prepare(self) -> None:
        """Build the vocabulary's tree ahead of the first grammar: 1 s for 250,000 tokens."""
        self._tokens()

    def fill(self, requested: Sequence[GrammarMasks["Compiled"]], memory: memoryview) -> None:
        """Compute the masks of a step for grammars of this compiler (see Fill).

        Raises: ValueError if the memory does not have the shape of the masks.
        """
        masks = Masks(memory, self.mask_bytes)
        jobs = [job for one in requested for job in one.grammar.begin(one.drafts, one.first, masks)]
        self._compute(jobs, masks)
        for job in jobs:
            job.matcher.finish(job, masks)

    def _compute(self, jobs: Sequence["Job"], masks: "Masks") -> None:
        """Advance each grammar along its drafts; write one mask before each draft and one after the
        last."""
        without_drafts = [(job.advanced, job.first) for job in jobs if not job.drafts]
        with_drafts = [(job.advanced, job.first, job.drafts) for job in jobs if job.drafts]
        masks.require(max((job.first + len(job.drafts) for job in jobs), default=0))
        if without_drafts:
            self._threads.unsafe_compute_mask_ptr(without_drafts, *masks.buffer)
        if with_drafts:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *masks.buffer)

    @cached_property
    def _threads(self) -> LLExecutor:
        return LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))

    def fault_of(self, source: str) -> str | None:
        """Return why a Lark grammar cannot be compiled; None if it can."""
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
                blanks, *other_slices = LLTokenizer.general_slices()
                slices = [blanks, *SLICES, *other_slices]
                self._tree = LLTokenizer(wrapped, self.vocab, ends, slices)
            return self._tree


class FirstMasks:
    """LRU cache: the mask of an answer's first token by grammar recipe.

    It is bounded by the number of entries and by bytes.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.size = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._masks: OrderedDict[GrammarRecipe, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._masks)

    def get(self, recipe: GrammarRecipe) -> bytes | None:
        """Return the cached mask, or None."""
        with self._lock:
            if recipe in self._masks:
                self._masks.move_to_end(recipe)
            return self._masks.get(recipe)

    def put(self, recipe: GrammarRecipe, mask: bytes) -> None:
        """Add a grammar and evict the least recently used ones above the bounds."""
        with self._lock:
            if self._masks.setdefault(recipe, mask) is not mask:
                return
            self.size += len(recipe.source) + len(mask)
            while len(self._masks) > self._max_entries or self.size > self._max_bytes:
                recipe, mask = self._masks.popitem(last=False)
                self.size -= len(recipe.source) + len(mask)


def first_line(reason: str) -> str:
    """Return a message of llguidance in one line of at most 300 characters."""
    message = reason.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    lines = [line.strip() for line in message.splitlines() if not EXCERPT.match(line)]
    text = " ".join(line for line in lines if line)
    return OF_SCHEMA.sub("", text)[:300]


class Masks:
    """View of the masks of a step.

    memory [N, size / itemsize]: writable.
    size: bytes of a mask.
    Raises: ValueError.
    """

    def __init__(self, memory: memoryview, size: int) -> None:
        strides = memory.strides or ()
        if strides[:1] != (size,):
            raise ValueError(f"masks of {strides} bytes; allowed: of {size}, as the vocabulary has")
        self.size = size
        self.count = len(memory)
        self._memory = memory.cast("B")

    def require(self, index: int) -> None:
        """Raise ValueError if the mask's index is out of range: llguidance writes without bounds
        checks."""
        if index >= self.count:
            raise ValueError(f"mask {index} of a step; allowed: 0 to {self.count - 1}")

    @property
    def buffer(self) -> tuple[int, int, int]:
        """Return (address of the first mask, bytes of a mask, number of masks)."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return address, self.size, self.count

    def put(self, index: int, mask: bytes) -> None:
        """Write a mask."""
        self._memory[index * self.size : (index + 1) * self.size] = mask[: self.size]

    def allow(self, index: int, token: int) -> None:
        """Allow a token in a mask that is written already."""
        self._memory[index * self.size + token // 8] |= 1 << token % 8

    def disallow(self, index: int, tokens: Sequence[int]) -> None:
        """Remove a few tokens from a mask that is written already, even if none remains."""
        for token in tokens:
            self._memory[index * self.size + token // 8] &= ~(1 << token % 8)

    def only(self, index: int, token: int) -> None:
        """Write a mask that allows one token."""
        self.put(index, bytes(self.size))
        self.allow(index, token)

    def forbid(self, index: int, tokens: int) -> None:
        """Remove tokens from a mask unless that would leave it empty. tokens: bit i for token i.

        Text that the grammar requires, such as the digits of a bound, is allowed in spite of a
        limit.
        """
        part = self._memory[index * self.size : (index + 1) * self.size]
        rest = int.from_bytes(part, "little") & ~tokens
        if rest:
            part[:] = rest.to_bytes(self.size, "little")

    def all(self, indices: Sequence[int]) -> None:
        """Write masks that allow every token."""
        for index in indices:
            self.put(index, b"\xff" * self.size)


@dataclass(frozen=True)
class Job:
    """Masks to compute for one answer: after `before`, and after each of `drafts`.

    ahead: compiled grammar, a private copy, that has consumed the answer and `before`.
    before: drafts that `ahead` has consumed.
    first: index of the first mask.
    """

    matcher: "Matcher"
    advanced: LLMatcher
    before: list[int]
    drafts: list[int]
    first: int


def _mask(inner: LLMatcher, tokens: list[int]) -> bytes | None:
    """Return the mask after these tokens; None if one of them is not allowed, b"" if the grammar
    fails."""
    if inner.try_consume_tokens(tokens) < len(tokens) and not inner.is_error():
        return None
    mask = inner.compute_bitmask()
    return b"" if inner.is_error() else mask


class Matcher:
    """Grammar state of one answer (implements lockstep.scheduling.grammar.Grammar).

    first: mask of the first token.
    make: compiles the grammar; called at first use.
    made: grammar that is compiled already.

    An end token is allowed where the grammar may end. Tokens after it are ignored. Drafts are tried
    on copies and never rolled back: llguidance 1.9.1 caches what it computed after tokens that were
    rolled back, and may return it for others.
    """

    def __init__(
        self,
        recipe: GrammarRecipe,
        first: bytes,
        compile_grammar: Callable[[], LLMatcher],
        compiler: Compiler,
        compiled: LLMatcher | None = None,
    ) -> None:
        self.fault: str | None = None
        self.recipe = recipe
        self.fill: Fill = compiler.fill
        self._first = first
        self._compile_grammar = compile_grammar
        self._ends = compiler.ends
        self._compiled = compiled
        self._consumed = 0  # tokens of the answer that the compiled grammar has consumed
        self._tokens: list[int] = []
        self._ended = False
        self.is_free = False
        self._json = compiler.json_reader(recipe.json_after)
        self._state = self._json.start
        self._token_bytes = compiler.tokenizer.token_bytes
        self._compiler = compiler

    def prepare(self) -> LLMatcher:
        """Compile the grammar if it is not compiled yet."""
        self._compiled = self._compiled or self._compile_grammar()
        return self._compiled

    @property
    def forbidden_ends(self) -> list[int]:
        """Return the end tokens that are forbidden as the first token."""
        return [end for end in self._ends if not self._first[end // 8] >> end % 8 & 1]

    @property
    def accepted(self) -> int:
        """Return the number of accepted tokens."""
        return len(self._tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        """Accept the next tokens of the answer."""
        for token in tokens:
            self._tokens.append(token)
            self._ended = self._ended or token in self._ends
            if not self._ended and self.fault is None:
                self._advance()
                self._state = self._read(self._state, token)

    def fresh(self) -> "Matcher":
        """See Grammar. The new grammar is compiled at first use."""
        return Matcher(self.recipe, self._first, self._compile_grammar, self._compiler)

    def begin(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """Write the masks that are known, beginning at index `first`; return jobs for the others.

        If the grammar has failed, no token is allowed.
        """
        valid = list(takewhile(lambda token: token not in self._ends, drafts))
        constrained = 0 if self._ended else 1 + len(valid)
        masks.all(range(first + constrained, first + 1 + len(drafts)))
        if self._ended:
            return []
        if self.fault is not None:
            masks.put(first, bytes(masks.size))
            return []
        known = 0 if self._tokens else 1
        if known:
            masks.put(first, self._first)
            self._limit_numbers(first, self._state, masks)
        if known > len(valid):
            return []
        advanced = self.prepare().deep_copy()
        if advanced.try_consume_tokens(valid[:known]) < known and not advanced.is_error():
            return []
        return [Job(self, advanced, valid[:known], valid[known:], first + known)]

    def finish(self, job: Job, masks: Masks) -> None:
        """Apply the number limits to the masks that were computed."""
        if job.advanced.is_error():
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
        """Compute the masks of a job with new grammars, whose limits count this answer's tokens
        only."""
        for count in range(1 + len(job.drafts)):
            fresh = self._compile_grammar()
            drafts = [*job.before, *job.drafts[:count]]
            mask = _mask(fresh, [*self._tokens, *drafts])
            if mask is None:
                break
            masks.put(job.first + count, mask or bytes(masks.size))
            if mask == b"" and not drafts:
                self._fail(fresh)
            if mask == b"":
                break

    def _advance(self) -> None:
        """Advance the compiled grammar to the end of the answer; on a failure retry once with a new
        one."""
        for _ in range(2):
            inner = self.prepare()
            if not inner.is_error() and inner.consume_tokens(self._tokens[self._consumed :]):
                self._consumed = len(self._tokens)
                return
            self._compiled = None
            self._consumed = 0
        self._fail(inner)

    def _fail(self, failed: LLMatcher) -> None:
        self.fault = TOO_COMPLEX.format(reason=first_line(failed.get_error()))


class AfterReasoning:
    """Grammar that binds the text after the reasoning. The reasoning itself is free.

    The answer may end inside of the reasoning only if the grammar allows an empty text. Otherwise
    it would lack the form that the client asked for.

    end: token that ends the reasoning.
    begin: token that begins it, if it may be the answer's first token; None if the prompt ends
    inside of the reasoning.
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
        self._forbidden_ends = inner.forbidden_ends

    def prepare(self) -> None:
        """Compile the grammar if it is not compiled yet."""
        self._inner.prepare()

    @property
    def fault(self) -> str | None:
        """Return why no token is allowed any more, or None."""
        return self._inner.fault

    def accept(self, tokens: Sequence[int]) -> None:
        """Accept the next tokens of the answer."""
        for token in tokens:
            first = self.accepted == 0
            self.accepted += 1
            if self._reasons:
                self._reasons = token != self._end
            elif first and token == self._begin:
                self._reasons = True
            else:
                self._inner.accept([token])

    def fresh(self) -> "AfterReasoning":
        """See Grammar."""
        return AfterReasoning(self._inner.fresh(), self._end, self._begin)

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
        """Write the masks from a position inside of the reasoning."""
        free = 1 + sum(1 for _ in takewhile(lambda token: token != self._end, drafts))
        masks.all(range(first, first + free))
        for index in range(first, first + free):
            masks.disallow(index, self._forbidden_ends)
        if free > len(drafts):
            return []
        return self._inner.begin(drafts[free:], first + free, masks)


class Compiled(Grammar, Protocol):
    """Grammar whose masks Compiler.fill computes."""

    @property
    def recipe(self) -> Any: ...

    def prepare(self) -> object:
        """Compile the grammar if it is not compiled yet."""
        ...

    def fresh(self) -> "Compiled":
        """See Grammar."""
        ...

    def begin(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """See Matcher."""
        ...
