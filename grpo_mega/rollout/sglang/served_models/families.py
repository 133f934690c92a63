"""SGLang's class of each family. weights/families has its name and module.

This module also patches SGLang 0.5.21 and 0.5.23. A test fails when a patch is no longer needed. Three are for all
servers: router choices, sliding windows and hybrid models.

Router choices: without its layer number a Mixtral router records the experts of all layers in the same place. SGLang
0.5.23 sets the number itself.

Multi-latent attention: SGLang would compute prompts with expanded keys and values, as for Triton, but the torch_native
backend has only latents in its cache. This patch selects the absorbed form for prompts too, so attention uses the
latents. DeepSeek's rotary embedding on a CPU supports only YaRN; without YaRN this patch uses the embedding of other
models.

Expert parallelism: a token's experts on other ranks have the id -1, and SGLang's plain torch experts would use it as an
index. This patch passes each choice of a token as a separate token, and leaves out the choices of other ranks.

Sliding windows: SGLang computes full attention in these families, without a word. This patch sets the window of each
layer's attention, on GPUs too.

Hybrid models (Qwen3.5): SGLang rounds dt_bias to the model's dtype. It also keeps a copy of each zero-centred norm, and
only its own loader updates the copy. On a CPU on_cpu.py has the operators of linear attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.models import deepseek_v2, mixtral
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.utils import is_cpu
from transformers import CONFIG_MAPPING

from grpo_mega.rollout.sglang.served_models import on_cpu
from grpo_mega.weights.families import FAMILIES
from grpo_mega.weights.hf_config import attention_windows

if is_cpu():
    on_cpu.install()
from sglang.srt.models import qwen3_5, qwen3_5_text  # needs the operators

Forward = Callable[[torch.nn.Module, torch.Tensor, Any, Any], torch.Tensor]


def own_experts_alone(forward: Forward) -> Forward:
    """Return a forward pass for a part of the experts, from one that needs all experts."""

    def of_a_part(layer: torch.nn.Module, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        weights, ids, _ = topk_output
        if bool((ids >= 0).all()):
            return forward(layer, x, topk_output, config)
        token, choice = (ids >= 0).nonzero(as_tuple=True)
        own = topk_output._replace(topk_weights=weights[token, choice, None], topk_ids=ids[token, choice, None])
        result = torch.zeros_like(x)
        return result.index_add_(0, token, forward(layer, x[token], own, config)) if len(token) else result

    return of_a_part


def with_plain_angles(get_yarn: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Return a constructor of rotary embeddings with or without YaRN, from a constructor that needs YaRN."""

    def made(*sizes: int, rope_scaling: dict[str, Any] | None, device: str, **settings: Any) -> torch.nn.Module:
        if rope_scaling is None and device == "cpu":
            return get_rope(*sizes, rope_scaling=None, **settings)
        return get_yarn(*sizes, rope_scaling=rope_scaling, device=device, **settings)

    return made


def with_windows(construct: Callable[..., None]) -> Callable[..., None]:
    """Return a model's constructor that sets the sliding windows of its config. SGLang does not count the token
    itself.
    """

    def windowed(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        construct(model, config, *args, **kwargs)
        windows = attention_windows(config.to_dict())
        model.get_attention_sliding_window_size = lambda: max(windows) - 1 if windows else None
        for attention in (module for module in model.modules() if windows and isinstance(module, RadixAttention)):
            attention.sliding_window_size = windows[attention.layer_id] - 1  # -1: none

    return windowed


class NumberedMixtralMoE(mixtral.MixtralMoE):
    """Sets the layer number of its router."""

    def __init__(self, *args: Any, layer_id: int, **kwargs: Any) -> None:
        super().__init__(*args, layer_id=layer_id, **kwargs)
        self.topk.layer_id = layer_id


class GatedDeltaNet(qwen3_5.Qwen3_5GatedDeltaNet):
    """Keeps dt_bias in float32 for any dtype of the model, as the trainer does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dt_bias.data = self.dt_bias.data.float()


class Qwen3_5ForCausalLM(qwen3_5_text.Qwen3_5ForCausalLM):  # SGLang reads the class by this name
    """Updates the copies of norms after each sync."""

    def post_load_weights(self) -> None:
        for norm in (module for module in self.modules() if isinstance(module, GemmaRMSNorm)):
            torch.add(norm.weight.data, 1.0, out=norm.gemma_weight)


qwen3_5.Qwen3_5GatedDeltaNet = GatedDeltaNet
qwen3_5_text.Qwen3_5ForCausalLM = Qwen3_5ForCausalLM
mixtral.MixtralMoE = NumberedMixtralMoE
deepseek_v2.get_rope_wrapper = with_plain_angles(deepseek_v2.get_rope_wrapper)
AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
fused_moe_native.moe_forward_native = own_experts_alone(fused_moe_native.moe_forward_native)

EntryClass: list[Any] = []
for model_type, family in FAMILIES.items():
    # SGLang reads these fields, but transformers leaves them out when it writes the config of such a model.
    for name, value in family.served_fields.items():
        setattr(CONFIG_MAPPING[model_type], name, value)
    if family.served_by is not None:
        model_class: Any = resolve_name(f"sglang.srt.models.{family.served_by}")
        if "sliding_window" in family.declared:
            model_class.__init__ = with_windows(model_class.__init__)
        EntryClass.append(model_class)
