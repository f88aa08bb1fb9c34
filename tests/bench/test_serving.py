"""Load over real HTTP against a fake engine: what is sent, when, and what comes of it."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.bench.http_client import Answer, Ask, Server, _has_output, _lines, ask
from lockstep.bench.serving import (
    Load,
    figures_of,
    make_asks,
    need_plots,
    plot,
    run_load,
    run_loads,
)
from lockstep.cli import app
from lockstep.errors import ConfigError
from tests.bench.server import serving
from tests.serve.fake_client import FakeClient


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, FakeClient]]:
    with serving(tmp_path_factory.mktemp("tiny")) as found:
        yield found


def asks(count: int, dataset: str = "random", seed: int = 0) -> list[Ask]:
    return make_asks(dataset, "tiny", count, 16, 50, 100, seed, temperature=0.0)


def test_figures_by_hand() -> None:
    """Three answers and a failure: gaps of 0.1 s and 0.3 s, five tokens in three pieces."""
    good = [
        Answer(due=10.0 + i, pieces=[p + i for p in (10.5, 10.6, 10.9)], ended=11.0 + i, tokens=5)
        for i in range(3)
    ]
    failed = Answer(due=12.0, ended=99.0, error="status 500")
    found = figures_of([*good, failed], Load(concurrency=2), started=10.0)
    assert (found.requests, found.failed, found.tokens, found.concurrency) == (4, 1, 15, 2)
    assert found.seconds == 3.0 and found.tokens_per_s == 5.0 and found.requests_per_s == 1.0
    assert found.ttft_ms == pytest.approx((500, 500, 500))
    assert found.tpot_ms == pytest.approx((100, 100, 100))
    assert found.itl_ms == pytest.approx((200, 300, 300))
    with pytest.raises(ConfigError, match="none of 1 requests was answered.*status 500"):
        figures_of([failed], Load(rate=1.0), 0.0)


def test_percentiles_are_interpolated() -> None:
    answers = [Answer(due=0.0, pieces=[t / 1e3], ended=1.0, tokens=1) for t in range(101)]
    found = figures_of(answers, Load(rate=1.0), 0.0)
    assert found.ttft_ms == pytest.approx((50, 90, 99)) and found.tpot_ms == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("choice", "output"),
    [
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"content": "a"}}, True),
        ({"delta": {"tool_calls": [{}]}}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"text": "", "finish_reason": None}, True),
        ({"text": "", "finish_reason": "stop"}, False),
        ({"text": "a", "finish_reason": "stop"}, True),
    ],
)
def test_which_pieces_bring_output(choice: dict[str, object], output: bool) -> None:
    assert _has_output(choice) is output


def test_lines_end_at_newlines_only() -> None:
    """However the bytes are cut, and with a line separator that JSON may hold unescaped."""
    sent = 'data: {"text": "a\u2028b\x85"}\r\n\ndata: [DONE]'.encode()
    for size in range(1, len(sent) + 1):
        chunks = (sent[i : i + size] for i in range(0, len(sent), size))
        assert list(_lines(chunks)) == sent.split(b"\n")


def test_an_answer_is_timed_piece_by_piece(running: tuple[str, FakeClient]) -> None:
    url, client = running
    client.step = 1
    answer = ask(Server.at(url), asks(1)[0], due=0.0)
    client.step = 3
    assert answer.error is None and answer.prompt_tokens == 16
    assert 1 < len(answer.pieces) <= answer.tokens and answer.pieces == sorted(answer.pieces)
    assert answer.pieces[-1] <= answer.ended and len(answer.itl) == len(answer.pieces) - 1


def test_open_loop_keeps_its_times(running: tuple[str, FakeClient]) -> None:
    """Arrivals follow the seed, whatever the answers take."""
    url, client = running
    client.requests.clear()
    found = run_load(Server.at(url), asks(12), Load(rate=10.0), seed=7)
    waits = random.Random(7)
    last = sum(waits.expovariate(10.0) for _ in range(11))
    assert last <= found.seconds < last + 0.5
    assert len(client.requests) == 12 and found.failed == 0
    assert found.rate == 10.0 and found.concurrency is None


def test_closed_loop_has_no_more_in_flight(running: tuple[str, FakeClient]) -> None:
    url, client = running
    alive = 0
    most = 0

    def counted(server: Server, request: Ask, due: float) -> Answer:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        answer = ask(server, request, due)
        alive -= 1
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.bench.serving.ask", counted)
        found = run_load(Server.at(url), asks(20), Load(concurrency=3))
    assert most == 3 and found.requests == 20 and found.failed == 0


def test_chats_send_the_bundled_conversations(running: tuple[str, FakeClient]) -> None:
    url, client = running
    client.requests.clear()
    sent = asks(8, "samples")
    assert sent[0].path == "/chat/completions" and "tools" in sent[0].body
    assert sent[7].body == sent[0].body != sent[1].body
    found = run_load(Server.at(url), sent[1:2], Load(concurrency=1))
    assert found.failed == 0 and found.tokens > 1 and len(client.requests) == 1


def test_every_load_has_its_own_prompts(running: tuple[str, FakeClient]) -> None:
    url, client = running
    client.requests.clear()
    loads = [Load(concurrency=1), Load(concurrency=2)]
    runs = run_loads(Server.at(url), lambda seed: asks(3, seed=seed), loads, 0)
    assert len(runs) == 2 and len(client.requests) == 7
    assert len({tuple(r.prompt_token_ids) for r in client.requests}) == 7
    assert asks(2, seed=5) == asks(2, seed=5)


def test_failures_are_counted_and_named(running: tuple[str, FakeClient]) -> None:
    url, client = running
    long = make_asks("random", "tiny", 1, 900, 50, 100, 0)
    found = run_load(Server.at(url), [*asks(2), *long], Load(concurrency=1))
    assert (found.requests, found.failed) == (3, 1)
    refused = ask(Server.at(url), long[0], 0.0).error
    assert refused is not None and "status 400" in refused and "max_model_len" in refused
    client.error = RuntimeError("lost")
    broken = ask(Server.at(url), asks(1)[0], 0.0).error
    client.error = None
    assert broken is not None
    assert "Connection refused" in str(ask(Server.at("http://127.0.0.1:9"), asks(1)[0], 0.0).error)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        Server.at(url)


def test_servers_that_name_no_model(running: tuple[str, FakeClient]) -> None:
    assert Server.at(running[0] + "/v1/").first_model() == "tiny"
    with pytest.raises(ConfigError, match="names no model"):
        Server.at(running[0] + "/other").first_model()
    with pytest.raises(ConfigError, match="names no model"):
        Server.at("http://127.0.0.1:9").first_model()


def test_command_prints_a_table_and_one_line(running: tuple[str, FakeClient]) -> None:
    asked = ["bench", "serving", "--url", running[0], "--input-len", "16", "--vocab-size", "100"]
    asked += ["--num-requests", "4", "--rate", "50", "--concurrency", "1,2"]
    shown = CliRunner().invoke(app, asked, catch_exceptions=False)
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["bench"] == "serving" and found["model"] == "tiny"
    assert [(r["rate"], r["concurrency"]) for r in found["runs"]] == [
        (50, None),
        (None, 1),
        (None, 2),
    ]
    assert all(r["tokens_per_s"] > 0 and len(r["ttft_ms"]) == 3 for r in found["runs"])
    assert "50/s" in shown.stdout and "2 at once" in shown.stdout
    with pytest.raises(ConfigError, match="rate='0' is not allowed"):
        CliRunner().invoke(app, [*asked, "--rate", "0"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="allowed: random, samples"):
        CliRunner().invoke(app, [*asked, "--dataset", "c4"], catch_exceptions=False)


def test_plot_is_a_png(tmp_path: Path) -> None:
    answers = [Answer(due=0.0, pieces=[0.1, 0.2], ended=1.0, tokens=2)]
    runs = [figures_of(answers, load, 0.0) for load in (Load(rate=2.0), Load(concurrency=8))]
    plot(runs, tmp_path / "out.png", "tiny")
    assert (tmp_path / "out.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[bench\]'"):
        need_plots()


def test_without_httpx_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(ConfigError, match=r"pip install '.\[bench\]'"):
        Server.at("http://127.0.0.1:8000")
