"""Folder of what Lockstep keeps between runs and can compute again."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the platform's cache folder of Lockstep; it need not exist.

    XDG_CACHE_HOME or ~/.cache on Linux, ~/Library/Caches on macOS, LOCALAPPDATA on Windows.
    """
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "lockstep"
