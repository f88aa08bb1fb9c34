"""The matrix covers its settings, and comparing outputs detects a single wrong bit."""

from itertools import product

from lockstep.answer import Answer
from lockstep.check.judges.trace import compare
from lockstep.check.matrix.cases import Case
from lockstep.check.matrix.setups import (
    BATCHES,
    DEFAULT_COUNTS,
    DRAFT_COUNTS,
    LONG_PROMPT,
    MAX_DRAFTS,
    PHASES,
    PLAIN,
    SIZES,
    Setup,
    setups,
)
from lockstep.check.matrix.tokens import batches
from lockstep.check.report.report import Failure, Report, Tally
from lockstep.outputs import RequestMetrics
from lockstep.sampling_params import SamplingParams
from lockstep.spec import DRAFTERS

ALL_DRAFTERS = tuple(DRAFTERS)
NUM_VARIANTS = len(DRAFT_COUNTS) + 1
"""Settings of one drafter: each K, and a changing one."""
GPU_GRAPH_MODES = ("full", "piecewise", "none")


def make_answer(*tokens: int, logprob: float = -0.5) -> Answer:
    bits = tuple(((token, logprob.hex(), 1),) for token in tokens)
    return Answer(tokens, bits, RequestMetrics())


def make_case(prompt: int, sampling: str) -> Case:
    return Case(f"{prompt} {sampling}", sampling, (prompt,), SamplingParams())


def test_full_is_every_combination_once() -> None:
    combinations = setups("full", ALL_DRAFTERS, GPU_GRAPH_MODES)
    assert (
        len(set(combinations))
        == len(combinations)
        == (1 + len(ALL_DRAFTERS) * NUM_VARIANTS) * len(PHASES) * len(GPU_GRAPH_MODES)
    )


def test_default_covers_every_drafter_and_phase_and_every_graph_mode() -> None:
    chosen = setups("default", ALL_DRAFTERS, GPU_GRAPH_MODES)
    drafting = {(s.drafting, s.phase) for s in chosen}
    assert len(drafting) == (1 + len(ALL_DRAFTERS) * (len(DEFAULT_COUNTS) + 1)) * len(PHASES)
    assert {min(DRAFT_COUNTS), max(DRAFT_COUNTS)} <= set(DEFAULT_COUNTS) <= set(DRAFT_COUNTS)
    for drafter, k in (("none", 0), ("ngram", 3), ("mtp", 3)):
        assert {s.graph for s in chosen if (s.drafter, s.k) == (drafter, k)} == set(GPU_GRAPH_MODES)
    changing = {(s.drafter, s.phase, s.graph) for s in chosen if s.changing}
    assert changing == set(product(ALL_DRAFTERS, PHASES, GPU_GRAPH_MODES))


def test_quick_covers_every_drafter_phase_and_graph_mode() -> None:
    chosen = setups("quick", ALL_DRAFTERS, GPU_GRAPH_MODES)
    assert len(set(chosen)) == len(chosen) == 1 + len(ALL_DRAFTERS)
    for values, covered in (
        (("none", *ALL_DRAFTERS), {s.drafter for s in chosen}),
        (PHASES, {s.phase for s in chosen}),
        (GPU_GRAPH_MODES, {s.graph for s in chosen}),
    ):
        assert covered == set(values)
    assert [s.k for s in chosen if s.changing] == [MAX_DRAFTS]
    assert len(setups("quick", ("ngram",), ("none",))) == len(PHASES)


def test_a_checkpoint_without_mtp_is_checked_with_the_rest() -> None:
    assert {s.drafter for s in setups("default", ("ngram",), ("none",))} == {"none", "ngram"}


def test_full_runs_every_case_in_every_batch() -> None:
    long = Case("long", "long", (99,), SamplingParams())
    cases = [*(make_case(i, f"way {i}") for i in range(7)), long]
    batches_of_engine = batches(cases, SIZES["full"], engine_index=2)
    names = sorted(c.name for c in cases)
    assert sorted(b.cases[0].name for b in batches_of_engine if b.name == BATCHES[0]) == names
    assert [b.cases for b in batches_of_engine if b.name == BATCHES[1]] == [tuple(cases[:7])]
    assert (
        sorted(c.name for b in batches_of_engine if b.name == BATCHES[2] for c in b.cases) == names
    )


def test_consecutive_engines_cover_all_cases() -> None:
    """Four engines, one more than phases, run each case alone and in a batch with the long one."""
    long = Case("long", "long", (99,), SamplingParams())
    cases = [*(make_case(i, f"way {i}") for i in range(7)), long]
    for first in (0, 4, 8):
        runs = [r for index in range(4) for r in batches(cases, SIZES["default"], first + index)]
        for name in (BATCHES[0], BATCHES[2]):
            assert {c for b in runs if b.name == name for c in b.cases} == set(cases)
        assert all(long in b.cases[1:-1] for b in runs if b.name == BATCHES[2])


def test_answers_differ_by_token_bit_and_length() -> None:
    same = make_answer(1, 2, 3)
    assert same.first_difference(make_answer(1, 2, 3)) is None
    token = same.first_difference(make_answer(1, 5, 3))
    assert token is not None and token[0] == 1 and "token 2 instead of 5" in token[1]
    bit = same.first_difference(make_answer(1, 2, 3, logprob=-0.5000000000000001))
    assert bit is not None and bit[0] == 0 and "logprobs" in bit[1]
    length = same.first_difference(make_answer(1, 2))
    assert length is not None and length[0] == 2


def test_report_counts_and_names_the_first_failure() -> None:
    setup = Setup("mtp", 3, "cold", "none")
    report = Report("quick", "cpu", [Tally(setup, 20, 1, 0.5)])
    assert report.to_json()["cases"] == 20 and report.to_json()["failed"] == 0
    assert "bit for bit" in report.verdict
    report.failures.append(
        Failure(setup, "batch of 7", "prompt 2, min_p", "min_p", 4, "token 1 instead of 2", "norm")
    )
    assert report.to_json()["failed"] == 1
    for part in ("mtp K=3", "batch of 7", "prompt 2, min_p", "position 4", "norm"):
        assert part in report.verdict


def test_trace_compares_common_modules_only() -> None:
    plain = {0: {"a": b"1", "b": b"2"}, 1: {"a": b"3", "b": b"4"}}
    assert compare(plain, {1: {"a": b"3", "b": b"4"}}, 2) is None
    assert compare(plain, {1: {"a": b"3", "b": b"x"}}, 1) is None
    assert compare(plain, {0: {"a": b"1"}, 1: {"b": b"x"}}, 2) == (
        "the first to differ is b at position 1"
    )


def test_engines_of_few_rows_chunk_long_prompts() -> None:
    """Engines with the user's max_num_seqs do so too, since it limits the rows of a step."""
    settings = Setup("none", 0, "cold", "none", rows=4).settings()
    assert settings["max_num_seqs"] == 4 and settings["max_num_batched_tokens"] < LONG_PROMPT // 2


def test_plain_run_has_no_optimizations() -> None:
    settings = PLAIN.settings(small_chunks=False)
    assert settings["speculative_config"] is None and settings["cuda_graph_mode"] == "none"
    assert not settings["enable_prefix_caching"] and not PLAIN.hooks().preempt_every
    assert settings["max_num_batched_tokens"] >= settings["max_model_len"]
