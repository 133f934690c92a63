"""Functions of the extension that are not emulated: they can be imported, and a call raises with their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAMES = """
    gelu geglu qgelu qgeglu relu reglu srelu sreglu silu clamped_swiglu dgelu dgeglu dqgelu dqgeglu drelu dreglu dsrelu
    dsreglu
    dsilu clamped_dswiglu dbias_dgelu dbias_dsilu dbias_drelu dbias_dqgelu dbias_dsrelu moe_permute_fwd moe_permute_bwd
    moe_unpermute_fwd moe_unpermute_bwd scaled_softmax_forward scaled_softmax_backward scaled_masked_softmax_forward
    scaled_masked_softmax_backward scaled_upper_triang_masked_softmax_forward
    scaled_upper_triang_masked_softmax_backward
    scaled_aligned_causal_masked_softmax_forward scaled_aligned_causal_masked_softmax_backward rmsnorm_bwd_add
    mxfp8_scaling_compute_partial_amax mxfp8_scaling_partial_cast
    fa_prepare_fwd fa_prepare_bwd copy_to_kv_cache fused_qkv_rope_forward fused_qkv_rope_backward
    fused_topk_with_score_function_fwd fused_topk_with_score_function_bwd fused_score_for_moe_aux_loss_fwd
    fused_score_for_moe_aux_loss_bwd fused_moe_aux_loss_fwd fused_moe_aux_loss_bwd dropout_fwd dropout_bwd
    init_nvshmem_backend
    create_nvshmem_tensor nvshmem_send_on_current_stream nvshmem_wait_on_current_stream nvshmem_finalize
    multi_tensor_unscale_l2norm multi_tensor_adam_param_remainder multi_tensor_adam_capturable
    multi_tensor_adam_capturable_master multi_tensor_sgd multi_tensor_compute_scale_inv_e8m0
    bulk_overlap_ag_with_external_gemm
    bgrad_group_quantize convert_host_pointers_to_tensor copy_data_ptrs_to_device
    cusolvermp_ctx_create cusolvermp_ctx_destroy dglu dsituglu ep_combine ep_combine_bwd ep_dispatch ep_dispatch_bwd
    ep_finalize ep_get_zero_copy ep_handle_mem_size ep_initialize ep_prepare ep_prepare_and_dispatch
    ep_zero_copy_supported fused_moe_aux_loss_fwd_graph_safe fused_topk_with_score_function_qb_fwd
    get_device_pointer_for_data_and_scales get_grouped_gemm_setup_workspace_size glu group_quantize
    group_requantize_inplace grouped_mlp_experimental grouped_swizzle_for_gemm
    multi_tensor_swizzle_scales_for_gemm_unchecked_ multi_tensor_transpose_to_bhsd newton_schulz
    nvfp4_2d_multi_tensor_transpose nvfp4_2d_scale_transpose nvfp4_compute_global_scale nvfp4_data_transpose
    nvfp4_group_quantize_with_amax nvfp4_multi_tensor_2d_partial_cast nvfp4_multi_tensor_compute_partial_amax
    nvfp4_multi_tensor_fused_scale nvfp4_quantize_with_amax
    scaled_clamped_dswiglu scaled_clamped_swiglu scaled_dsituglu scaled_dsrelu scaled_dswiglu scaled_situglu
    scaled_srelu scaled_swiglu situglu splits_to_offsets splits_to_offsets_multi swizzle_scales_for_gemm_
    te_general_grouped_gemm_for_discrete_in te_general_grouped_gemm_for_discrete_out
    te_general_grouped_gemm_for_grouped_tensor
"""


def functions() -> dict[str, Callable[..., Any]]:
    return {name: _raising(name) for name in NAMES.split()}


def _raising(name: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} is not emulated")

    missing.__name__ = name
    return missing
