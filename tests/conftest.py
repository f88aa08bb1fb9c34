"""Triton's interpreter on machines without a GPU, and fixtures with the bundled model."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing
from typer.main import get_command

from lockstep import LLM
from lockstep.doctor import children
from lockstep.engine import process_transport
from lockstep.worker import local_ranks
from tests.bundled_model import assert_idle, make_engine
from tests.forked_processes import (
    PRELOADED_MODULE,
    fork_context,
    start_fork_server,
    use_fork_server,
)
from tests.pairwise import mark_uncovered

SEARCH = (10_000, 10, 1_000)
"""gc's thresholds. Python's defaults take a tenth of the tests' time, since imported objects stay
and are half of all."""
gc.disable()  # while tests are collected: it would look at all of them again and again
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what it runs in the background; processes that tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any test imports Triton, which reads it then
# An app builds its options anew for every command line of a CliRunner, in 30 ms of CPU time.
# Other callers of get_command() get new commands, whose functions test_docs.py replaces.
typer.testing._get_command = cache(get_command)
# A process has one fork server, with the imports that its first user names. All others' processes
# would import what is missing, e.g. two seconds for each process of doctor.
children.PRELOADED = local_ranks.PRELOADED = PRELOADED_MODULE


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start the fork server that all xdist workers share, and pass its address to a worker.

    Its imports take 3 s of CPU time.
    """
    node.workerinput["fork_server"] = start_fork_server()


def pytest_configure(config: pytest.Config) -> None:
    """Fork the processes of an xdist worker from the shared server."""
    if address := getattr(config, "workerinput", {}).get("fork_server"):
        use_fork_server(address)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each xdist worker import the test files from another one on.

    In a new clone pytest rewrites the assertions of every file, 7 s of CPU time for all of them.
    Workers that begin at the same file would each do all of that at the same time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    folders = [Path(argument) for argument in session.config.args]
    if worker == "0" or session.config.getoption("ignore") or not all(map(Path.is_dir, folders)):
        return
    files = sorted(path.resolve() for folder in folders for path in folder.rglob("test_*.py"))
    # Pytest knows the files of packages by names without "tests.".
    files = [path for path in files if not (path.parent / "__init__.py").exists()]
    begin = len(files) * int(worker) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    conftests = (path.resolve() for folder in folders for path in folder.rglob("conftest.py"))
    for path in (*conftests, *files[begin:]):
        name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
        # The collection imports it again and reports what is wrong.
        with suppress(Exception, pytest.skip.Exception):
            import_module(name)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what coverings leave out, before `-m` selects by marks."""
    mark_uncovered(items)


def pytest_collection_finish() -> None:
    """Exclude the objects of collection from garbage collection."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(*SEARCH)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    """Collect garbage after each file's tests, and freeze what remains."""
    interrupt = signal.getsignal(signal.SIGINT)
    done = yield
    if signal.getsignal(signal.SIGINT) is not interrupt:
        # A command that was interrupted lets the next Ctrl-C end the process: here, the worker.
        signal.signal(signal.SIGINT, interrupt)
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done


@pytest.fixture(scope="module")
def engine() -> LLM:
    """Return the bundled model with its own draft module."""
    return make_engine("mtp")


@pytest.fixture
def llm(engine: LLM) -> Any:
    """Return the engine; assert afterwards that no request is left in it."""
    yield engine
    assert_idle(engine)


@pytest.fixture(scope="module")
def plain() -> LLM:
    """Return the bundled model without drafts."""
    return make_engine(None)


@pytest.fixture(scope="module")
def forked_processes() -> Iterator[None]:
    """Fork the processes of engines and ranks from a server that has imported what they need.

    Servers in processes of their own, and tests of a start, spawn them as users do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_transport, "get_context", lambda _: fork_context())
        yield
