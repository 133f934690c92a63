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
"""


def functions() -> dict[str, Callable[..., Any]]:
    return {name: _raising(name) for name in NAMES.split()}


def _raising(name: str) -> Callable[..., Any]:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name} is not emulated")

    missing.__name__ = name
    return missing
