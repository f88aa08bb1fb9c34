"""Token budget of an answer's reasoning, kept by a grammar that composes with other grammars.

The reasoning parser decides which tokens are reasoning, so that the budget bounds what usage
reports as reasoning tokens. After the budget is used up, only the next token of the closing tag is
allowed. The masks depend on the answer's tokens alone, as those of all grammars do.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.errors import RequestError
from lockstep.text.grammars.compiler import Compiled, Compiler, GrammarRecipe, Job, Masks
from lockstep.text.parsers import ReplyParser
from lockstep.text.tokenizers.detokenizer import Detokenizer
from lockstep.text.tokenizers.tokenizer import Tokenizer

BUDGET = "thinking_token_budget"
PROMPT_END = 64
"""Characters at the prompt's end that decide whether the answer begins inside of reasoning."""


@dataclass(frozen=True)
class BudgetRecipe:
    """Plain data from which a ThinkingBudget is built, in any process.

    prompt_end: last characters of the prompt, without trailing whitespace.
    tool_names: tools whose calls end the reasoning.
    form: grammar of the content.
    """

    budget: int
    prompt_end: str
    tool_names: tuple[str, ...] = ()
    form: GrammarRecipe | None = None


class ClosingTag:
    """Closing tag of the reasoning, in tokens of one model."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        """Raise RequestError if no tokens of the vocabulary spell the tag."""
        self.text = text
        self._single_token = tokenizer.fast.token_to_id(text)
        # Rest of the tag -> next token, the longest that is a prefix of the rest.
        self._next: dict[str, int] = {}
        if self._single_token is None:
            rests = [text[start:] for start in range(len(text))]
            self._next = {rest: _longest_token(rest, tokenizer) for rest in rests}

    @property
    def tokens(self) -> list[int]:
        """Return every token that may be forced."""
        return [*self._next.values()] if self._single_token is None else [self._single_token]

    def next_token(self, written: str) -> int:
        """Return the next token of the tag; written: last characters of the reasoning.

        A tag of several tokens is continued where the model has begun it.
        """
        if self._single_token is not None:
            return self._single_token
        sizes = range(len(self.text) - 1, 0, -1)
        begun = next((size for size in sizes if written.endswith(self.text[:size])), 0)
        return self._next[self.text[begun:]]


def _longest_token(text: str, tokenizer: Tokenizer) -> int:
    """Return the longest token that is a prefix of a text. Raises RequestError."""
    for size in range(len(text), 0, -1):
        token = tokenizer.fast.token_to_id(text[:size])
        if token is not None and tokenizer.token_bytes(token) == text[:size].encode():
            return token
    raise RequestError(
        f"{BUDGET} cannot be kept: the model's tokenizer has no token for {text[0]!r}, which the "
        "tag that ends the reasoning needs. Remove it.",
        BUDGET,
    )


class ReasoningProgress:
    """Progress of an answer through its reasoning. budget: maximum tokens between the two tags."""

    def __init__(
        self, parser: ReplyParser, text: Detokenizer, closing: ClosingTag, budget: int
    ) -> None:
        self._parser = parser
        self._text = text
        self._closing = closing
        self._written = ""
        self.remaining = budget

    @property
    def ended(self) -> bool:
        """Return whether the reasoning has ended, or will never begin."""
        return not self._parser.may_reason

    @property
    def only_token(self) -> int | None:
        """Return the token that must come next; None if the budget allows any."""
        if self.remaining > 0 or not self._parser.reasons:
            return None
        return self._closing.next_token(self._written)

    def feed(self, token: int) -> None:
        """Read the next token of the answer. Tokens of the opening tag are not counted."""
        if self.ended:
            return
        was_inside = self._parser.reasons
        text = self._text.push(token)
        self._parser.feed(text)
        self._written = (self._written + text)[-len(self._closing.text) :]
        if was_inside and self._parser.reasons:
            self.remaining -= 1

    def fork(self, tokenizer: Tokenizer) -> "ReasoningProgress":
        """Return an independent copy; the tokenizer and the tag are shared."""
        shared = (tokenizer, self._closing)
        return copy.deepcopy(self, {id(item): item for item in shared})


class ThinkingBudget:
    """Bound of an answer's reasoning (implements lockstep.scheduling.grammar.Grammar).

    make_progress: returns the progress of an answer without tokens. form: grammar of the content
    after the reasoning; None if the content is free.
    """

    def __init__(
        self,
        recipe: BudgetRecipe,
        make_progress: Callable[[], ReasoningProgress],
        compiler: Compiler,
        form: Compiled | None = None,
    ) -> None:
        self.accepted = 0
        self.recipe = recipe
        self.fill = compiler.fill
        self._make_progress = make_progress
        self._progress = make_progress()
        self._compiler = compiler
        self._form = form

    @property
    def ended(self) -> bool:
        """Return whether the reasoning has ended, or will never begin."""
        return self._progress.ended

    @property
    def is_free(self) -> bool:
        """Return whether nothing binds the rest of the answer."""
        return self._form is None and self.ended

    def prepare(self) -> None:
        """Compile the content's grammar if it is not compiled yet."""
        if self._form is not None:
            self._form.prepare()

    def fresh(self) -> "ThinkingBudget":
        """See Grammar."""
        form = None if self._form is None else self._form.fresh()
        return ThinkingBudget(self.recipe, self._make_progress, self._compiler, form)

    @property
    def fault(self) -> str | None:
        """Return why no token is allowed any more, or None."""
        return None if self._form is None else self._form.fault

    def accept(self, tokens: Sequence[int]) -> None:
        """Read the next tokens of the answer."""
        self.accepted += len(tokens)
        for token in tokens:
            self._progress.feed(token)
        if self._form is not None:
            self._form.accept(tokens)

    def begin(self, drafts: Sequence[int], first: int, masks: Masks) -> list[Job]:
        """See Matcher. Inside of the reasoning the content's grammar needs no jobs, so that none
        of them writes a mask that is narrowed here."""
        if self._form is None:
            masks.all(range(first, first + 1 + len(drafts)))
            jobs = []
        else:
            jobs = self._form.begin(drafts, first, masks)
        for index, token in self._forced(drafts):
            masks.only(first + index, token)
        return jobs

    def _forced(self, drafts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield (index, token) of each position that allows one token only.

        Index 0 follows the answer's tokens, index i the i-th draft.
        """
        progress = self._progress
        if progress.ended or progress.remaining > len(drafts):
            return
        progress = progress.fork(self._compiler.tokenizer)
        for index in range(len(drafts) + 1):
            token = progress.only_token
            if token is not None:
                yield index, token
            if index < len(drafts):
                progress.feed(drafts[index])
