"""Every op is registered and tested: it has cases, and is interpreted without a GPU."""

import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
import torch

import lockstep.kernels
from lockstep.errors import ConfigError
from lockstep.kernels import Op, backends, op
from lockstep.kernels.row_subsets import ROWS
from tests.kernels.backends import EXCHANGES, OPS


def defined_ops() -> set[Op]:
    """Return every op that some module of lockstep.kernels defines."""
    result: set[Op] = set()
    for module in pkgutil.walk_packages(lockstep.kernels.__path__, "lockstep.kernels."):
        values = vars(importlib.import_module(module.name)).values()
        result |= {value for value in values if isinstance(value, Op)}
    return result


def test_every_op_has_cases() -> None:
    """The tests of this folder run the ops found by folder."""
    assert defined_ops() == {*OPS, *EXCHANGES} and len(OPS) >= 11
    assert set(ROWS) <= set(OPS)
    for actual in OPS:
        assert any(backends.load_cases(actual)(torch.float32)), actual.name


def test_every_op_has_a_triton_backend() -> None:
    """A kernel of each op then runs under the interpreter in test_backends.py and
    test_bounds.py."""
    assert all("triton" in actual.backends for actual in OPS)


NEW_OP_FILES = {
    "__init__": "from lockstep.kernels import op\n\n\n@op\ndef double(x):\n    return 2 * x\n",
    "cases": "def double_cases(dtype):\n    yield 'one', dict(x=1)\n",
    "cpu": "from lockstep.kernels.added import double\n"
    "from lockstep.kernels.backends import cpu_trait\n\n\n"
    "@double.backend('cpu', supports=cpu_trait)\ndef add(x):\n    return x + x\n",
    "bench": "raise ImportError('a bench holds no backend')\n",
    "_parts": "raise ImportError('a name that begins with _ holds no backend')\n",
    "gpu": "import triton.nothing\n",
}


@pytest.fixture
def new_op_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add an op's folder whose module gpu needs a missing part of Triton."""
    folder = tmp_path / "added"
    folder.mkdir()
    for name, text in NEW_OP_FILES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(lockstep.kernels, "__path__", [*lockstep.kernels.__path__, str(tmp_path)])
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        del sys.modules[name]
    vars(lockstep.kernels).pop("added", None)


@pytest.mark.usefixtures("new_op_folder")
def test_op_folder_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton the op has its CPU backend; with Triton, a missing import is an error."""
    find_spec = backends.find_spec
    monkeypatch.setattr(backends, "find_spec", lambda name: name != "triton" and find_spec(name))
    monkeypatch.setitem(sys.modules, "triton.nothing", None)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    backends.load()
    actual = backends.all_ops()["double"]
    assert list(actual.backends) == ["reference", "cpu"]
    assert actual.choose(device="cpu") == "cpu"
    assert list(backends.load_cases(actual)(torch.float32)) == [("one", {"x": 1})]
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    with pytest.raises(ModuleNotFoundError):
        backends.load()


def test_last_supported_backend_is_chosen() -> None:
    """Never one that is opt-in."""

    @op(writes=("x",))
    def twice(x: list[int]) -> None:
        x.append(1)

    cuda = dict(supports=lambda **traits: None if traits["device"] == "cuda" else "no GPU")
    for name in ("slow", "fast"):
        twice.backend(name, **cuda)(lambda x: None)
    twice.backend("risky", opt_in_reason="nobody compared it", **cuda)(lambda x: None)
    assert twice.writes == ("x",) and twice.choose(device="cuda") == "fast"
    assert twice.choose(device="cpu") == "reference"
    assert twice.explain(device="cuda")["risky"] == "nobody compared it"
    twice.backend("cpu", supports=backends.cpu_trait)(lambda x: None)
    assert twice.choose(device="cpu") == "cpu"
    assert list(twice.explain(device="cpu"))[-1] == "reference"
    with pytest.raises(ConfigError, match="no backend serves"):
        twice.choose(device="tpu")


@pytest.mark.parametrize("op", ["paged_attention", "latent_attention"])
def test_hopper_attention_is_preferred(op: str) -> None:
    """Two backends support a Hopper GPU; the order of their files must not decide."""
    names = list(backends.all_ops()[op].backends)
    assert names.index("hopper") > names.index("triton")
