"""Transformer Engine's modules on emulated kernels, forward and backward, against plain torch in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative errors of norms, after several bf16 roundings
RECIPES = {
    "tensorwise": Float8CurrentScaling(fp8_format=Format.HYBRID),
    "delayed": DelayedScaling(fp8_format=Format.HYBRID),
    "blockwise": Float8BlockScaling(),
}
TOKENS, WIDTH, OUT = 48, 144, 80


def rmsnorm(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


MODULES: dict[str, tuple[Callable[..., Any], Callable[[Any, Tensor], Tensor]]] = {
    "Linear": (lambda **k: te.Linear(WIDTH, OUT, **k), lambda p, x: x @ p["weight"].t() + p["bias"]),
    "LayerNormLinear": (
        lambda **k: te.LayerNormLinear(WIDTH, OUT, normalization="RMSNorm", **k),
        lambda p, x: rmsnorm(x, p["layer_norm_weight"]) @ p["weight"].t() + p["bias"],
    ),
    "LayerNormMLP": (
        lambda **k: te.LayerNormMLP(WIDTH, 96, normalization="RMSNorm", activation="swiglu", bias=False, **k),
        lambda p, x: swiglu(rmsnorm(x, p["layer_norm_weight"]) @ p["fc1_weight"].t()) @ p["fc2_weight"].t(),
    ),
    "RMSNorm": (lambda **k: te.RMSNorm(WIDTH, eps=1e-5, **k), lambda p, x: rmsnorm(x, p["weight"])),
    "LayerNorm": (
        lambda **k: te.LayerNorm(WIDTH, eps=1e-5, **k),
        lambda p, x: F.layer_norm(x, (WIDTH,), p["weight"], p["bias"], 1e-5),
    ),
}


def made(name: str, dtype: torch.dtype) -> Any:
    """Return a module with random parameters: gains other than 1, biases other than 0."""
    torch.manual_seed(3)
    module = MODULES[name][0](params_dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    return module


def run(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input, for a fixed input and upstream gradient."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=random, dtype=torch.float64).bfloat16().to(dtype).requires_grad_()
    y = function(x)
    upstream = torch.randn(*y.shape, generator=random, dtype=torch.float64).bfloat16().to(dtype)
    y.backward(upstream)
    assert x.grad is not None
    return y.detach(), x.grad


def compare(found: Tensor, expected: Tensor, rounding: float, name: str) -> None:
    assert expected.norm() > 0 and (found.double() - expected).norm() <= rounding * expected.norm(), name


def expected_of(name: str, module: Any) -> dict[str, Tensor]:
    """Return the float64 values, keyed by "output", "input" and the parameter names."""
    parameters = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}
    output, input_grad = run(lambda x: MODULES[name][1](parameters, x), torch.float64)
    grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return {"output": output, "input": input_grad, **grads}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_gives_the_output_and_gradients_of_plain_torch(name: str, dtype: torch.dtype) -> None:
    module = made(name, dtype)
    output, input_grad = run(module, dtype)
    found = {"output": output, "input": input_grad} | {n: p.grad for n, p in module.named_parameters()}
    expected = expected_of(name, module)
    assert found.keys() == expected.keys()
    for part, value in expected.items():
        compare(found[part], value, ROUNDING[dtype], part)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_module_in_fp8_errs_by_the_rounding_of_fp8(name: str, recipe: str) -> None:
    """e4m3 has 3 mantissa bits: an operand errs by at most 2^-4, on average about half of it. e5m2 gradients err twice
    that.
    """
    module = made(name, torch.bfloat16)

    def forward(x: Tensor) -> Tensor:
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPES[recipe]):
            return module(x)

    run(forward, torch.bfloat16)  # the first pass sets the scales of delayed scaling
    module.zero_grad()
    output, input_grad = run(forward, torch.bfloat16)
    found = {"output": output, "input": input_grad} | {n: p.grad for n, p in module.named_parameters()}
    expected = expected_of(name, module)
    for part, value in expected.items():
        compare(found[part], value, 0.15, part)
    exact = (found["output"].double() - expected["output"]).norm() / expected["output"].norm()
    assert exact > 0.01, "FP8 was not in use"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_attention_of_packed_sequences_is_that_of_each_alone(num_kv_heads: int, dtype: torch.dtype) -> None:
    """Three packed sequences (thd) of odd lengths, one with a single token; causal, with grouped heads of width 24."""
    lengths, heads, dim = (17, 1, 46), 4, 24
    cu = torch.tensor([0, 17, 18, 64], dtype=torch.int32)
    random = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(64, n, dim, generator=random, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (heads, num_kv_heads, num_kv_heads)
    )
    upstream = torch.randn(64, heads * dim, generator=random, dtype=torch.float64).to(dtype)
    attention = te.DotProductAttention(
        heads,
        dim,
        num_gqa_groups=num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
    out = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=46, max_seqlen_kv=46)
    out.backward(upstream)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    alone = [
        F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts), is_causal=True, enable_gqa=True
        )[0]
        for parts in zip(*(t.split(lengths) for t in exact), strict=True)
    ]
    expected = torch.cat([part.transpose(0, 1).reshape(-1, heads * dim) for part in alone])
    expected.backward(upstream.double())
    compare(out, expected, 5e-3, "output")
    for name, found, wanted in zip("qkv", (q, k, v), exact, strict=True):
        assert found.grad is not None and wanted.grad is not None
        compare(found.grad, wanted.grad, 5e-3, name)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_rotary_positions_turn_pairs_of_halves(form: str) -> None:
    """Compare with complex multiplication. The last 6 of 22 values do not rotate. Each packed sequence starts at
    position 0.
    """
    dim, turned, lengths = 22, 16, (5, 1, 9)
    angles = torch.outer(torch.arange(12).float(), 10_000 ** (-torch.arange(0, turned, 2) / turned))
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    shape = {"sbhd": (9, 2, 3, dim), "bshd": (2, 9, 3, dim), "thd": (sum(lengths), 3, dim)}[form]
    positions = torch.cat([torch.arange(n) for n in lengths]) if form == "thd" else torch.arange(9)
    cu = torch.tensor([0, 5, 6, 15], dtype=torch.int32) if form == "thd" else None
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found = apply_rotary_pos_emb(x, freqs, tensor_format=form, fused=True, cu_seqlens=cu)
    exact = x.detach().double().requires_grad_()
    factor = torch.polar(torch.ones(()).double(), angles[positions].double())
    factor = factor[:, None] if form == "thd" else factor[:, None, None] if form == "sbhd" else factor[None, :, None]
    result = torch.complex(exact[..., : turned // 2], exact[..., turned // 2 : turned]) * factor
    expected = torch.cat((result.real, result.imag, exact[..., turned:]), -1)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream.double())
    assert x.grad is not None and exact.grad is not None
    compare(found, expected, 1e-6, "output")
    compare(x.grad, exact.grad, 1e-6, "input")
