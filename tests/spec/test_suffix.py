"""The suffix drafter uses a bounded buffer of past answers, and the rows' own texts."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import SamplingParams
from lockstep.errors import ConfigError
from lockstep.scheduling.request import Request
from lockstep.spec import read
from lockstep.spec.drafter import DraftContext
from lockstep.spec.suffix import Options, SuffixDrafter, create
from lockstep.step import StepShape
from lockstep.worker.executor import worker_of
from tests.regressions.conftest import engine_over
from tests.tiny_model import THREE_LAYERS, make_model

CACHE_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def drafter_of(history: list[int], count: int = 5, **options: int) -> SuffixDrafter:
    """Return a drafter with one row of known tokens, and the null row."""
    chosen = {"suffix_cache_tokens": CACHE_TOKENS, "suffix_lookup_min": 1, **options}
    tokens = torch.zeros(2, 60, dtype=torch.int64)
    tokens[1, : len(history)] = torch.tensor(history)
    context = DraftContext(
        Options("suffix", count, **chosen),
        torch.full((2, count), 7),
        tokens,
        torch.tensor([0, len(history) - 1]),
        folded=torch.tensor([0, len(history) - 1]),
        page_size=64,
        module=None,
        sample=torch.cat,
        op=lambda op: op,
    )
    return create(context)


def drafts(drafter: SuffixDrafter, count: int = 5) -> list[int]:
    """Return its drafts for the row."""

    class Step:
        row_ids = torch.tensor([1, 0])
        shape = StepShape.uniform(2, count + 1)

    drafter.propose(Step(), None, (), None)  # type: ignore[arg-type]
    result = drafter.context.drafts
    assert (result[0, :count] == -1).all(), "the null row has no text"
    return [token for token in result[1, :count].tolist() if token >= 0]


def test_empty_buffer_drafts_from_own_text() -> None:
    assert drafts(drafter_of([1, 2, 3, 4, 1, 2])) == [3, 4, 1, 2]
    assert drafts(drafter_of([1, 2, 3])) == []
    assert drafts(drafter_of([1, 2, 3, 1], suffix_cache_tokens=0)) == [2, 3, 1]


def test_longest_then_own_then_latest_match_wins() -> None:
    drafter = drafter_of([5, 1, 2])
    drafter.learn([9, 1, 2, 30])
    assert drafts(drafter) == [30]
    drafter.learn([8, 1, 2, 40, 41])
    assert drafts(drafter) == [40, 41]
    drafter.learn([5, 1, 2, 50])
    drafter.learn([7, 1, 2, 60])
    assert drafts(drafter) == [50], "three tokens alike beat two"
    mine = drafter_of([1, 2, 70, 1, 2])
    mine.learn([1, 2, 80])
    assert drafts(mine) == [70, 1, 2]


def test_drafts_end_with_the_matched_answer() -> None:
    drafter = drafter_of([4, 5])
    drafter.learn([4, 5, 6])
    drafter.learn([90, 91, 92, 93])
    assert drafts(drafter) == [6]


def test_buffer_is_bounded_and_circular() -> None:
    """Compared with a plain list of the latest tokens, also for answers longer than the buffer."""
    rng = random.Random(0)
    drafter = drafter_of([1, 2])
    kept: list[int] = [-1] * CACHE_TOKENS
    for _ in range(60):
        answer = [rng.randrange(4) for _ in range(rng.choice((0, 1, 3, 7, 23, 24, 40)))]
        drafter.learn(answer)
        kept = [*kept, *answer[max(len(answer) - CACHE_TOKENS + 1, 0) :], -1][-CACHE_TOKENS:]
        begin = int(drafter.oldest)
        actual = drafter.texts.tolist()
        assert actual[begin:] + actual[:begin] == kept
        assert drafter.texts.shape == (CACHE_TOKENS,)
        text = [*kept, 1, 2]
        best: tuple[int, int] = (0, 0)
        for index in range(1, len(text)):
            n = 0
            while n < min(2, index) and text[index - 1 - n] == text[-1 - n]:
                n += 1
            best = max(best, (n, index)) if n else best
        continuation = text[best[1] : best[1] + 5] if best[0] else []
        ends = continuation.index(-1) if -1 in continuation else len(continuation)
        assert drafts(drafter) == continuation[:ends]


def test_step_may_request_fewer_drafts() -> None:
    drafter = drafter_of([1, 2, 3, 4, 5, 1])
    assert drafts(drafter, 2) == [2, 3]
    assert drafter.context.drafts[1, 2:].tolist() == [7, 7, 7]


def test_engine_learns_finished_answers(tmp_path: Path) -> None:
    """When a prompt is repeated, its whole answer is drafted; the tokens do not change."""
    folder = make_model(tmp_path / "model", **THREE_LAYERS)
    prompt = {"prompt_token_ids": [(7 * i + i * i) % 250 for i in range(20)]}
    plain = engine_over(folder).generate(prompt, GREEDY)[0].outputs[0].token_ids

    def accepted(llm: Any) -> int:
        out = llm.generate(prompt, GREEDY)[0]
        assert out.outputs[0].token_ids == plain
        return out.metrics.num_accepted_tokens

    llm = engine_over(folder, "suffix", k=7)
    first = accepted(llm)
    assert accepted(llm) > first + 8
    learnt = worker_of(llm.engine).program.drafter.texts.tolist()
    assert learnt[: len(plain) + 1] == [*plain, -1]
    assert learnt[len(plain) + 1 : 2 * len(plain) + 2] == [*plain, -1]


def test_salted_answers_are_not_learned(tmp_path: Path) -> None:
    llm = engine_over(make_model(tmp_path / "model", **THREE_LAYERS), "suffix", k=3)
    engine = llm.engine
    learnt = worker_of(engine).program.drafter.texts
    for salt, length in (("mine", 0), ("", 5)):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.run([Request("r", [5, 6, 7], params, cache_salt=salt)], lambda request: None)
        assert int(worker_of(engine).program.drafter.oldest) == length
    assert learnt[4] == -1 and (learnt[:4] >= 0).all()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_tree_depth", 65),
        ("suffix_lookup_min", 0),
        ("suffix_cache_tokens", -1),
        ("suffix_cache_tokens", (1 << 20) + 1),
        ("num_speculative_tokens", 16),
    ],
)
def test_suffix_option_bounds(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{key}={value} is not allowed"):
        read({"method": "suffix", key: value})
