"""Write the requests of scenarios: a value of each feature becomes a prompt and parameters."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.answer import Answer
from lockstep.check.engines import Conversation, rendered
from lockstep.check.judges.plain_runs import SERVED, PlainRuns
from lockstep.check.random_adapters import NAMES
from lockstep.check.scenarios.features import THOUGHTS
from lockstep.check.scenarios.scenario import (
    IN_ANSWER,
    IN_PROMPT,
    MAX_MODEL_LEN,
    NEVER,
    Kind,
    ScenarioRequest,
    WarmPrefix,
)
from lockstep.errors import RequestError
from lockstep.outputs import CompletionOutput
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import check_ids
from lockstep.step import PAGE_SIZE

PAGE = PAGE_SIZE
PARTS = (3, 17, 40, 61)
"""Prompt lengths within a page."""
TEMPLATE_PARTS = (40, 57)
"""Prompt lengths within a page that a template can have."""
SPLITS = (513, 514, 577, 600)
"""Prompt lengths with three KV splits: the sum of two does not depend on their order."""
SHORT = (5, 7, 10, 14)
"""Lengths of short answers."""
PROBED = 4
"""Tokens of a probing run after the size that an answer should reach: a stop is among them."""
LONG = (65, 70, 100, 119)
"""Lengths of long answers: beyond page boundaries and beyond the circular history buffers."""
CUT_REMAINDERS = (1, 2, 5, 9)
"""Numbers of tokens that max_model_len leaves to the answers that it cuts."""
CUT_TOKENS = 14
"""max_tokens of the answers that max_model_len cuts."""
GRAMMAR_TOKENS = (10, 20, 30)
"""max_tokens of answers with a grammar."""
BUDGETS = (0, 2, 5)
"""Maximum tokens of thoughts."""
THOUGHT_BIAS = 30.0
"""Bias by which a token wins over all tokens without one."""
SALT = "of another"
WORDS = "the harbour was quiet that morning and the storm was not there for two boats".split()
"""Words of rendered prompts."""
MAX_DIGITS = 6
"""Tokens of digits that may follow the words."""
MAX_RENDERINGS = 40
"""Renderings that are tried for a prompt of the wanted length."""
TEMPERATURES = {"0": (0.0,), "1e-4": (1e-4,), "1": (0.4, 0.8, 1.0, 1.4), "3": (2.5, 3.0),
                "100": (100.0,)}  # fmt: skip
TOP_K = {"1": (1,), "few": (2, 3, 5), "40": (40,)}
TOP_P = {"low": (1e-6, 0.3), "high": (0.6, 0.9, 0.97)}
REPETITION = {"below 1": (0.5, 0.9), "above 1": (1.3, 2.0, 5.0)}
LOGPROBS = {"0": 0, "3": 3}
PRIORITIES = {"0": 0, "urgent": -3, "late": 3}
REGEXES = ("[a-z ]{3,30}", "(yes|no|perhaps)[.!?]{1,3}", "[0-9]{1,3}(, [0-9]{1,3}){0,5}")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
ENDINGS: dict[str, type | None] = {
    "length": None,
    "ids": int,
    "string": str,
    "end of sequence": type(None),
}
"""Type of the stop reason of answers that end so; None where no stop is needed."""
Params = dict[str, Any]


def adapter_of(values: dict[str, str]) -> str:
    """Return the name of a request's adapter, "" for the base model."""
    return {"none": "", "first": NAMES[0], "second": NAMES[1]}[values["adapter"]]


@dataclass(frozen=True)
class Family:
    """Texts whose prompts share pages.

    trunk, other: two texts of equal length. ends: last tokens of prompts, which ask the model
    something.
    """

    trunk: tuple[int, ...]
    other: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WrittenRequest:
    """Request with the values that it expresses, and the prompts that are cached before it.

    num_tokens: tokens of its shortest completion.
    """

    request: ScenarioRequest
    values: dict[str, str]
    warm: tuple[WarmPrefix, ...] = ()
    num_tokens: int = 0


@dataclass
class Draft:
    """Request while it is written. refused: features whose values the others do not permit."""

    rng: random.Random
    values: dict[str, str]
    prompt: tuple[int, ...] = ()
    conversation: Conversation | None = None
    params: Params = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    warm: list[WarmPrefix] = field(default_factory=list)

    def is_usual(self, name: str, usual: str = "off") -> bool:
        """Return whether a feature has its usual value."""
        return self.values[name] == usual

    @property
    def max_output_tokens(self) -> int:
        """Return the tokens that max_model_len leaves to the answer."""
        return MAX_MODEL_LEN - len(self.prompt)

    @property
    def tokens_to_reach(self) -> int:
        """Return the minimum tokens of an answer of the planned size."""
        page_end = PAGE - len(self.prompt) % PAGE
        return {"past 64": PAGE + 1, "past a page end": page_end}.get(self.values["answer size"], 1)

    @property
    def thinks(self) -> bool:
        """Return whether the answer begins with a thought."""
        return self.values["prompt"] in THOUGHTS


class RequestWriter:
    """Writer of the requests of one scenario.

    plain: plain runs of the scenario's model. closing: token that ends a thought, None if the model
    has none.
    """

    def __init__(
        self, plain: PlainRuns, kind: Kind, family: Family, vocab: int, closing: int | None
    ) -> None:
        self.plain = plain
        self.kind = kind
        self.family = family
        self.vocab = vocab
        self.closing = closing

    def write(self, rng: random.Random, values: dict[str, str]) -> WrittenRequest:
        """Return the request of a row of values."""
        draft = Draft(rng, values)
        length = self._length(draft)
        self._write_prompt(draft, length)
        draft.params = self._base_params(draft)
        for name, write in WRITERS:
            candidate = dict(draft.params)
            before = draft.params
            draft.params = candidate
            write(self, draft)
            if not self._is_accepted(draft):
                draft.params = before
                draft.refused.add(name)
        answers = self._drop_errors(draft)
        self._refuse_unreached(draft, answers)
        preempted = values["preempted"]
        aborted = values["aborted"]
        forced = 0
        if values["forced"] != "none":
            max_forced = draft.params["max_tokens"]
            forced = max_forced if values["forced"] == "all" else rng.randrange(1, max_forced + 1)
        request = ScenarioRequest(
            draft.prompt,
            draft.params,
            abort=NEVER if aborted == "never" else aborted,
            preempt={"never": (), "twice": (IN_ANSWER, IN_ANSWER)}.get(preempted, (preempted,)),
            priority=PRIORITIES[values["priority"]],
            speculate=values["speculate"] == "yes",
            salt=SALT if values["salt"] == "own" else "",
            adapter=adapter_of(values),
            forced=forced,
            returns=values["return"],
            again=values["id"] == "again",
            conversation=draft.conversation,
        )
        kept = {name: value for name, value in values.items() if name not in draft.refused}
        num_tokens = min(len(answer.tokens) for answer in answers)
        return WrittenRequest(request, kept, tuple(draft.warm), num_tokens)

    def _length(self, draft: Draft) -> int:
        """Choose the number of prompt tokens."""
        rng = draft.rng
        size = draft.values["prompt size"]
        if size == "1":
            return 1
        if size == "part of a page":
            return rng.choice(TEMPLATE_PARTS if draft.values["prompt"] != "ids" else PARTS)
        if size == "3 splits":
            if draft.values["answer size"] == "cut":
                return MAX_MODEL_LEN - rng.choice(CUT_REMAINDERS)
            return rng.choice(SPLITS if draft.values["answer size"] == "few" else SPLITS[:2])
        pages = rng.choice((1, 1, 2, 3))
        if draft.values["prefix"] != "new":
            pages = rng.choice((2, 2, 3))
        if draft.values["prefix"] == "without a snapshot":
            pages = 3
        if IN_PROMPT in (draft.values["preempted"], draft.values["aborted"]):
            chunk = draft.values["chunk"]
            pages = (0 if chunk == "whole" else int(chunk) // PAGE) + rng.choice((2, 3))
        if draft.values["prompt"] != "ids":
            pages = max(pages, 1)
        offset = {"64n - 1": -1, "64n": 0, "64n + 1": 1}.get(size)
        if offset is None:
            offset = -1 - self.kind.drafts
        return pages * PAGE + offset

    def _write_prompt(self, draft: Draft, length: int) -> None:
        """Choose the prompt of this length, and the prompts that are cached before it."""
        rng = draft.rng
        if draft.values["prompt"] != "ids":
            draft.conversation = self._conversation(rng, length, draft.thinks)
            ids = rendered(self.plain.llm, draft.conversation).ids
            draft.prompt = tuple(ids)
            if len(ids) != length:
                draft.refused.add("prompt size")
        else:
            draft.prompt = self._ids(draft, length)
        prefix = draft.values["prefix"]
        if prefix == "new":
            return
        if draft.conversation is not None and prefix == "generated":
            draft.refused.add("prefix")
            return
        self._write_warm(draft, prefix)

    def _write_warm(self, draft: Draft, prefix: str) -> None:
        """Choose the prompts that are cached before this request."""
        rng = draft.rng
        salt = SALT if draft.values["salt"] == "own" else ""
        adapter = adapter_of(draft.values)
        length = len(draft.prompt)
        if prefix == "generated":
            tokens = rng.choice((5, 8))
            base = draft.prompt[: (length // PAGE - (length % PAGE == 0)) * PAGE - 3]
            params: Params = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
            answer = (
                self.plain.of(adapter)
                .answers(base, SamplingParams(**params, detokenize=False))[0]
                .tokens
            )
            draft.prompt = (*base, *answer, *draft.prompt[len(base) + len(answer) :])[:length]
            if len(draft.prompt) < length:
                draft.refused.add("prompt size")
            draft.warm.append(WarmPrefix(base, tokens, salt, adapter))
            return
        if prefix == "without a snapshot":
            shared = min(2, (length - 1) // PAGE) * PAGE
            tail = tuple(rng.choices(range(self.vocab), k=3 * PAGE + 1 - shared))
            draft.warm.append(WarmPrefix((*draft.prompt[:shared], *tail), 1, salt, adapter))
            return
        cut = rng.choice((length, length - 1, length // PAGE * PAGE, 2 * PAGE))
        if IN_PROMPT in (draft.values["preempted"], draft.values["aborted"]):
            cut = PAGE
        draft.warm.append(WarmPrefix(draft.prompt[: max(cut, PAGE + 1)], 1, salt, adapter))
        if prefix == "on device" and rng.random() < 0.5:
            # Later pages of the prompt after another first page: their keys must differ.
            first = tuple(rng.choices(range(self.vocab), k=PAGE))
            draft.warm.append(WarmPrefix((*first, *draft.prompt[PAGE:]), 1, salt, adapter))
        if salt or adapter:
            # The same pages without the salt or the adapter: they must not be resumed.
            draft.warm.insert(0, WarmPrefix(draft.prompt[: PAGE + 1]))

    def _ids(self, draft: Draft, length: int) -> tuple[int, ...]:
        """Return a prompt of the family; most leave the shared trunk at some position."""
        rng = draft.rng
        texts = self.family
        if draft.values["prefix"] == "new" and rng.random() < 0.5:
            return (rng.randrange(self.vocab), *texts.trunk[1:length])
        variant = rng.randrange(5)
        if variant == 0:
            return texts.trunk[:length]
        if variant == 1:
            return (*texts.other[: min(length, PAGE)], *texts.trunk[PAGE:length])
        cut = max(0, length // PAGE * PAGE - (0, 1, rng.randrange(1, PAGE))[variant - 2])
        tail = rng.choice(texts.ends) if rng.random() < 0.7 else texts.other
        return (*texts.trunk[:cut], *tail, *texts.other)[:length]

    def _conversation(self, rng: random.Random, length: int, thinks: bool) -> Conversation:
        """Return a conversation whose rendered prompt has this length, if one is found."""
        first = rng.randrange(len(WORDS))
        words = [*WORDS[first:], *WORDS[:first]] * (length // len(WORDS) + 2)
        count = max(length - TEMPLATE_PARTS[0], 1)
        best = Conversation(words[0], thinks)
        for _ in range(MAX_RENDERINGS):
            text = " ".join(words[:count])
            best = Conversation(text, thinks)
            missing = length - len(rendered(self.plain.llm, best).ids)
            if missing == 0:
                return best
            # A word has one to five tokens. Digits correct that: a token has one to three of them.
            for digits in range(missing, 3 * missing + 1) if missing <= MAX_DIGITS else ():
                best = Conversation(text + "1" * digits, thinks)
                if len(rendered(self.plain.llm, best).ids) == length:
                    return best
            # The difference is halved, and at least one word is added or removed.
            count = max(count + (missing // 2 or 1), 1)
        return best

    def _base_params(self, draft: Draft) -> Params:
        rng = draft.rng
        values = draft.values
        params: Params = {
            "temperature": rng.choice(TEMPERATURES[values["temperature"]]),
            "max_tokens": self._max_tokens(draft),
            "seed": {
                "small": rng.randrange(100),
                "64 bits": rng.choice((2**63 - 1, 2**32 - 1, rng.randrange(2**63))),
                "negative": -rng.randrange(1, 2**63),
            }[values["seed"]],
        }
        if values["stop"] == "length":
            params["ignore_eos"] = True
        if values["text"] == "ids only":
            params["detokenize"] = False
        if values["text"] == "special tokens":
            params["skip_special_tokens"] = False
        if values["logprobs"] != "off":
            params["logprobs"] = LOGPROBS[values["logprobs"]]
        if values["prompt logprobs"] != "off":
            params["prompt_logprobs"] = LOGPROBS[values["prompt logprobs"]]
        if values["n"] != "1":
            params["n"] = int(values["n"])
        return params

    def _max_tokens(self, draft: Draft) -> int:
        rng = draft.rng
        length = len(draft.prompt)
        size = draft.values["answer size"]
        max_output_tokens = draft.max_output_tokens
        if size == "1":
            return 1
        if size == "cut":
            return CUT_TOKENS
        if size == "past 64":
            # A step of the served model takes several times as long as one of a companion.
            return min(rng.choice(LONG if self.is_companion else LONG[:2]), max_output_tokens)
        if size == "past a page end":
            return min(PAGE - length % PAGE + rng.choice((0, 1, 3)), max_output_tokens)
        if draft.values["grammar"] != "off" or draft.thinks:
            return min(rng.choice(GRAMMAR_TOKENS), max_output_tokens)
        return min(rng.choice(SHORT), max_output_tokens)

    def _is_accepted(self, draft: Draft) -> bool:
        """Return whether the engine accepts it: some parameters together ban all tokens."""
        try:
            prompt: Any = {"prompt_token_ids": list(draft.prompt)}
            if draft.conversation is not None:
                prompt = rendered(self.plain.llm, draft.conversation)
            params = SamplingParams(**draft.params)
            check_ids(self.plain.llm.processor.requests("", prompt, params)[0], self.vocab)
        except RequestError:
            return False
        return True

    def _drop_errors(self, draft: Draft) -> list[Answer]:
        """Drop the parameters that together leave no token at some position; return the answers."""
        for feature, names in (
            ("bad words", ("bad_words", "bad_words_ids")),
            ("allowed ids", ("allowed_token_ids",)),
            ("grammar", ("structured_outputs",)),
            # The token that must end a thought may be a stop token that comes too early.
            ("min_tokens", ("min_tokens",)),
        ):
            answers = self._answers(draft)
            if all(answer.ending[0] != "error" for answer in answers):
                return answers
            if any(draft.params.pop(name, None) for name in names):
                draft.refused.add(feature)
        return self._answers(draft)

    def _answers(self, draft: Draft) -> list[Answer]:
        """Return the plain answers of the request as it is written so far."""
        max_tokens = min(draft.params["max_tokens"], draft.max_output_tokens)
        params = SamplingParams(**{**draft.params, "max_tokens": max_tokens})
        return self.runs(draft).answers(draft.prompt, params, draft.conversation)

    def _refuse_unreached(self, draft: Draft, answers: list[Answer]) -> None:
        """Refuse values that the answers do not have: another value may end them before."""
        values = draft.values
        longest = max(len(answer.tokens) for answer in answers)
        if longest < draft.tokens_to_reach:
            draft.refused.add("answer size")
        wanted = ENDINGS[values["stop"]]
        if wanted is not None and not any(
            answer.ending[0] == "stop" and isinstance(answer.ending[1], wanted)
            for answer in answers
        ):
            draft.refused.add("stop")
        if draft.thinks and not any(self.closing in answer.tokens for answer in answers):
            draft.refused.add("prompt")

    def runs(self, draft: Draft) -> PlainRuns:
        """Return the plain runs of the request's adapter."""
        return self.plain.of(adapter_of(draft.values))

    def output(self, draft: Draft, params: Params, reach: int = 1) -> CompletionOutput:
        """Return the first completion of the plain run, without parameters that end it early.

        reach: token that the completion should have, if max_tokens permits it.
        """
        probe = {name: value for name, value in params.items() if name not in IGNORED_BY_PROBE}
        probe["max_tokens"] = min(probe["max_tokens"], max(*SHORT, reach + PROBED))
        params_of_probe = SamplingParams(**probe, ignore_eos=True)
        return self.runs(draft).probe(draft.prompt, params_of_probe, draft.conversation)

    def begin_across_tokens(self, output: CompletionOutput, begin: int, earliest: int) -> int:
        """Return where a stop string begins that spans two tokens of an output.

        It begins at the last character of a token, at `earliest` or later and as near to `begin` as
        possible. The text before it lacks its first two characters. Returns `begin` if there is no
        such token.
        """
        tokenizer = self.plain.llm.tokenizer
        assert tokenizer is not None, "an output with a text has a tokenizer"
        text = output.text
        counts = range(1, len(output.token_ids))
        lasts = (len(tokenizer.fast.decode(output.token_ids[:count])) - 1 for count in counts)
        candidates = [
            last
            for last in lasts
            if earliest <= last < len(text) - 2 and text.index(text[last : last + 2]) == last
        ]
        return min(candidates, key=lambda last: abs(last - begin), default=begin)

    def greedy_tokens(self, draft: Draft) -> list[int]:
        """Return the tokens of the greedy output, each once."""
        greedy = {"temperature": 0.0, "max_tokens": 8}
        return list(dict.fromkeys(self.output(draft, greedy).token_ids))

    @property
    def is_companion(self) -> bool:
        """Return whether the scenario's model has random weights."""
        return self.kind.model != SERVED


def _penalties(writer: RequestWriter, draft: Draft) -> None:
    """Set high penalties, positive and negative."""
    rng = draft.rng
    if not draft.is_usual("repetition"):
        draft.params["repetition_penalty"] = rng.choice(REPETITION[draft.values["repetition"]])


def _count_penalties(writer: RequestWriter, draft: Draft) -> None:
    rng = draft.rng
    if draft.is_usual("count penalties"):
        return
    sign = 1 if draft.values["count penalties"] == "positive" else -1
    which = rng.choice(("frequency", "presence", "both"))
    if which != "presence":
        draft.params["frequency_penalty"] = sign * rng.choice((1.0, 2.0))
    if which != "frequency":
        draft.params["presence_penalty"] = sign * rng.choice((1.0, 2.0))


def _filters(writer: RequestWriter, draft: Draft) -> None:
    rng = draft.rng
    if not draft.is_usual("top_k"):
        draft.params["top_k"] = rng.choice(TOP_K[draft.values["top_k"]])
    if not draft.is_usual("top_p"):
        draft.params["top_p"] = rng.choice(TOP_P[draft.values["top_p"]])
    if not draft.is_usual("min_p"):
        draft.params["min_p"] = rng.choice((0.02, 0.1, 0.3))


def _allowed(writer: RequestWriter, draft: Draft) -> None:
    """Allow few, unlikely tokens, so that their counts decide; or many, some of the answer."""
    rng = draft.rng
    if draft.is_usual("allowed ids", "all"):
        return
    if draft.values["allowed ids"] == "few":
        chosen = set(rng.sample(range(writer.vocab), rng.choice((3, 6, 12))))
    else:
        likely = writer.greedy_tokens(draft)
        chosen = {*rng.sample(likely, (len(likely) + 1) // 2)}
        chosen |= set(rng.sample(range(writer.vocab), 30))
    if draft.thinks and writer.closing is not None:
        chosen.add(writer.closing)
    if draft.values["stop"] == "end of sequence":
        chosen |= writer.plain.llm.processor.eos_ids
    draft.params["allowed_token_ids"] = sorted(chosen)


def _bias(writer: RequestWriter, draft: Draft) -> None:
    """Bias tokens of the greedy output up, down, or to -100, and tokens that end something."""
    rng = draft.rng
    bias: dict[int, float] = {}
    if not draft.is_usual("bias"):
        likely = writer.greedy_tokens(draft)
        chosen = rng.sample(likely, min(len(likely), 3)) + rng.sample(range(writer.vocab), 2)
        bias = {t: rng.choice((-100.0, -3.0, 2.5, 6.0, 0.5)) for t in chosen}
    if draft.values["prompt"] == "thought ends" and writer.closing is not None:
        bias[writer.closing] = rng.choice((4.0, 8.0, 30.0))
        _lengthen_thought(draft, writer.closing, bias)
    if draft.values["stop"] == "end of sequence" and writer.is_companion:
        # Random weights hardly ever end a text.
        for token in writer.plain.llm.processor.eos_ids:
            # The noise of a high temperature hides a small bias.
            bias[token] = rng.choice((4.0, 6.0, 30.0)) * max(draft.params["temperature"], 1.0)
    if bias:
        draft.params["logit_bias"] = bias


def _lengthen_thought(draft: Draft, closing: int, bias: dict[int, float]) -> None:
    """Put two tokens before the end of a thought whose answer then has a grammar.

    The end is drafted after another draft then, and the grammar begins inside of a window. The bias
    of the closing tag alone would make it the first token.
    """
    fits = draft.params["max_tokens"] >= SHORT[0]
    if draft.is_usual("grammar") or not draft.is_usual("bad words") or not fits:
        return
    token = draft.prompt[len(draft.prompt) // 2]
    scale = max(draft.params["temperature"], 1.0)
    bias[closing] = THOUGHT_BIAS * scale
    bias[token] = 2 * THOUGHT_BIAS * scale
    draft.params["bad_words_ids"] = [[token] * 3]
    if "allowed_token_ids" in draft.params:
        allowed = {*draft.params["allowed_token_ids"], token}
        draft.params["allowed_token_ids"] = sorted(allowed)


def _bad_words(writer: RequestWriter, draft: Draft) -> None:
    """Ban words of the output: their first tokens still occur, also as drafts."""
    rng = draft.rng
    if draft.values["bad words"] == "text":
        words = writer.output(draft, draft.params).text.split()
        short = [word for word in words if word.isascii() and len(word) < 7]
        draft.params["bad_words"] = [rng.choice(short or ["a"])]
        return
    if draft.is_usual("bad words"):
        return
    tokens = writer.output(draft, draft.params).token_ids
    if len(tokens) < 2:
        draft.refused.add("bad words")
        return
    last = rng.randrange(1, len(tokens))
    word = list(tokens[max(0, last - rng.choice((1, 1, 2, 3))) : last + 1])
    draft.params["bad_words_ids"] = [word]


def _new_text_from(rng: random.Random, text: str, begin: int) -> int:
    """Return where a stop string of two characters begins that the text before it lacks.

    begin: first position that it may have. Any position, if the text repeats itself.
    """
    positions = rng.sample(range(begin, len(text) - 2), len(text) - 2 - begin)
    new = (at for at in positions if text.index(text[at : at + 2]) == at)
    return next(new, positions[0])


def _other_strings(text: str, string: str) -> list[str]:
    """Return more stop strings, with which `string` still ends the text.

    The first never occurs. The second ends where `string` ends, and the longest match counts.
    """
    end = string[1:]
    ends_together = text.find(end) == text.find(string) + 1
    return ["\N{SNOWMAN}", end] if ends_together else ["\N{SNOWMAN}"]


def _stops(writer: RequestWriter, draft: Draft) -> None:
    """End the answer by tokens or a string of the output; min_tokens is near the first one."""
    rng = draft.rng
    stop = draft.values["stop"]
    reach = draft.tokens_to_reach
    first = 0
    if stop == "ids":
        tokens = writer.output(draft, draft.params, reach).token_ids
        begin = max(reach - 1, 1)
        positions = [i for i in range(begin, len(tokens)) if tokens[i] not in tokens[:i]]
        if not positions:
            draft.refused.add("stop")
            return
        chosen = sorted(rng.sample(positions, min(len(positions), rng.choice((1, 1, 2)))))
        draft.params["stop_token_ids"] = [tokens[i] for i in chosen]
        draft.params["ignore_eos"] = True
        first = chosen[0]
    elif stop == "string":
        probed = writer.output(draft, draft.params, reach)
        text = probed.text
        if len(text) <= 3:
            draft.refused.add("stop")
            return
        # Characters of the tokens before `reach`, if all tokens have equally many.
        earliest = min(len(text) * (reach - 1) // len(probed.token_ids), len(text) - 4)
        earliest = max(earliest, 1)
        begin = _new_text_from(rng, text, earliest)
        has_others = rng.random() < 0.4
        length = rng.randrange(2, 8)
        if length > 2:
            begin = writer.begin_across_tokens(probed, begin, earliest)
        string = text[begin : begin + length]
        more_strings = _other_strings(text, string) if has_others else []
        draft.params["stop"] = [*more_strings, string]
        draft.params["include_stop_str_in_output"] = rng.random() < 0.5
        draft.params["ignore_eos"] = draft.is_usual("grammar")
        first = begin // 3
    if not draft.is_usual("min_tokens", "0"):
        some = max(1, first + rng.choice((0, 0, 0, 1, -1, -2)))
        # max_model_len may cut the answer.
        draft.params["min_tokens"] = min(some, draft.params["max_tokens"], draft.max_output_tokens)


def _grammar(writer: RequestWriter, draft: Draft) -> None:
    """Require a text, of which some drafts are a part and others are not."""
    rng = draft.rng
    grammar = draft.values["grammar"]
    if grammar == "off":
        return
    draft.params.pop("ignore_eos", None)
    if grammar == "regex":
        draft.params["structured_outputs"] = {"regex": rng.choice(REGEXES)}
    elif grammar == "json":
        draft.params["structured_outputs"] = {"json": SCHEMA}
    else:
        text = writer.output(draft, draft.params).text.partition("\N{REPLACEMENT CHARACTER}")[0]
        text = text if len(text) > 3 else "perhaps yes, perhaps no"
        cuts = [rng.randrange(1, len(text)) for _ in range(rng.choice((1, 3, 6)))]
        ends = [rng.choice((" and so on", "x", ".", text[::-1], text[:5])) for _ in cuts]
        texts = {text[:cut] + end for cut, end in zip(cuts, ends, strict=True)}
        texts.add(text[: rng.randrange(1, len(text))])
        draft.params["structured_outputs"] = {"choice": sorted(texts)}


def _thought(writer: RequestWriter, draft: Draft) -> None:
    if draft.values["prompt"] == "thought cut":
        draft.params["thinking_token_budget"] = draft.rng.choice(BUDGETS)


Writer = Callable[[RequestWriter, Draft], None]
WRITERS: tuple[tuple[str, Writer], ...] = (
    ("prompt", _thought),
    ("repetition", _penalties),
    ("count penalties", _count_penalties),
    ("top_k", _filters),
    ("allowed ids", _allowed),
    ("bias", _bias),
    ("bad words", _bad_words),
    ("stop", _stops),
    ("grammar", _grammar),
)
"""Writers of parameters, in the order in which they run. A later one reads the plain output under
the parameters of earlier ones."""
IGNORED_BY_PROBE = {
    "n", "ignore_eos", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "bad_words", "detokenize", "skip_special_tokens", "logprobs", "prompt_logprobs",
    "structured_outputs",
}  # fmt: skip
"""Parameters that the probing plain run omits, so that more aims share one run."""
