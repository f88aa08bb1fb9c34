"""Settings of quantization_config that may be ignored, each with the reason why.

Every other setting that the code of a weight format has not read is refused.
"""

from collections.abc import Mapping

_WRITER = "notes of the tool that wrote the file"
_SEARCH = "how the tool searched for the codes; the stored codes are its result"
_LOADER = "how other libraries load or compute the same weights"
_ACTIVATIONS = "activations, which are rounded as the user chose"
_STORED = "the dtype of stored scales and zero points, which their tensors tell"
_BLOCKS = "where the tool looked for layers; the stored tensors show which modules are quantized"

COMMON: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "quant_method", "version", "quantizer", "provider", "producer", "model_name_or_path",
            "quantization", "library",
        ),
        _WRITER,
    ),
    **dict.fromkeys(("input_activations", "output_activations", "activation_scheme"), _ACTIVATIONS),
}  # fmt: skip
"""Settings that may be ignored in every format."""

_OF_GPTQ: Mapping[str, str] = {
    **dict.fromkeys(("meta", "method", "model_file_base_name"), _WRITER),
    **dict.fromkeys(
        (
            "damp_percent", "damp_auto_increment", "true_sequential", "mse", "dataset",
            "tokenizer", "batch_size", "cache_block_outputs", "group_aware_reordering",
            "act_group_aware", "v2", "v2_alpha", "v2_memory_device", "gptaq", "hyb_act",
            "failsafe", "fail_safe", "fallback", "mock_quantization", "offload_to_disk",
            "offload_to_disk_path", "parallel_packing", "compensate_damping_factor",
            "model_seqlen", "pad_token_id", "activation_weighted_mse", "pack_impl", "gc_mode",
            "vram_strategy", "moe", "auto_forward_data_parallel", "wait_for_submodule_finalizers",
        ),
        _SEARCH,
    ),
    **dict.fromkeys(
        (
            "backend", "exllama_config", "use_exllama", "disable_exllama", "use_cuda_fp16",
            "max_input_length", "kernel",
        ),
        _LOADER,
    ),
    **dict.fromkeys(
        ("block_name_to_quantize", "module_name_preceding_first_block"), _BLOCKS
    ),
}  # fmt: skip
_OF_AWQ: Mapping[str, str] = {
    "model_file_base_name": _WRITER,
    **dict.fromkeys(
        (
            "duo_scaling", "apply_clip", "n_parallel_calib_samples", "max_calib_samples",
            "max_calib_seq_len", "calib_data",
        ),
        _SEARCH,
    ),
    **dict.fromkeys(
        (
            "backend", "exllama_config", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "kernel",
        ),
        _LOADER,
    ),
}  # fmt: skip
_OF_GPTQMODEL_AWQ: Mapping[str, str] = {**_OF_GPTQ, **_OF_AWQ}
"""GPTQModel writes AWQ too, with its usual settings."""
_OF_AUTO_ROUND: Mapping[str, str] = {
    **dict.fromkeys(("autoround_version", "model_free"), _WRITER),
    **dict.fromkeys(
        (
            "iters", "nsamples", "seqlen", "lr", "minmax_lr", "batch_size", "dataset", "tokenizer",
            "low_gpu_mem_usage", "enable_minmax_tuning", "enable_quanted_input", "seed", "sampler",
            "gradient_accumulate_steps", "scale_algo", "amp", "enable_norm_bias_tuning",
            "enable_alg_ext", "use_quant_input", "not_use_best_mse", "damp_percent",
            "true_sequential", "model_seqlen",
        ),
        _SEARCH,
    ),
    "backend": _LOADER,
    **dict.fromkeys(
        (
            "act_bits", "act_group_size", "act_sym", "act_dynamic", "act_data_type", "input_dtype",
        ),
        _ACTIVATIONS,
    ),
    "scale_dtype": _STORED,
    **dict.fromkeys(
        (
            "block_name_to_quantize", "to_quant_block_names", "supported_types",
            "quant_block_list",
        ),
        _BLOCKS,
    ),
}  # fmt: skip
_OF_COMPRESSED_TENSORS: Mapping[str, str] = {
    **dict.fromkeys(("quantization_status", "global_compression_ratio"), _WRITER),
    **dict.fromkeys(("observer", "observer_kwargs"), _SEARCH),
    "run_compressed": _LOADER,
    **dict.fromkeys(("scale_dtype", "zp_dtype"), _STORED),
}
_OF_FP8: Mapping[str, str] = {
    "quantization_status": _WRITER,
    **dict.fromkeys(("use_cutlass_kernel", "dequantize"), _LOADER),
}

BY_FORMAT: Mapping[str, Mapping[str, str]] = {
    "gptq": {**COMMON, **_OF_GPTQ},
    "awq": {**COMMON, **_OF_GPTQMODEL_AWQ},
    "auto-round": {**COMMON, **_OF_AUTO_ROUND},
    "compressed-tensors": {**COMMON, **_OF_COMPRESSED_TENSORS},
    "modelopt": COMMON,
    "fp8": {**COMMON, **_OF_FP8},
    "gguf": COMMON,
}
"""Settings that may be ignored, by format; the format's code reads the others."""


def is_switched_off(value: object) -> bool:
    """Return whether a setting of this value changes nothing, whatever the setting is."""
    return value is None or value is False or value in ([], {})
