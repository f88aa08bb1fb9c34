"""lockstep doctor: table, JSON, exit status; lines of the system with a remedy each."""

import json
import socket
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.doctor import system
from lockstep.doctor.children import Finding
from lockstep.doctor.kernels import ExaminedBackend, KernelReport
from lockstep.kernels.selection import Replacement
from lockstep.serve.telemetry.metrics import Metrics
from lockstep.worker.device_rates import H200

FINDING = Finding("rms_norm", "fast", "crash", "call", "1x80", "sm_86", ("blocking",), "SIGABRT")
REPLACEMENT = Replacement("rms_norm", "fast", "triton", "crash at 1x80 on sm_86", 1.5)


def report(*findings: Finding) -> KernelReport:
    entries = [ExaminedBackend("rms_norm", "fast", list(findings), 9, 1.0)]
    replacements = [REPLACEMENT] if findings else []
    return KernelReport({"device": "a card"}, entries, replacements, [])


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the examinations by results that a test sets."""
    results: dict[str, Any] = {"kernels": report(), "system": [system.Line("disk", "9 GiB")]}
    monkeypatch.setattr(
        "lockstep.doctor.kernels.Doctor.examine", lambda *arguments: results["kernels"]
    )
    monkeypatch.setattr("lockstep.doctor.needs.kernels_of", lambda *arguments: [])
    monkeypatch.setattr(system, "examine_system", lambda *arguments: results["system"])
    return results


def test_healthy_machine_exits_with_zero(examined: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "1 of 1 kernels are healthy on device a card" in result.stdout


def test_sick_kernel_exits_with_one_and_is_named(examined: dict[str, Any]) -> None:
    examined["kernels"] = report(FINDING)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "rms_norm, fast: crash at 1x80 on sm_86, with blocking launches" in result.stdout
    assert "triton replaces fast" in result.stdout and "1.50 times" in result.stdout


def test_json_is_one_object(examined: dict[str, Any]) -> None:
    examined["kernels"] = report(FINDING)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    content = json.loads(result.stdout)
    assert content["kernels"]["examined"][0]["findings"][0]["detail"] == "SIGABRT"
    assert content["system"][0]["name"] == "disk"


def test_fault_of_the_system_alone_exits_with_one(examined: dict[str, Any]) -> None:
    examined["system"] = [system.Line("cache", "not writable", "fault", "Make it writable.")]
    result = CliRunner().invoke(app, ["doctor", "--system-only"])
    assert result.exit_code == 1
    assert "Make it writable." in result.stdout and "kernels are healthy" not in result.stdout


def test_system_lines_that_are_not_ok_have_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        lines = {line.name: line for line in system.examine_system("cpu", port)}
    assert lines["port"].status == "warning" and "--port" in lines["port"].remedy
    assert lines["hub"].status == "note" and "cached" in lines["hub"].remedy
    bad = [line for line in lines.values() if line.status in ("warning", "fault")]
    assert all(line.remedy for line in bad)


@pytest.mark.parametrize(
    ("card", "bytes_per_second", "status"),
    [
        ("NVIDIA H200", 4.28e12, "ok"),
        ("NVIDIA H200", 2.0e12, "warning"),
        ("NVIDIA H100 PCIe", 1.8e12, "ok"),
        ("NVIDIA A100-SXM4-40GB", 1.3e12, "ok"),
        ("NVIDIA A100-SXM4-80GB", 1.3e12, "warning"),
        ("NVIDIA L4", 0.3e12, "note"),
    ],
)
def test_bandwidth_is_compared_with_the_cards_own(
    monkeypatch: pytest.MonkeyPatch, card: str, bytes_per_second: float, status: str
) -> None:
    rates = replace(H200, memory=bytes_per_second)
    monkeypatch.setattr(system, "measured_rates", lambda device: rates)
    assert system._bandwidth(card, 0).status == status


def test_metrics_name_replacements_and_their_cost() -> None:
    metrics = Metrics("a model")
    metrics.add_replacements([REPLACEMENT])
    from prometheus_client import generate_latest

    text = generate_latest(metrics.registry).decode()
    labels = 'backend="triton",model_name="a model",op="rms_norm",replaced="fast"'
    assert f"lockstep:kernel_replaced_info{{{labels}}} 1.0" in text
    assert f"lockstep:kernel_replacement_slowdown{{{labels}}} 1.5" in text
