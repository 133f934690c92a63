"""Arguments of SGLang 0.5.21 that rollout.server_args must not hold, with the alternative or the reason.

They would change tokens or log-probs without the trainer's knowledge, keep weights or caches of another policy, or split the
engine differently from the weights it receives. Aliases count. So do prefixes of a name, because SGLang's parser completes
them.
"""

from __future__ import annotations

from collections.abc import Mapping

_SAMPLING = "changes how tokens are sampled; use rollout.temperature, top_p and top_k"
_SPECULATION = "generates with another model or method that does not get the policy's weights"
_MODEL = "changes the model that generates; use the files of model.path, rollout.dtype or rollout.quantization"
_ADAPTERS = "adds weights that the trainer does not have; merge them into model.path"
_CACHES = "keeps caches beyond a weight sync, so that tokens would come from an older policy's"
_EXPERTS = "moves experts to where a weight sync does not send them"
_LAYOUT = "cuts the engine otherwise than its weights are sent; use rollout.tp, rollout.ep and more ranks"
_OTHERS = "is set by the trainer"
REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("preferred_sampling_params", "sampling_defaults", "allow_auto_truncate", "sampling_mask_max_tokens"), _SAMPLING
    ),
    **dict.fromkeys(("enable_strict_thinking", "mlx_enable_sampling"), _SAMPLING),
    **dict.fromkeys(("enable_multi_layer_eagle", "uno_lora_path", "decoupled_spec_role", "dllm_algorithm"), _SPECULATION),
    **dict.fromkeys(("dllm_algorithm_config", "dllm_fdfo", "no_dllm_fdfo"), _SPECULATION),
    **dict.fromkeys(("json_model_override_args", "model_config_parser", "model_impl", "revision", "is_embedding"), _MODEL),
    **dict.fromkeys(("quantization", "quantization_param_path", "modelopt_quant", "quantize_and_serve"), _MODEL),
    **dict.fromkeys(("modelopt_checkpoint_restore_path", "rl_quant_profile", "startup_weight_load_mode"), _MODEL),
    **dict.fromkeys(("decrypted_config_file", "decrypted_draft_config_file", "delete_ckpt_after_loading"), _MODEL),
    **dict.fromkeys(("weight_cache_mode", "weight_version", "model", "forward_hooks", "debug_tensor_dump_input_file"), _MODEL),
    **dict.fromkeys(("enable_lora", "lora_paths", "enable_lora_overlap_loading"), _ADAPTERS),
    **dict.fromkeys(("enable_hierarchical_cache", "hicache_storage_backend", "enable_lmcache", "enable_flexkv"), _CACHES),
    **dict.fromkeys(("enable_unified_cache_external_linker", "disaggregation_mode"), _CACHES),
    **dict.fromkeys(("enable_eplb", "ep_num_redundant_experts", "init_expert_location", "elastic_ep_backend"), _EXPERTS),
    **dict.fromkeys(("kt_weight_path", "enforce_shared_experts_fusion"), _EXPERTS),
    **dict.fromkeys(("tensor_parallel_size", "ep", "expert_parallel_size", "pp_size", "pipeline_parallel_size"), _LAYOUT),
    **dict.fromkeys(("dp_size", "data_parallel_size", "dcp_size", "decode_context_parallel_size", "attn_cp_size"), _LAYOUT),
    **dict.fromkeys(("attention_context_parallel_size", "moe_dp_size", "moe_data_parallel_size", "dwdp_size"), _LAYOUT),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr", "nccl_init_addr", "gpu_id_step"), _LAYOUT),
    **dict.fromkeys(("enable_dp_attention", "enable_dp_lm_head", "enable_prefill_cp", "moe_dense_tp_size"), _LAYOUT),
    **dict.fromkeys(("enable_dense_mlp_attn_tp", "enable_shared_experts_attn_tp", "shared_experts_tp_size"), _LAYOUT),
    "config": "reads further arguments from a file; give them here",
    **dict.fromkeys(("host", "port", "api_key", "nccl_port", "served_model_name", "model_path", "load_format"), _OTHERS),
    **dict.fromkeys(("custom_weight_loader", "skip_tokenizer_init", "device", "dtype", "tp_size", "ep_size"), _OTHERS),
    **dict.fromkeys(("disable_shared_experts_fusion", "base_gpu_id", "context_length", "max_running_requests"), _OTHERS),
    **dict.fromkeys(("max_total_tokens", "mem_fraction_static", "enable_memory_saver", "random_seed"), _OTHERS),
    **dict.fromkeys(("enable_return_routed_experts", "admin_api_key", "incremental_streaming_output"), _OTHERS),
}
_SPECULATIVE = "speculative_"  # prefix of further refused arguments


def problem_of(name: str) -> str | None:
    """Return the reason why a server argument of this name is not allowed; None if it is."""
    plain = name.strip("-").replace("-", "_").lower().partition("=")[0]
    if plain in REASONS:
        return REASONS[plain]
    if plain.startswith(_SPECULATIVE):
        return _SPECULATION
    completed = {_SPECULATIVE: _SPECULATION, **REASONS}
    return next((reason for full, reason in completed.items() if full.startswith(plain)), None)
