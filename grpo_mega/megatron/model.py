"""Build this rank's model chunks from a Hugging Face config and the layout. Each chunk is a GPTModel.

With Transformer Engine on a GPU the layers are TE's. Otherwise they are Megatron's local layers with the modules of
attention.py. The last chunk returns hidden states, complete on every tensor-parallel rank. Log-probs are computed from
them and the output weight. Parameters are not initialized here: weights.apply fills all of them from a checkpoint or
from a seed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import (
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from grpo_mega.config import LayoutConfig, ModelConfig, PrecisionConfig
from grpo_mega.distributed.kernels import latent_problems
from grpo_mega.errors import raise_all
from grpo_mega.megatron import compat, routers
from grpo_mega.megatron.attention import (
    LatentRotary,
    PackedAttention,
    PackedRotary,
    RMSNorm,
    attend_latent,
)
from grpo_mega.megatron.gated_delta import gated_delta_spec
from grpo_mega.megatron.loaded_kernels import attention_notes, check_attention, in_use
from grpo_mega.megatron.precision import DTYPES, megatron_settings
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.weights.boxes import RankShards
from grpo_mega.weights.layout import ShardLayout, megatron_shards
from grpo_mega.weights.spec import Family, ModelShape, Span, round_up

_BIAS = ".router.expert_bias"  # it is a buffer, so no optimizer changes it


def uses_transformer_engine(runtime: Runtime) -> bool:
    return in_use(runtime.device).transformer_engine


def groups_experts(model: ModelConfig, runtime: Runtime) -> bool:
    """Return True if one module computes all experts of a layer."""
    return uses_transformer_engine(runtime) and model.grouped_experts is not False


def build_chunks(
    shape: ModelShape,
    family: Family,
    hf_config: Any,
    model: ModelConfig,
    layout: LayoutConfig,
    precision: PrecisionConfig,
    runtime: Runtime,
) -> list[GPTModel]:
    """Return this rank's model chunks, first to last. Without virtual pipeline parallelism there is one."""
    if shape.num_experts:
        compat.patch_moe()
    if shape.kv_lora:
        compat.patch_latent_attention()
    if shape.linear_layers:
        compat.patch_gated_delta_net()
        if runtime.device.is_cuda and gated_delta_net.chunk_gated_delta_rule is None:
            attention_notes[
                "linear attention: plain torch, which needs more memory; pip install flash-linear-attention"
            ] = None
    if uses_transformer_engine(runtime):
        raise_all(latent_problems(shape, runtime.device.capability, runtime.device.name))
        check_attention(shape, DTYPES[model.resolved_dtype], runtime.device)
        compat.allow_fused_weight_gradients()
    megatron = transformer_config(shape, family, hf_config, model, layout, precision, runtime)
    chunks = [_build(shape, family, hf_config, megatron, runtime, chunk) for chunk in range(runtime.layout.vpp)]
    for router in (r for chunk in chunks for r in routers.routers_of(chunk) if model.router.freeze):
        router.weight.requires_grad_(False)
    return chunks


def transformer_config(
    shape: ModelShape,
    family: Family,
    hf_config: Any,
    model: ModelConfig,
    layout: LayoutConfig,
    precision: PrecisionConfig,
    runtime: Runtime,
) -> TransformerConfig:
    """Return Megatron's config, with the settings that prevent its silent errors."""
    dtype = DTYPES[model.resolved_dtype]
    is_cuda, use_te = runtime.device.is_cuda, uses_transformer_engine(runtime)
    config_class = MLATransformerConfig if shape.kv_lora else TransformerConfig
    return config_class(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        qk_layernorm=family.qk_norm or bool(shape.qk_norm),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=runtime.layout.tp,
        context_parallel_size=runtime.layout.cp,
        cp_comm_type=layout.cp_comm_type,
        pipeline_model_parallel_size=runtime.layout.pp,
        pipeline_model_parallel_layout=_uneven_stages(shape, runtime),
        **_interleaving(runtime.layout.vpp),
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        **megatron_settings(precision),
        **_moe_config(shape, family, hf_config, model, layout.token_dispatcher, runtime),
        **_latent_config(shape, hf_config),
        # Megatron counts the tokens before a token; the list says which layers have the window.
        window_size=(max(shape.windows) - 1, 0) if shape.windows else None,
        window_attn_skip_freq=[int(window > 0) for window in shape.windows] or None,
        **_hybrid_config(shape),
        use_cpu_initialization=not is_cuda,
        perform_initialization=False,
        # Apex's kernel is for Megatron's linear layers only.
        gradient_accumulation_fusion=in_use(runtime.device).fuses_weight_gradients and (use_te or not shape.shared_ffn),
        # Megatron compiles the two bias fusions for CUDA.
        bias_dropout_fusion=is_cuda,
        bias_activation_fusion=is_cuda,
        apply_rope_fusion=use_te and not shape.kv_lora,  # angles come from LatentRotary
        # The loss is already divided by global counts, so Megatron must only sum over micro-batches and ranks.
        calculate_per_token_loss=True,
        # With gloo an output may be freed before it is sent to the next stage. Losses are then randomly wrong.
        deallocate_pipeline_outputs=is_cuda,
        **_recompute_settings(model, uses_te=use_te),
    )


def _interleaving(vpp: int) -> dict[str, Any]:
    # With gloo and interleaving at pp=2, batched p2p swaps the previous and the next stage.
    return {
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "overlap_p2p_comm": vpp > 1,
        "batch_p2p_comm": vpp <= 1,
    }


def _recompute_settings(model: ModelConfig, *, uses_te: bool) -> dict[str, Any]:
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(model.recomputed(uses_te=uses_te))}
    if model.recompute == "full":
        return {
            "recompute_granularity": "full",
            # block: the first layers of each chunk; uniform: all layers, one at a time
            "recompute_method": "block" if model.recompute_num_layers else "uniform",
            "recompute_num_layers": model.recompute_num_layers or 1,
        }
    return {}


def _moe_config(
    shape: ModelShape, family: Family, hf_config: Any, model: ModelConfig, dispatcher: str, runtime: Runtime
) -> dict[str, Any]:
    """Return Megatron's settings for an MoE model. They route as the Hugging Face model does; `Routers` does the
    rest.
    """
    if not shape.num_experts:
        return {}
    settings = {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.moe_ffn,
        "moe_router_topk": hf_config.num_experts_per_tok,
        # A softmax over the chosen experts equals a softmax over all experts, renormalized over the chosen ones.
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
        **routers.settings(model.router),
        "moe_grouped_gemm": groups_experts(model, runtime),
        "moe_permute_fusion": uses_transformer_engine(runtime) and model.fused_permutation is not False,
        "moe_token_dispatcher_type": "alltoall" if dispatcher == "alltoall" else "flex",
        "expert_model_parallel_size": runtime.layout.ep,
        "expert_tensor_parallel_size": runtime.layout.etp,
    }
    if dispatcher != "alltoall":
        settings["moe_flex_dispatcher_backend"] = dispatcher
    if shape.shared_ffn:
        settings["moe_shared_expert_intermediate_size"] = shape.shared_ffn
    if shape.shared_gates:
        settings["moe_shared_expert_gate"] = True
    elif shape.shared_ffn:
        is_sigmoid = family.has_router_bias
        is_limited = is_sigmoid and hf_config.topk_group < hf_config.n_group
        settings |= {
            # Layers differ, so checkpoints must store them separately. A list makes Megatron do so.
            "moe_layer_freq": [0] * shape.num_dense + [1] * (shape.num_layers - shape.num_dense)
            if shape.num_dense
            else 1,
            "moe_router_score_function": "sigmoid" if is_sigmoid else "softmax",
            "moe_router_enable_expert_bias": is_sigmoid,
            "moe_router_num_groups": hf_config.n_group if is_limited else None,
            "moe_router_group_topk": hf_config.topk_group if is_limited else None,
            "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
        }
    return settings


def _latent_config(shape: ModelShape, hf_config: Any) -> dict[str, Any]:
    """Return the fields of multi-latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Tensor parallelism needs sequence parallelism: each rank computes the latents of its part of the sequence, and
    gradients of the matrices and norms that make them are summed over ranks once.
    """
    if not shape.kv_lora:
        return {}
    rope = hf_config.rope_parameters
    return {
        "q_lora_rank": shape.q_lora or None,
        "kv_lora_rank": shape.kv_lora,
        "qk_head_dim": shape.head_dim - shape.rope_dim,
        "qk_pos_emb_head_dim": shape.rope_dim,
        "v_head_dim": shape.v_dim,
        # Megatron computes attention's scale from the two factors. Angles and their scale come from `LatentRotary`.
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _hybrid_config(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a model with layers of linear attention (gated delta net)."""
    if not shape.linear_layers:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        # Layers differ, so checkpoints must store them separately. A list makes Megatron do so.
        "linear_attention_freq": [int(i in shape.linear_layers) for i in range(shape.num_layers)],
        "linear_conv_kernel_dim": shape.linear_conv,
        "linear_key_head_dim": shape.linear_k_dim,
        "linear_value_head_dim": shape.linear_v_dim,
        "linear_num_key_heads": shape.linear_k_heads,
        "linear_num_value_heads": shape.linear_v_heads,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
    }


def _uneven_stages(shape: ModelShape, runtime: Runtime) -> list[list[str]] | None:
    """Return Megatron's list of the parts of each chunk; None if Megatron's even division is right."""
    sizes = runtime.layout.chunk_sizes(shape.num_layers)
    if len(set(sizes)) == 1:
        return None
    chunks = [["decoder"] * n for n in sizes]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]


def _build(
    shape: ModelShape, family: Family, hf_config: Any, config: TransformerConfig, runtime: Runtime, chunk: int
) -> GPTModel:
    layout = runtime.layout
    vp_stage = chunk if layout.vpp > 1 else None
    layers = layout.layers_of(shape.num_layers, runtime.pp_rank, chunk)
    span = get_transformer_layer_offset(config, vp_stage=vp_stage), get_num_layers_to_build(config, vp_stage=vp_stage)
    assert span == (layers.start, len(layers)), (span, layers)
    use_te = uses_transformer_engine(runtime)
    spec = (_te_spec if use_te else _local_spec)(shape, config, layers)
    model = GPTModel(
        config,
        spec,
        vocab_size=round_up(shape.vocab, layout.tp),
        max_sequence_length=hf_config.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    compat.mark_sharded_weights(model)
    for name, p in model.named_parameters():
        if ".mlp.experts." in name:  # Megatron reduces gradients over an expert's replicas only if ep > 1
            p.allreduce = not layout.has_own_expert_groups
            p.tensor_model_parallel = True
        elif "_down_proj." in name:  # whole on every rank, but TE marks it as sharded
            p.tensor_model_parallel = False
    if model.post_process:
        model.output_layer.forward = partial(_forward_hidden, model.output_layer)
    # transformers computes the frequencies, for every rope type that the checks accept.
    theirs = resolve_name(f"transformers.models.{family.rotary}")(hf_config)
    inv_freq = theirs.inv_freq.detach().float().to(runtime.device.torch_device)  # no buffer, which a cast would round
    if shape.kv_lora:
        rotary = LatentRotary(inv_freq, theirs.attention_scaling)
        for attention in (layer.self_attention for layer in model.decoder.layers):
            attention.rotary_pos_emb = rotary
            if use_te:
                attention.core_attention.forward = partial(attend_latent, attention.core_attention.forward)
    elif use_te:
        model.rotary_pos_emb.inv_freq = inv_freq
    else:
        model.rotary_pos_emb = PackedRotary(inv_freq)
    return model.to(runtime.device.torch_device)


def output_weight(model: GPTModel) -> Any:
    """Return the last chunk's output weight [padded_vocab / tp, hidden]. If tied, it is the embedding's weight."""
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )


def parameters_of(models: Sequence[Any], holding: RankShards) -> dict[str, torch.Tensor]:
    """Return every parameter by its local name. Assert that the family's table and the model agree on names and shapes.

    The expert biases of routers are buffers, not parameters: see `biases_of`.
    """
    holding = {name: tensor for name, tensor in holding.items() if not name.endswith(_BIAS)}
    parameters = {f"chunk{i}.{name}": p for i, model in enumerate(models) for name, p in model.named_parameters()}
    assert set(parameters) == set(holding), sorted(set(parameters) ^ set(holding))
    for name, p in parameters.items():
        assert tuple(p.shape) == holding[name].shape, (name, tuple(p.shape), holding[name].shape)
    return parameters


def check_marks(parameters: Mapping[str, torch.Tensor], shards: ShardLayout, runtime: Runtime) -> None:
    """Assert that parameters are marked as split where they are. The gradient norm counts others on one rank only."""
    if runtime.tp_group is None:
        return
    first, second = map(shards.rank_shards, torch.distributed.get_process_group_ranks(runtime.tp_group)[:2])
    for name, p in parameters.items():
        # Replicas of an expert share its gradients also across tensor-parallel ranks.
        is_spread = ".mlp.experts." in name and runtime.layout.has_own_expert_groups
        is_cut = first[name] != second[name] or is_spread
        assert getattr(p, "tensor_model_parallel", False) == is_cut, (name, is_cut)


def biases_of(models: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the expert biases of all routers by local name, in fp32 even if the model was cast after it was built."""
    for model in models:
        for router in routers.routers_of(model):
            router._maintain_float32_expert_bias()
    buffers = ((f"chunk{i}.{name}", b) for i, model in enumerate(models) for name, b in model.named_buffers())
    return {name: buffer for name, buffer in buffers if name.endswith(_BIAS)}


def shards_of(family: Family, shape: ModelShape, model: ModelConfig, runtime: Runtime) -> ShardLayout:
    """Return the slices of a model that each rank of the layout holds, in the form that transfer plans use."""
    use_te = uses_transformer_engine(runtime)
    grouped_experts = groups_experts(model, runtime)
    return megatron_shards(family, shape, runtime.layout, fused_norms=use_te, grouped_experts=grouped_experts)


def _forward_hidden(
    layer: ColumnParallelLinear, hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Replace the output layer's forward: return hidden states, complete on every rank, and sum their gradients over
    tp.

    The layer must still be called as a module, because Megatron waits there for the gather of its parameters.
    """
    if layer.sequence_parallel:
        return gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=layer.tp_group
        ), None
    return copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group), None


def _te_spec(shape: ModelShape, config: TransformerConfig, layers: range) -> TransformerBlockSubmodules:
    """Return Transformer Engine's layers. They save a checkpoint under the keys of the local layers."""

    def layer(span: Span) -> Any:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=None if span == "dense" else config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm or bool(shape.kv_lora),  # MLA: the norms of the latents
            multi_latent_attention=config.multi_latent_attention,
        )
        keys = spec.submodules.sharded_state_dict_keys_map
        if shape.kv_lora:
            keys |= {
                f"self_attention.linear_{latent}_up_proj.layer_norm_": f"self_attention.{latent}_layernorm."
                for latent in ("q", "kv")
            }
            keys |= {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."} if span == "dense" else {}
        elif span != "dense" and shape.num_experts:
            keys |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
        if span == "linear":
            spec.submodules.self_attention = gated_delta_spec(TELayerNormColumnParallelLinear, TERowParallelLinear)
        return spec

    return TransformerBlockSubmodules([layer(span) for span, run in shape.spans(layers) for _ in run], TENorm)


def _local_spec(shape: ModelShape, config: TransformerConfig, layers: range) -> TransformerBlockSubmodules:
    def layer(span: Span) -> Any:
        spec = get_gpt_layer_local_spec(
            num_experts=None if span == "dense" else config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization="RMSNorm",
        )
        parts, attention = spec.submodules, spec.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
        attention.core_attention = PackedAttention
        if shape.kv_lora:
            # Megatron's column-parallel projections to the latents lose the other ranks' share of the gradient of the
            # keys' rotary part: logits are right, gradients are wrong. modelopt's Linear is replicated on every rank.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if span == "linear":
            parts.self_attention = gated_delta_spec(ColumnParallelLinear, RowParallelLinear)
            spec.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
        return spec

    return TransformerBlockSubmodules([layer(span) for span, run in shape.spans(layers) for _ in run], RMSNorm)
