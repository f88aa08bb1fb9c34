"""fp8_linear: y = x W^T with an e4m3 weight, where x is quantized to e4m3 per token (W8A8)."""

from lockstep.kernels.fp8_linear.contract import (
    MIN_SCALE,
    QuantizedRows,
    choose_fp8_split_k,
    codes_of,
    fp8_linear,
    fused_sum,
    quantize_add_rms_norm,
    quantize_rows,
    quantize_silu_mul,
    row_codes,
)

__all__ = [
    "MIN_SCALE",
    "QuantizedRows",
    "choose_fp8_split_k",
    "codes_of",
    "fp8_linear",
    "fused_sum",
    "quantize_add_rms_norm",
    "quantize_rows",
    "quantize_silu_mul",
    "row_codes",
]
