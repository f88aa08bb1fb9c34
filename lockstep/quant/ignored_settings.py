"""Settings of quantization_config that may be ignored, each with the reason why.

Every other setting that the code of a weight format has not asked for is refused.
"""

from collections.abc import Mapping

_WRITER = "notes of the tool that wrote the file"
_SEARCH = "how the tool searched for the codes; the stored codes are its result"
_LOADER = "how other libraries load or compute the same weights"
_ACTIVATIONS = "activations, which are never rounded"
_STORED = "the dtype of stored scales and zero points, which their tensors tell"
_BLOCKS = "where the tool looked for layers; the stored tensors tell which modules are packed"

WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "quant_method", "version", "autoround_version", "quantizer", "provider", "producer",
            "quantization_status", "global_compression_ratio", "model_name_or_path",
            "model_file_base_name", "meta", "method", "quantization", "library", "model_free",
        ),
        _WRITER,
    ),
    **dict.fromkeys(
        (
            "damp_percent", "damp_auto_increment", "true_sequential", "mse", "dataset",
            "tokenizer", "batch_size", "cache_block_outputs", "group_aware_reordering",
            "act_group_aware", "v2", "v2_alpha", "v2_memory_device", "gptaq", "hyb_act",
            "failsafe", "fail_safe", "mock_quantization", "offload_to_disk",
            "offload_to_disk_path", "parallel_packing", "compensate_damping_factor", "fallback",
            "observer", "observer_kwargs", "iters", "nsamples", "seqlen", "lr", "minmax_lr",
            "low_gpu_mem_usage", "enable_minmax_tuning", "enable_quanted_input",
            "gradient_accumulate_steps", "scale_algo", "amp", "enable_norm_bias_tuning",
            "enable_alg_ext", "use_quant_input", "not_use_best_mse", "sampler", "seed",
            "model_seqlen", "pad_token_id", "duo_scaling", "apply_clip", "n_parallel_calib_samples",
            "max_calib_samples", "max_calib_seq_len", "calib_data",
        ),
        _SEARCH,
    ),
    **dict.fromkeys(
        (
            "backend", "exllama_config", "use_exllama", "disable_exllama", "use_cuda_fp16",
            "max_input_length", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "kernel",
            "use_cutlass_kernel", "dequantize", "run_compressed",
        ),
        _LOADER,
    ),
    **dict.fromkeys(
        (
            "input_activations", "output_activations", "activation_scheme", "act_bits",
            "act_group_size", "act_sym", "act_dynamic", "act_data_type", "input_dtype",
        ),
        _ACTIVATIONS,
    ),
    **dict.fromkeys(("scale_dtype", "zp_dtype"), _STORED),
    **dict.fromkeys(
        (
            "block_name_to_quantize", "to_quant_block_names", "module_name_preceding_first_block",
            "supported_types", "quant_block_list",
        ),
        _BLOCKS,
    ),
}  # fmt: skip


def is_switched_off(value: object) -> bool:
    """Return whether a setting of this value changes nothing, whatever the setting is."""
    return value is None or value is False or value in ([], {})
