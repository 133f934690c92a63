"""The embedded engine's transformers model: fast linear layers, weight names, and router choices.

It patches transformers 5.12 and 5.19. tests/rollout/test_embedded.py fails when a patch is no longer needed.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from grpo_mega.weights.families import MULTIMODAL, family_of
from grpo_mega.weights.spec import FLOAT32, Family, ModelShape

GROUPED_MM_ROW_BYTES = 16  # torch.grouped_mm needs rows of a multiple of 16 bytes
MOST_ROWS = 64  # with more rows torch's product is as fast as `linear`
_TILE = 4096  # weight rows per tile


def make_model(hf_config: Any, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model with random weights. Do not change torch's random state."""
    widths = (shape.hidden, shape.moe_ffn) if shape.num_experts else ()
    is_aligned = all(width * dtype.itemsize % GROUPED_MM_ROW_BYTES == 0 for width in widths)
    # transformers' default for experts is torch.grouped_mm, which does not support all row sizes.
    experts = {} if is_aligned else {"experts_implementation": "eager"}
    if device.type == "cpu":
        silence_fast_path()
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation="sdpa", **experts)
    model = model.to(device).eval().requires_grad_(False)
    speed_up(model)
    scale_attention(model)
    return model


def speed_up(model: nn.Module) -> None:
    """Replace every linear layer's forward in an untrained model with `linear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(linear, module)  # type: ignore[method-assign]


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a layer to [..., in] and return [..., out]. On a CPU multiply the weight's rows tile by tile.

    For few rows, as in decoding, and a whole vocabulary torch takes up to twice as long, because its library is tuned
    for many rows.
    """
    rows_RI = x.reshape(-1, x.shape[-1])
    num_rows = len(rows_RI)
    if num_rows > MOST_ROWS or x.device.type != "cpu":
        return F.linear(x, layer.weight, layer.bias)
    # Round up to 1, 2, 4, 8 or a multiple of 16, because 15 rows take twice as long as 16.
    num_padded = -(-num_rows // 16) * 16 if num_rows > 8 else 1 << max(num_rows - 1, 0).bit_length()
    rows_RI = F.pad(rows_RI, (0, 0, 0, num_padded - num_rows))
    out_OR = torch.empty((layer.out_features, len(rows_RI)), dtype=x.dtype, device=x.device)
    for weight_oI, out_oR in zip(layer.weight.split(_TILE), out_OR.split(_TILE), strict=True):
        torch.mm(weight_oI, rows_RI.t(), out=out_oR)
    out_RO = out_OR[:, :num_rows].t().contiguous()
    if layer.bias is not None:
        out_RO += layer.bias
    return out_RO.view(*x.shape[:-1], -1)


def checkpoint_tensors(model: nn.Module, family: Family, shape: ModelShape) -> Mapping[str, Tensor]:
    """Return the parameters of `model`, views of expert parameters, and router biases, by the names of
    `family.hf_tensors`. Tensors that are float32 in every checkpoint become float32.

    transformers stores an MoE layer's experts in one parameter, and DeepSeek-V3's router bias in a float32 buffer.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(FLOAT32):
            tensor.data = tensor.data.float()  # transformers also loads the routers' bias in float32
            parameters[name] = tensor
    prefix = family.embedding.hf[0].removesuffix("embed_tokens.weight")  # longer in a multimodal model's checkpoint
    parameters = {re.sub(r"^model\.", prefix, name): tensor for name, tensor in parameters.items()}
    if not shape.num_experts:
        return parameters
    tensors: dict[str, Tensor] = {}
    router, gate_up, down = (row.hf for row in family.rows if "router.weight" in row.megatron or row.where == "expert")
    for layer in range(shape.num_dense, shape.num_layers):
        block = f"{prefix}layers.{layer}.mlp"
        tensors[router[0].format(i=layer)] = parameters.pop(f"{block}.gate.weight")
        gates_ups = parameters.pop(f"{block}.experts.gate_up_proj")  # [experts, 2 * moe_ffn, hidden]
        downs = parameters.pop(f"{block}.experts.down_proj")  # [experts, hidden, moe_ffn]
        for expert in range(shape.num_experts):
            parts = *gates_ups[expert].chunk(2), downs[expert]
            for name, part in zip((*gate_up, *down), parts, strict=True):
                tensors[name.format(i=layer, e=expert)] = part
    return tensors | parameters


class RouteRecorder:
    """Records experts using hooks. While it is on, `take` must follow every forward pass."""

    def __init__(self, model: Any) -> None:
        self.is_on = False
        blocks = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
        # Experts chosen in the last forward pass, by MoE layer.
        self._chosen: list[Tensor | None] = [None] * len(blocks)
        for number, experts in enumerate(blocks):
            experts.register_forward_pre_hook(partial(self._note, number))

    def take(self, num_sequences: int) -> Tensor:
        """Return the last forward pass's experts [sequences, tokens, MoE layers, top_k] int16."""
        layers = [chosen for chosen in self._chosen if chosen is not None]
        assert len(layers) == len(self._chosen), "a layer did not report its experts"
        self._chosen = [None] * len(layers)
        return torch.stack(layers, dim=1).short().unflatten(0, (num_sequences, -1))

    def _note(self, number: int, module: Any, inputs: tuple[Tensor, ...]) -> None:
        if self.is_on:
            assert self._chosen[number] is None, "the experts of a forward pass were not taken"
            self._chosen[number] = inputs[1]


class LinearState(LinearAttentionLayer):
    """A linear attention layer's state, in float32.

    transformers 5.12 would round it to the model's dtype. 5.19 does not, and keeps a dict from index to state.
    """

    recurrent_states: Any

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(self.recurrent_states, dict):
            return super().update_recurrent_state(recurrent_states, *args, **kwargs)
        self.recurrent_states, self.is_recurrent_states_initialized = recurrent_states, True
        return recurrent_states

    def append(self, others: Iterable[LinearState]) -> None:
        """Append sequences from other caches. A state has no padding, whatever the sequence lengths."""
        states: list[Any] = [self, *others]
        for name in ("conv_states", "recurrent_states"):
            first, *more = (getattr(one, name) for one in states)
            if isinstance(first, dict):
                first.update({i: torch.cat((tensor, *(one[i] for one in more))) for i, tensor in first.items()})
            else:
                setattr(self, name, torch.cat((first, *more)))


def silence_fast_path() -> None:
    """Drop transformers' notices that kernels for linear attention are missing: these kernels need a GPU."""
    models = (f"models.{name}.modeling_{name}" for name in MULTIMODAL)
    for name in (*models, "integrations.hub_kernels"):
        logging.getLogger(f"transformers.{name}").addFilter(_is_no_notice)


def _is_no_notice(record: logging.LogRecord) -> bool:
    notices = "The fast path is not available", "is falling back to its reference PyTorch implementation"  # 5.12, 5.19
    return not any(notice in record.getMessage() for notice in notices)


def new_cache(config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    cache.layers = [LinearState() if isinstance(layer, LinearAttentionLayer) else layer for layer in cache.layers]
    return cache


def scale_attention(model: Any) -> None:
    """Include the square of YaRN's mscale in the scale of latent attention, as DeepSeek's own code does.

    transformers 5.12 includes it only for DeepSeek-V3, and 5.19 for both, so the scale is set and not multiplied.
    """
    rope = model.config.rope_parameters
    factor = rope.get("mscale_all_dim")
    if not family_of(model.config.model_type).ignores_mscale or not factor or rope["factor"] <= 1:
        return
    mscale = 0.1 * factor * math.log(rope["factor"]) + 1
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5 * mscale**2
