"""Transformer Engine's attention of packed samples against float64, for the head sizes of all families."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.megatron.loaded_kernels import in_use

# query heads, key heads, size of a query, size of a value
HEADS = [(4, 2, 64, 64), (6, 2, 80, 80), (3, 1, 128, 128), (4, 4, 192, 128), (4, 4, 256, 256), (8, 2, 256, 256)]
LENGTHS = (1, 5, 63, 129, 200)
WINDOWS = (None, 3, 128)

pytestmark = pytest.mark.emulated


def exact(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Return causal attention of one sample [tokens, heads, size] in the dtype of the inputs."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_and_its_gradients_equal_float64s(
    heads: tuple[int, int, int, int], window: int | None, device: Device
) -> None:
    if not in_use(device).transformer_engine:
        pytest.skip("needs Transformer Engine")
    from transformer_engine.pytorch import DotProductAttention

    num_heads, num_groups, size, value_size = heads
    generator = torch.Generator(device.torch_device).manual_seed(0)
    q, k, v, upstream = (
        torch.randn(sum(LENGTHS), *shape, generator=generator, device=device.torch_device, dtype=torch.bfloat16)
        for shape in ((num_heads, size), (num_groups, size), (num_groups, value_size), (num_heads, value_size))
    )
    cuts = torch.tensor([0, *LENGTHS], device=device.torch_device).cumsum(0).int()
    module = DotProductAttention(
        num_heads,
        (size, value_size),
        num_gqa_groups=num_groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=(-1, 0) if window is None else (window - 1, 0),
    )
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = module(*inputs, cu_seqlens_q=cuts, cu_seqlens_kv=cuts, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    out.backward(upstream.flatten(1))
    found = [out.view(upstream.shape), *(x.grad for x in inputs)]

    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    samples = [[x[a:b] for x in doubles] for a, b in pairwise(cuts.tolist())]
    expected_out = torch.cat([exact(*sample, window) for sample in samples])
    expected_out.backward(upstream.double())
    for name, mine, theirs in zip("oqkv", found, [expected_out, *(x.grad for x in doubles)], strict=True):
        assert (mine.double() - theirs).norm() <= 0.01 * theirs.norm(), name
