"""vocab_parallel_kl on one rank, compared with full softmaxes in float64. tests/distributed covers tensor
parallelism.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_mega.algorithm.kl import vocab_parallel_kl

T, V, PADDED, TEMPERATURE = 9, 37, 41, 0.7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden_TH = 0.7 * torch.randn(T, 5, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(PADDED, 5, generator=generator, dtype=torch.float64)
    teacher_hidden_TG = 0.6 * torch.randn(T, 8, generator=generator, dtype=torch.float64)
    teacher_weight_VG = torch.randn(PADDED, 8, generator=generator, dtype=torch.float64)
    weight_VH[V:] = teacher_weight_VG[V:] = torch.nan
    needed_T = torch.tensor([t % 4 != 1 for t in range(T)])
    hidden, weight = hidden_TH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_()
    return hidden, weight, teacher_hidden_TG.to(dtype), teacher_weight_VG.to(dtype), needed_T


@pytest.mark.parametrize("is_reverse", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("tile", [(2, 5), (4, 37), None])
def test_values_and_gradients_equal_full_softmaxes(
    is_reverse: bool, dtype: torch.dtype, tolerance: float, tile: tuple[int, int] | None
) -> None:
    hidden, weight, teacher_hidden, teacher_weight, needed = inputs(dtype)
    upstream = torch.linspace(-1, 2, T, dtype=torch.float64)
    found = vocab_parallel_kl(
        hidden,
        weight,
        teacher_hidden[needed],
        teacher_weight,
        is_reverse=is_reverse,
        needed_T=needed,
        vocab_size=V,
        temperature=TEMPERATURE,
        tile=tile,
    )
    (found * upstream).sum().backward()
    wide, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    p = torch.log_softmax(wide @ wide_weight[:V].t() / TEMPERATURE, -1)
    q = torch.log_softmax(teacher_hidden.double() @ teacher_weight[:V].double().t() / TEMPERATURE, -1)
    expected = needed * ((p.exp() * (p - q)) if is_reverse else (q.exp() * (q - p))).sum(-1)
    (expected * upstream).sum().backward()
    assert expected.max() > 1
    for ours, oracle in ((found, expected), (hidden.grad, wide.grad), (weight.grad, wide_weight.grad)):
        assert ours is not None and oracle is not None
        assert (ours - oracle).abs().max() <= tolerance * oracle.abs().max(), (ours - oracle).abs().max()


def test_models_with_equal_probabilities_have_no_divergence_or_gradient() -> None:
    hidden, weight, _, _, needed = inputs()
    kl = vocab_parallel_kl(
        hidden, weight, hidden.detach()[needed], weight.detach(), is_reverse=True, needed_T=needed, vocab_size=V
    )
    kl.sum().backward()
    assert kl.abs().max() < 1e-14 and hidden.grad is not None and hidden.grad.abs().max() < 1e-14


def test_no_tensor_of_tokens_times_vocabulary_is_created() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            self.numel = max([self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
            return out

    hidden, weight = torch.randn(300, 4, requires_grad=True), torch.randn(500, 4)
    with Largest() as seen:
        vocab_parallel_kl(
            hidden,
            weight,
            torch.randn(300, 3),
            torch.randn(500, 3),
            is_reverse=True,
            needed_T=torch.ones(300, dtype=torch.bool),
            vocab_size=499,
            tile=(20, 50),
        ).sum().backward()
    assert seen.numel <= 500 * 4
