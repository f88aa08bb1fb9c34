"""Replay of an audit that found a difference: the request runs again, plain and in other ways."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.answer import Answer
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.matrix.setups import COLD, PREFIX_HIT, Setup
from lockstep.check.report.report import Report, Tally, running
from lockstep.config import EngineConfig
from lockstep.engine.audit_record import AuditRecord, answer_of_plain
from lockstep.engine.auditor import answer_of
from lockstep.engine.engine import Engine
from lockstep.engine_builder import build_engine
from lockstep.llm import LLM
from lockstep.scheduling.request import Request
from lockstep.text.grammars.compiler import GrammarRecipe
from lockstep.text.grammars.thinking_budget import BudgetRecipe

MAX_ROWS = 8
"""Maximum copies of the request that run together."""
AS_SERVED = "; the served answer differed in the same way"


def replay_audit(record: AuditRecord, **settings: Any) -> Report:
    """Run the request of an audit again on an engine of its settings, and compare all answers.

    The plain run must repeat the audit's answer where the numerics are the same. The other runs
    must equal the plain one: the request with drafts, with its cached prefix, and in a batch.
    settings: settings that replace those of the record. Raises ConfigError and Interrupted.
    """
    report = Report("replay")
    with running(report):
        config = EngineConfig.read(**{**record.settings, **settings})
        engine = build_engine(config)
        report.numerics = engine.numerics
        _Replay(record, engine, report).run()
    return report


class _Replay:
    """Runs of one request on one engine, whose results go to a report."""

    def __init__(self, record: AuditRecord, engine: Engine, report: Report) -> None:
        self._record = record
        self._engine = engine
        self._report = report
        self._processor = LLM.from_engine(engine).processor
        self._num_requests = 0
        self._started = time.monotonic()

    def run(self) -> None:
        """Run the request plain, cold, with a cached prefix and in a batch."""
        (plain,) = self._serve([self._request().audit()])
        expected = answer_of(plain)
        if self._engine.numerics == self._record.numerics:
            audited = answer_of_plain(self._record.repeated)
            self._compare("the audit", COLD, [plain], audited)
        else:
            self._report.refused["the audit's answer"] = f"its numerics are {self._record.numerics}"
        rows = min(self._engine.plan.max_num_seqs, MAX_ROWS)
        for name, phase, count in (
            ("alone", COLD, 1),
            ("alone", PREFIX_HIT, 1),
            (f"batch of {rows}", COLD, rows),
        ):
            requests = [self._request() for _ in range(count)]
            if count > 1:
                # Requests of other salts share no prefix, so that all rows have their own prompt.
                requests = [replace(one, cache_salt=one.id) for one in requests]
            self._compare(name, phase, self._serve(requests), expected)

    def _request(self) -> Request:
        """Return the request under a new id, with a new grammar."""
        self._num_requests += 1
        request = self._record.request(f"replay-{self._num_requests}")
        if self._record.grammar is not None:
            request.grammar = self._processor.grammar_of(_recipe(self._record.grammar))
        return request

    def _serve(self, requests: list[Request]) -> list[Request]:
        """Run requests together until they end."""
        self._started = time.monotonic()
        self._engine.run(requests, lambda request: None)
        return requests

    def _compare(
        self, batch: str, phase: str, requests: Sequence[Request], expected: Answer
    ) -> None:
        """Compare the answers of requests that have ended, and add them to the report."""
        setup = self._setup(phase)
        served = answer_of_plain(self._record.served)
        num_failures = len(self._report.failures)
        for row, request in enumerate(requests, 1):
            answer = answer_of(request)
            mismatch = answer.first_difference(expected)
            if mismatch is None:
                continue
            position, what = mismatch
            if answer.first_difference(served) is None:
                what += AS_SERVED
            name = f"request {self._record.request_id}, copy {row} of {len(requests)}"
            sampling = ", ".join(self._record.params)
            self._report.fail(setup, batch, what, name, sampling, position)
        failed = len(self._report.failures) - num_failures
        seconds = time.monotonic() - self._started
        self._report.add(Tally(setup, len(requests), failed, round(seconds, 2), batch))

    def _setup(self, phase: str) -> Setup:
        """Return the engine, for the report."""
        drafting = self._engine.config.speculative_config
        graph = self._engine.plan.graph_mode
        if drafting is None:
            return Setup(NO_DRAFTER, 0, phase, graph)
        return Setup(
            drafting.method, drafting.num_speculative_tokens, phase, graph, drafting.adaptive
        )


def _recipe(data: dict[str, Any]) -> GrammarRecipe | BudgetRecipe:
    """Return the recipe of a grammar from its fields."""
    if "budget" in data:
        form = data["form"] and _recipe(data["form"])
        return BudgetRecipe(**{**data, "tool_names": tuple(data["tool_names"]), "form": form})
    json_after = data["json_after"]
    return GrammarRecipe(
        **{**data, "json_after": None if json_after is None else tuple(json_after)}
    )
