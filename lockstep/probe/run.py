"""Run of a probe: its sections one after the other, within a budget."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from lockstep.choices import read_choices
from lockstep.errors import ConfigError
from lockstep.probe.http import Budget, BudgetSpentError, Server
from lockstep.probe.report import Section, ServerReport
from lockstep.probe.sections import SECTIONS, drift
from lockstep.probe.session import Session
from lockstep.progress import Progress, ignore_progress


@dataclass(frozen=True)
class Limits:
    """Limits of a probe of one server. timeout: seconds of one request. context: tokens or None."""

    requests: int
    seconds: float
    timeout: float
    minutes: float
    context: int | None


def section_names(value: str) -> tuple[str, ...]:
    """Return the names of --sections in their order; empty means all. Raises ConfigError."""
    return read_choices("sections", value, SECTIONS)


def probe_server(
    url: str,
    key: str | None,
    model: str | None,
    limits: Limits,
    names: Sequence[str],
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> ServerReport:
    """Probe a server. Ctrl-C ends it early, with what is known until then.

    Raises ConfigError if the server names no model, or answers no chat completion.
    """
    # Drift takes its minutes in addition to the seconds of the other sections.
    seconds = limits.seconds + 60 * limits.minutes
    budget = Budget(limits.requests, seconds)
    server = Server(url, key, limits.timeout, budget)
    started = time.monotonic()
    try:
        session = Session(server, model, seed, limits.minutes)
        session.max_context = limits.context
        report = ServerReport(server.url, session.model)
        _run_sections(session, report, names, progress)
    except BudgetSpentError as error:
        limit = limits.requests if str(error) == "requests" else limits.seconds
        raise ConfigError(
            f"--{error} {limit} ended the probe before its first answer; allowed: more. "
            "Raise the limit, or look at the server."
        ) from None
    finally:
        server.close()
    report.answers = session.greedy_answers
    report.requests = budget.used
    report.seconds = time.monotonic() - started
    return report


def _run_sections(
    session: Session,
    report: ServerReport,
    names: Sequence[str],
    progress: Progress,
) -> None:
    budget = session.server.budget
    # Without the protocol section, the limit's name and the model are still learned.
    if "protocol" not in names:
        session.learn_limits()
    report.sections = [Section(name, SECTIONS[name].title) for name in names]
    weights = [SECTIONS[name].weight for name in names]
    for index, section in enumerate(report.sections):
        progress(section.title, index, len(names))
        if section.name == "protocol":
            section = report.sections[index] = session.protocol
        if report.interrupted:
            section.stopped = "interrupted"
            continue
        used = budget.used
        session.stopped = None
        # Drift is last, and its minutes are part of the whole budget.
        is_drift = section.name == "drift"
        if is_drift:
            budget.max_requests += ceil(drift.REQUESTS_PER_MINUTE * session.minutes)
        budget.begin_section(1.0 if is_drift else weights[index] / sum(weights[index:]))
        try:
            SECTIONS[section.name].run(session, section)
        except BudgetSpentError as error:
            session.stopped = str(error)
        except KeyboardInterrupt:
            report.interrupted = True
            section.stopped = "interrupted"
        if session.stopped is not None:
            section.stopped = f"its share of --{session.stopped} was used up"
        section.requests = budget.used - used
    if "protocol" not in names and session.protocol.findings:
        # Failures and deviations that other sections met must not be lost.
        report.sections.insert(0, session.protocol)
