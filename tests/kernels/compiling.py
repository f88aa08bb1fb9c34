"""Runs one of this folder's commands in a process that a test forks."""

import os
import runpy
import sys


def run(module: str, arguments: list[str], out: str, errors: str) -> None:
    """Run `python -m tests.kernels.module` with these arguments; write its output to two files."""
    for path, descriptor in ((out, 1), (errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    sys.argv = [module, *arguments]
    runpy.run_module(f"tests.kernels.{module}", run_name="__main__", alter_sys=True)
