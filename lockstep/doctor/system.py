"""Examination of the system: device, driver, memory, bandwidth, links, disk, port, versions, hub.

Every line has a status. Warnings and faults have a remedy, notes may have one.
"""

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Literal

import torch

from lockstep.cache_folder import cache_folder
from lockstep.kernels.architecture import ARCHITECTURES, HOPPER, architecture_of
from lockstep.kernels.health import driver_version, health_path
from lockstep.worker.device_rates import H200, measured_rates

Status = Literal["ok", "note", "warning", "fault"]
GIB = 1 << 30
MIN_DISK_BYTES = 20 * GIB
"""Free bytes of the hub's cache below which a line warns: a small model's checkpoint."""
MIN_MEMORY_BYTES = 4 * GIB
MIN_BANDWIDTH_SHARE = 0.7
"""Share of the card's bandwidth that a copy reaches at least on a healthy card."""
CARD_BANDWIDTH = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-40GB": 1.55e12,
    "A100-PCIE-40GB": 1.55e12,
    "A100": 1.9e12,
}
"""Bytes per second by the data sheets of NVIDIA, by the first of these parts in the card's name."""
HUB = ("huggingface.co", 443)
HUB_SECONDS = 3.0
PACKAGES = ("torch", "triton", "safetensors", "tokenizers", "llguidance", "fastapi")


@dataclass(frozen=True)
class Line:
    """Line of the examination. remedy: what to do, "" where nothing is to be done."""

    name: str
    value: str
    status: Status = "ok"
    remedy: str = ""


def examine_system(device: str, port: int) -> list[Line]:
    """Return the lines about this machine for a server on this device and port."""
    lines = [*_versions(), *_host()]
    lines += _gpus() if device == "cuda" else _cpu()
    return [*lines, *_disk(), _port(port), _hub(), _examined(device)]


def _versions() -> Iterator[Line]:
    from lockstep import __version__

    yield Line("lockstep", __version__)
    yield Line("python", platform.python_version())
    for name in PACKAGES:
        try:
            yield Line(name, version(name))
        except PackageNotFoundError:
            if name == "triton" and not torch.cuda.is_available():
                yield Line(name, "not installed", "note", "Only a GPU needs it.")
            else:
                yield Line(name, "not installed", "fault", f"Install it: pip install {name}")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _host() -> Iterator[Line]:
    yield Line("cores", f"{num_cores()} on {platform.machine()}, {sys.platform}")
    free = free_memory()
    if free is not None:
        short = free < MIN_MEMORY_BYTES
        remedy = "End other programs: the engine and its tokenizer need memory." if short else ""
        yield Line("free memory", f"{free / GIB:.1f} GiB", "warning" if short else "ok", remedy)


def free_memory() -> int | None:
    """Return the bytes that programs can still take; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    except (OSError, StopIteration, ValueError):
        return None


def _cpu() -> Iterator[Line]:
    capability = torch.backends.cpu.get_cpu_capability()
    slow = capability == "DEFAULT"
    remedy = "This CPU has no AVX2 that torch uses: steps are slow." if slow else ""
    yield Line("instructions", capability, "warning" if slow else "ok", remedy)
    yield Line("threads of torch", str(torch.get_num_threads()))
    if find_spec("triton") and Path("/proc/driver/nvidia/version").exists():
        remedy = "Install a torch with CUDA of this driver, or set device to cuda to see why."
        yield Line("GPU", f"driver {driver_version()}, not seen by torch", "warning", remedy)


def _gpus() -> Iterator[Line]:
    yield Line("driver", driver_version())
    yield Line("CUDA of torch", str(torch.version.cuda))
    for index in range(torch.cuda.device_count()):
        yield from _gpu(index)
    yield from _links()


def _gpu(index: int) -> Iterator[Line]:
    properties = torch.cuda.get_device_properties(index)
    name = f"GPU {index}"
    card = architecture_of(f"cuda:{index}")
    yield Line(name, f"{properties.name}, {card.name}")
    if card.number not in ARCHITECTURES:
        remedy = "Tiles assume the least shared memory; examine all kernels with --every."
        yield Line(f"{name} architecture", card.name, "warning", remedy)
    elif card.number != HOPPER:
        remedy = "Kernels are compiled for it, not measured on it: examine them, then run check."
        yield Line(f"{name} architecture", card.name, "note", remedy)
    free, total = torch.cuda.mem_get_info(index)
    used = 1 - free / total
    busy = used > 0.1
    remedy = "Another program uses the GPU: end it, or lower gpu_memory_utilization."
    value = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield Line(f"{name} memory", value, "warning" if busy else "ok", remedy if busy else "")
    yield from _clocks(index)
    if index == torch.cuda.current_device():
        yield _bandwidth(properties.name, index)


def _clocks(index: int) -> Iterator[Line]:
    """Yield the clock of the multiprocessors, where NVML is installed."""
    try:
        megahertz = torch.cuda.clock_rate(index)
        celsius = torch.cuda.temperature(index)
    except Exception:  # NVML is optional, and its errors have no common class
        remedy = "pip install nvidia-ml-py shows clocks and temperature."
        yield Line(f"GPU {index} clock", "unknown", "note", remedy)
        return
    hot = celsius >= 85
    remedy = "The GPU lowers its clock when hot: improve cooling." if hot else ""
    value = f"{megahertz} MHz, {celsius} C"
    yield Line(f"GPU {index} clock", value, "warning" if hot else "ok", remedy)


def _bandwidth(card: str, index: int) -> Line:
    """Return the bandwidth that is reached, against the card's."""
    name = f"GPU {index} bandwidth"
    try:
        rates = measured_rates("cuda")
    except torch.OutOfMemoryError:
        remedy = "Too little memory is free to measure it: end other programs."
        return Line(name, "not measured", "note", remedy)
    value = f"{rates.memory / 1e12:.2f} TB/s"
    listed = next((rate for part, rate in CARD_BANDWIDTH.items() if part in card), None)
    if listed is None:
        return Line(name, value, "note", f"An H200 reaches {H200.memory / 1e12:.2f} TB/s.")
    slow = rates.memory < MIN_BANDWIDTH_SHARE * listed
    remedy = "Look for other programs, low clocks, ECC errors (nvidia-smi -q)." if slow else ""
    value += f" of {listed / 1e12:.2f} TB/s"
    return Line(name, value, "warning" if slow else "ok", remedy)


def _links() -> Iterator[Line]:
    """Yield the pairs of GPUs that reach each other's memory."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    pairs = list(permutations(range(count), 2))
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    value = f"{len(pairs) - len(without)} of {len(pairs)} pairs"
    remedy = "Exchanges of such pairs use NCCL, which is slower: check NVLink (nvidia-smi topo -m)."
    yield Line("peer access", value, "warning" if without else "ok", remedy if without else "")


def _disk() -> Iterator[Line]:
    from huggingface_hub import constants

    for name, folder in (("hub cache", Path(constants.HF_HUB_CACHE)), ("cache", cache_folder())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        value = f"{free / GIB:.1f} GiB free at {folder}"
        if not os.access(existing, os.W_OK):
            remedy = f"Make {existing} writable, or choose another folder."
            yield Line(name, value, "fault", remedy)
        elif name == "hub cache" and free < MIN_DISK_BYTES:
            remedy = "Free disk space, or set HF_HOME to a larger disk."
            yield Line(name, value, "warning", remedy)
        else:
            yield Line(name, value)


def _port(port: int) -> Line:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            remedy = "End the program that listens there, or serve with another --port."
            return Line("port", f"{port}: {error.args[-1]}", "warning", remedy)
    return Line("port", f"{port} is free")


def _hub() -> Line:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return Line("hub", "offline by HF_HUB_OFFLINE", "note", "Only cached models can be served.")
    try:
        socket.create_connection(HUB, HUB_SECONDS).close()
    except OSError as error:
        remedy = "Only cached models and folders can be served; check the network or the proxy."
        return Line("hub", f"{HUB[0]} is not reached: {error}", "note", remedy)
    value = f"{HUB[0]} is reached, {'with' if get_token() else 'without'} a token"
    return Line("hub", value)


def _examined(device: str) -> Line:
    path = health_path(device)
    if path.exists():
        return Line("kernels", f"examined before: {path}")
    return Line("kernels", "not examined yet with these versions", "note", "")
