"""Nodes: several processes on this host that run one model together, over one connection each."""

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from lockstep.config import EngineConfig
from lockstep.errors import ConfigError
from lockstep.worker.executor import executor_of
from lockstep.worker.node import run_node
from lockstep.worker.worker import Worker
from tests.bundled_model import GREEDY, PROMPTS, SEEDED, answer, make_engine

SIZES = {"max_model_len": 512, "max_num_seqs": 4}
DRAFTING = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
SECONDS = 60.0


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


def test_a_node_gives_the_answers_of_one_process_and_ends_with_the_head() -> None:
    params = [replace(GREEDY, logprobs=1), SEEDED, replace(SEEDED, seed=9, prompt_logprobs=1)]
    expected = [answer(out) for out in make_engine("mtp").generate(PROMPTS[:3], params)]
    port = free_port()
    other = NodeThread(node_config(port, speculative_config=DRAFTING))
    llm = make_engine("mtp", tensor_parallel_size=2, nnodes=2, master_port=port)
    assert [answer(out) for out in llm.generate(PROMPTS[:3], params)] == expected
    executor = executor_of(llm.engine)
    executor.probe()
    with pytest.raises(ConfigError, match="test_nodes.*not allowed in a message between nodes"):
        executor.collective_rpc(own_function)
    executor.close()
    assert other.wait() is None
    assert other.lines[-1] == "node 1 of 2: the head has ended"


def own_function(worker: Worker) -> None:
    """Do nothing: a function that is not Lockstep's."""
