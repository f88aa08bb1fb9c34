"""Grammars of answers, by llguidance: one matcher per answer.

Everything that is known of llguidance stands here. Masks are a function of the answer's tokens
alone, but for llguidance's own limits (LLParserLimits), at which an answer ends with an error.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from lockstep.scheduling.grammar import ONE_LANE, Lanes
from lockstep.text.tokenizer import Tokenizer

LEXER_FUEL = 200_000
"""llguidance's steps to build a lexer: about 0.1 s."""
WORD_BITS = 32
"""Tokens of a word of a mask."""
UNFORCED = '\n%llguidance {"no_forcing": true}\n'
"""Where one text alone may come, llguidance lets only one spelling of it in tokens come, unless it
is told not to. So every token may come that leads to a text of the grammar, and no other."""
MOST_KNOWN = 256
"""Grammars that are remembered as ones that can be compiled."""
MOST_KNOWN_BYTES = 16 << 20
"""Of their texts and their first masks."""
SLICES = ("[a-z]+", "[A-Za-z]+")
"""Beside llguidance's own: tokens that come together where a grammar allows all text of them."""
TOO_COMPLEX = (
    "the grammar is too complex to go on with: {reason}. What came before stands. Simplify it."
)


class GrammarFault(ValueError):
    """A grammar that cannot be compiled, or that no text matches."""


@dataclass(frozen=True)
class GrammarRecipe:
    """What Compiler.grammar makes a grammar of. source: in llguidance's Lark; reasoning_end and
    reasoning_begin: AfterReasoning's tokens, None where the grammar binds the answer from its first
    token on."""

    source: str
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
        self._known = FirstMasks(MOST_KNOWN, MOST_KNOWN_BYTES)

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask: a bit per token, in whole words."""
        return -(-self.vocab // WORD_BITS) * WORD_BITS // 8

    def matcher(self, source: str) -> "Matcher":
        """The matcher of a grammar in llguidance's Lark. Raises GrammarFault.

        Each answer has a compiled grammar of its own, made when it is first needed, about 1 ms:
        copies of one share its lexer and the lock around it, so that answers would wait for each
        other, and one would feel the limits that another met. What a first mask shows, that it can
        be compiled and that some text matches, is looked at once.
        """
        made = None
        first = self._known.get(source)
        if first is None:
            made = self._compile(source)
            first = made.compute_bitmask()[: self.mask_bytes]
            if made.is_error() or not any(first):
                reason = first_line(made.get_error())
                never = reason in ("", "NoExtensionBias")
                raise GrammarFault("no text matches it" if never else reason)
            self._known.put(source, first)
        return Matcher(source, first, lambda: self._compile(source), self.ends, made)

    def grammar(self, recipe: GrammarRecipe) -> "Matcher | AfterReasoning":
        """A fresh grammar by its recipe. Raises GrammarFault."""
        matcher = self.matcher(recipe.source)
        if recipe.reasoning_end is None:
            return matcher
        return AfterReasoning(
            matcher, self.mask_bytes, recipe.reasoning_end, recipe.reasoning_begin
        )

    def prepare(self) -> None:
        """Builds now what the first grammar would have to wait for: a second for 250,000 tokens."""
        self._tokens()

    def fault_of(self, source: str) -> str | None:
        """Why a grammar in llguidance's Lark cannot be compiled; None if it can."""
        return first_line(self._compile(source).get_error()) or None

    def _compile(self, source: str) -> LLMatcher:
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(source + UNFORCED)
        return LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)

    def _tokens(self) -> LLTokenizer:
        """The vocabulary's tree, built when it is first asked for."""
        with self._building:
            if self._tree is None:
                ends = sorted(self.ends)
                wrapped = TokenizerWrapper(_Vocabulary(self.tokenizer, self.vocab, ends))
                blanks, *others = LLTokenizer.general_slices()
                slices = [blanks, *SLICES, *others]
                self._tree = LLTokenizer(wrapped, self.vocab, ends, slices)
            return self._tree


class FirstMasks:
    """Grammars that could be compiled, by their text, and the mask of an answer's first token.

    Bounded in number and in bytes; the one that was asked for longest ago goes first.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.size = 0
        self._most = most
        self._most_bytes = most_bytes
        self._masks: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._masks)

    def get(self, source: str) -> bytes | None:
        """The mask; None where the grammar is not known."""
        with self._lock:
            if source in self._masks:
                self._masks.move_to_end(source)
            return self._masks.get(source)

    def put(self, source: str, mask: bytes) -> None:
        """Remembers a grammar; others make room."""
        with self._lock:
            if self._masks.setdefault(source, mask) is not mask:
                return
            self.size += len(source) + len(mask)
            while len(self._masks) > self._most or self.size > self._most_bytes:
                source, mask = self._masks.popitem(last=False)
                self.size -= len(source) + len(mask)


def first_line(reason: str) -> str:
    """What a message of llguidance says, in one line that is not long."""
    said = reason.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    lines = [line.strip() for line in said.splitlines()]
    return " ".join(line for line in lines if line)[:300]


class Follower:
    """A compiled grammar, led along an answer; copies of it are led along drafts.

    make: compiles the grammar; made: compiled. It is compiled when it is first needed. Nothing is
    taken back from it: llguidance 1.9.1 keeps what it found behind tokens that were taken back, and
    may give it for others.
    """

    def __init__(self, make: Callable[[], LLMatcher], made: LLMatcher | None = None) -> None:
        self.fault = ""
        self._make = make
        self._made = made
        self._taken = 0  # tokens of the answer

    def prepare(self) -> LLMatcher:
        """Compiles the grammar now, if it is not."""
        self._made = self._made or self._make()
        return self._made

    def takes(self, answer: Sequence[int]) -> bool:
        """Whether the grammar lets the answer come so far."""
        return self._lead(answer) is not None

    def legal(self, answer: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts may come behind the answer, at most."""
        inner = self._lead(answer)
        return inner.deep_copy().validate_tokens(list(drafts)) if inner and drafts else 0

    def masks(
        self, answer: Sequence[int], drafts: Sequence[int], places: Sequence[int]
    ) -> list[bytes]:
        """The masks behind the answer and so many drafts, for each of these ascending numbers.

        b"" where the grammar fails.
        """
        if not places:
            return []
        inner = self._lead(answer)
        ahead = inner.deep_copy() if inner is not None and any(places) else inner
        found = []
        before = 0
        for place in places:
            mask = _mask(ahead, drafts[before:place])
            found.append(mask or self._mask_afresh(answer, drafts[:place]))
            before = place
        return found

    def _mask_afresh(self, answer: Sequence[int], drafts: Sequence[int]) -> bytes:
        """The mask of a grammar that has met nothing else: a limit that others met by their drafts
        is not this answer's."""
        fresh = self._make()
        mask = _mask(fresh, [*answer, *drafts])
        if not mask:
            self._drop(fresh)
        return mask

    def _lead(self, answer: Sequence[int]) -> LLMatcher | None:
        """The grammar behind the answer; None where it does not go that far, and a fresh one does
        not either."""
        for _ in range(2):
            inner = self.prepare()
            new = list(answer[self._taken :])
            if not inner.is_error() and (not new or inner.consume_tokens(new)):
                self._taken = len(answer)
                return inner
            self._drop(inner)
        return None

    def _drop(self, failed: LLMatcher) -> None:
        self.fault = first_line(failed.get_error())
        self._made = None
        self._taken = 0


def _mask(inner: LLMatcher | None, new: Sequence[int]) -> bytes:
    """The mask behind these tokens; b"" where the grammar has failed, or fails there."""
    if inner is None or inner.is_error() or (new and not inner.consume_tokens(list(new))):
        return b""
    mask = inner.compute_bitmask()
    return b"" if inner.is_error() else mask


class Matcher:
    """Follows one answer through a grammar: lockstep.scheduling.grammar.Grammar. source: in
    llguidance's Lark; first: the mask of its first token; make: compiles it; made: compiled.

    An end token is allowed where the grammar may end. Whatever comes behind it is of no matter.
    """

    def __init__(
        self,
        source: str,
        first: bytes,
        make: Callable[[], LLMatcher],
        ends: frozenset[int],
        made: LLMatcher | None = None,
    ) -> None:
        self.fault: str | None = None
        self.recipe = GrammarRecipe(source)
        self._first = first
        self._make = make
        self._followers = [Follower(make, made)]
        self._ends = ends
        self._tokens: list[int] = []
        self._over = False

    def prepare(self) -> None:
        """Compiles the grammar now, if it is not."""
        self._followers[0].prepare()

    @property
    def accepted(self) -> int:
        """Tokens of the answer that it has taken."""
        return len(self._tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        for token in tokens:
            self._tokens.append(token)
            self._over = self._over or token in self._ends
            if not self._over and self.fault is None and not self._followers[0].takes(self._tokens):
                self._fail()

    def masks(self, drafts: Sequence[int], lanes: Lanes = ONE_LANE) -> list[bytes]:
        """See Grammar. Where it fails no token is allowed."""
        if self._over:
            return [every_token(len(self._first))]
        if self.fault is not None:
            return [bytes(len(self._first))]
        drafts = list(takewhile(lambda token: token not in self._ends, drafts))
        drafts = drafts[: self._followers[0].legal(self._tokens, drafts)] if drafts else drafts
        found = self._made_in(lanes, drafts)
        if not found[0]:
            self._fail()
        masks = [mask[: len(self._first)] or bytes(len(self._first)) for mask in found]
        return masks[: 1 + legal(masks, drafts)]

    def _made_in(self, lanes: Lanes, drafts: Sequence[int]) -> list[bytes]:
        """The masks behind the answer and behind each draft, each lane by a follower of its own,
        since those of one grammar wait for each other where they share a lexer."""
        places = range(0 if self._tokens else 1, 1 + len(drafts))
        count = max(1, min(lanes.count, len(places)))
        while len(self._followers) < count:
            self._followers.append(Follower(self._make))
        shares = [places[lane::count] for lane in range(count)]
        made = lanes.map(
            lambda follower, share: follower.masks(self._tokens, drafts, share),
            self._followers[:count],
            shares,
        )
        found = [self._first] * (1 + len(drafts))
        for share, masks in zip(shares, made, strict=True):
            for place, mask in zip(share, masks, strict=True):
                found[place] = mask
        return found

    def _fail(self) -> None:
        self.fault = TOO_COMPLEX.format(reason=self._followers[0].fault)


def legal(masks: Sequence[bytes], drafts: Sequence[int]) -> int:
    """How many of the drafts may come, each by the mask in front of it."""
    pairs = zip(masks, drafts, strict=False)
    return sum(1 for _ in takewhile(lambda pair: allows(*pair), pairs))


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask lets a token come."""
    return bool(mask[token // 8] >> token % 8 & 1)


def every_token(mask_bytes: int) -> bytes:
    """The mask that allows all."""
    return b"\xff" * mask_bytes


class AfterReasoning:
    """A grammar that binds what comes behind the reasoning, which is free text.

    end: the token that ends reasoning. begin: the token that begins it, where the answer itself may
    say so with its first token; None where the prompt has begun it.
    """

    def __init__(self, inner: Matcher, mask_bytes: int, end: int, begin: int | None) -> None:
        self.accepted = 0
        self.recipe = GrammarRecipe(inner.recipe.source, end, begin)
        self._inner = inner
        self._bytes = mask_bytes
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

    def masks(self, drafts: Sequence[int], lanes: Lanes = ONE_LANE) -> list[bytes]:
        """See Grammar."""
        drafts = list(drafts)
        if self._reasons:
            return self._reasoning(drafts, lanes)
        if self.accepted or self._begin is None:
            return self._inner.masks(drafts, lanes)
        begins = drafts[:1] == [self._begin]
        first, *others = self._inner.masks([] if begins else drafts, lanes)
        opened = bytearray(first)
        opened[self._begin // 8] |= 1 << self._begin % 8
        return [bytes(opened), *(self._reasoning(drafts[1:], lanes) if begins else others)]

    def _reasoning(self, drafts: list[int], lanes: Lanes) -> list[bytes]:
        """The masks from a place inside of reasoning on."""
        free = drafts.index(self._end) + 1 if self._end in drafts else len(drafts) + 1
        bound = self._inner.masks(drafts[free:], lanes) if free <= len(drafts) else []
        return [every_token(self._bytes)] * free + bound
