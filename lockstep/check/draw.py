"""Draws worlds from a seed. They aim at where drafts, cache and parameters meet.

Prompts are cut from a few families that share text, at and beside the ends of pages. Parameters are
chosen by what the plain run answers, so that they strike: a bad word whose first tokens it would
say, a stop token that it would say just when min_tokens allows it. One or two requests of a world
are new; the others come from earlier worlds, whose plain runs are known.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check import answer_oracle
from lockstep.check.answers import Answer
from lockstep.check.drafters import NONE
from lockstep.check.plain import PlainRuns
from lockstep.check.world import MOST_HOST, MOST_PAGES, ROOM, Kind, Limits, World, WorldRequest
from lockstep.errors import RequestError
from lockstep.example_prompts import short_prompts
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import check_ids
from lockstep.step import PAGE_SIZE

EARLY = 8
"""The first worlds bring two new requests each, later ones one, so that all aims come soon."""
MOST_OLD = 4
"""Earlier requests beside the new ones, at most."""
MEMORY = 40
"""How many requests back those lie, at most."""
WORLDS_OF_A_KIND = 2
PAGE = PAGE_SIZE
LENGTHS = (1, 3, 17, 40, 61, 62, 63, 64, 65, 66, 90, 125, 126, 127, 128, 129, 130, 150, 190, 191,
           192, 193, 200, 250, 255, 256, 257)  # fmt: skip
LONG = (513, 514, 577, 600)
"""Prompts that attention folds in three parts: of two, no order shows."""
SELDOM = 10
"""One world of so many has a long prompt, one has rows that others push out, and two have prefixes
that come back from host memory."""
LONGER = 1
"""Which of them has the long prompt."""
PUSHED = 2
"""Which of them has rows that are pushed out."""
HOSTED = (3, 8)
"""Which of them have prefixes that the pages do not hold, but host memory does."""
HOSTS = 24
"""Steps in which these come one after the other."""
PUSHES = 12
"""Steps in which urgent requests push rows out."""
ALSO = 7
"""One world of so many has an answer that lasts, and one an answer that the engine's length
ends."""
LASTING = 4
"""Which of them has the answer that lasts."""
EDGE = 6
"""Which of them has the answer that ends at the engine's length."""
LAST = (70, 100, 130)
"""Tokens of answers that last: past ends of pages, and past what rings of recent tokens hold."""
LAST_BEHIND = (20, 47, 62, 100)
"""Tokens of the prompts in front of them."""
EDGE_ROOM = (1, 2, 5, 9)
"""Tokens that an engine's length leaves the answers that it ends."""
EDGE_TOKENS = 14
"""Tokens that these ask for."""
NO_DRAFTS = 0.1
"""Share of the requests that want no drafts."""
BUCKETS = ((1, 2, 4, 6), (2, 6), (3, 5), (6,), (1, 2, 3, 4, 5, 6))
Params = dict[str, Any]
Requests = tuple[WorldRequest, ...]


def kinds_of(drafters: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """The drafters of engines, in turn, and whether every step brings another number of drafts."""
    told = answer_oracle.NAME
    own = tuple(reversed(drafters))
    changing = [(name, True) for name in (told, *own)]
    return ((told, False), *changing, (NONE, False), *((name, False) for name in (told, *own)))


def kind_of(seed: int, group: int, drafters: tuple[str, ...], graphs: tuple[str, ...]) -> Kind:
    """The engine of the `group`th worlds. drafters: those that the checkpoint allows."""
    rng = random.Random(f"kind {seed} {group}")
    kinds = kinds_of(drafters)
    drafter, changing = kinds[group % len(kinds)]
    common: dict[str, Any] = {
        "buckets": rng.choice(BUCKETS),
        "in_flight": rng.choice((1, 1, 2)),
        "graph": graphs[group % len(graphs)],
    }
    if drafter == NONE:
        return Kind(**common)
    drafts = (
        rng.choice((3, 7, 15)) if changing else rng.choice((7, 15) if not group else (1, 2, 3, 4))
    )
    return Kind(drafter, drafts, changing, rng.choice((1, 1, 2)), **common)


@dataclass(frozen=True)
class Family:
    """Texts that share pages. trunk: one text; other: another one of equal length; ends: what
    prompts end with, so that the model has something to answer."""

    trunk: tuple[int, ...]
    other: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]


class Drawer:
    """Draws worlds by number, the same ones for the same seed and model."""

    def __init__(
        self, plain: PlainRuns, seed: int, drafters: tuple[str, ...], graphs: tuple[str, ...]
    ) -> None:
        self.plain = plain
        self.seed = seed
        self.drafters = drafters
        self.graphs = graphs
        self.vocab = plain.llm.engine.vocab_size
        self._drawn: dict[int, WorldRequest] = {}
        self._texts = short_prompts(plain.llm)

    def kind(self, index: int) -> Kind:
        """The engine of a world."""
        return kind_of(self.seed, index // WORLDS_OF_A_KIND, self.drafters, self.graphs)

    def world(self, index: int) -> World:
        """World number `index`. The first of a kind may be short of rows and pages, the others are
        crowded."""
        rng = random.Random(f"world {self.seed} {index}")
        own = [2 * index, 2 * index + 1] if index < EARLY else [EARLY + index]
        before = list(range(max(0, own[0] - MEMORY), own[0]))
        crowded = index % WORLDS_OF_A_KIND > 0
        beside = rng.randrange(2, MOST_OLD + 1) if crowded else rng.randrange(MOST_OLD)
        own += rng.sample(before, min(len(before), beside))
        rng.shuffle(own)
        kind = self.kind(index)
        drawn = [self._request(number) for number in own]
        requests = tuple(self._scheduled(rng, request) for request in drawn)
        requests += self._next_turns(rng, requests)
        primed = self._primed(rng, requests)
        pushed = index % SELDOM == PUSHED
        hosted = self.wants_host(index)
        if index % SELDOM == LONGER:
            requests += (self._long(index),)
        if not (pushed or hosted):
            requests += self._also(index)
        if pushed:
            requests = self._pushed(index, kind, requests)
        if hosted:
            requests = self._hosted(index, requests)
        limits = self._limits(rng, kind, requests, primed)
        if crowded:
            limits = replace(limits, rows=kind.buckets[-1], pages=MOST_PAGES)
        if pushed:
            limits = replace(limits, rows=2, policy="priority")
        # From numbers of its own, so that nothing else of a world depends on it.
        host = random.Random(f"host {self.seed} {index}")
        limits = replace(limits, host=host.choice((0, 0, 1, 2, 5, MOST_HOST)))
        if hosted:
            pages = _least_pages(requests, primed)
            limits = replace(limits, rows=2, pages=pages, snapshots=1, host=MOST_HOST, caching=True)
        dirt = rng.randrange(2**31)
        draws = rng.randrange(2**31)
        requests = tuple(replace(r, speculate=rng.random() >= NO_DRAFTS) for r in requests)
        return World(kind, limits, requests, primed, dirt, draws)

    def wants_host(self, index: int) -> bool:
        """Whether a world is made for prefixes to come back from host memory."""
        return index % SELDOM in HOSTED

    def _scheduled(self, rng: random.Random, request: WorldRequest) -> WorldRequest:
        """When a request comes, goes, and is moved to the host."""
        arrival = 0 if rng.random() < 0.5 else rng.randrange(10)
        abort = arrival + rng.randrange(12) if rng.random() < 0.12 else None
        preempt = [arrival + 1 + rng.randrange(14) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
        rank = rng.randrange(-2, 3)
        return replace(
            request, arrival=arrival, abort=abort, preempt=tuple(sorted(preempt)), priority=rank
        )

    def _next_turns(self, rng: random.Random, requests: Requests) -> Requests:
        """The next turn of a conversation whose answer has filled a page, sent twice: what was
        generated is a prompt there, and no state of it may come from the cache."""
        for request in requests:
            said = self.plain.answers(request.prompt, request.sampling())[0].tokens
            before = len(request.prompt)
            after = before + len(said)
            if before // PAGE == (after - 1) // PAGE or after > 4 * PAGE:
                continue
            text = (*request.prompt, *said, *rng.choice(self._texts)[-20:])
            params = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1}
            later = request.arrival + len(said) + rng.randrange(3, 6)
            return tuple(WorldRequest(text, params, arrival=later + wait) for wait in (0, 10))
        return ()

    def _long(self, index: int) -> WorldRequest:
        """A prompt that attention folds in three parts, of the family that is new now."""
        rng = random.Random(f"long {self.seed} {index}")
        texts = self._family((EARLY + index) // 10)
        prompt = (*texts.trunk, *texts.other)[: rng.choice(LONG)]
        params = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True, "logprobs": 1}
        return WorldRequest(prompt, params, arrival=rng.randrange(3))

    def _also(self, index: int) -> Requests:
        """An answer that goes on for long, in a world where one is due, and one that ends where the
        table of rows does."""
        rng = random.Random(f"also {self.seed} {index}")
        texts = self._family((EARLY + index) // 10)
        params: Params = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1}
        if index % ALSO == LASTING:
            sampled = {"temperature": rng.choice((0.0, 0.8)), "seed": rng.randrange(2**63)}
            prompt = texts.trunk[: rng.choice(LAST_BEHIND)]
            params |= {"max_tokens": rng.choice(LAST), **sampled}
        elif index % ALSO == EDGE:
            prompt = (*texts.trunk, *texts.other)[: ROOM - rng.choice(EDGE_ROOM)]
            params |= {"max_tokens": EDGE_TOKENS}
        else:
            return ()
        return (WorldRequest(prompt, params, arrival=rng.randrange(3)),)

    def _pushed(self, index: int, kind: Kind, requests: Requests) -> Requests:
        """Rows that are pushed out while they run. Two answers begin a page, and urgent requests
        push them out, also in the step that has just granted it; then the world's own ones do, and
        one of the two ends from outside while it is out."""
        rng = random.Random(f"pushed {self.seed} {index}")
        texts = self._family((EARLY + index) // 10)
        rows = []
        for abort in (None, rng.choice((4, 6, 8))):
            before = rng.randrange(kind.drafts + 2, kind.drafts + 6)
            params = {"temperature": 0.0, "max_tokens": before + 3, "ignore_eos": True}
            prompt = texts.trunk[: rng.choice((1, 1, 2)) * PAGE - before]
            rows.append(WorldRequest(prompt, params, abort=abort, priority=3))
        urgent = WorldRequest(texts.ends[0], {"temperature": 0.0, "max_tokens": 1}, priority=-3)
        steps = [step for step in range(1, PUSHES, 2) for _ in range(rng.choice((1, 2)))]
        own = (replace(a, **_later(a, PUSHES)) for a in requests)
        return (*rows, *(replace(urgent, arrival=step) for step in steps), *own)

    def _hosted(self, index: int, requests: Requests) -> Requests:
        """Two prompts of which the pages hold one, in turn: what was computed of each is evicted by
        the other, and wanted again, also with what follows it and under another salt."""
        rng = random.Random(f"hosted {self.seed} {index}")
        texts = self._family((EARLY + index) // 10)
        params = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "logprobs": 1}
        length = max(_least_pages(requests, ()) - 1, 2) * PAGE + rng.choice((1, 17, 40))
        pair = (texts.trunk * 2)[:length], (texts.other * 2)[:length]
        turns = []
        for turn in range(HOSTS // 4):
            prompt = pair[turn % 2]
            cut = rng.choice((0, 0, 20)) if turn > 1 else 0
            salt = "of another" if turn == 4 else ""
            asked = WorldRequest(prompt[: length - cut], params, arrival=4 * turn, salt=salt)
            turns.append(asked)
        own = (replace(a, **_later(a, HOSTS)) for a in requests)
        return (*turns, *own)

    def _limits(
        self,
        rng: random.Random,
        kind: Kind,
        requests: Requests,
        primed: tuple[tuple[int, ...], ...],
    ) -> Limits:
        """Pages from just enough for the longest request to plenty, and so on."""
        least = _least_pages(requests, primed)
        pages = rng.choice((least, least, least + 1, least + 2, 2 * least, MOST_PAGES))
        return Limits(
            rows=rng.choice((kind.buckets[-1], kind.buckets[-1], 2, 3)),
            chunk=rng.choice((64, 64, 100, 128, 192, 300, 2048)),
            pages=min(pages, MOST_PAGES),
            snapshots=rng.choice((0, 1, 1, 2, 3, 16)),
            caching=bool(primed) or rng.random() < 0.6,
            preempt_every=rng.choice((0, 0, 0, 0, 1, 2, 3, 5)),
            policy=rng.choice(("fcfs", "fcfs", "priority")),
        )

    def _primed(self, rng: random.Random, requests: Requests) -> tuple[tuple[int, ...], ...]:
        """Beginnings of the prompts, cut at pages and beside them, and their second pages under
        the first page of another text."""
        if rng.random() < 0.35:
            return ()
        long = [a.prompt for a in requests if len(a.prompt) > PAGE]
        found = []
        for prompt in rng.sample(long, min(len(long), 3)):
            cut = rng.choice((len(prompt), len(prompt) - 1, len(prompt) // PAGE * PAGE, 2 * PAGE))
            found.append(prompt[: max(cut, PAGE + 1)])
            if rng.random() < 0.5:
                other = tuple(rng.choices(range(self.vocab), k=PAGE))
                found.append((*other, *prompt[PAGE:]))
            if len(prompt) > 2 * PAGE and rng.random() < 0.5:
                found.append(prompt[: PAGE + 1])
        rng.shuffle(found)
        return tuple(found[:4])

    def _request(self, number: int) -> WorldRequest:
        """Request number `number`: its prompt, and parameters around one aim."""
        if number not in self._drawn:
            rng = random.Random(f"ask {self.seed} {number}")
            prompt = self._prompt(rng, number // 10)
            params = self._params(rng, prompt, TURNS[number % len(TURNS)])
            self._drawn[number] = WorldRequest(prompt, params)
        return self._drawn[number]

    def _family(self, number: int) -> Family:
        rng = random.Random(f"family {self.seed} {number}")
        length = max(LENGTHS) + PAGE
        if rng.random() < 0.6:
            stream = [t for text in rng.sample(self._texts, len(self._texts)) for t in text]
            stream = stream * (2 * length // len(stream) + 2)
            at = rng.randrange(len(stream) - 2 * length)
            trunk = stream[at : at + length]
            other = stream[at + length : at + 2 * length]
        else:
            trunk, other = (self._pattern(rng, length) for _ in range(2))
        ends = [text[-rng.randrange(8, 30) :] for text in self._texts]
        return Family(tuple(trunk), tuple(other), tuple(tuple(e) for e in ends))

    def _pattern(self, rng: random.Random, length: int) -> list[int]:
        """Random ids, over and over, so that an n-gram drafter finds its drafts."""
        pattern = rng.choices(range(self.vocab), k=rng.choice((7, 23, 200)))
        return (pattern * (length // len(pattern) + 1))[:length]

    def _prompt(self, rng: random.Random, family: int) -> tuple[int, ...]:
        """A prompt of the family that leaves the trunk somewhere, or never."""
        texts = self._family(family)
        length = rng.choice(LENGTHS)
        way = rng.randrange(5)
        if way == 0:
            return texts.trunk[:length]
        if way == 1:
            return (*texts.other[: min(length, PAGE)], *texts.trunk[PAGE:length])
        cut = max(0, length // PAGE * PAGE - (0, 1, rng.randrange(1, PAGE))[way - 2])
        tail = rng.choice(texts.ends) if rng.random() < 0.7 else texts.other
        return (*texts.trunk[:cut], *tail[: max(length - cut, 1)])

    def _params(self, rng: random.Random, prompt: tuple[int, ...], aim: str) -> Params:
        params = _base(rng)
        steps = [aim, *(name for name in AIMS if name != aim and rng.random() < 0.18)]
        for name in sorted(steps, key=AIMS.index):
            aimed = dict(params)
            AIM[name](self, rng, prompt, aimed)
            params = aimed if self._fits(prompt, aimed) else params
        return params

    def _fits(self, prompt: tuple[int, ...], params: Params) -> bool:
        """Whether an engine takes such a request: some parameters leave no token together."""
        try:
            given = {"prompt_token_ids": list(prompt)}
            requests = self.plain.llm.processor.requests("", given, SamplingParams(**params))
            check_ids(requests[0], self.vocab)
        except RequestError:
            return False
        return True

    def answer(self, prompt: tuple[int, ...], params: Params) -> Answer:
        """The first completion of the plain run, without what ends it early."""
        kept = {name: value for name, value in params.items() if name not in ENDING}
        return self.plain.answers(prompt, SamplingParams(**kept, ignore_eos=True))[0]

    def likes(self, prompt: tuple[int, ...]) -> list[int]:
        """Tokens that the model would say behind the prompt."""
        greedy = {"temperature": 0.0, "max_tokens": 8}
        return list(dict.fromkeys(self.answer(prompt, greedy).tokens))


def _least_pages(requests: Requests, primed: tuple[tuple[int, ...], ...]) -> int:
    """Pages that just hold the longest request."""
    longest = max(len(a.prompt) + a.params["max_tokens"] for a in requests)
    longest = max(longest, max((len(p) + 1 for p in primed), default=0))
    return -(-longest // PAGE)


def _later(request: WorldRequest, steps: int) -> dict[str, Any]:
    """When a request comes, goes and is moved, so many steps later."""
    abort = None if request.abort is None else request.abort + steps
    preempt = tuple(step + steps for step in request.preempt)
    return {"arrival": request.arrival + steps, "abort": abort, "preempt": preempt}


def _base(rng: random.Random) -> Params:
    params: Params = {
        "temperature": 0.0,
        "max_tokens": rng.choice((5, 7, 10, 14)),
        "seed": rng.choice((rng.randrange(2**63), -rng.randrange(2**63), rng.randrange(100))),
        "logprobs": rng.choice((None, 0, 1, 3)),
    }
    if rng.random() < 0.55:
        params["temperature"] = rng.choice((0.4, 0.8, 1.0, 1.4, 2.5))
    if rng.random() < 0.5:
        params["ignore_eos"] = True
    if rng.random() < 0.3:
        params["detokenize"] = False
    if rng.random() < 0.3:
        params["skip_special_tokens"] = False
    return {name: value for name, value in params.items() if value is not None}


def _penalties(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """High weights, up and down."""
    which = rng.choice(("repetition", "frequency", "presence", "all", "all"))
    if which in ("repetition", "all"):
        params["repetition_penalty"] = rng.choice((0.5, 1.3, 2.0, 5.0))
    if which in ("frequency", "all"):
        params["frequency_penalty"] = rng.choice((-2.0, -1.0, 1.0, 2.0))
    if which in ("presence", "all"):
        params["presence_penalty"] = rng.choice((-2.0, -1.0, 1.0, 2.0))


def _counts(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """Few tokens to choose from, none of them likely, so that their counts decide every one."""
    params |= {"frequency_penalty": 2.0, "max_tokens": 12, "ignore_eos": True}
    unlikely = rng.sample(range(drawer.vocab), rng.choice((3, 6, 12)))
    params["allowed_token_ids"] = sorted(unlikely)


def _filters(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    params["temperature"] = rng.choice((0.8, 1.0, 1.5, 3.0))
    which = rng.choice(("top_k", "top_p", "min_p", "all", "all"))
    if which in ("top_k", "all"):
        params["top_k"] = rng.choice((1, 2, 5, 40))
    if which in ("top_p", "all"):
        params["top_p"] = rng.choice((0.3, 0.6, 0.9, 0.97))
    if which in ("min_p", "all"):
        params["min_p"] = rng.choice((0.02, 0.1, 0.3))


def _bias(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """Tokens that it would say are made likelier, less likely, and impossible."""
    likes = drawer.likes(prompt)
    chosen = rng.sample(likes, min(len(likes), 3)) + rng.sample(range(drawer.vocab), 2)
    values = (-100.0, -3.0, 2.5, 6.0, 0.5)
    params["logit_bias"] = {t: rng.choice(values) for t in dict.fromkeys(chosen)}


def _allowed(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    if "allowed_token_ids" in params:
        return
    likes = drawer.likes(prompt)
    others = rng.sample(range(drawer.vocab), 30)
    params["allowed_token_ids"] = sorted({*rng.sample(likes, (len(likes) + 1) // 2), *others})


def _bad_words(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """Words that it is about to say: their first tokens come, as drafts too, their last may not."""
    words: list[list[int]] = []
    for _ in range(rng.choice((1, 1, 2))):
        said = drawer.answer(prompt, {**params, "bad_words_ids": words} if words else params).tokens
        if len(said) < 2:
            break
        last = rng.randrange(1, len(said))
        words.append(list(said[max(0, last - rng.choice((1, 1, 2, 3))) : last + 1]))
    if words:
        params["bad_words_ids"] = words


def _bad_text(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """The same, as text."""
    if _has_text(drawer):
        words = drawer.answer(prompt, params).text.split()
        params["bad_words"] = [
            rng.choice([w for w in words if w.isascii() and len(w) < 7] or ["a"])
        ]


def _stops(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """Tokens that it would say end the answer, from min_tokens on: there, before or behind."""
    said = drawer.answer(prompt, params).tokens
    fresh = [i for i in range(1, len(said)) if said[i] not in said[:i]]
    chosen = sorted(rng.sample(fresh, min(len(fresh), rng.choice((1, 1, 2)))))
    if not chosen:
        return
    params["stop_token_ids"] = [said[i] for i in chosen]
    least = max(0, chosen[0] + rng.choice((0, 0, 0, 1, -1, -2)))
    params["min_tokens"] = min(least, params["max_tokens"])


def _ends(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """The model's own end, kept off by min_tokens."""
    params.pop("ignore_eos", None)
    said = drawer.answer(prompt, params).tokens
    params["min_tokens"] = min(params["max_tokens"], len(said) + rng.choice((-1, 0, 1, 3)))


def _stop_text(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """A string that lies across tokens, and so across windows."""
    params.pop("detokenize", None)
    text = drawer.answer(prompt, params).text if _has_text(drawer) else ""
    if len(text) > 3:
        begin = rng.randrange(1, len(text) - 2)
        strings = [text[begin : begin + rng.randrange(2, 8)]]
        if rng.random() < 0.4:
            strings.append("\N{SNOWMAN}")
        params["stop"] = strings
    if rng.random() < 0.5:
        params["include_stop_str_in_output"] = True


def _several(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    params["n"] = rng.choice((2, 3))
    params["temperature"] = rng.choice((0.8, 1.2))
    params["seed"] = rng.choice((2**63 - 1, 2**32 - 1, rng.randrange(2**63)))


def _prompt_logprobs(
    drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    params["prompt_logprobs"] = rng.choice((0, 1, 3))


def _choice(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """One of some texts, which begin as the model would say, and part late; so drafts are accepted,
    and others are what no text goes on with."""
    for name in ("detokenize", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words",
                 "bad_words_ids"):  # fmt: skip
        params.pop(name, None)
    text = drawer.answer(prompt, params).text if _has_text(drawer) else ""
    text = text.partition("\N{REPLACEMENT CHARACTER}")[0]
    if len(text) < 3:
        return
    cuts = [rng.randrange(1, len(text)) for _ in range(rng.choice((1, 3, 6)))]
    ends = [rng.choice((" and so on", "x", ".", text[::-1], text[:5])) for _ in cuts]
    texts = {text[:cut] + end for cut, end in zip(cuts, ends, strict=True)}
    texts.add(text[: rng.randrange(1, len(text))])
    params["structured_outputs"] = {"choice": sorted(texts)}
    params["max_tokens"] = rng.choice((10, 20, 30))


def _nothing(drawer: Drawer, rng: random.Random, prompt: tuple[int, ...], params: Params) -> None:
    """Nothing beside the common parameters."""


def _has_text(drawer: Drawer) -> bool:
    return drawer.plain.llm.tokenizer is not None


Aim = Callable[[Drawer, random.Random, tuple[int, ...], Params], None]
AIM: dict[str, Aim] = {
    "nothing": _nothing,
    "penalties": _penalties,
    "counts": _counts,
    "filters": _filters,
    "several": _several,
    "prompt_logprobs": _prompt_logprobs,
    "bias": _bias,
    "allowed": _allowed,
    "bad_words": _bad_words,
    "bad_text": _bad_text,
    "stops": _stops,
    "ends": _ends,
    "stop_text": _stop_text,
    "choice": _choice,
}
"""What a request aims at. Later ones look at the plain answer that the earlier ones lead to."""
AIMS = tuple(AIM)
ENDING = {
    "n", "ignore_eos", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "bad_words", "detokenize", "skip_special_tokens", "logprobs", "prompt_logprobs",
    "structured_outputs",
}  # fmt: skip
"""Parameters that a plain run by which worlds aim does without: more of its aims share one run."""
TURNS = (
    "counts", "bad_words", "stops", "filters", "several", "prompt_logprobs", "bias", "counts",
    "stop_text", "allowed", "bad_words", "ends", "stops", "bad_text", "penalties", "choice",
)  # fmt: skip
"""The main aims of requests, in turn."""
