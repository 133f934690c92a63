"""Check that SGLang's FP8 parameters keep the format of a sync. This code runs inside the server.

After a load SGLang may rearrange FP8 blocks for its kernels (`process_weights_after_loading`). On Hopper, and with its Triton
kernels on any GPU, it does not change 128 x 128 blocks with float32 scales. A sync then writes the blocks in place, so the
addresses in CUDA graphs stay valid. Other kernels change shapes and dtypes or move bytes: DeepGEMM on Blackwell packs scales as
powers of two, and Marlin, on GPUs older than an L40, repacks the weights. `check_formats` detects all such changes before the
first bucket, by processing a pattern.

A model with FP8 weights also has scales for an FP8 KV cache. No checkpoint has these scales. A dummy load leaves random values,
and sleep loses them, so this module sets them to SGLang's default, 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mega.weights.fp8_blocks import VALUES

_CACHE_SCALES = ("k_scale", "v_scale")
REMEDY = "use rollout.server_args={fp8_gemm_backend: triton} or another GPU, or leave rollout.quantization out"


def is_cache_scale(name: str) -> bool:
    return name.endswith(tuple(f".attn.{scale}" for scale in _CACHE_SCALES))


@torch.no_grad()
def check_formats(model: torch.nn.Module) -> list[str]:
    """Set the cache's scales and return the FP8 parameters that SGLang rearranges. The model must not have weights yet."""
    problems = []
    for path, module in model.named_modules():
        method, own = getattr(module, "quant_method", None), dict(module.named_parameters(recurse=False))
        if method is None:
            continue
        for name in own.keys() & set(_CACHE_SCALES):
            own[name].fill_(-1.0)  # SGLang's value for a scale that was not loaded
        sent = {name: p for name, p in own.items() if p.dtype == VALUES or name.endswith("_scale_inv")}
        before = {name: _stamp(p) for name, p in sent.items()}
        if sent or own.keys() & set(_CACHE_SCALES):
            method.process_weights_after_loading(module)
        after = dict(module.named_parameters(recurse=False))
        problems += [
            f"{path}.{name}: SGLang rearranges it on this device, so it cannot be filled in place; {REMEDY}"
            for name, p in sent.items()
            if name not in after or after[name].data_ptr() != p.data_ptr() or not torch.equal(_bytes(after[name]), before[name])
        ]
    return problems


@torch.no_grad()
def reset_cache_scales(model: torch.nn.Module) -> None:
    """Set the cache's scales again, because sleep may have lost them."""
    for name, parameter in model.named_parameters():
        if is_cache_scale(name):
            parameter.fill_(1.0)


def _stamp(parameter: Tensor) -> Tensor:
    """Write a pattern without equal neighbours, and return its bytes."""
    numbers = torch.arange(parameter.numel(), device=parameter.device).remainder_(113).add_(1).view(parameter.shape)
    parameter.copy_(numbers.to(torch.float32))
    return _bytes(parameter).clone()


def _bytes(parameter: Tensor) -> Tensor:
    return parameter.detach().contiguous().view(-1).view(torch.uint8)
