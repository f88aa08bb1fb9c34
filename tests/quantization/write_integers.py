"""Write data/integers.safetensors with auto-round (0.16.1), AutoAWQ (0.2.9), GPTQModel (7.7.0).

    pip install auto-round==0.16.1 autoawq==0.2.9 gptqmodel==7.7.0
    python tests/quantization/write_integers.py

Each case is a linear layer: the tensors that the library writes, and `value` [N, K] fp16, as the
library's own reader dequantizes them. The settings of each case are in the file's metadata. Zero
points go from 0 to the largest; auto-round writes 1 for 0 in version 1 of GPTQ's layout. The
libraries take half a minute to import, so tests read the file.
"""

import json
from pathlib import Path
from typing import Any

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM as RoundAwq
from auto_round_extension.torch.qlinear_torch import QuantLinear as RoundOwn
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as RoundGptq
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
from safetensors.torch import save_file
from torch import Tensor, nn

FILE = Path(__file__).parent / "data" / "integers.safetensors"
N = 32
K = 96
GROUP = 32
Written = tuple[dict[str, Any], dict[str, Tensor], Tensor]
"""(settings, tensors, the value [N, K])."""


class RandomLinear:
    """A random linear layer with weights exactly on their grid: scales and zeros [N, G]."""

    def __init__(self, bits: int, *, sym: bool, shuffle: bool = False) -> None:
        generator = torch.Generator().manual_seed(bits + sym)
        top = 2**bits
        codes = torch.randint(0, top, (N, K), generator=generator)
        self.zeros = torch.randint(0, top, (N, K // GROUP), generator=generator)
        if sym:
            self.zeros.fill_(top // 2)
        else:
            self.zeros.view(-1)[::5] = 0
        scales = 0.01 + 0.01 * torch.rand(N, K // GROUP, generator=generator)
        self.scales = scales.half().float()
        order = torch.arange(K) // GROUP
        self.groups = order[torch.randperm(K, generator=generator)] if shuffle else order
        steps = codes - self.zeros[:, self.groups]
        self.linear = nn.Linear(K, N, bias=False)
        self.linear.weight.data = steps * self.scales[:, self.groups]


def buffers(module: nn.Module, *names: str) -> dict[str, Tensor]:
    """Return these tensors of a module."""
    return {name: getattr(module, name).contiguous() for name in names}


def auto_round(bits: int, *, sym: bool, form: str) -> Written:
    """Return a case of the classes that auto-round uses, by packing_format."""
    drawn = RandomLinear(bits, sym=sym)
    settings = {"quant_method": "auto-round", "bits": bits, "group_size": GROUP, "sym": sym}
    kind = RoundGptq if form == "auto_round:auto_gptq" else RoundOwn
    module = kind(bits, GROUP, K, N, False)
    module.device = "cpu"
    module.pack(drawn.linear, drawn.scales, drawn.zeros.float(), None, "cpu")
    tensors = buffers(module, "qweight", "qzeros", "scales")
    return {**settings, "packing_format": form}, tensors, module(torch.eye(K).half()).t()


def auto_round_awq() -> Written:
    """Return a case of auto-round's copy of AutoAWQ's class."""
    drawn = RandomLinear(4, sym=False)
    module = RoundAwq.from_linear(
        drawn.linear, 4, GROUP, scales=drawn.scales.t(), zeros=drawn.zeros.t().float()
    )
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": False}
    tensors = buffers(module, "qweight", "qzeros", "scales")
    value = dequantize_gemm(*tensors.values(), 4, GROUP).t()
    return {**settings, "packing_format": "auto_round:auto_awq"}, tensors, value


def auto_awq() -> Written:
    """Return a case of AutoAWQ."""
    drawn = RandomLinear(4, sym=False)
    module = WQLinear_GEMM.from_linear(
        drawn.linear, 4, GROUP, scales=drawn.scales.t(), zeros=drawn.zeros.t().float()
    )
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    tensors = buffers(module, "qweight", "qzeros", "scales")
    return settings, tensors, dequantize_gemm(*tensors.values(), 4, GROUP).t()


def gptq(bits: int, version: int, *, sym: bool, shuffle: bool = False) -> Written:
    """Return a case of GPTQModel, which writes version 2 and subtracts 1 from every zero point of a
    word for version 1."""
    drawn = RandomLinear(bits, sym=sym, shuffle=shuffle)
    module = TorchLinear(
        bits=bits, group_size=GROUP, sym=sym, desc_act=shuffle, in_features=K, out_features=N
    )
    module.pack_original(drawn.linear, drawn.scales, drawn.zeros, drawn.groups.int())
    if version == 1:
        module.qzeros.data -= sum(1 << at for at in range(0, 32, bits))
    tensors = {name: x.clone() for name, x in
               buffers(module, "qweight", "qzeros", "scales", "g_idx").items()}  # fmt: skip
    if version == 1:
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    module.post_init()
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": sym}
    settings |= {"desc_act": shuffle, "checkpoint_format": "gptq_v2" if version == 2 else "gptq"}
    return settings, tensors, module.dequantize_weight().t()


def all_cases() -> dict[str, Written]:
    """Return the cases by name."""
    forms = ("auto_round:auto_gptq", "auto_round")
    result = {
        f"{form.replace(':', '-')}-{bits}-{'sym' if sym else 'asym'}": auto_round(
            bits, sym=sym, form=form
        )
        for form in forms
        for bits in (4, 8)
        for sym in (True, False)
    }
    result |= {"auto_round-auto_awq": auto_round_awq(), "awq": auto_awq()}
    for bits in (4, 8):
        for version in (1, 2):
            for sym in (True, False):
                name = f"gptq-{bits}-v{version}-{'sym' if sym else 'asym'}"
                result[name] = gptq(bits, version, sym=sym)
    return result | {"gptq-4-v2-ordered": gptq(4, 2, sym=True, shuffle=True)}


def main() -> None:
    """Write the file."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, (settings, packed, value) in all_cases().items():
        tensors |= {f"{name}.{suffix}": x for suffix, x in packed.items()}
        tensors[f"{name}.value"] = value.half().contiguous()
        metadata[name] = json.dumps(settings)
    save_file(tensors, FILE, metadata)


if __name__ == "__main__":
    main()
