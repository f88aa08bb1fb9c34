# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Cache of machine code on disk, shared by all copies of the package that a user has.

Numba's own cache is in each copy's folders, so every new clone, environment and container compiles
all kernels. Here the name of a file is a hash of everything that decides its contents: sources,
versions of Python, Numba and llvmlite, CPU, argument types, and what the kernel's factory got.
So files need no index, and a file that two processes write is the same one. Correctness needs no
lock. A lock only saves CPU time: where ranks start together, one compiles and the others load.
"""

import fcntl
import hashlib
import inspect
import logging
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

import llvmlite
import numba
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

INLINED = ("simd/*.py", "*/numba_kernels.py", "gated_delta_rule/reference.py")
"""Files of lockstep.kernels whose functions and constants kernels inline: the last for L2_EPS."""
MAX_WAIT = 120.0
"""Seconds for which a process waits while another one compiles a kernel. Compilation takes up to 5
seconds of CPU time, and several processes may share a CPU."""
POLL = 0.02
"""Seconds between two attempts to take the lock."""
UNUSED_DAYS = 30
"""Days after which the machine code of sources that no process used is deleted."""
CHECKSUM_BYTES = hashlib.sha256().digest_size

log = logging.getLogger("lockstep.kernels")


@cache
def source_hash() -> str:
    """Return a hash of the files that kernels may inline, and of the compiler's versions."""
    kernels = Path(__file__).parents[1]
    versions = (platform.python_version(), numba.__version__, llvmlite.__version__)
    digest = hashlib.sha256(repr((sys.implementation.cache_tag, versions)).encode())
    for file in sorted(file for pattern in INLINED for file in kernels.glob(pattern)):
        digest.update(str(file.relative_to(kernels)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:24]


@cache
def cache_folder() -> Path | None:
    """Return the folder of machine code of these sources; None if it can be neither made nor read.

    It is below NUMBA_CACHE_DIR if that is set. Otherwise it is below the user's cache folder (on
    Linux ~/.cache/lockstep), or next to this file where the user's folder is not writable. A folder
    that is only readable serves too, e.g. in an image for containers; then nothing is added to it.
    """
    user = Path(AppDirs(appname="lockstep", appauthor=False).user_cache_dir)
    bases = [user, Path(__file__).parent / "__pycache__"]
    if config.CACHE_DIR:
        bases = [Path(config.CACHE_DIR, "lockstep")]
    elif not user.is_absolute():
        # An unknown home folder stays "~", which would be a folder below the current one.
        bases = bases[1:]
    folders = [base / "kernels" / source_hash() for base in bases]
    for folder in folders:
        if _make_writable(folder):
            return folder
    return next((folder for folder in folders if folder.is_dir()), None)


def _make_writable(folder: Path) -> bool:
    """Make a folder and note that it is used. Return whether files can be added to it."""
    try:
        is_new = not folder.is_dir()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.utime(folder)
    except OSError:
        return False
    if is_new:
        _delete_unused(folder)
    return True


def _delete_unused(folder: Path) -> None:
    """Delete neighbours of a folder that no process has used for UNUSED_DAYS."""
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    with suppress(OSError):
        for other in folder.parent.iterdir():
            if other != folder and other.stat().st_mtime < oldest:
                shutil.rmtree(other, ignore_errors=True)


class MachineCodeFiles:
    """Files of one kernel's machine code: one per argument types, CPU and factory arguments.

    folder: of all files. name: beginning of their names. stamp: what else decides their contents.
    """

    def __init__(self, folder: Path, name: str, stamp: tuple[str, ...]) -> None:
        self.folder = folder
        self.name = name
        self.stamp = stamp
        self.locks = ExitStack()

    def path(self, key) -> Path:
        """Return the file of a key of Numba's Cache."""
        digest = hashlib.sha256(repr((self.stamp, key)).encode()).hexdigest()
        return self.folder / f"{self.name}-{digest[:32]}.machine_code"

    def load(self, key):
        """Return the contents of a file, or None.

        If there is no file, take the lock of the kernel's compilation, which unlock() releases. A
        file that another process writes meanwhile is loaded.
        """
        path = self.path(key)
        contents = _read(path)
        if contents is None:
            self._lock(path)
            contents = _read(path)
        return contents

    def save(self, key, contents) -> None:
        """Write a file, or log where the disk is full or the folder is read-only."""
        data = dumps(contents)
        path = self.path(key)
        # Files of the module tempfile could be read by this user alone.
        temporary = path.with_suffix(f".{uuid4().hex}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(hashlib.sha256(data).digest() + data)
            temporary.replace(path)
        except OSError as error:
            _warn_once(str(self.folder), str(error))
            with suppress(OSError):
                temporary.unlink()

    def unlock(self) -> None:
        """Release all locks of this process."""
        self.locks.close()

    def _lock(self, path: Path) -> None:
        """Take the lock of a file's compilation, unless the file appears or MAX_WAIT passes.

        There is no lock in a read-only folder or a file system without locks. A killed process
        loses its lock. One that is stopped keeps it, so waiting has a bound.
        """
        with ExitStack() as stack, suppress(OSError):
            file = stack.enter_context(path.with_suffix(".lock").open("w"))
            if _wait(file, path):
                # Closing is not enough: a process that was forked meanwhile has the file open too.
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
                self.locks.enter_context(stack.pop_all())


def _wait(file, path: Path) -> bool:
    """Lock a file and return True, or False if `path` appears first or MAX_WAIT passes.

    Raises OSError where the file system refuses locks.
    """
    deadline = time.monotonic() + MAX_WAIT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if path.exists():
                return False
        if time.monotonic() >= deadline:
            log.warning(
                f"Another process has been compiling the kernel {path.stem} for {MAX_WAIT:.0f} s; "
                f"this process compiles it too. The other one has {file.name} open."
            )
            return False
        time.sleep(POLL)


def _read(path: Path):
    """Return the contents of a file, or None if it is missing or damaged."""
    try:
        file = path.read_bytes()
    except OSError:
        return None
    checksum = file[:CHECKSUM_BYTES]
    data = file[CHECKSUM_BYTES:]
    return pickle.loads(data) if checksum == hashlib.sha256(data).digest() else None


@cache
def _warn_once(folder: str, error: str) -> None:
    log.warning(
        f"Compiled kernels cannot be kept in {folder} ({error}), so each process compiles them "
        "anew. Free space there, or set NUMBA_CACHE_DIR to a folder that can be written."
    )


class _Locator(_CacheLocator):
    """Place of a kernel's machine code: see cache_folder."""

    def __init__(self, function) -> None:
        self.function = function

    def ensure_cache_path(self) -> None:
        """Do nothing: cache_folder() has made the folder, and save() reports what fails."""

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> tuple[str, str]:
        """Return what decides the machine code besides INLINED: the kernel's module and file."""
        file = Path(inspect.getfile(self.function))
        return self.function.__module__, hashlib.sha256(file.read_bytes()).hexdigest()

    def get_disambiguator(self) -> str:
        return str(self.function.__code__.co_firstlineno)


class _Contents(CompileResultCacheImpl):
    """Numba's conversion of compiled kernels to contents of files."""

    def __init__(self, function) -> None:
        # Numba's constructor would take a locator of NUMBA_CACHE_LOCATOR_CLASSES if that is set.
        # Its stamp leaves out inlined files, so old machine code would be used.
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(function)
        self._filename_base = function.__name__


class MachineCodeCache(FunctionCache):
    """Numba's cache of one kernel, with MachineCodeFiles in place of Numba's index."""

    _impl_class = _Contents

    def __init__(self, function) -> None:
        super().__init__(function)
        locator = self._impl.locator
        folder = Path(locator.get_cache_path())
        name = f"{function.__name__}-{locator.get_disambiguator()}"
        self._cache_file = MachineCodeFiles(folder, name, locator.get_source_stamp())

    def unlock(self) -> None:
        """Let other processes compile or load the kernel."""
        self._cache_file.unlock()
