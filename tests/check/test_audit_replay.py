"""Replays of audits: the file of a difference suffices to run its request again."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from typer.testing import CliRunner

from lockstep.check.audit_replay import AS_SERVED, replay_audit
from lockstep.check.scenarios.scenario import read_replay
from lockstep.cli import app
from lockstep.engine.audit_record import AuditRecord
from lockstep.engine.auditor import answer_of
from lockstep.errors import ConfigError
from lockstep.layers.linear import Head
from tests.bundled_model import GREEDY, TEXT, make_engine

CASES: dict[str, dict[str, Any]] = {
    "sampling": {"temperature": 0.8, "seed": 3, "logit_bias": {17: 2.5}, "logprobs": 2},
    "grammar": {"structured_outputs": {"regex": "[a-z]{3,8}"}, "ignore_eos": False},
    "prompt": {"prompt_logprobs": 1, "stop_token_ids": [220], "min_tokens": 2},
}


def write_record(folder: Path, text: str = TEXT, **changes: Any) -> Path:
    """Run a request and write the record that its audit would write if it differed."""
    llm = make_engine("ngram", num_gpu_blocks=30)
    (request,) = llm.processor.requests("served", text, replace(GREEDY, **changes))
    llm.engine.run([request], lambda request: None)
    answer = answer_of(request)
    engine = llm.engine
    record = AuditRecord.of(engine.config, engine.plan, request, answer, answer, "none")
    return record.write(folder)


@pytest.mark.parametrize("name", CASES)
def test_file_suffices_to_run_the_request_again(name: str, tmp_path: Path) -> None:
    record = read_replay(write_record(tmp_path, **CASES[name]))
    assert isinstance(record, AuditRecord)
    report = replay_audit(record)
    assert not report.failures
    assert report.refused == {"the cached prefix": "no token of the prompt was cached"}
    assert {tally.setup.phase for tally in report.tallies} == {"cold"}
    # The plain run, the request alone and again, and four copies.
    assert report.cases == 7
    assert {tally.setup.drafter for tally in report.tallies} == {"ngram"}


def test_report_counts_cached_and_draft_tokens(tmp_path: Path) -> None:
    """A prompt of several pages with repetitions: its replay has cached tokens and drafts."""
    record = read_replay(write_record(tmp_path, "import os\n" * 60))
    assert isinstance(record, AuditRecord)
    report = replay_audit(record)
    assert not report.failures and not report.refused
    assert report.exercised["cached tokens"] > 0
    assert [tally.setup.phase for tally in report.tallies].count("prefix hit") == 1
    assert report.exercised["draft tokens"] > 0


def test_resumed_answer_is_forced_again(tmp_path: Path) -> None:
    """The plain run generates the tokens that were forced in the next engine; the others do not."""
    path = write_record(tmp_path)
    data = json.loads(path.read_text())
    data["audit"]["params"]["forced_token_ids"] = data["audit"]["served"]["tokens"][:4]
    path.write_text(json.dumps({**data, "audit": {**data["audit"], "num_resumed": 4}}))
    record = read_replay(path)
    assert isinstance(record, AuditRecord)
    report = replay_audit(record)
    assert report.cases == 7 and not report.failures


def test_forced_tokens_that_the_model_would_not_choose_end_all_runs(tmp_path: Path) -> None:
    """The answer ended with an error, and so must its replays: its tokens stay forced."""
    path = write_record(tmp_path, forced_token_ids=[7, 8, 9, 10])
    data = json.loads(path.read_text())
    assert data["audit"]["served"]["ending"][0] == "error"
    data["audit"]["num_resumed"] = 2
    path.write_text(json.dumps(data))
    record = read_replay(path)
    assert isinstance(record, AuditRecord)
    report = replay_audit(record)
    assert report.cases == 7 and not report.failures


def test_replay_names_the_run_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are wrong: the copies differ as the served answer did, the plain run does not."""
    path = write_record(tmp_path)
    data = json.loads(path.read_text())
    forward = Head.forward

    def faulty(self: Head, x: Tensor) -> Tensor:
        out = forward(self, x).clone()
        if out.shape[0] >= 4 * 4:  # four rows with three drafts
            out[::4] = out[::4].roll(1, dims=-1)
        return out

    monkeypatch.setattr(Head, "forward", faulty)
    result = CliRunner().invoke(app, ["check", "--replay", str(path), "--json"])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert {failure["batch"] for failure in report["failures"]} == {"batch of 4"}
    assert not any(AS_SERVED in failure["what"] for failure in report["failures"])
    assert report["engines"][0]["batch"] == "the audit" and not report["engines"][0]["failed"]
    monkeypatch.undo()
    data["audit"]["repeated"]["tokens"][3] += 1
    path.write_text(json.dumps(data))
    result = CliRunner().invoke(app, ["check", "--replay", str(path)])
    assert result.exit_code == 1 and "the audit" in result.output and AS_SERVED in result.output


def test_other_numerics_are_named(tmp_path: Path) -> None:
    """With other numerics the plain run need not repeat the audit's answer."""
    path = write_record(tmp_path)
    options = ["--replay", str(path), "--kv-cache-dtype", "fp8", "--json"]
    result = CliRunner().invoke(app, ["check", *options])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["cases"] == 6 and "kv-fp8" in report["numerics"]
    assert "its numerics are" in report["not_exercised"][0]["reason"]


def test_full_disk_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_full(descriptor: int, *mode: str, **options: str) -> Any:
        os.close(descriptor)
        return open("/dev/full", *mode, **options)

    monkeypatch.setattr("lockstep.engine.audit_record.open", open_full, raising=False)
    answer = {"tokens": [1], "logprobs": [], "ending": ["stop", None], "prompt_logprobs": []}
    record = AuditRecord({}, "", "a", [1], {}, [], 0, "", 0, None, answer, answer, "what")
    with pytest.raises(OSError, match="No space left"):
        record.write(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 0}, "version=0 of an audit is not allowed; allowed: 1"),
        ({"audit": {}}, "the audit is malformed"),
        ({"audit": {"served": {}}}, "the audit is malformed"),
        ({"audit": {"prompt_token_ids": None}}, "the audit is malformed"),
        ({"audit": {"prompt_token_ids": "abc"}}, "the audit is malformed"),
        ({"audit": {"seed": None}}, "the audit is malformed"),
    ],
)
def test_malformed_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    answer = {"tokens": [1], "logprobs": [], "ending": ["stop", None], "prompt_logprobs": []}
    record = AuditRecord({}, "", "a", [1], {}, [], 0, "", 0, None, answer, answer, "what")
    data: dict[str, Any] = {"version": 1, "audit": vars(record)}
    path.write_text(json.dumps(data))
    assert read_replay(path) == record
    if "audit" in change:
        change = {"audit": {**vars(record), **change["audit"]} if change["audit"] else {}}
    path.write_text(json.dumps({**data, **change}))
    with pytest.raises(ConfigError, match=message):
        read_replay(path)


def test_file_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read: maximum recursion depth"):
        read_replay(path)


@pytest.mark.parametrize(
    "grammar", [{}, {"budget": 3}, {"source": "a", "json_after": 5}, {"source": "a", "other": 1}]
)
def test_malformed_grammar_is_refused(grammar: dict[str, Any]) -> None:
    answer = {"tokens": [1], "logprobs": [], "ending": ["stop", None], "prompt_logprobs": []}
    record = AuditRecord({}, "", "a", [1], {}, [], 0, "", 0, grammar, answer, answer, "what")
    with pytest.raises(ConfigError, match="the grammar of the audit is malformed"):
        replay_audit(record)
