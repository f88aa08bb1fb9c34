"""Nodes: several processes on this host that run one model together, over one connection each."""

import json
import multiprocessing
import operator
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from lockstep import LLM
from lockstep.cache.host_tier import Move
from lockstep.check.random_adapters import write_random_adapter
from lockstep.cli.show import summary
from lockstep.config import EngineConfig
from lockstep.engine_builder import build_engine
from lockstep.errors import ConfigError, EngineDeadError, LockstepError
from lockstep.sampling_params import SamplingParams
from lockstep.scheduling.request import Request
from lockstep.scheduling.schedule import Admission, RowSpec, Schedule
from lockstep.worker import node, node_link, ranks
from lockstep.worker.agreement import check_identity, identity_of, shown
from lockstep.worker.build import find_model
from lockstep.worker.executor import executor_of
from lockstep.worker.node import run_node
from lockstep.worker.node_link import Hello, Link, NodeListener, RemoteNode, join_head
from lockstep.worker.plain_data import decode_plain
from lockstep.worker.rank_process import Call, Execute, Failed, Joined, Ready
from lockstep.worker.rank_times import end_step_times, start_step_times
from lockstep.worker.row_table_audit import compare_ranks
from lockstep.worker.worker import Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, make_engine
from tests.forked_processes import forked_children
from tests.ports import free_port
from tests.serve.server_process import is_gone
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_processes")
SIZES = {"max_model_len": 512, "max_num_seqs": 4}
DRAFTING = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
SECONDS = 60.0


def node_config(port: int, node_rank: int = 1, nodes: int = 2, **settings: Any) -> EngineConfig:
    """Return the settings of a node with one rank."""
    return EngineConfig.read(
        **{
            **SIZES,
            "tensor_parallel_size": nodes,
            "nnodes": nodes,
            "node_rank": node_rank,
            "master_port": port,
            "distributed_timeout_seconds": 60,
            **settings,
        }
    )


class NodeThread:
    """Node in a thread of the test's process, which spares the start of one process."""

    def __init__(self, config: EngineConfig) -> None:
        self.lines: list[str] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(config,), daemon=True)
        self._thread.start()

    def _run(self, config: EngineConfig) -> None:
        try:
            run_node(config, self.lines.append)
        except BaseException as error:
            self.error = error

    def wait(self) -> BaseException | None:
        """Wait for its end, and return what it raised."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def brief_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which a silent rank, node or head is given up."""
    for module in (node, ranks):
        monkeypatch.setattr(module, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(node, "REJOIN_SECONDS", 1.0)


def rank_process(rank: int) -> int:
    """Return the process id of a rank that a process of this test has started."""
    for process in multiprocessing.active_children():
        if process.name == f"lockstep-rank-{rank}":
            assert process.pid is not None
            return process.pid
    raise AssertionError(f"rank {rank} does not run")


def test_a_node_gives_the_answers_of_one_process(brief_silence: None) -> None:
    """A rank of it is named when it is killed, and the node joins the head's next engine."""
    params = [replace(GREEDY, logprobs=1), SEEDED, replace(SEEDED, seed=9, prompt_logprobs=1)]
    expected = [answer(out) for out in make_engine("mtp").generate(PROMPTS[:3], params)]
    port = free_port()
    other = NodeThread(node_config(port, speculative_config=DRAFTING))
    settings = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": port}
    llm = make_engine("mtp", **settings)
    assert " on cpu, 2 ranks on 2 nodes, mtp K=" in summary(llm.engine.facts)
    assert [answer(out) for out in llm.generate(PROMPTS[:3], params)] == expected
    executor_of(llm.engine).probe()
    with pytest.raises(ConfigError, match="test_nodes.*not allowed in a message between nodes"):
        executor_of(llm.engine).collective_rpc(own_function)
    os.kill(rank_process(1), signal.SIGKILL)
    with pytest.raises(LockstepError, match=r"rank 1 of 2 on node 1 \(127.0.0.1\) .*SIGKILL"):
        llm.generate(PROMPTS[:1], replace(GREEDY, max_tokens=400))
    again = make_engine("mtp", **settings)
    assert [answer(out) for out in again.generate(PROMPTS[:1], params[:1])] == expected[:1]
    executor_of(again.engine).close()
    assert other.wait() is None
    assert "node 1 of 2: the head is gone; waiting 1 s for another engine" in other.lines
    assert other.lines[-1] == "node 1 of 2: the head has ended"


def own_function(worker: Worker) -> None:
    """Do nothing: a function that is not Lockstep's."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_num_seqs": 5}, r"max_num_seqs of rank 1 of 2 on node 1 \S+ is 5, and of rank 0 4"),
        pytest.param(
            {"dtype": "bfloat16"},
            r"numerics of rank 1 of 2 on node 1 \S+ is cpu-.*/weights-bfloat",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_nodes_with_other_settings_are_refused(settings: dict[str, Any], expected: str) -> None:
    """The head and the node report it, and neither waits."""
    port = free_port()
    other = NodeThread(node_config(port, **settings))
    with pytest.raises(ConfigError, match=expected):
        make_engine(None, tensor_parallel_size=2, nnodes=2, master_port=port)
    error = other.wait()
    assert isinstance(error, EngineDeadError)
    assert re.search(f"the head has ended: {expected}", str(error))


def copy_of_bundled_model(folder: Path, changes: dict[str, Any]) -> str:
    """Copy the bundled model, with changes of config.json, or of its weights under the key ""."""
    shutil.copytree(find_model(None), folder)
    if changes:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **changes}))
    return str(folder)


def test_checkpoints_are_compared_by_their_contents(tmp_path: Path) -> None:
    mine = identity_of(EngineConfig.read())
    same = copy_of_bundled_model(tmp_path / "same", {})
    check_identity(mine, identity_of(EngineConfig.read(model=same)), "rank 1")
    changed = copy_of_bundled_model(tmp_path / "config", {"rms_norm_eps": 0.5})
    with pytest.raises(ConfigError, match=r"config\.json of rank 1 is"):
        check_identity(mine, identity_of(EngineConfig.read(model=changed)), "rank 1")
    (file,) = (tmp_path / "same").glob("*.safetensors")
    with file.open("r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"\x00\x01\x02\x03")
    with pytest.raises(ConfigError, match="weights of rank 1 is"):
        check_identity(mine, identity_of(EngineConfig.read(model=same)), "rank 1")


def test_draft_models_are_compared_by_their_contents(tmp_path: Path) -> None:
    """Ranks with other drafts would have other rows in a step."""
    drafting = {"method": "draft_model", "num_speculative_tokens": 2}
    folder = copy_of_bundled_model(tmp_path / "draft", {})
    mine = identity_of(EngineConfig.read(speculative_config={**drafting, "model": folder}))
    moved = copy_of_bundled_model(tmp_path / "moved", {})
    other = EngineConfig.read(speculative_config={**drafting, "model": moved})
    check_identity(mine, identity_of(other), "rank 1")
    (file,) = (tmp_path / "moved").glob("*.safetensors")
    with file.open("ab") as weights:
        weights.write(b"\x00")
    with pytest.raises(ConfigError, match="draft model's weights of rank 1"):
        check_identity(mine, identity_of(other), "rank 1")


def test_adapters_are_compared_by_their_contents(plain: LLM, tmp_path: Path) -> None:
    """A different order is refused as well, since rows name adapters by their numbers."""
    model = executor_of(plain.engine).worker.model
    folders = [write_random_adapter(model, tmp_path / f"a{i}", seed=i % 2) for i in range(3)]
    first, second, moved = map(str, folders)

    def identity(**paths: str) -> dict[str, str]:
        return identity_of(EngineConfig.read(lora_modules=paths))

    mine = identity(sql=first, law=second)
    check_identity(mine, identity(sql=moved, law=second), "rank 1")
    for other in (identity(sql=second, law=second), identity(law=second, sql=first), identity()):
        with pytest.raises(ConfigError, match="lora_modules of rank 1 is"):
            check_identity(mine, other, "rank 1")


def test_long_settings_are_compared_whole() -> None:
    value = {"rope_parameters": {str(number): number for number in range(200)}}
    changed = {"rope_parameters": {**value["rope_parameters"], "199": 0}}
    assert len(shown(value)) < 200 and shown(value) != shown(changed)


@contextmanager
def listening(**settings: Any) -> Iterator[NodeListener]:
    """Yield a head's port, for nodes of the config `listener.config`."""
    config = node_config(free_port(), node_rank=0, **settings)
    with closing(NodeListener(config, 7)) as listener:
        yield listener


@contextmanager
def in_thread(function: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a function in a thread; the list gets what it returns or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield outcome
    thread.join(SECONDS)
    assert not thread.is_alive()


def hello(listener: NodeListener, host: str = "127.0.0.1", **changes: Any) -> Link:
    """Connect to a head as a node does, with changes of its first frame."""
    config = replace(listener.config, node_rank=1)
    address = (host, listener.config.master_port)
    link = Link(socket.create_connection(address), node_link.MAX_MESSAGE_BYTES)
    frame = {**asdict(Hello.of(config)), **changes}
    link.connection.send_bytes(json.dumps(frame).encode())
    return link


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"release": "0.0.7"}, r"release of node 1 \(127.0.0.1\) is 0.0.7, and of node 0"),
        ({"tensor_parallel_size": 4}, r"tensor_parallel_size of node 1 \S+ is 4, and of node 0 2"),
        ({"nnodes": 4}, r"nnodes of node 1 \S+ is 4, and of node 0 2"),
        ({"node_rank": 2}, r"node_rank=2 \S+ is not allowed; allowed: 1, which have not joined"),
    ],
)
def test_head_names_a_node_that_differs(changes: dict[str, Any], expected: str) -> None:
    with listening() as listener, closing(hello(listener, **changes)) as link:
        with pytest.raises(ConfigError, match=expected):
            listener.accept(5.0)
        assert re.search(expected, json.loads(link.connection.recv_bytes())["error"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack 127.0.0.2")
def test_nodes_join_at_any_address_of_the_head() -> None:
    with listening(master_addr="head.example") as listener:
        with closing(hello(listener, "127.0.0.2")) as link:
            joined = listener.accept(5.0)
            assert joined is not None and joined.link.address == link.peer == "127.0.0.2"
            assert joined.node_name == " on node 1 (127.0.0.1)"
            joined.close()
    with listening() as listener, pytest.raises(ConnectionRefusedError):
        hello(listener, "127.0.0.2")  # the default address is for nodes of this host alone


def test_two_nodes_of_one_number_are_refused() -> None:
    with listening(nodes=3) as listener:
        with closing(hello(listener)) as first, closing(hello(listener)):
            joined = listener.accept(5.0)
            assert joined is not None and joined.ranks == range(1, 2)
            assert json.loads(first.connection.recv_bytes()) == {"port": 7, "error": ""}
            with pytest.raises(ConfigError, match="node_rank=1 .* allowed: 2, which have not"):
                listener.accept(5.0)
            joined.close()


def test_node_names_the_reason_of_a_head_that_refuses_it() -> None:
    with listening() as listener:
        config = replace(listener.config, node_rank=1, nnodes=3, tensor_parallel_size=3)
        with in_thread(lambda: join_head(config, 5.0)) as outcome:
            with pytest.raises(ConfigError):
                listener.accept(5.0)
    assert "the head refuses this node: nnodes of node 1" in str(outcome[0])


@contextmanager
def joined_node() -> Iterator[tuple[RemoteNode, Link]]:
    """Yield a node as the head sees it, and the node's end of the connection."""
    with listening() as listener, closing(hello(listener)) as link:
        joined = listener.accept(5.0)
        assert joined is not None
        with closing(joined):
            link.connection.recv_bytes()
            yield joined, link


@pytest.mark.parametrize(
    "frame",
    [
        b"R",
        b"R\x01\x00\x00\x00",
        b"R\x01\x00\x00\x00not a pickle",
        b"R\x09\x00\x00\x00" + pickle.dumps(Ready()),
        b"R\x01\x00\x00\x00" + pickle.dumps("no report"),
        b"R\x01\x00\x00\x00" + pickle.dumps(os.system),
        b"R\x01\x00\x00\x00" + pickle.dumps(Joined({"release": []})),  # type: ignore[dict-item]
        b"R\x01\x00\x00\x00" + pickle.dumps(Joined([])),  # type: ignore[arg-type]
        b"R\x01\x00\x00\x00" + pickle.dumps(Failed([], "")),  # type: ignore[arg-type]
        b"R\x01\x00\x00\x00" + pickle.dumps(Failed("", "", [])),  # type: ignore[arg-type]
        b"R\x01\x00\x00\x00" + b"Nr\xff\xff\xff\xff.",  # a memo of 64 GB
        b"R" + b"x" * node_link.MAX_REPORT_BYTES,
    ],
    ids=[
        *("empty", "no report", "no pickle", "other rank", "text", "function"),
        *(
            "identity of lists",
            "no identity",
            "error of lists",
            "kind of lists",
            "memo",
            "too long",
        ),
    ],
)
def test_a_report_that_cannot_be_read_fails_the_node(frame: bytes) -> None:
    with joined_node() as (joined, link), in_thread(lambda: link.connection.send_bytes(frame)):
        ((rank, report),) = joined.read(joined.connections[0])
        assert rank == 1 and isinstance(report, Failed), report
        joined.kill()


def test_frames_of_other_kinds_only_show_that_the_node_lives() -> None:
    with joined_node() as (joined, link):
        for frame in (b"B", b"?later", b""):
            link.connection.send_bytes(frame)
            assert not joined.read(joined.connections[0])
        link.send(b"R", node_link.encode_report(1, Ready()))
        assert joined.read(joined.connections[0]) == [(1, Ready())]
        assert joined.silent_for < 5


def test_a_frame_that_ends_in_its_middle_fails_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network may end without a word; the head's thread must not wait for the rest."""
    monkeypatch.setattr(node_link, "STALL_SECONDS", 0.2)
    with joined_node() as (joined, link):
        os.write(link.connection.fileno(), b"\x00\x00\x01\x00R")
        ((rank, report),) = joined.read(joined.connections[0])
        assert rank == 1 and isinstance(report, Failed)
        assert "its node has ended, or the network" in report.error


def test_a_node_that_reads_nothing_does_not_block_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_link, "STALL_SECONDS", 0.2)
    with joined_node() as (joined, _):
        with pytest.raises(OSError):
            for _ in range(100):
                joined.send(b"x" * (1 << 20), lambda: None)
        ((rank, report),) = joined.read(joined.connections[0])
        assert rank == 1 and isinstance(report, Failed)


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"",
    b"\x00\x00\x00\x02{}",
    b"\x00\x00\x00\x02[]",
    b"\x00\x00\x20\x00" + b"[" * 0x2000,
    b"\x7f\xff\xff\xff" + b"x" * 100,
    b"\xff\xff\xff\xff" + b"\xff" * 8,
]


@pytest.mark.parametrize("sent", GARBAGE)
def test_head_ignores_connections_that_are_no_nodes(sent: bytes) -> None:
    with listening() as listener:
        address = ("127.0.0.1", listener.config.master_port)
        with socket.create_connection(address) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert listener.accept(5.0) is None
        assert listener.missing == {1}


def test_head_does_not_wait_for_a_silent_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "HELLO_SECONDS", 0.2)
    with listening() as listener:
        with socket.create_connection(("127.0.0.1", listener.config.master_port)):
            began = time.monotonic()
            assert listener.accept(5.0) is None
            assert time.monotonic() - began < 3


def test_head_does_not_wait_for_a_slow_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte arrives in time, and the frame does not."""
    monkeypatch.setattr(node_link, "HELLO_SECONDS", 0.5)
    with listening() as listener:
        address = ("127.0.0.1", listener.config.master_port)
        with socket.create_connection(address) as stranger:

            def drip() -> None:
                with suppress(OSError):
                    for byte in b"\x00\x00\x20\x00" + b" " * 100:
                        stranger.send(bytes([byte]))
                        time.sleep(0.1)

            began = time.monotonic()
            with in_thread(drip):
                assert listener.accept(5.0) is None
                assert time.monotonic() - began < 3


@pytest.mark.parametrize("answer", [b"\x00\x00\x00\x02{}", b"HTTP/1.1 400 Bad Request\r\n", b""])
def test_node_names_a_head_that_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = node_config(server.getsockname()[1])

        def reply() -> None:
            connected, _ = server.accept()
            with connected:
                connected.sendall(answer)
                connected.shutdown(socket.SHUT_WR)
                connected.recv(1000)

        with in_thread(reply), pytest.raises(ConfigError, match="has not answered for 0 s"):
            join_head(config, 0.0)


def test_a_busy_port_and_a_missing_node_are_named() -> None:
    with listening() as listener:
        port = listener.config.master_port
        with pytest.raises(ConfigError, match=f"master_port={port} cannot be opened: .*in use"):
            make_engine(None, tensor_parallel_size=2, nnodes=2, master_port=port)
    settings = {"tensor_parallel_size": 3, "nnodes": 3, "distributed_timeout_seconds": 1}
    expected = r"node 1, 2 of 3 .* within 1 s \(distributed_timeout.*nodes of this host alone"
    with pytest.raises(ConfigError, match=expected):
        make_engine(None, master_port=port, **settings)
    with pytest.raises(ConfigError, match=f"master_port={port}: the head .* for 0.1 s .*refused"):
        join_head(node_config(port), 0.1)


def test_only_the_head_has_an_engine() -> None:
    with pytest.raises(ConfigError, match="node_rank=1 is not allowed here; allowed: 0"):
        build_engine(node_config(free_port()))


class Evil:
    """Object whose pickle calls a function."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    "value",
    [
        Evil(os.system, "true"),
        Evil(eval, "1"),
        Evil(getattr, 1, "real"),
        Evil(operator.methodcaller, "unlink"),
        Call(own_function),
        Call(Worker.launch),
        replace,  # a function of another module, which a module of messages imports
    ],
)
def test_messages_of_other_hosts_run_no_code(value: Any) -> None:
    with pytest.raises(ConfigError, match="not allowed in a message between nodes"):
        decode_plain(pickle.dumps(value))


@pytest.mark.parametrize("name", ["field.__globals__", "sha256", "Path", "dataclass"])
def test_messages_reach_nothing_that_a_module_imports(name: str) -> None:
    opcodes = b"\x80\x04\x8c\x0flockstep.config\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(ConfigError, match="not allowed in a message between nodes"):
        decode_plain(opcodes)


def test_messages_between_nodes_are_plain_data() -> None:
    class Answer(BaseModel):
        """Model of an answer, which exists in this process alone."""

    params = SamplingParams(structured_outputs={"json": Answer}, seed=3)
    spec = RowSpec.of(Request("a", [1, 2], params, eos_token_ids=frozenset({3})))
    assert spec.params.structured_outputs is None and spec.params.seed == 3
    admission = Admission(1, spec, [4], 0, 0, 0)
    schedule = Schedule(1, decode=[1], admissions=[admission], evicted={"pages": [Move(1, (2,))]})
    message = Execute(3, schedule)
    assert decode_plain(pickle.dumps(message)) == message
    for function in (Worker.probe, compare_ranks, start_step_times, end_step_times):
        assert decode_plain(pickle.dumps(Call(function))).function is function


def test_a_long_error_of_a_rank_is_cut() -> None:
    data = node_link.encode_report(3, Failed("x" * 10**6, "y" * 10**6))
    assert len(data) < node_link.MAX_REPORT_BYTES


# Whole command lines, with a process per node.


def start_node(port: int, node_rank: int, nodes: int, *options: str) -> subprocess.Popen[str]:
    """Start `lockstep serve` as another node."""
    command = [sys.executable, "-m", "lockstep", "serve", "--speculative-config", "none"]
    command += ["--max-model-len", "512", "--max-num-seqs", "4"]
    command += ["--nnodes", str(nodes), "--node-rank", str(node_rank), "-tp", str(nodes)]
    command += ["--master-port", str(port), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


@contextmanager
def nodes_of(port: int, count: int, *options: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the processes of all nodes but the head, and end them and their ranks."""
    processes = [start_node(port, index, count, *options) for index in range(1, count)]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def group_is_gone(process: subprocess.Popen[str]) -> bool:
    """Return whether a process has ended, with all that it has started."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_three_nodes_give_the_answers_of_one_process() -> None:
    params = [replace(GREEDY, logprobs=1), SEEDED]
    expected = [answer(out) for out in make_engine(None).generate(PROMPTS[:2], params)]
    port = free_port()
    with nodes_of(port, 3, "--master-addr", "127.0.0.2") as processes:
        settings = {"tensor_parallel_size": 3, "nnodes": 3, "master_port": port}
        llm = make_engine(None, master_addr="127.0.0.2", **settings)
        assert [answer(out) for out in llm.generate(PROMPTS[:2], params)] == expected
        executor_of(llm.engine).close()
        for process in processes:
            assert process.wait(20) == 0
            wait_until(partial(group_is_gone, process), 10.0)


@pytest.mark.slow
def test_two_nodes_of_two_ranks_give_the_answers_of_one_process(brief_silence: None) -> None:
    """Messages reach two ranks of a node through its memory; the audit compares all tables."""
    settings: dict[str, Any] = {
        **SIZES,
        "model": str(Path(__file__).parents[1] / "assets" / "moe"),
        "speculative_config": DRAFTING,
        "audit": 0.001,
    }
    params = [replace(GREEDY, logprobs=1), SEEDED, replace(SEEDED, seed=9, prompt_logprobs=1)]
    alone = LLM.from_engine(build_engine(EngineConfig.read(**settings)))
    expected = [answer(out) for out in alone.generate(PROMPTS[:3], params)]
    port = free_port()
    other = NodeThread(node_config(port, **settings, tensor_parallel_size=4))
    head = node_config(port, node_rank=0, **settings, tensor_parallel_size=4)
    llm = LLM.from_engine(build_engine(head))
    assert [answer(out) for out in llm.generate(PROMPTS[:3], params)] == expected
    os.kill(rank_process(3), signal.SIGKILL)
    with pytest.raises(LockstepError, match=r"rank 3 of 4 on node 1 \(127.0.0.1\) .*SIGKILL"):
        llm.generate(PROMPTS[:1], replace(GREEDY, max_tokens=400))
    error = other.wait()
    assert isinstance(error, EngineDeadError), "no other engine follows"
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_node_that_ends_or_stops_is_named(sent: signal.Signals, brief_silence: None) -> None:
    port = free_port()
    with nodes_of(port, 2) as (process,):
        llm = make_engine(None, tensor_parallel_size=2, nnodes=2, master_port=port)
        llm.generate(PROMPTS[:1], GREEDY)
        os.kill(process.pid, sent)
        began = time.monotonic()
        with pytest.raises(LockstepError, match=r"rank 1 of 2 on node 1 \(127.0.0.1\) .*node"):
            llm.generate(PROMPTS[:1], replace(GREEDY, max_tokens=400))
        assert time.monotonic() - began < 15
        if sent == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)  # it finds that the head has given it up
            os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
        wait_until(lambda: group_is_gone(process), 10.0)


HEAD = """
import sys
from tests.bundled_model import GREEDY, PROMPTS, make_engine
if __name__ == "__main__":
    llm = make_engine(None, tensor_parallel_size=2, nnodes=2, master_port=int(sys.argv[1]))
    llm.generate(PROMPTS[:1], GREEDY)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_whose_head_ends_or_stops_ends_its_ranks(
    sent: signal.Signals, tmp_path: Path
) -> None:
    port = free_port()
    program = tmp_path / "head.py"
    program.write_text(HEAD)
    head = subprocess.Popen(
        [sys.executable, str(program), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with nodes_of(port, 2) as (process,):
        assert head.stdout is not None and head.stdout.readline() == "ready\n"
        node_ranks = forked_children(process.pid)
        assert len(node_ranks) == 1
        began = time.monotonic()
        os.kill(head.pid, sent)
        wait_until(lambda: all(map(is_gone, node_ranks)), 20.0)
        assert process.wait(60) == 2
        print(f"{sent.name}: the node has ended after {time.monotonic() - began:.0f} s")
        assert process.stderr is not None
        assert "the head has ended or cannot be reached" in process.stderr.read()
        wait_until(lambda: group_is_gone(process), 10.0)
    head.kill()
    head.communicate()
