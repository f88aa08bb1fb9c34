"""Choice of backends by the user, and waits after every op."""

import pytest
import torch

from lockstep import LLM, SamplingParams
from lockstep.errors import ConfigError, KernelError
from lockstep.kernels.backends import uses_numba
from lockstep.kernels.norm import rms_norm
from lockstep.kernels.selection import KernelSelection, Replacement, check_forced

PROMPT = [5, 9, 300, 7]


def tokens(**settings: object) -> list[int]:
    llm = LLM(skip_tokenizer_init=True, **settings)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return list(llm.generate([PROMPT], params)[0].outputs[0].token_ids)


def test_backends_by_hand_and_waits_change_no_token() -> None:
    by_hand = dict(kernels={"gated_delta_chunk": "reference"}, sync_kernels=True)
    assert tokens(**by_hand) == tokens()


def test_backends_with_other_bits_are_part_of_the_numerics() -> None:
    """On a CPU Numba kernels have other reduction trees than the other backends."""
    plan = LLM(skip_tokenizer_init=True).engine.plan
    same = LLM(skip_tokenizer_init=True, kernels={"gated_delta_chunk": "reference"}).engine.plan
    assert same.fingerprint == plan.fingerprint
    other = LLM(skip_tokenizer_init=True, kernels={"linear": "cpu"}).engine.plan
    if uses_numba(torch.float32):
        assert other.numerics == f"{plan.numerics}/linear=cpu"
        assert other.fingerprint != plan.fingerprint
    else:
        assert other.fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("linear=cublas", "its bits are only known where a probe compared them"),
        ("matmul=cpu", "kernels='matmul' is not allowed"),
        ("linear=fast", "kernels='linear=fast' is not allowed"),
    ],
)
def test_unknown_kernels_are_refused(kernels: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_forced(dict([kernels.split("=")]))


@pytest.mark.parametrize("kernels", ["linear=triton", "lora=cpu"])
def test_backend_that_serves_no_layer_is_refused(kernels: str) -> None:
    with pytest.raises(ConfigError, match=f"kernels={kernels} is not allowed with this model"):
        LLM(skip_tokenizer_init=True, kernels=kernels)


def test_failing_op_is_named() -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("CUDA error: misaligned address\nand more")

    run = KernelSelection(sync=True).wrapped(fails, rms_norm.name, "triton", "layers.3", "cuda")
    expected = r"op rms_norm, backend triton of layer layers.3, .*\[2, 8\]: CUDA error: misaligned"
    with pytest.raises(KernelError, match=expected):
        run(torch.zeros(2, 8))


def test_replacement_says_what_it_costs() -> None:
    one = Replacement("rms_norm", "fast", "triton", "hang at 1x80")
    assert "its cost was not measured" in str(one)
    assert "1.50 times its time" in str(Replacement("rms_norm", "fast", "triton", "hang", 1.5))
