"""Generate random scenarios from a seed, aimed at where drafts, cache and parameters interact.

Prompts come from a few families that share text; they are cut at page boundaries or next to them.
Parameters depend on the plain run's output, so that they take effect: a bad word that begins with
tokens of that output, or a stop token at the position where min_tokens begins to allow it. One or
two requests of a scenario are new. The others repeat requests of earlier scenarios, because their
plain runs are cached.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.check import oracle_drafter
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.judges.answers import Answer
from lockstep.check.judges.plain_runs import PlainRuns
from lockstep.check.random_adapters import NAMES
from lockstep.check.scenarios.scenario import (
    MAX_HOST_PAGES,
    MAX_MODEL_LEN,
    MAX_PAGES,
    Kind,
    Limits,
    Scenario,
    ScenarioRequest,
)
from lockstep.errors import RequestError
from lockstep.example_prompts import short_prompts
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import check_ids
from lockstep.step import PAGE_SIZE

NUM_EARLY_SCENARIOS = 8
"""Number of first scenarios with two new requests each, so that all aims occur early."""
MAX_REPEATED_REQUESTS = 4
"""Maximum repeated requests of a scenario."""
MAX_REUSE_DISTANCE = 40
"""Maximum distance, in request numbers, between a repeated request and the new one."""
SCENARIOS_PER_KIND = 2
"""Consecutive scenarios that share an engine: building one takes longer than a scenario."""
PAGE = PAGE_SIZE
LENGTHS = (1, 3, 17, 40, 61, 62, 63, 64, 65, 66, 90, 125, 126, 127, 128, 129, 130, 150, 190, 191,
           192, 193, 200, 250, 255, 256, 257)  # fmt: skip
"""Prompt lengths, most of them at page boundaries or next to them."""
LONG = (513, 514, 577, 600)
"""Prompt lengths with three KV splits: the sum of two does not depend on their order."""
AIM_PERIOD = 10
"""Period in scenarios: one of them has a long prompt, one has urgent requests that preempt rows,
and two load prefixes from host memory."""
LONG_PROMPT_INDEX = 1
"""Scenario of each period with the long prompt."""
PREEMPTION_INDEX = 2
"""Scenario of each period whose rows are preempted by urgent requests."""
HOST_TIER_INDICES = (3, 8)
"""Scenarios of each period whose prefixes fit host memory but not the KV cache."""
HOST_TIER_STEPS = 24
"""Steps in which the prompts of a host-memory scenario arrive."""
PREEMPTION_STEPS = 12
"""Steps in which urgent requests arrive."""
ADAPTERS_GROUP = 2
"""Engine of each period whose requests have adapters, so that others run without their launches."""
EXTRA_PERIOD = 7
"""Period in scenarios: one of them has a long output, one an output cut by max_model_len."""
LONG_ANSWER_INDEX = 4
"""Scenario of each period with the long output."""
LENGTH_LIMIT_INDEX = 6
"""Scenario of each period with the output that max_model_len cuts."""
LONG_ANSWER_TOKENS = (70, 100, 130)
"""Lengths of long outputs: beyond page boundaries and beyond the circular history buffers."""
LONG_ANSWER_PROMPTS = (20, 47, 62, 100)
"""Prompt lengths of long outputs."""
LENGTH_LIMIT_REMAINDERS = (1, 2, 5, 9)
"""Numbers of tokens that max_model_len leaves to the outputs that it cuts."""
LENGTH_LIMIT_MAX_TOKENS = 14
"""max_tokens of the outputs that max_model_len cuts."""
NO_DRAFTS = 0.1
"""Share of the requests that disable speculative decoding."""
FORCED = 0.3
"""Share of the requests whose outputs begin with forced tokens."""
BUCKETS = ((1, 2, 4, 6), (2, 6), (3, 5), (6,), (1, 2, 3, 4, 5, 6))
"""Row buckets of engines; with gaps, steps have padded rows."""
Params = dict[str, Any]
Requests = tuple[ScenarioRequest, ...]


def kinds_of(drafters: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """Return the cycle of (drafter, whether the number of drafts changes per step)."""
    oracle = oracle_drafter.NAME
    names = (oracle, *reversed(drafters))
    changing = [(name, True) for name in names]
    return ((oracle, False), *changing, (NO_DRAFTER, False), *((name, False) for name in names))


def kind_of(seed: int, group: int, drafters: tuple[str, ...], graphs: tuple[str, ...]) -> Kind:
    """Return the engine kind of a group of scenarios.

    drafters: names that the checkpoint supports. graphs: graph modes of the device.
    """
    rng = random.Random(f"kind {seed} {group}")
    kinds = kinds_of(drafters)
    drafter, changing = kinds[group % len(kinds)]
    common: dict[str, Any] = {
        "buckets": rng.choice(BUCKETS),
        "in_flight": rng.choice((1, 1, 2)),
        "graph": graphs[group % len(graphs)],
    }
    if drafter == NO_DRAFTER:
        return Kind(**common)
    if changing:
        choices: tuple[int, ...] = (3, 7, 15)
    elif group == 0:
        choices = (7, 15)
    else:
        choices = (1, 2, 3, 4)
    drafts = rng.choice(choices)
    return Kind(drafter, drafts, changing, rng.choice((1, 1, 2)), **common)


@dataclass(frozen=True)
class Family:
    """Texts whose prompts share pages.

    trunk, other: two texts of equal length. ends: last tokens of prompts, which ask the model
    something.
    """

    trunk: tuple[int, ...]
    other: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]


class ScenarioGenerator:
    """Generator of numbered scenarios, the same for the same seed and model."""

    def __init__(
        self, plain: PlainRuns, seed: int, drafters: tuple[str, ...], graphs: tuple[str, ...]
    ) -> None:
        self.plain = plain
        self.seed = seed
        self.drafters = drafters
        self.graphs = graphs
        self.vocab = plain.llm.engine.vocab_size
        self._requests: dict[int, ScenarioRequest] = {}
        self._texts = short_prompts(plain.llm)

    def kind(self, index: int) -> Kind:
        """Return the engine kind of a scenario."""
        group = index // SCENARIOS_PER_KIND
        kind = kind_of(self.seed, group, self.drafters, self.graphs)
        has_adapters = group % (AIM_PERIOD // SCENARIOS_PER_KIND) == ADAPTERS_GROUP
        return replace(kind, adapters=has_adapters)

    def scenario(self, index: int) -> Scenario:
        """Return scenario number `index`.

        The first scenario of a kind may have few rows and pages; the others have many requests.
        """
        # The text that seeds a generator is part of the meaning of --seed: it never changes.
        rng = random.Random(f"world {self.seed} {index}")
        numbers = (
            [2 * index, 2 * index + 1]
            if index < NUM_EARLY_SCENARIOS
            else [NUM_EARLY_SCENARIOS + index]
        )
        reusable = list(range(max(0, numbers[0] - MAX_REUSE_DISTANCE), numbers[0]))
        crowded = index % SCENARIOS_PER_KIND > 0
        num_repeated = (
            rng.randrange(2, MAX_REPEATED_REQUESTS + 1)
            if crowded
            else rng.randrange(MAX_REPEATED_REQUESTS)
        )
        numbers += rng.sample(reusable, min(len(reusable), num_repeated))
        rng.shuffle(numbers)
        kind = self.kind(index)
        unscheduled = [self._request(number) for number in numbers]
        requests = tuple(self._scheduled(rng, request) for request in unscheduled)
        requests += self._follow_ups(rng, requests)
        warm_prefixes = self._warm_prefixes(rng, requests)
        has_preemptions = index % AIM_PERIOD == PREEMPTION_INDEX
        has_host_loads = self.loads_from_host(index)
        if index % AIM_PERIOD == LONG_PROMPT_INDEX:
            requests += (self._long_prompt_request(index),)
        if not (has_preemptions or has_host_loads):
            requests += self._extra_request(index)
        if has_preemptions:
            requests = self._with_preemptions(index, kind, requests)
        if has_host_loads:
            requests = self._with_host_loads(index, requests)
        limits = self._limits(rng, kind, requests, warm_prefixes)
        if crowded:
            limits = replace(limits, rows=kind.buckets[-1], pages=MAX_PAGES)
        if has_preemptions:
            limits = replace(limits, rows=2, policy="priority")
        # A separate generator, so that host memory changes nothing else of a scenario.
        host_rng = random.Random(f"host {self.seed} {index}")
        limits = replace(limits, host=host_rng.choice((0, 0, 1, 2, 5, MAX_HOST_PAGES)))
        if has_host_loads:
            pages = _min_pages(requests, warm_prefixes)
            limits = replace(
                limits, rows=2, pages=pages, snapshots=1, host=MAX_HOST_PAGES, caching=True
            )
        poison_seed = rng.randrange(2**31)
        draws = rng.randrange(2**31)
        requests = tuple(replace(r, speculate=rng.random() >= NO_DRAFTS) for r in requests)
        if kind.adapters:
            # A separate generator, so that adapters change nothing else of a scenario.
            adapter_rng = random.Random(f"adapters {self.seed} {index}")
            names = ("", *NAMES)
            requests = tuple(replace(r, adapter=adapter_rng.choice(names)) for r in requests)
        # A separate generator, so that forced tokens change nothing else of a scenario.
        forced_rng = random.Random(f"forced {self.seed} {index}")
        requests = tuple(replace(r, forced=_num_forced(forced_rng, r)) for r in requests)
        return Scenario(kind, limits, requests, warm_prefixes, poison_seed, draws)

    def loads_from_host(self, index: int) -> bool:
        """Return whether a scenario is meant to load prefixes from host memory."""
        return index % AIM_PERIOD in HOST_TIER_INDICES

    def _scheduled(self, rng: random.Random, request: ScenarioRequest) -> ScenarioRequest:
        """Choose the steps at which a request arrives, is aborted and is preempted."""
        arrival = 0 if rng.random() < 0.5 else rng.randrange(10)
        abort = arrival + rng.randrange(12) if rng.random() < 0.12 else None
        preempt = [arrival + 1 + rng.randrange(14) for _ in range(rng.choice((0, 0, 0, 1, 3)))]
        rank = rng.randrange(-2, 3)
        return replace(
            request, arrival=arrival, abort=abort, preempt=tuple(sorted(preempt)), priority=rank
        )

    def _follow_ups(self, rng: random.Random, requests: Requests) -> Requests:
        """Return the next chat message of a request whose output filled a page, sent twice.

        Its prompt contains generated tokens, whose recurrent state may not come from the cache.
        """
        for request in requests:
            output_tokens = self.plain.answers(request.prompt, request.sampling())[0].tokens
            prompt_len = len(request.prompt)
            total_len = prompt_len + len(output_tokens)
            if prompt_len // PAGE == (total_len - 1) // PAGE or total_len > 4 * PAGE:
                continue
            text = (*request.prompt, *output_tokens, *rng.choice(self._texts)[-20:])
            params = {"temperature": 0.0, "max_tokens": 6, "logprobs": 1}
            arrival = request.arrival + len(output_tokens) + rng.randrange(3, 6)
            return tuple(
                ScenarioRequest(text, params, arrival=arrival + delay) for delay in (0, 10)
            )
        return ()

    def _long_prompt_request(self, index: int) -> ScenarioRequest:
        """Return a request whose prompt has three KV splits, of the newest family."""
        rng = random.Random(f"long {self.seed} {index}")
        texts = self._family((NUM_EARLY_SCENARIOS + index) // 10)
        prompt = (*texts.trunk, *texts.other)[: rng.choice(LONG)]
        params = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True, "logprobs": 1}
        return ScenarioRequest(prompt, params, arrival=rng.randrange(3))

    def _extra_request(self, index: int) -> Requests:
        """Return one request or none: one with a long output, or one that max_model_len cuts."""
        rng = random.Random(f"also {self.seed} {index}")
        texts = self._family((NUM_EARLY_SCENARIOS + index) // 10)
        params: Params = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1}
        if index % EXTRA_PERIOD == LONG_ANSWER_INDEX:
            sampled = {"temperature": rng.choice((0.0, 0.8)), "seed": rng.randrange(2**63)}
            prompt = texts.trunk[: rng.choice(LONG_ANSWER_PROMPTS)]
            params |= {"max_tokens": rng.choice(LONG_ANSWER_TOKENS), **sampled}
        elif index % EXTRA_PERIOD == LENGTH_LIMIT_INDEX:
            prompt = (*texts.trunk, *texts.other)[
                : MAX_MODEL_LEN - rng.choice(LENGTH_LIMIT_REMAINDERS)
            ]
            params |= {"max_tokens": LENGTH_LIMIT_MAX_TOKENS}
        else:
            return ()
        return (ScenarioRequest(prompt, params, arrival=rng.randrange(3)),)

    def _with_preemptions(self, index: int, kind: Kind, requests: Requests) -> Requests:
        """Return requests, some of which are preempted while they run.

        Two outputs begin a new page. Urgent requests preempt them, also in the step that has just
        reserved that page. One of the two is aborted while it is preempted.
        """
        rng = random.Random(f"pushed {self.seed} {index}")
        texts = self._family((NUM_EARLY_SCENARIOS + index) // 10)
        rows = []
        for abort in (None, rng.choice((4, 6, 8))):
            tokens_to_page_end = rng.randrange(kind.drafts + 2, kind.drafts + 6)
            params = {"temperature": 0.0, "max_tokens": tokens_to_page_end + 3, "ignore_eos": True}
            prompt = texts.trunk[: rng.choice((1, 1, 2)) * PAGE - tokens_to_page_end]
            rows.append(ScenarioRequest(prompt, params, abort=abort, priority=3))
        urgent = ScenarioRequest(texts.ends[0], {"temperature": 0.0, "max_tokens": 1}, priority=-3)
        steps = [step for step in range(1, PREEMPTION_STEPS, 2) for _ in range(rng.choice((1, 2)))]
        delayed = (replace(request, **_delayed(request, PREEMPTION_STEPS)) for request in requests)
        return (*rows, *(replace(urgent, arrival=step) for step in steps), *delayed)

    def _with_host_loads(self, index: int, requests: Requests) -> Requests:
        """Return requests that alternate between two prompts of which the KV cache fits only one.

        Each evicts the pages of the other to host memory. Some are shorter, one has another salt.
        """
        rng = random.Random(f"hosted {self.seed} {index}")
        texts = self._family((NUM_EARLY_SCENARIOS + index) // 10)
        params = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, "logprobs": 1}
        length = max(_min_pages(requests, ()) - 1, 2) * PAGE + rng.choice((1, 17, 40))
        pair = (texts.trunk * 2)[:length], (texts.other * 2)[:length]
        alternating = []
        for turn in range(HOST_TIER_STEPS // 4):
            prompt = pair[turn % 2]
            cut = rng.choice((0, 0, 20)) if turn > 1 else 0
            salt = "of another" if turn == 4 else ""
            request = ScenarioRequest(prompt[: length - cut], params, arrival=4 * turn, salt=salt)
            alternating.append(request)
        delayed = (replace(other, **_delayed(other, HOST_TIER_STEPS)) for other in requests)
        return (*alternating, *delayed)

    def _limits(
        self,
        rng: random.Random,
        kind: Kind,
        requests: Requests,
        warm_prefixes: tuple[tuple[int, ...], ...],
    ) -> Limits:
        """Choose limits; pages range from just enough for the longest request to the maximum."""
        min_pages = _min_pages(requests, warm_prefixes)
        pages = rng.choice(
            (min_pages, min_pages, min_pages + 1, min_pages + 2, 2 * min_pages, MAX_PAGES)
        )
        return Limits(
            rows=rng.choice((kind.buckets[-1], kind.buckets[-1], 2, 3)),
            chunk=rng.choice((64, 64, 100, 128, 192, 300, 2048)),
            pages=min(pages, MAX_PAGES),
            snapshots=rng.choice((0, 1, 1, 2, 3, 16)),
            caching=bool(warm_prefixes) or rng.random() < 0.6,
            preempt_every=rng.choice((0, 0, 0, 0, 1, 2, 3, 5)),
            policy=rng.choice(("fcfs", "fcfs", "priority")),
        )

    def _warm_prefixes(self, rng: random.Random, requests: Requests) -> tuple[tuple[int, ...], ...]:
        """Return prefixes to cache first, cut at page boundaries or next to them.

        Some have the later pages of a prompt after a different first page: their keys must differ.
        """
        if rng.random() < 0.35:
            return ()
        long = [request.prompt for request in requests if len(request.prompt) > PAGE]
        prefixes = []
        for prompt in rng.sample(long, min(len(long), 3)):
            cut = rng.choice((len(prompt), len(prompt) - 1, len(prompt) // PAGE * PAGE, 2 * PAGE))
            prefixes.append(prompt[: max(cut, PAGE + 1)])
            if rng.random() < 0.5:
                other = tuple(rng.choices(range(self.vocab), k=PAGE))
                prefixes.append((*other, *prompt[PAGE:]))
            if len(prompt) > 2 * PAGE and rng.random() < 0.5:
                prefixes.append(prompt[: PAGE + 1])
        rng.shuffle(prefixes)
        return tuple(prefixes[:4])

    def _request(self, number: int) -> ScenarioRequest:
        """Return request number `number`: a prompt, and parameters around one aim."""
        if number not in self._requests:
            rng = random.Random(f"ask {self.seed} {number}")
            prompt = self._prompt(rng, number // 10)
            params = self._params(rng, prompt, MAIN_AIMS[number % len(MAIN_AIMS)])
            self._requests[number] = ScenarioRequest(prompt, params)
        return self._requests[number]

    def _family(self, number: int) -> Family:
        rng = random.Random(f"family {self.seed} {number}")
        length = max(LENGTHS) + PAGE
        if rng.random() < 0.6:
            stream = [t for text in rng.sample(self._texts, len(self._texts)) for t in text]
            stream = stream * (2 * length // len(stream) + 2)
            start = rng.randrange(len(stream) - 2 * length)
            trunk = stream[start : start + length]
            other = stream[start + length : start + 2 * length]
        else:
            trunk, other = (self._pattern(rng, length) for _ in range(2))
        ends = [text[-rng.randrange(8, 30) :] for text in self._texts]
        return Family(tuple(trunk), tuple(other), tuple(tuple(e) for e in ends))

    def _pattern(self, rng: random.Random, length: int) -> list[int]:
        """Return repeated random ids, in which an n-gram drafter finds matches."""
        pattern = rng.choices(range(self.vocab), k=rng.choice((7, 23, 200)))
        return (pattern * (length // len(pattern) + 1))[:length]

    def _prompt(self, rng: random.Random, family: int) -> tuple[int, ...]:
        """Return a prompt of a family; most leave the shared trunk at some position."""
        texts = self._family(family)
        length = rng.choice(LENGTHS)
        variant = rng.randrange(5)
        if variant == 0:
            return texts.trunk[:length]
        if variant == 1:
            return (*texts.other[: min(length, PAGE)], *texts.trunk[PAGE:length])
        cut = max(0, length // PAGE * PAGE - (0, 1, rng.randrange(1, PAGE))[variant - 2])
        tail = rng.choice(texts.ends) if rng.random() < 0.7 else texts.other
        return (*texts.trunk[:cut], *tail[: max(length - cut, 1)])

    def _params(self, rng: random.Random, prompt: tuple[int, ...], aim: str) -> Params:
        params = _base_params(rng)
        aims = [aim, *(name for name in AIMS if name != aim and rng.random() < 0.18)]
        for name in sorted(aims, key=AIMS.index):
            candidate = dict(params)
            AIM_FUNCTIONS[name](self, rng, prompt, candidate)
            params = candidate if self._is_accepted(prompt, candidate) else params
        return params

    def _is_accepted(self, prompt: tuple[int, ...], params: Params) -> bool:
        """Return whether the engine accepts it: some parameters together ban all tokens."""
        try:
            tokens_prompt = {"prompt_token_ids": list(prompt)}
            requests = self.plain.llm.processor.requests(
                "", tokens_prompt, SamplingParams(**params)
            )
            check_ids(requests[0], self.vocab)
        except RequestError:
            return False
        return True

    def plain_output(self, prompt: tuple[int, ...], params: Params) -> Answer:
        """Return the first completion of the plain run, without parameters that end it early."""
        probe_params = {
            name: value for name, value in params.items() if name not in IGNORED_BY_PROBE
        }
        return self.plain.answers(prompt, SamplingParams(**probe_params, ignore_eos=True))[0]

    def greedy_tokens(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the tokens of the greedy output, each once."""
        greedy = {"temperature": 0.0, "max_tokens": 8}
        return list(dict.fromkeys(self.plain_output(prompt, greedy).tokens))


def _min_pages(requests: Requests, warm_prefixes: tuple[tuple[int, ...], ...]) -> int:
    """Return the pages that the longest request needs."""
    longest = max(len(request.prompt) + request.params["max_tokens"] for request in requests)
    longest = max(longest, max((len(prefix) + 1 for prefix in warm_prefixes), default=0))
    return -(-longest // PAGE)


def _num_forced(rng: random.Random, request: ScenarioRequest) -> int:
    """Return how many tokens of a request's output are forced; long outputs fill windows."""
    if rng.random() >= FORCED:
        return 0
    return rng.randrange(1, request.params["max_tokens"] + 1)


def _delayed(request: ScenarioRequest, steps: int) -> dict[str, Any]:
    """Return the fields of a request's schedule, moved by a number of steps."""
    abort = None if request.abort is None else request.abort + steps
    preempt = tuple(step + steps for step in request.preempt)
    return {"arrival": request.arrival + steps, "abort": abort, "preempt": preempt}


def _base_params(rng: random.Random) -> Params:
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


def _penalties(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Set high penalties, positive and negative."""
    which = rng.choice(("repetition", "frequency", "presence", "all", "all"))
    if which in ("repetition", "all"):
        params["repetition_penalty"] = rng.choice((0.5, 1.3, 2.0, 5.0))
    if which in ("frequency", "all"):
        params["frequency_penalty"] = rng.choice((-2.0, -1.0, 1.0, 2.0))
    if which in ("presence", "all"):
        params["presence_penalty"] = rng.choice((-2.0, -1.0, 1.0, 2.0))


def _counts(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Allow few, unlikely tokens, so that their counts decide each choice."""
    params |= {"frequency_penalty": 2.0, "max_tokens": 12, "ignore_eos": True}
    unlikely = rng.sample(range(generator.vocab), rng.choice((3, 6, 12)))
    params["allowed_token_ids"] = sorted(unlikely)


def _filters(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    params["temperature"] = rng.choice((0.8, 1.0, 1.5, 3.0))
    which = rng.choice(("top_k", "top_p", "min_p", "all", "all"))
    if which in ("top_k", "all"):
        params["top_k"] = rng.choice((1, 2, 5, 40))
    if which in ("top_p", "all"):
        params["top_p"] = rng.choice((0.3, 0.6, 0.9, 0.97))
    if which in ("min_p", "all"):
        params["min_p"] = rng.choice((0.02, 0.1, 0.3))


def _bias(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Bias tokens of the greedy output up, down, or to -100."""
    frequent_tokens = generator.greedy_tokens(prompt)
    chosen = rng.sample(frequent_tokens, min(len(frequent_tokens), 3)) + rng.sample(
        range(generator.vocab), 2
    )
    values = (-100.0, -3.0, 2.5, 6.0, 0.5)
    params["logit_bias"] = {t: rng.choice(values) for t in dict.fromkeys(chosen)}


def _allowed(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    if "allowed_token_ids" in params:
        return
    frequent_tokens = generator.greedy_tokens(prompt)
    random_tokens = rng.sample(range(generator.vocab), 30)
    params["allowed_token_ids"] = sorted(
        {*rng.sample(frequent_tokens, (len(frequent_tokens) + 1) // 2), *random_tokens}
    )


def _bad_words(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Ban words of the output: their first tokens still occur, also as drafts."""
    words: list[list[int]] = []
    for _ in range(rng.choice((1, 1, 2))):
        # The second word comes from the output that avoids the first.
        banned = {"bad_words_ids": words} if words else {}
        output_tokens = generator.plain_output(prompt, {**params, **banned}).tokens
        if len(output_tokens) < 2:
            break
        last = rng.randrange(1, len(output_tokens))
        words.append(list(output_tokens[max(0, last - rng.choice((1, 1, 2, 3))) : last + 1]))
    if words:
        params["bad_words_ids"] = words


def _bad_text(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Ban a word of the output by its text."""
    if _has_text(generator):
        words = generator.plain_output(prompt, params).text.split()
        params["bad_words"] = [
            rng.choice([w for w in words if w.isascii() and len(w) < 7] or ["a"])
        ]


def _stops(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Make tokens of the output stop tokens; min_tokens is at their position, before or after."""
    output_tokens = generator.plain_output(prompt, params).tokens
    first_occurrences = [
        i for i in range(1, len(output_tokens)) if output_tokens[i] not in output_tokens[:i]
    ]
    chosen = sorted(
        rng.sample(first_occurrences, min(len(first_occurrences), rng.choice((1, 1, 2))))
    )
    if not chosen:
        return
    params["stop_token_ids"] = [output_tokens[i] for i in chosen]
    min_tokens = max(0, chosen[0] + rng.choice((0, 0, 0, 1, -1, -2)))
    params["min_tokens"] = min(min_tokens, params["max_tokens"])


def _ends(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Delay the model's end-of-sequence token by min_tokens."""
    params.pop("ignore_eos", None)
    output_tokens = generator.plain_output(prompt, params).tokens
    params["min_tokens"] = min(params["max_tokens"], len(output_tokens) + rng.choice((-1, 0, 1, 3)))


def _stop_text(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Set a stop string that spans tokens, and so verification windows."""
    params.pop("detokenize", None)
    text = generator.plain_output(prompt, params).text if _has_text(generator) else ""
    if len(text) > 3:
        begin = rng.randrange(1, len(text) - 2)
        strings = [text[begin : begin + rng.randrange(2, 8)]]
        if rng.random() < 0.4:
            # A string that never occurs: the search has several strings.
            strings.append("\N{SNOWMAN}")
        params["stop"] = strings
    if rng.random() < 0.5:
        params["include_stop_str_in_output"] = True


def _several_completions(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    params["n"] = rng.choice((2, 3))
    params["temperature"] = rng.choice((0.8, 1.2))
    params["seed"] = rng.choice((2**63 - 1, 2**32 - 1, rng.randrange(2**63)))


def _prompt_logprobs(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    params["prompt_logprobs"] = rng.choice((0, 1, 3))


def _choice(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Require one of several texts that begin like the output.

    Some drafts are accepted; others are not a prefix of any choice.
    """
    for name in ("detokenize", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words",
                 "bad_words_ids"):  # fmt: skip
        params.pop(name, None)
    text = generator.plain_output(prompt, params).text if _has_text(generator) else ""
    text = text.partition("\N{REPLACEMENT CHARACTER}")[0]
    if len(text) < 3:
        return
    cuts = [rng.randrange(1, len(text)) for _ in range(rng.choice((1, 3, 6)))]
    ends = [rng.choice((" and so on", "x", ".", text[::-1], text[:5])) for _ in cuts]
    texts = {text[:cut] + end for cut, end in zip(cuts, ends, strict=True)}
    texts.add(text[: rng.randrange(1, len(text))])
    params["structured_outputs"] = {"choice": sorted(texts)}
    params["max_tokens"] = rng.choice((10, 20, 30))


def _nothing(
    generator: ScenarioGenerator, rng: random.Random, prompt: tuple[int, ...], params: Params
) -> None:
    """Leave the common parameters unchanged."""


def _has_text(generator: ScenarioGenerator) -> bool:
    return generator.plain.llm.tokenizer is not None


Aim = Callable[[ScenarioGenerator, random.Random, tuple[int, ...], Params], None]
AIM_FUNCTIONS: dict[str, Aim] = {
    "nothing": _nothing,
    "penalties": _penalties,
    "counts": _counts,
    "filters": _filters,
    "several": _several_completions,
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
"""Aims of a request. A later aim reads the plain output under the parameters of earlier aims."""
AIMS = tuple(AIM_FUNCTIONS)
IGNORED_BY_PROBE = {
    "n", "ignore_eos", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "bad_words", "detokenize", "skip_special_tokens", "logprobs", "prompt_logprobs",
    "structured_outputs",
}  # fmt: skip
"""Parameters that the probing plain run omits, so that more aims share one run."""
MAIN_AIMS = (
    "counts", "bad_words", "stops", "filters", "several", "prompt_logprobs", "bias", "counts",
    "stop_text", "allowed", "bad_words", "ends", "stops", "bad_text", "penalties", "choice",
)  # fmt: skip
"""Cycle of the main aims of requests."""
