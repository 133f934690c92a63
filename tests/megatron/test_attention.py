"""Attention of packed rows: without a mask, as on a GPU, and with windows, against fp64 softmax."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("preloaded_python")
ROOT = Path(__file__).resolve().parents[2]


def test_attention_without_masks_gives_the_numbers_of_masks() -> None:
    """Run in a separate process, because importing Megatron changes torch."""
    result = subprocess.run([sys.executable, __file__], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def test_attention_with_windows_equals_float64_around_the_window() -> None:
    result = subprocess.run([sys.executable, __file__, "windows"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def run() -> None:
    from types import SimpleNamespace

    import torch

    from grpo_mega.batching.layout import chunks_of
    from grpo_mega.megatron.attention import PackedAttention, pack_params

    heads, kv_heads, width, v_width, cp_size = 4, 2, 6, 5, 2
    lengths = (4, 4, 2, 6)  # per rank; a whole segment is cp_size times as long
    cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    no_window: dict[str, Any] = {"window_size": None, "window_attn_skip_freq": None}
    config = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0, **no_window)
    attention = PackedAttention(config, 1, None, "self", softmax_scale=0.3)
    generator = torch.Generator().manual_seed(1)
    total = sum(lengths) * cp_size
    whole = [
        torch.randn(total, n, d, generator=generator)
        for n, d in ((heads, width), (kv_heads, width), (kv_heads, v_width))
    ]
    expected = torch.cat(
        [_exact(*(x[a:b].double() for x in whole)) for a, b in _segments(lengths, cp_size)]
    )  # [total, heads, v_width]
    # rows of each rank in the whole segments, rank after rank, as the gather of keys returns them
    rows = [
        [a + i for (a, b) in _segments(lengths, cp_size) for c in chunks_of(b - a, cp_size, rank) for i in c]
        for rank in range(cp_size)
    ]
    keys, values = (torch.cat([x[r] for r in rows])[:, None] for x in whole[1:])
    for rank in range(cp_size):
        results = []
        for dtype in (torch.float32, None):  # with masks, and without
            params = pack_params(cuts, torch.arange(sum(lengths)), dtype, cp_size, rank)
            assert any(s.mask is not None for s in params.stacks) == (dtype is not None)
            query = whole[0][rows[rank]][:, None].clone().requires_grad_()
            out = attention(query, keys, values, None, packed_seq_params=params)
            out.square().sum().backward()
            assert query.grad is not None
            results.append((out.detach(), query.grad))
            difference = out.detach().view(-1, heads, v_width).double() - expected[rows[rank]]
            assert float(difference.abs().max()) < 2e-6, (rank, dtype, difference.abs().max())
        for masked, plain in zip(*results, strict=True):
            assert torch.allclose(masked, plain, atol=2e-6, rtol=0), (rank, (masked - plain).abs().max())


def _segments(lengths: tuple[int, ...], cp_size: int) -> list[tuple[int, int]]:
    starts = [sum(lengths[:i]) * cp_size for i in range(len(lengths))]
    return [(a, a + n * cp_size) for a, n in zip(starts, lengths, strict=True)]


def run_windows() -> None:
    """Compare outputs and gradients for segments around the window. What attention keeps must grow with tokens only."""
    from types import SimpleNamespace

    import torch

    from grpo_mega.megatron.attention import PackedAttention, pack_params

    generator = torch.Generator().manual_seed(1)
    for window in (2, 3, 127, 128, 129, 200):
        config = SimpleNamespace(
            context_parallel_size=1, attention_dropout=0.0, window_size=(window - 1, 0), window_attn_skip_freq=[1, 0]
        )
        layers = [PackedAttention(config, number, None, "self", softmax_scale=0.3) for number in (1, 2)]
        lengths = (300, 129, 1, 128, 127, 3, 2, 501)
        cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        values = [torch.randn(sum(lengths), n, 6, generator=generator, requires_grad=True) for n in (4, 2, 2)]
        exact = [x.detach().double().requires_grad_() for x in values]
        for dtype in (torch.float32, None):
            params = pack_params(cuts, torch.arange(sum(lengths)), dtype, window=window)
            for layer, width in zip(layers, (window, 10**6), strict=True):
                out = layer(*(x[:, None] for x in values), None, packed_seq_params=params)
                expected = torch.cat([_exact(*(x[a:b] for x in exact), width) for a, b in _segments(lengths, 1)])
                probe = torch.randn(expected.shape, generator=generator)
                found = torch.autograd.grad((out.view_as(probe) * probe).sum(), values)
                wanted = torch.autograd.grad((expected * probe).sum(), exact)
                for one, other in zip((out.view_as(probe), *found), (expected, *wanted), strict=True):
                    assert float((one - other).abs().max()) < 2e-6 * float(other.abs().max()), (window, width, dtype)
    kept = [_kept(layers[0], number) for number in (3000, 6000)]
    assert kept[1] < 2.1 * kept[0] < 2.1 * 3000 * 8 * 6 * 4 * 3, kept


def _kept(layer: Any, num_tokens: int) -> int:
    """Return the bytes that a windowed layer keeps for its backward pass."""
    import torch

    from grpo_mega.megatron.attention import pack_params

    cuts = torch.tensor([0, num_tokens], dtype=torch.int32)
    params = pack_params(cuts, torch.arange(num_tokens), torch.float32, window=100)
    values, kept = [torch.randn(num_tokens, 1, n, 6, requires_grad=True) for n in (4, 2, 2)], dict[int, int]()

    def pack(x: Any) -> Any:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        layer(*values, None, packed_seq_params=params)
    return sum(kept.values())


def _exact(q: Any, k: Any, v: Any, window: int = 10**6) -> Any:
    """Return causal attention of one segment: [t, heads, width of a value]."""
    import torch

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    is_seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril().triu(1 - window)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    {"": run, "windows": run_windows}["".join(sys.argv[1:])]()
