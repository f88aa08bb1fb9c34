"""Load tests over real HTTP against a fake engine: requests, their times, and figures."""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.bench.http_client import (
    Server,
    StreamRequest,
    StreamResult,
    _has_output,
    _lines,
    send,
)
from lockstep.bench.serving import (
    Load,
    figures_of,
    make_requests,
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
    with serving(tmp_path_factory.mktemp("tiny")) as server:
        yield server


def make_test_requests(count: int, dataset: str = "random", seed: int = 0) -> list[StreamRequest]:
    return make_requests(dataset, "tiny", count, 16, 50, 100, seed, temperature=0.0)


def test_figures_by_hand() -> None:
    """Three results and a failure: gaps of 0.1 s and 0.3 s, five tokens in three chunks."""
    succeeded = [
        StreamResult(
            due_time=10.0 + i,
            chunk_times=[p + i for p in (10.5, 10.6, 10.9)],
            end_time=11.0 + i,
            tokens=5,
        )
        for i in range(3)
    ]
    failed = StreamResult(due_time=12.0, end_time=99.0, error="status 500")
    figures = figures_of([*succeeded, failed], Load(concurrency=2), started=10.0)
    assert (figures.requests, figures.failed, figures.tokens, figures.concurrency) == (4, 1, 15, 2)
    assert figures.seconds == 3.0 and figures.tokens_per_s == 5.0 and figures.requests_per_s == 1.0
    assert figures.ttft_ms == pytest.approx((500, 500, 500))
    assert figures.tpot_ms == pytest.approx((100, 100, 100))
    assert figures.itl_ms == pytest.approx((200, 300, 300))
    with pytest.raises(ConfigError, match="none of 1 requests was answered.*status 500"):
        figures_of([failed], Load(rate=1.0), 0.0)


def test_percentiles_are_interpolated() -> None:
    results = [
        StreamResult(due_time=0.0, chunk_times=[t / 1e3], end_time=1.0, tokens=1)
        for t in range(101)
    ]
    figures = figures_of(results, Load(rate=1.0), 0.0)
    assert figures.ttft_ms == pytest.approx((50, 90, 99)) and figures.tpot_ms == (0.0, 0.0, 0.0)


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
def test_chunks_with_output(choice: dict[str, object], output: bool) -> None:
    assert _has_output(choice) is output


def test_lines_end_at_newlines_only() -> None:
    """Lines do not depend on the chunks, and U+2028, which JSON may contain, ends none."""
    sent = 'data: {"text": "a\u2028b\x85"}\r\n\ndata: [DONE]'.encode()
    for size in range(1, len(sent) + 1):
        chunks = (sent[i : i + size] for i in range(0, len(sent), size))
        assert list(_lines(chunks)) == sent.split(b"\n")


def test_every_chunk_is_timed(running: tuple[str, FakeClient]) -> None:
    url, client = running
    client.step = 1
    result = send(Server.at(url), make_test_requests(1)[0], due_time=0.0)
    client.step = 3
    assert result.error is None and result.prompt_tokens == 16
    assert 1 < len(result.chunk_times) <= result.tokens and result.chunk_times == sorted(
        result.chunk_times
    )
    assert (
        result.chunk_times[-1] <= result.end_time and len(result.itl) == len(result.chunk_times) - 1
    )


def test_open_loop_keeps_its_times(running: tuple[str, FakeClient]) -> None:
    """Arrival times follow from the seed, however long the responses take."""
    url, client = running
    client.requests.clear()
    figures = run_load(Server.at(url), make_test_requests(12), Load(rate=10.0), seed=7)
    rng = random.Random(7)
    last_arrival = sum(rng.expovariate(10.0) for _ in range(11))
    assert last_arrival <= figures.seconds < last_arrival + 0.5
    assert len(client.requests) == 12 and figures.failed == 0
    assert figures.rate == 10.0 and figures.concurrency is None


def test_closed_loop_has_no_more_in_flight(running: tuple[str, FakeClient]) -> None:
    url, client = running
    in_flight = 0
    max_in_flight = 0

    def counting_send(server: Server, request: StreamRequest, due_time: float) -> StreamResult:
        nonlocal in_flight, max_in_flight
        in_flight += 1
        max_in_flight = max(max_in_flight, in_flight)
        result = send(server, request, due_time)
        in_flight -= 1
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.bench.serving.send", counting_send)
        figures = run_load(Server.at(url), make_test_requests(20), Load(concurrency=3))
    assert max_in_flight == 3 and figures.requests == 20 and figures.failed == 0


def test_chats_send_the_bundled_conversations(running: tuple[str, FakeClient]) -> None:
    url, client = running
    client.requests.clear()
    requests = make_test_requests(8, "samples")
    assert requests[0].path == "/chat/completions" and "tools" in requests[0].body
    assert requests[7].body == requests[0].body != requests[1].body
    figures = run_load(Server.at(url), requests[1:2], Load(concurrency=1))
    assert figures.failed == 0 and figures.tokens > 1 and len(client.requests) == 1


def test_every_load_has_its_own_prompts(running: tuple[str, FakeClient]) -> None:
    url, client = running
    client.requests.clear()
    loads = [Load(concurrency=1), Load(concurrency=2)]
    runs = run_loads(Server.at(url), lambda seed: make_test_requests(3, seed=seed), loads, 0)
    assert len(runs) == 2 and len(client.requests) == 7
    assert len({tuple(r.prompt_token_ids) for r in client.requests}) == 7
    assert make_test_requests(2, seed=5) == make_test_requests(2, seed=5)


def test_failures_are_counted_and_named(running: tuple[str, FakeClient]) -> None:
    url, client = running
    long = make_requests("random", "tiny", 1, 900, 50, 100, 0)
    figures = run_load(Server.at(url), [*make_test_requests(2), *long], Load(concurrency=1))
    assert (figures.requests, figures.failed) == (3, 1)
    refused = send(Server.at(url), long[0], 0.0).error
    assert refused is not None and "status 400" in refused and "max_model_len" in refused
    client.error = RuntimeError("lost")
    broken = send(Server.at(url), make_test_requests(1)[0], 0.0).error
    client.error = None
    assert broken is not None
    assert "Connection refused" in str(
        send(Server.at("http://127.0.0.1:9"), make_test_requests(1)[0], 0.0).error
    )


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port"])
def test_malformed_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        Server.at(url)


def test_servers_without_a_model_list(running: tuple[str, FakeClient]) -> None:
    assert Server.at(running[0] + "/v1/").first_model() == "tiny"
    with pytest.raises(ConfigError, match="names no model"):
        Server.at(running[0] + "/other").first_model()
    with pytest.raises(ConfigError, match="names no model"):
        Server.at("http://127.0.0.1:9").first_model()


def test_command_prints_a_table_and_one_line(running: tuple[str, FakeClient]) -> None:
    arguments = [
        "bench",
        "serving",
        "--url",
        running[0],
        "--input-len",
        "16",
        "--vocab-size",
        "100",
    ]
    arguments += ["--num-requests", "4", "--rate", "50", "--concurrency", "1,2"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["bench"] == "serving" and figures["model"] == "tiny"
    assert [(r["rate"], r["concurrency"]) for r in figures["runs"]] == [
        (50, None),
        (None, 1),
        (None, 2),
    ]
    assert all(r["tokens_per_s"] > 0 and len(r["ttft_ms"]) == 3 for r in figures["runs"])
    assert "50/s" in result.stdout and "2 at once" in result.stdout
    with pytest.raises(ConfigError, match="rate='0' is not allowed"):
        CliRunner().invoke(app, [*arguments, "--rate", "0"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="allowed: random, samples"):
        CliRunner().invoke(app, [*arguments, "--dataset", "c4"], catch_exceptions=False)


def test_plot_is_a_png(tmp_path: Path) -> None:
    results = [StreamResult(due_time=0.0, chunk_times=[0.1, 0.2], end_time=1.0, tokens=2)]
    runs = [figures_of(results, load, 0.0) for load in (Load(rate=2.0), Load(concurrency=8))]
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
