"""Benchmark of an LLM on a fixed list of prompts."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.llm import LLM
from lockstep.outputs import RequestOutput
from lockstep.progress import Progress, ignore_progress
from lockstep.sampling_params import SamplingParams
from lockstep.worker.executor import executor_of
from lockstep.worker.rank_times import end_step_times, start_step_times

WARM_UPS = 3
"""Default number of runs that do not count."""
RUNS = 5
"""Default number of measured runs."""


@dataclass(frozen=True)
class Figures:
    """Figures of runs over the same prompts. Speeds in tokens/s are means over the runs.

    requests, prompt_tokens, tokens: of one run. wall_deviation, decode_deviation: standard
    deviation of these speeds over the runs; wall_cv, decode_cv: the same divided by the mean.
    ttft_ms: mean time to the first token. acceptance_length, acceptance_rate: tokens emitted per
    row and step, and accepted drafts per draft.
    decode_tokens_per_s: tokens after each request's first, over the time from the first token to
    the last. wall_tokens_per_s: all tokens over the whole run. ms_per_step: decode time over the
    steps of the longest request. rank_step_ms: mean time of a decode step on each tensor-parallel
    rank, from its first kernel to its last.
    """

    requests: int
    prompt_tokens: int
    tokens: int
    wall_tokens_per_s: float
    wall_deviation: float
    wall_cv: float
    decode_tokens_per_s: float
    decode_deviation: float
    decode_cv: float
    ms_per_step: float
    ttft_ms: float
    acceptance_length: float
    acceptance_rate: float
    runs: int
    rank_step_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Figures of the same prompts without and with drafts.

    disagreement: index of the first prompt whose tokens differ, or None.
    """

    plain: Figures
    drafted: Figures
    disagreement: int | None

    @property
    def speedup(self) -> float:
        """Return the decode speed with drafts over that without."""
        return self.drafted.decode_tokens_per_s / self.plain.decode_tokens_per_s


def measure(
    llm: LLM,
    prompts: Sequence[Any],
    params: SamplingParams | Sequence[SamplingParams],
    warm_ups: int = WARM_UPS,
    runs: int = RUNS,
    progress: Progress = ignore_progress,
) -> tuple[Figures, list[RequestOutput]]:
    """Return the figures of `runs` runs after `warm_ups`, and the outputs of the last.

    Prefix caching should be off, or only the first run computes the prompts.
    """
    walls: list[float] = []
    timed: list[list[RequestOutput]] = []
    executor = executor_of(llm.engine)
    for index in range(warm_ups + runs):
        if index == warm_ups:
            executor.collective_rpc(start_step_times)
        progress("warming up" if index < warm_ups else "measuring", index, warm_ups + runs)
        started = time.monotonic()
        outputs = llm.generate(list(prompts), params)
        if index >= warm_ups:
            walls.append(time.monotonic() - started)
            timed.append(outputs)
    rank_step_ms = executor.collective_rpc(end_step_times)
    return replace(_figures(timed, walls), rank_step_ms=tuple(rank_step_ms)), timed[-1]


def compare(
    plain: LLM,
    drafted: LLM,
    prompts: Sequence[Any],
    params: SamplingParams,
    warm_ups: int = 1,
    runs: int = 3,
) -> tuple[Comparison, list[RequestOutput]]:
    """Measure the same prompts on both engines; return the outputs with drafts.

    Sampled params need a seed, or the outputs are not comparable.
    """
    plain_figures, answers = measure(plain, prompts, params, warm_ups, runs)
    drafted_figures, outputs = measure(drafted, prompts, params, warm_ups, runs)
    pairs = zip(answers, outputs, strict=True)
    differ = [a.outputs[0].token_ids != b.outputs[0].token_ids for a, b in pairs]
    disagreement = differ.index(True) if True in differ else None
    return Comparison(plain_figures, drafted_figures, disagreement), outputs


def _figures(timed: list[list[RequestOutput]], walls: list[float]) -> Figures:
    tokens = _tokens(timed[0])
    wall_speeds = [
        _tokens(outputs) / seconds for outputs, seconds in zip(timed, walls, strict=True)
    ]
    decode_seconds = [_decode_seconds(outputs) for outputs in timed]
    decode_speeds = [
        (_tokens(outputs) - len(outputs)) / span if span else 0.0
        for outputs, span in zip(timed, decode_seconds, strict=True)
    ]
    metrics = [output.metrics for outputs in timed for output in outputs]
    num_steps = sum(m.num_steps for m in metrics)
    num_drafts = sum(m.num_draft_tokens for m in metrics)
    num_accepted = sum(m.num_accepted_tokens for m in metrics)
    longest_steps = [max(o.metrics.num_steps for o in outputs) for outputs in timed]
    ttfts = [(m.first_token_time or m.arrival_time) - m.arrival_time for m in metrics]
    return Figures(
        requests=len(timed[0]),
        prompt_tokens=sum(len(o.prompt_token_ids) for o in timed[0]),
        tokens=tokens,
        wall_tokens_per_s=statistics.mean(wall_speeds),
        wall_deviation=_deviation(wall_speeds),
        wall_cv=_deviation(wall_speeds) / statistics.mean(wall_speeds),
        decode_tokens_per_s=statistics.mean(decode_speeds),
        decode_deviation=_deviation(decode_speeds),
        decode_cv=_deviation(decode_speeds) / statistics.mean(decode_speeds)
        if any(decode_speeds)
        else 0.0,
        ms_per_step=1000 * sum(decode_seconds) / max(1, sum(longest_steps)),
        ttft_ms=1000 * statistics.mean(ttfts),
        acceptance_length=1 + num_accepted / num_steps if num_steps else 1.0,
        acceptance_rate=num_accepted / num_drafts if num_drafts else 0.0,
        runs=len(timed),
    )


def _tokens(outputs: list[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _decode_seconds(outputs: list[RequestOutput]) -> float:
    """Return the seconds from the first token of any request to the last of all."""
    metrics = [output.metrics for output in outputs]
    begins = [m.first_token_time for m in metrics if m.first_token_time is not None]
    ends = [m.finished_time for m in metrics if m.finished_time is not None]
    return max(ends) - min(begins) if begins and ends else 0.0
