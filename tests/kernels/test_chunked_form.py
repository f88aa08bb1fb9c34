"""Chunked forms of the recurrent mixers: the bits of a prompt do not depend on how it is cut."""

from dataclasses import replace

import pytest
import torch

from lockstep.kernels.recurrent.cases import Dims
from tests.kernels.backends import Backend, backends
from tests.kernels.prompts import GATED_DELTA, MAMBA2, ChunkedForm

BACKENDS = backends(pytest.mark.slow)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL = Dims(1, 2, 16, 16)
SIZES = {"gated_delta": Dims(4, 12, 128, 128, w=8), "mamba2": Dims(2, 16, 128, 64, w=8)}
"""Sizes of a served model's mixer, for backends on a GPU."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "form, size", [(GATED_DELTA, "gated_delta"), (MAMBA2, "mamba2")], ids=["gated_delta", "mamba2"]
)
def test_chunked_form_is_independent_of_cuts(
    backend: Backend, state: torch.dtype, form: ChunkedForm, size: str
) -> None:
    dims = replace(SIZES[size] if backend.on_gpu else SMALL, state=state)
    form.assert_independent_of_cuts(backend, dims)
