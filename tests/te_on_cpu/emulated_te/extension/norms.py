"""RMSNorm and LayerNorm, forward and backward, and SwiGLU: computed in fp32, rounded to the output's dtype, then
quantized.

With delayed scaling the forward kernel casts fp32 to FP8. With the other recipes it rounds to the output's dtype first.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.te_on_cpu.emulated_te.extension.casts import kind_of, quantize
from tests.te_on_cpu.emulated_te.extension.names import TORCH_OF, DType


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [normed, None, 1 / root mean square of each row]."""
    x = input.float()
    rsigma = (x.square().mean(-1) + eps).rsqrt()
    result = x * rsigma[..., None] * _gain(weight, zero_centered_gamma)
    return [_put(result, ln_out, quantizer, otype), None, rsigma.reshape(-1)]


def rmsnorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the input and the gain."""
    grad, normed, r = dz.float(), x.float(), rsigma.view(*x.shape[:-1], 1)
    normed = normed * r
    weighted = grad * _gain(gamma, zero_centered_gamma)
    dx = r * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    dgamma = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
    return [dx.to(x.dtype), dgamma.to(gamma.dtype)]


def layernorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [normed, mean of each row, 1 / standard deviation of each row]."""
    x = input.float()
    mu, rsigma = x.mean(-1), (x.var(-1, correction=0) + eps).rsqrt()
    result = (x - mu[..., None]) * rsigma[..., None] * _gain(weight, zero_centered_gamma)
    result = result if bias is None else result + bias.float()
    return [_put(result, ln_out, quantizer, otype), mu.reshape(-1), rsigma.reshape(-1)]


def layernorm_bwd(
    dz: torch.Tensor,
    x: torch.Tensor,
    mu: torch.Tensor,
    rsigma: torch.Tensor,
    gamma: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the input, the gain and the bias."""
    grad, r = dz.float(), rsigma.view(*x.shape[:-1], 1)
    normed = (x.float() - mu.view(*x.shape[:-1], 1)) * r
    weighted = grad * _gain(gamma, zero_centered_gamma)
    mean = weighted.mean(-1, keepdim=True) + normed * (weighted * normed).mean(-1, keepdim=True)
    dx = r * (weighted - mean)
    dgamma = (grad * normed).reshape(-1, x.shape[-1]).sum(0)
    dbeta = grad.reshape(-1, x.shape[-1]).sum(0)
    return [dx.to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]


def swiglu(input: torch.Tensor, quantizer: Any) -> Any:
    """Return silu(first half) * second half."""
    gate, up = input.float().chunk(2, -1)
    return quantize((torch.nn.functional.silu(gate) * up).to(input.dtype), quantizer)


def dswiglu(grad: torch.Tensor, fwd_input: torch.Tensor, quantizer: Any) -> Any:
    gate, up = fwd_input.float().chunk(2, -1)
    s, g = gate.sigmoid(), grad.float()
    return quantize(torch.cat((g * up * s * (1 + gate * (1 - s)), g * gate * s), -1).to(fwd_input.dtype), quantizer)


def _gain(weight: torch.Tensor, is_zero_centred: bool) -> torch.Tensor:
    return weight.float() + (1.0 if is_zero_centred else 0.0)


def _put(result: torch.Tensor, out: Any, quantizer: Any, otype: DType) -> Any:
    kind = None if quantizer is None else kind_of(quantizer)
    if kind != "Float8Quantizer":
        result = result.to(TORCH_OF[DType(otype)])
    if quantizer is None:
        return result if out is None else out.copy_(result)
    if kind == "Float8CurrentScalingQuantizer" and getattr(quantizer, "use_existing_amax", False):
        raise NotImplementedError("a norm with FP8 output and a given amax is not emulated")
    return quantize(result, quantizer, out)
