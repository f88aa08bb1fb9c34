"""Cases of doctor have the arguments that the layers of a model give to its kernels."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep.config import EngineConfig
from lockstep.doctor.cases import cases_of
from lockstep.doctor.needs import kernels_of
from lockstep.kernels.backends import load
from lockstep.kernels.linear import linear
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Gemm

NARROW = 600
"""Output columns below which the weights of the test have two split-K partitions."""


def test_partitions_of_a_rank_are_those_of_the_whole_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank has half of the output columns. That must not change how K is split."""
    chosen: list[int] = []

    def choose(n: int, *rest: object, layer_outputs: int | None = None) -> int:
        chosen.append(n)
        return 2 if n < NARROW else 1

    monkeypatch.setattr("lockstep.layers.linear.choose_split_k", choose)
    needs = kernels_of(EngineConfig.read(tensor_parallel_size=2), "cpu")
    splits = {(n.traits["n"], n.traits["k"]): n.split_k for n in needs if n.op == linear.name}
    assert {1024, 4096} <= set(chosen), "columns of the whole weights"
    assert splits[512, 256] == 1 and splits[128, 384] == 2
    for need in needs:
        if need.op == linear.name:
            *_, sized = cases_of(linear, need, torch.float32)
            assert sized.arguments["split_k"] == need.split_k
            assert f"/{need.split_k}" in sized.name


def test_cases_of_a_gpu_have_the_split_k_of_the_layer() -> None:
    load()
    build = BuildContext("cuda", torch.bfloat16, window=1, max_positions=64, arch=90)
    build.memory_budget.bounded = False  # tensors without memory take none
    with FakeTensorMode(allow_non_fake_inputs=True):
        gemm = Gemm(build, 2048, [(None, 256)], total=65536)
    *_, sized = cases_of(linear, build.needs[-1], torch.bfloat16)
    assert sized.arguments["split_k"] == gemm.split_k == 1
