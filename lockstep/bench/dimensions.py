"""Dimensions of real models, and the environment in which their ops are measured."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.kernels.bench_types import BenchEnv, LatentShape, ModelShape, MoeShape
from lockstep.kernels.formats.kv import KVFormat
from lockstep.kernels.recurrent.cases import Dims
from lockstep.layers.build_context import BuildContext
from lockstep.layers.linear import Linear, probe

MODELS = {
    model.name: model
    for model in (
        ModelShape("Qwen3-8B", 4096, 12288, 32, 8, 128, 151936),
        ModelShape("Qwen3.6-27B", 5120, 17408, 24, 4, 256, 248320, True, Dims(16, 48, 128, 128)),
        ModelShape(
            "Qwen3.6-35B-A3B",
            *(2048, 512, 16, 2, 256, 248320),
            gate=True,
            delta=Dims(16, 32, 128, 128),
            moe=MoeShape(256, 8, 512),
        ),
        ModelShape(
            "DeepSeek-V3",
            *(7168, 18432, 128, 0, 192, 129280),
            latent=LatentShape(1536, 512, 64, 128, 128),
        ),
        ModelShape(
            "Nemotron-3-Nano-30B-A3B",
            *(2688, 3712, 32, 2, 128, 131072),
            mamba=Dims(8, 64, 128, 64),
            moe=MoeShape(128, 6, 1856),
            gated=False,
        ),
        ModelShape(
            "small",
            *(256, 512, 4, 2, 64, 4096),
            gate=True,
            delta=Dims(2, 4, 32, 32),
            context=300,
            prompt=100,
            moe=MoeShape(12, 3, 64),
            latent=LatentShape(48, 64, 16, 32, 24),
            mamba=Dims(2, 4, 32, 16),
        ),
    )
}


def bench_env(
    device: str, dtype: torch.dtype, max_rows: int, format: KVFormat | None = None
) -> BenchEnv:
    """Return a benchmark environment whose calls take at most `max_rows` rows.

    format: KV-cache format.
    """

    def linears(
        n: int, k: int, count: int, tokens: int
    ) -> tuple[str, list[Callable[[Tensor], Tensor]]]:
        build = BuildContext(device, dtype, window=1, max_positions=1)
        layers = [Linear(build, k, {"weight": n}) for _ in range(count)]
        for layer in layers:
            weight = layer.part(0)
            assert isinstance(weight, Tensor), "no weight format was requested"
            # Outputs have unit variance, so no 16-bit or 8-bit format overflows.
            weight.normal_(0.0, k**-0.5)
        probe(build, nn.ModuleList(layers), [tokens])
        return build.choices[-1].backend, [partial(layer, ctx=None) for layer in layers]

    return BenchEnv(device, dtype, max_rows, linears, format)
