"""Results of doctor on disk, one file per device, driver, Triton, torch and release.

A file is valid only for the software and hardware on which it was written. Any other combination
has another name, so an update of the driver or of Triton requires a new examination.
"""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.cache_folder import cache_folder
from lockstep.kernels.selection import BackendHealth

FOLDER = "doctor"
FORMAT = 1
"""Version of the file's format; files of other versions are ignored."""


def machine(device: str) -> dict[str, str]:
    """Return what results of doctor depend on: device, driver and releases, by name."""
    versions = {"torch": torch.__version__, "lockstep": __version__}
    if device.partition(":")[0] != "cuda":
        names = {"device": platform.machine(), "isa": torch.backends.cpu.get_cpu_capability()}
        if find_spec("numba"):
            names["numba"] = version("numba")
        return names | versions
    import triton

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "device": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "driver": driver_version(),
        "triton": triton.__version__,
        **versions,
    }


def driver_version() -> str:
    """Return the version of the NVIDIA driver, or "unknown"."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    words = text.partition("\n")[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def health_path(device: str) -> Path:
    """Return the file of doctor's results for this machine's device."""
    about = machine(device)
    digest = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / FOLDER / f"{digest}.json"


def read_health(device: str) -> dict[tuple[str, str], BackendHealth]:
    """Return doctor's results for this machine's device by (op, backend); {} where there are none.

    A file that cannot be read counts as no result: it is only a cache.
    """
    try:
        content = json.loads(health_path(device).read_text())
        if content["format"] != FORMAT or content["machine"] != machine(device):
            return {}
        entries = [BackendHealth(**entry) for entry in content["backends"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {(entry.op, entry.backend): entry for entry in entries}


def write_health(device: str, results: Iterable[BackendHealth]) -> Path:
    """Merge results into the file of this machine's device and return its path.

    A backend that was examined now replaces its older result; others stay. Raises OSError.
    """
    merged: Mapping[tuple[str, str], BackendHealth] = read_health(device) | {
        (entry.op, entry.backend): entry for entry in results
    }
    content: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine(device),
        "backends": [asdict(entry) for entry in merged.values()],
    }
    path = health_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(content, indent=1))
    # A server that starts now reads the old file or the new one, never a part.
    partial.replace(path)
    return path
