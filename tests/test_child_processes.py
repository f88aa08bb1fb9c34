"""Tests of how child processes end."""

import subprocess
import sys

EXIT = """
import weakref

class Owner: pass

first, owner = Owner(), Owner()
weakref.finalize(first, print, "first")

import time
from multiprocessing import get_context
from lockstep.child_processes import blocked_signals, ignore_signals, on_end

def run():
    ignore_signals()
    time.sleep(3600)

with blocked_signals():
    child = get_context("fork").Process(target=run, daemon=True)
    child.start()
end = on_end(owner, lambda: (print("owner"), child.kill()))
"""


def test_functions_at_the_end_precede_the_wait_for_child_processes() -> None:
    """Those of weakref.finalize do not where one is older than multiprocessing's module."""
    assert run(EXIT) == "owner\nfirst\n"


def test_functions_at_the_end_are_called_once() -> None:
    """They are called with the end of the owner, or by hand."""
    assert run(EXIT + "del owner; print('deleted')") == "owner\ndeleted\nfirst\n"
    assert run(EXIT + "end(); print('called')") == "owner\ncalled\nfirst\n"


def run(program: str) -> str:
    """Return the output of a program that ends by itself."""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True)
    return ended.stdout
