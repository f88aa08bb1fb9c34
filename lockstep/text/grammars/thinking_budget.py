"""A budget of tokens for an answer's thought, kept by a grammar that composes with others.

The reasoning parser decides which tokens belong to the thought, so that the budget bounds what
usage reports as reasoning tokens. Once the budget is used up only the next token of the closing tag
is allowed. The masks depend on the answer's tokens alone, as those of all grammars do.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.errors import RequestError
from lockstep.text.grammars.compiler import Compiled, Compiler, GrammarRecipe, Job, Masks
from lockstep.text.parsers import ReplyParser
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"
PROMPT_END = 64
"""Characters of a prompt's end that tell whether the answer begins inside of a thought."""


@dataclass(frozen=True)
class BudgetRecipe:
    """Plain data of which a ThinkingBudget is made, in another process too.

    prompt_end: last characters of the prompt, without whitespace at the end. tool_names: tools
    whose calls end a thought. form: what the content must match.
    """

    budget: int
    prompt_end: str
    tool_names: tuple[str, ...] = ()
    form: GrammarRecipe | None = None


class ClosingTag:
    """The tag that ends a thought, spelled in the tokens of one model."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        """Raise RequestError where no tokens of the vocabulary spell the tag."""
        self.text = text
        self._whole = tokenizer.fast.token_to_id(text)
        # Next token by what is left of the tag: the longest with which the rest begins.
        self._next: dict[str, int] = {}
        if self._whole is None:
            rests = [text[start:] for start in range(len(text))]
            self._next = {rest: _longest_token(rest, tokenizer) for rest in rests}

    @property
    def tokens(self) -> list[int]:
        """Return every token that may be forced."""
        return [*self._next.values()] if self._whole is None else [self._whole]

    def next_token(self, written: str) -> int:
        """Return the token that comes next; written: the thought's last characters.

        A tag of several tokens goes on where the model has begun it.
        """
        if self._whole is not None:
            return self._whole
        sizes = range(len(self.text) - 1, 0, -1)
        begun = next((size for size in sizes if written.endswith(self.text[:size])), 0)
        return self._next[self.text[begun:]]


def _longest_token(text: str, tokenizer: Tokenizer) -> int:
    """Return the longest token with which a text begins. Raises RequestError."""
    for size in range(len(text), 0, -1):
        token = tokenizer.fast.token_to_id(text[:size])
        if token is not None and tokenizer.token_bytes(token) == text[:size].encode():
            return token
    raise RequestError(
        f"{BUDGET} cannot be kept: the model's tokenizer has no token for {text[0]!r}, with which "
        "the end of its thought is written. Leave it out.",
        BUDGET,
    )


class Thought:
    """Progress of an answer through its thought. budget: maximum tokens between the two tags."""

    def __init__(
        self, parser: ReplyParser, text: Detokenizer, closing: ClosingTag, budget: int
    ) -> None:
        self._parser = parser
        self._text = text
        self._closing = closing
        self._written = ""
        self.remaining = budget

    @property
    def over(self) -> bool:
        """Return whether the thought has ended, or will never begin."""
        return not self._parser.may_reason

    @property
    def only_token(self) -> int | None:
        """The one token that may come next; None where the budget allows any."""
        if self.remaining > 0 or not self._parser.reasons:
            return None
        return self._closing.next_token(self._written)

    def feed(self, token: int) -> None:
        """Read the next token of the answer. Tokens of the opening tag are not counted."""
        if self.over:
            return
        was_inside = self._parser.reasons
        text = self._text.push(token)
        self._parser.feed(text)
        self._written = (self._written + text)[-len(self._closing.text) :]
        if was_inside and self._parser.reasons:
            self.remaining -= 1

    def fork(self, tokenizer: Tokenizer) -> "Thought":
        """Return a copy that reads on by itself; the tokenizer and the tag are shared."""
        shared = (tokenizer, self._closing)
        return copy.deepcopy(self, {id(one): one for one in shared})


class ThinkingBudget:
    """Bounds an answer's thought: lockstep.scheduling.grammar.Grammar.

    form: binds the content after the thought; None where the content is free.
    """

    def __init__(
        self,
        recipe: BudgetRecipe,
        thought: Thought,
        compiler: Compiler,
        form: Compiled | None = None,
    ) -> None:
        self.accepted = 0
        self.recipe = recipe
        self.fill = compiler.fill
        self._thought = thought
        self._tokenizer = compiler.tokenizer
        self._form = form

    @property
    def over(self) -> bool:
        """Return whether the thought has ended, or will never begin."""
        return self._thought.over

    @property
    def is_free(self) -> bool:
        """Return whether nothing binds the rest of the answer."""
        return self._form is None and self.over

    def prepare(self) -> None:
        """Compile the content's grammar now, if it is not."""
        if self._form is not None:
            self._form.prepare()

    @property
    def fault(self) -> str | None:
        """Why no token is allowed any more."""
        return None if self._form is None else self._form.fault

    def accept(self, tokens: Sequence[int]) -> None:
        """Read the next tokens of the answer."""
        self.accepted += len(tokens)
        for token in tokens:
            self._thought.feed(token)
        if self._form is not None:
            self._form.accept(tokens)

    def begin(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """See Matcher. Inside of a thought the content's grammar allows every token, so that its
        jobs write no mask that is narrowed here."""
        if self._form is None:
            masks.all(range(first, first + 1 + len(drafts)))
            jobs = []
        else:
            jobs = self._form.begin(drafts, first, masks)
        for place, token in self._forced(drafts):
            masks.only(first + place, token)
        return jobs

    def _forced(self, drafts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the places where one token alone may come, and that token.

        Place 0 follows the answer's tokens, place i the i-th draft.
        """
        thought = self._thought
        if thought.over or thought.remaining > len(drafts):
            return
        thought = thought.fork(self._tokenizer)
        for place in range(len(drafts) + 1):
            token = thought.only_token
            if token is not None:
                yield place, token
            if place < len(drafts):
                thought.feed(drafts[place])
