"""Masks between the halves of a step: made of the row's own history, whatever runs beside it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.scheduling.grammar import Wanted
from lockstep.scheduling.request import NO_TOKEN, Request
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.program import nothing
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, make_engine
from tests.masks import allows

MOST = 12


class ByHistory:
    """A third of all tokens may come, which ones is drawn from all that has come before.

    So a mask of another row, of another position or behind a rejected draft lets other tokens come.
    """

    def __init__(
        self, seed: int, vocab: int, fails_at: int | None = None, free_at: int | None = None
    ) -> None:
        self.seed = seed
        self.words = -(-vocab // 32)
        self.taken: list[int] = []
        self.fails_at = fails_at
        self.free_at = free_at
        self.asked: list[list[int]] = []

    @property
    def accepted(self) -> int:
        return len(self.taken)

    @property
    def is_free(self) -> bool:
        return self.free_at is not None and self.accepted >= self.free_at

    @property
    def fault(self) -> str | None:
        return "no more" if self.accepted == self.fails_at else None

    def accept(self, tokens: Sequence[int]) -> None:
        self.taken += tokens

    @staticmethod
    def fill(wanted: Sequence[Wanted], memory: memoryview) -> None:
        for one in wanted:
            one.grammar.write(one.drafts, one.first, memory.cast("B"))

    def write(self, drafts: Sequence[int], first: int, memory: memoryview) -> None:
        """Masks up to the first draft that may not come itself."""
        self.asked.append(list(drafts))
        for count in range(1 + len(drafts)):
            mask = self._mask([*self.taken, *drafts[:count]])
            place = (first + count) * len(mask)
            memory[place : place + len(mask)] = mask
            if not all(allows(mask, draft) for draft in drafts[count : count + 1]):
                break

    def _mask(self, tokens: list[int]) -> bytes:
        size = self.words * 4
        if len(tokens) == self.fails_at:
            return bytes(size)
        if self.free_at is not None and len(tokens) >= self.free_at:
            return b"\xff" * size
        draw = random.Random(str((self.seed, tokens)))
        bits = draw.getrandbits(8 * size) & (
            draw.getrandbits(8 * size) | draw.getrandbits(8 * size)
        )
        return bits.to_bytes(size, "little")


def run(
    llm: LLM, ways: Sequence[int | None], fails_at: int | None = None, first: int = 0
) -> list[Request]:
    """Requests one after the other prompt, some greedy and some drawn; a number: held to the
    grammar of that seed. first: the number of the first request."""
    requests = []
    for index, seed in enumerate(ways, first):
        params = replace(SEEDED if index % 2 else GREEDY, max_tokens=MOST, logprobs=2)
        (request,) = llm.processor.requests(f"r{index}", PROMPTS[index % 4], params)
        if seed is not None:
            request.grammar = ByHistory(seed, llm.engine.vocab_size, fails_at)
        requests.append(request)
    llm.engine.run(requests, lambda request: None)
    return requests


def told(request: Request) -> Any:
    scores = [[(t, x.logprob.hex()) for t, x in entry.items()] for entry in request.logprobs]
    return request.output_token_ids, scores, request.finish_reason


WAYS = (1, None, 3, 4, None, 6)


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    """Each request alone, without drafts."""
    llm = make_engine(None)
    return [told(run(llm, [way], first=index)[0]) for index, way in enumerate(WAYS)]


def changing(counts: tuple[int, ...]) -> RandomDraftLength:
    return RandomDraftLength(counts, random.Random(5))


FREE_AT = ((1, 0), (2, 3), (3, 5), (4, None))
"""Seeds of grammars, and the tokens after which each allows everything."""
BATCH: dict[str, Any] = {"max_num_seqs": 6}
AHEAD = {**BATCH, "steps_in_flight": 2}
PREEMPTED = CheckHooks(preempt_every=3)
ANY_COUNT = CheckHooks(draft_policy=changing)
BUCKETS = {"row_buckets": (3, 4)}


@pytest.mark.parametrize(
    ("drafter", "hooks", "settings"),
    [
        pytest.param(None, PREEMPTED, AHEAD, id="preempted, one step ahead"),
        pytest.param("ngram", CheckHooks(), BATCH, id="ngram, batch"),
        pytest.param("ngram", ANY_COUNT, BUCKETS, id="ngram, any number of drafts"),
        pytest.param("mtp", PREEMPTED, AHEAD, id="mtp, preempted, one step ahead"),
        pytest.param("mtp", ANY_COUNT, BUCKETS, id="mtp, any number of drafts"),
    ],
)
def test_masks_follow_their_own_row(
    plain: list[Any], drafter: str | None, hooks: CheckHooks, settings: dict[str, Any]
) -> None:
    requests = run(make_engine(drafter, hooks, **settings), WAYS)
    assert [told(request) for request in requests] == plain
    for request in requests:
        if request.grammar is not None:
            judge = ByHistory(request.grammar.seed, 4096)  # type: ignore[attr-defined]
            for token in request.output_token_ids:
                assert allows(judge._mask(judge.taken), token)
                judge.accept([token])


def test_drafts_are_accepted_under_a_grammar() -> None:
    """The drafts that a grammar lets come are verified as ever, so its masks lie behind them."""
    llm = make_engine("mtp")
    (request,) = run(llm, [1])
    assert request.metrics.num_accepted_tokens > 0
    assert any(len(drafts) == 3 for drafts in request.grammar.asked)  # type: ignore[union-attr]


def test_a_row_whose_grammar_allows_nothing_ends_alone() -> None:
    llm = make_engine("mtp")
    failing = run(llm, [1, None], fails_at=5)
    assert len(failing[0].output_token_ids) == 5
    assert failing[0].finish_reason == "error"
    assert failing[0].error in ("no more", NO_TOKEN)
    assert told(failing[1]) == told(run(llm, [None, None])[1])


def test_steps_without_a_grammar_do_nothing_between(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_engine(None)
    begin = worker_of(llm.engine).grammar_masks.begin
    seen: list[Callable[[], None]] = []

    def watched(*given: Any, **named: Any) -> Callable[[], None]:
        seen.append(begin(*given, **named))
        return seen[-1]

    monkeypatch.setattr(worker_of(llm.engine).grammar_masks, "begin", watched)
    run(llm, [None, None])
    assert seen
    assert all(between is nothing for between in seen)
    seen.clear()
    run(llm, [None, 2])
    assert seen
    assert not any(between is nothing for between in seen)


class NeverLeftOut(ByHistory):
    """The same grammar, whose masks are made to the end."""

    @property
    def is_free(self) -> bool:
        return False


def run_freed(llm: LLM, kind: type[ByHistory]) -> list[Any]:
    """Return the answers of requests whose grammars allow everything after some tokens."""
    requests = []
    for index, (seed, free_at) in enumerate(FREE_AT):
        params = replace(SEEDED if index % 2 else GREEDY, max_tokens=MOST, logprobs=2)
        (request,) = llm.processor.requests(f"r{index}", PROMPTS[index], params)
        request.grammar = kind(seed, llm.engine.vocab_size, free_at=free_at)
        requests.append(request)
    llm.engine.run(requests, lambda request: None)
    for request in requests:
        grammar = request.grammar
        assert isinstance(grammar, ByHistory)
        assert grammar.is_free == (kind is ByHistory and grammar.free_at is not None)
        if grammar.is_free:
            assert grammar.free_at is not None and len(grammar.asked) <= grammar.free_at
            assert grammar.accepted < MOST
    return [told(request) for request in requests]


@pytest.mark.parametrize("drafter", [None, "ngram", "mtp"])
def test_a_grammar_that_is_free_costs_no_masks_and_changes_no_token(drafter: str | None) -> None:
    """Rows are preempted before and after their grammars are free, and step beside bound ones."""
    due = run_freed(make_engine(drafter), NeverLeftOut)
    for hooks, settings in ((CheckHooks(), {}), (PREEMPTED, AHEAD)):
        assert run_freed(make_engine(drafter, hooks, **settings), ByHistory) == due


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, "mtp"])
@pytest.mark.parametrize("graph", ["none", "full"])
def test_graphs_read_no_mask_of_a_free_grammar(graph: str, drafter: str | None) -> None:
    due = run_freed(make_engine(None, cuda_graph_mode="none", steps_in_flight=1), NeverLeftOut)
    assert run_freed(make_engine(drafter, PREEMPTED, cuda_graph_mode=graph), ByHistory) == due


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, "ngram", "mtp"])
@pytest.mark.parametrize("graph", ["none", "piecewise", "full"])
def test_graphs_change_no_masked_token(graph: str, drafter: str | None) -> None:
    """A masked row beside free ones, on a GPU, where the host runs ahead: each as it is alone."""
    alone = make_engine(None, cuda_graph_mode="none", steps_in_flight=1)
    due = [told(run(alone, [way], first=i)[0]) for i, way in enumerate(WAYS)]
    hooks = CheckHooks(preempt_every=5)
    for settings in ({}, {"max_num_batched_tokens": 64}):
        llm = make_engine(drafter, hooks, cuda_graph_mode=graph, **settings)
        assert [told(request) for request in run(llm, WAYS)] == due
