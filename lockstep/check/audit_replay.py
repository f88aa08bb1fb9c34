"""Replay of an audit that found a difference: the request runs again, plain and in other ways."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.answer import Answer
from lockstep.check.drafters import NO_DRAFTER
from lockstep.check.events import count_events
from lockstep.check.matrix.setups import COLD, PREFIX_HIT, Setup
from lockstep.check.report.report import Report, Tally, running
from lockstep.config import EngineConfig
from lockstep.engine.audit_record import AuditRecord, answer_of_plain
from lockstep.engine.auditor import answer_of
from lockstep.engine.engine import Engine
from lockstep.engine_builder import build_engine
from lockstep.errors import ConfigError
from lockstep.llm import LLM
from lockstep.scheduling.request import Request
from lockstep.text.grammars.compiler import GrammarRecipe
from lockstep.text.grammars.thinking_budget import BudgetRecipe

Recipe = GrammarRecipe | BudgetRecipe
MAX_ROWS = 8
"""Maximum copies of the request that run together."""
AS_SERVED = "; the served answer differed in the same way"
"""End of a failure's description where the server's answer was equal to the one that failed."""


def replay_audit(record: AuditRecord, **settings: Any) -> Report:
    """Run the request of an audit again on an engine of its settings, and compare all answers.

    The plain run must repeat the audit's answer where the numerics are the same. The other runs
    must equal the plain one: the request with drafts, with its cached prefix, and in a batch.
    settings: settings that replace those of the record. Raises ConfigError and Interrupted.
    """
    report = Report("replay")
    with running(report):
        recipe = None if record.grammar is None else _recipe(record.grammar)
        config = EngineConfig.read(**{**record.settings, **settings})
        engine = build_engine(config)
        report.numerics = engine.numerics
        _Replay(record, recipe, engine, report).run()
    return report


class _Replay:
    """Runs of one request on one engine, whose results go to a report."""

    def __init__(
        self, record: AuditRecord, recipe: Recipe | None, engine: Engine, report: Report
    ) -> None:
        self._record = record
        self._recipe = recipe
        self._engine = engine
        self._report = report
        self._processor = LLM.from_engine(engine).processor
        self._num_requests = 0

    def run(self) -> None:
        """Run the request plain, cold, with a cached prefix and in a batch."""
        audited_request = self._request()
        # Whether the audit forces tokens depends on how the served answer ended.
        audited_request.finish_reason, _ = self._record.served["ending"]
        (plain,), seconds = self._serve([audited_request.audit()])
        if self._engine.numerics == self._record.numerics:
            audited = answer_of_plain(self._record.repeated)
            self._compare("the audit", COLD, [plain], audited, seconds)
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
            answers, seconds = self._serve(requests)
            if phase == PREFIX_HIT and not any(one.metrics.num_cached_tokens for one in answers):
                self._report.refused["the cached prefix"] = "no token of the prompt was cached"
                phase = COLD
            self._compare(name, phase, answers, plain, seconds)

    def _request(self) -> Request:
        """Return the request under a new id, with a new grammar."""
        self._num_requests += 1
        request = self._record.request(f"replay-{self._num_requests}")
        if self._recipe is not None:
            request.grammar = self._processor.grammar_of(self._recipe)
        return request

    def _serve(self, requests: list[Request]) -> tuple[list[Answer], float]:
        """Run requests together until they end. Return their answers, and the seconds."""
        started = time.monotonic()
        self._engine.run(requests, lambda request: None)
        seconds = time.monotonic() - started
        answers = [answer_of(request) for request in requests]
        self._report.count(count_events(answers))
        return answers, seconds

    def _compare(
        self, batch: str, phase: str, answers: Sequence[Answer], expected: Answer, seconds: float
    ) -> None:
        """Compare the answers of a batch, and add them to the report."""
        setup = self._setup(phase)
        served = answer_of_plain(self._record.served)
        num_failures = len(self._report.failures)
        for row, answer in enumerate(answers, 1):
            mismatch = answer.first_difference(expected)
            if mismatch is None:
                continue
            position, what = mismatch
            if answer.first_difference(served) is None:
                what += AS_SERVED
            name = f"request {self._record.request_id}, copy {row} of {len(answers)}"
            sampling = ", ".join(self._record.params)
            self._report.fail(setup, batch, what, name, sampling, position)
        failed = len(self._report.failures) - num_failures
        self._report.add(Tally(setup, len(answers), failed, round(seconds, 2), batch))

    def _setup(self, phase: str) -> Setup:
        """Return the engine, for the report."""
        drafting = self._engine.config.speculative_config
        graph = self._engine.plan.graph_mode
        if drafting is None:
            return Setup(NO_DRAFTER, 0, phase, graph)
        return Setup(
            drafting.method, drafting.num_speculative_tokens, phase, graph, drafting.adaptive
        )


def _recipe(data: dict[str, Any]) -> Recipe:
    """Return the recipe of a grammar from its fields. Raises ConfigError."""
    try:
        if "budget" in data:
            form = None if data["form"] is None else _recipe(data["form"])
            return BudgetRecipe(**{**data, "tool_names": tuple(data["tool_names"]), "form": form})
        json_after = None if data["json_after"] is None else tuple(data["json_after"])
        return GrammarRecipe(**{**data, "json_after": json_after})
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the grammar of the audit is malformed: {error!r}. Name a file that an audit wrote."
        ) from None
