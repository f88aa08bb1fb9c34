"""Grammar masks between forward and decide depend on the row's own history only."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lockstep import LLM
from lockstep.scheduling.draft_length import RandomDraftLength
from lockstep.scheduling.grammar import FillMasks, GrammarMasks, MaskQuery
from lockstep.scheduling.request import NO_TOKEN, Request
from lockstep.worker.executor import worker_of
from lockstep.worker.hooks import CheckHooks
from lockstep.worker.program import do_nothing
from lockstep.worker.rank_process import read_masks
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, make_engine
from tests.masks import allows

MAX_TOKENS = 12


class HistoryGrammar:
    """Grammar that allows a random third of all tokens, seeded by the full token history.

    A mask of another row, of another position or after a rejected draft would therefore allow other
    tokens.
    """

    def __init__(
        self, seed: int, vocab: int, fails_at: int | None = None, free_at: int | None = None
    ) -> None:
        self.seed = seed
        self.words = -(-vocab // 32)
        self.accepted_tokens: list[int] = []
        self.fails_at = fails_at
        self.free_at = free_at
        self.mask_queries: list[list[int]] = []

    @property
    def accepted(self) -> int:
        return len(self.accepted_tokens)

    @property
    def is_free(self) -> bool:
        return self.free_at is not None and self.accepted >= self.free_at

    @property
    def fault(self) -> str | None:
        return "no more" if self.accepted == self.fails_at else None

    def accept(self, tokens: Sequence[int]) -> None:
        self.accepted_tokens += tokens

    def fresh(self) -> "HistoryGrammar":
        return type(self)(self.seed, self.words * 32, self.fails_at, self.free_at)

    @staticmethod
    def fill(expected: Sequence[GrammarMasks], memory: memoryview) -> None:
        for one in expected:
            one.grammar.write(one.drafts, one.first, memory.cast("B"))

    def write(self, drafts: Sequence[int], first: int, memory: memoryview) -> None:
        """Write masks up to the first draft that is not allowed."""
        self.mask_queries.append(list(drafts))
        for count in range(1 + len(drafts)):
            mask = self._mask([*self.accepted_tokens, *drafts[:count]])
            index = (first + count) * len(mask)
            memory[index : index + len(mask)] = mask
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
    llm: LLM, seeds: Sequence[int | None], fails_at: int | None = None, first: int = 0
) -> list[Request]:
    """Run requests over alternating prompts, greedy and sampled.

    seeds: the grammar's seed of each request, None for no grammar. first: index of the first
    request.
    """
    requests = []
    for index, seed in enumerate(seeds, first):
        params = replace(SEEDED if index % 2 else GREEDY, max_tokens=MAX_TOKENS, logprobs=2)
        (request,) = llm.processor.requests(f"r{index}", PROMPTS[index % 4], params)
        if seed is not None:
            request.grammar = HistoryGrammar(seed, llm.engine.vocab_size, fails_at)
        requests.append(request)
    llm.engine.run(requests, lambda request: None)
    return requests


def answer_of(request: Request) -> Any:
    scores = [[(t, x.logprob.hex()) for t, x in entry.items()] for entry in request.logprobs]
    return request.output_token_ids, scores, request.finish_reason


SEEDS = (1, None, 3, 4, None, 6)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Return each request's answer, run alone without drafts."""
    llm = make_engine(None)
    return [answer_of(run(llm, [seed], first=index)[0]) for index, seed in enumerate(SEEDS)]


def random_draft_length(counts: tuple[int, ...]) -> RandomDraftLength:
    return RandomDraftLength(counts, random.Random(5))


FREE_AT = ((1, 0), (2, 3), (3, 5), (4, None))
"""(seed of a grammar, number of tokens after which it allows everything)."""
BATCH: dict[str, Any] = {"max_num_seqs": 6}
AHEAD = {**BATCH, "steps_in_flight": 2}
PREEMPTED = CheckHooks(preempt_every=3)
ANY_COUNT = CheckHooks(draft_policy=random_draft_length)
BUCKETS = {"row_buckets": (3, 4)}


@pytest.mark.default_cases("mtp, preempted, one step ahead")
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
def test_masks_follow_their_row(
    expected: list[Any], drafter: str | None, hooks: CheckHooks, settings: dict[str, Any]
) -> None:
    requests = run(make_engine(drafter, hooks, **settings), SEEDS)
    assert [answer_of(request) for request in requests] == expected
    for request in requests:
        if request.grammar is not None:
            judge = HistoryGrammar(request.grammar.seed, 4096)  # type: ignore[attr-defined]
            for token in request.output_token_ids:
                assert allows(judge._mask(judge.accepted_tokens), token)
                judge.accept([token])


def test_drafts_are_accepted_with_grammar() -> None:
    """Drafts that the grammar allows are verified, with one mask after each."""
    llm = make_engine("mtp")
    (request,) = run(llm, [1])
    assert request.metrics.num_accepted_tokens > 0
    assert any(len(drafts) == 3 for drafts in request.grammar.mask_queries)  # type: ignore[union-attr]


def test_row_without_allowed_tokens_ends_alone() -> None:
    llm = make_engine("mtp")
    failing = run(llm, [1, None], fails_at=5)
    assert len(failing[0].output_token_ids) == 5
    assert failing[0].finish_reason == "error"
    assert failing[0].error in ("no more", NO_TOKEN)
    assert answer_of(failing[1]) == answer_of(run(llm, [None, None])[1])


def test_steps_without_grammar_fill_no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_engine(None)
    begin = worker_of(llm.engine).grammar_masks.begin
    seen: list[Callable[[], None]] = []

    def watched(*args: Any, **named: Any) -> Callable[[], None]:
        seen.append(begin(*args, **named))
        return seen[-1]

    monkeypatch.setattr(worker_of(llm.engine).grammar_masks, "begin", watched)
    run(llm, [None, None])
    assert seen
    assert all(hook is do_nothing for hook in seen)
    seen.clear()
    run(llm, [None, 2])
    assert seen
    assert not any(hook is do_nothing for hook in seen)


def test_steps_of_one_pass_write_their_masks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may still copy the decode step's masks when the host writes those of the prompts."""
    llm = make_engine(None, max_num_seqs=2)
    worker = worker_of(llm.engine)
    launch = worker._launch
    num_fills: list[int] = []

    def watched(steps: Any, masked: Any, fill_masks: FillMasks) -> Any:
        filled: list[tuple[Sequence[MaskQuery], bytes]] = []

        def fill(queries: Sequence[MaskQuery], memory: memoryview) -> frozenset[str]:
            free = fill_masks(queries, memory)
            filled.append((queries, read_masks(queries, memory)))
            return free

        launched = launch(steps, masked, fill)
        num_fills.append(len(filled))
        for queries, bitmasks in filled:
            assert read_masks(queries, worker.grammar_masks.memory) == bitmasks
        return launched

    monkeypatch.setattr(worker, "_launch", watched)
    requests = []
    for index in range(6):
        params = replace(GREEDY, max_tokens=3 + 2 * index)
        (request,) = llm.processor.requests(f"r{index}", PROMPTS[index % 4], params)
        request.grammar = HistoryGrammar(index, llm.engine.vocab_size)
        requests.append(request)
    llm.engine.run(requests, lambda request: None)
    assert 2 in num_fills


class NeverFreeGrammar(HistoryGrammar):
    """The same grammar, which fills masks until the end."""

    @property
    def is_free(self) -> bool:
        return False


def run_freed(llm: LLM, kind: type[HistoryGrammar]) -> list[Any]:
    """Return the answers of requests whose grammars allow everything after some tokens."""
    requests = []
    for index, (seed, free_at) in enumerate(FREE_AT):
        params = replace(SEEDED if index % 2 else GREEDY, max_tokens=MAX_TOKENS, logprobs=2)
        (request,) = llm.processor.requests(f"r{index}", PROMPTS[index], params)
        request.grammar = kind(seed, llm.engine.vocab_size, free_at=free_at)
        requests.append(request)
    llm.engine.run(requests, lambda request: None)
    for request in requests:
        grammar = request.grammar
        assert isinstance(grammar, HistoryGrammar)
        assert grammar.is_free == (kind is HistoryGrammar and grammar.free_at is not None)
        if grammar.is_free:
            assert grammar.free_at is not None and len(grammar.mask_queries) <= grammar.free_at
            assert grammar.accepted < MAX_TOKENS
    return [answer_of(request) for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "ngram", "mtp"])
def test_free_grammar_fills_no_masks_and_changes_no_token(drafter: str | None) -> None:
    """Rows are preempted before and after their grammars become free, in batches with constrained
    rows."""
    expected = run_freed(make_engine(drafter), NeverFreeGrammar)
    for hooks, settings in ((CheckHooks(), {}), (PREEMPTED, AHEAD)):
        assert run_freed(make_engine(drafter, hooks, **settings), HistoryGrammar) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, "mtp"])
@pytest.mark.parametrize("graph", ["none", "full"])
def test_graphs_ignore_masks_of_free_grammars(graph: str, drafter: str | None) -> None:
    expected = run_freed(
        make_engine(None, cuda_graph_mode="none", steps_in_flight=1), NeverFreeGrammar
    )
    assert (
        run_freed(make_engine(drafter, PREEMPTED, cuda_graph_mode=graph), HistoryGrammar)
        == expected
    )


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [None, "ngram", "mtp"])
@pytest.mark.parametrize("graph", ["none", "piecewise", "full"])
def test_graphs_change_no_constrained_token(graph: str, drafter: str | None) -> None:
    """Constrained and unconstrained rows in one batch on a GPU, where the host runs ahead: each
    equals its run alone."""
    alone = make_engine(None, cuda_graph_mode="none", steps_in_flight=1)
    expected = [answer_of(run(alone, [seed], first=i)[0]) for i, seed in enumerate(SEEDS)]
    hooks = CheckHooks(preempt_every=5)
    for settings in ({}, {"max_num_batched_tokens": 64}):
        llm = make_engine(drafter, hooks, cuda_graph_mode=graph, **settings)
        assert [answer_of(request) for request in run(llm, SEEDS)] == expected
