"""Random cases for vocab_parallel_logprobs on one or more ranks, and their results from the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from tests.oracles.logprobs import logprobs_and_entropy_of_hidden

# (values, gradients). A bfloat16 gradient has one rounding error per rank that adds a part.
TOLERANCES = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 3e-5), torch.bfloat16: (1e-5, 2**-8)}


@dataclass(frozen=True)
class Case:
    num_tokens: int
    vocab_size: int
    width: int  # rows of the whole weight, including padding
    hidden: int = 5
    dtype: torch.dtype = torch.float64
    temperature: float = 1.0
    tile: tuple[int, int] | None = None
    forbidden: float = 0.0  # share of the vocabulary with logits of -inf although all weights are finite
    needed: float = 1.0  # share of needed tokens
    with_buffer: bool = False  # the weight's gradient is added to a buffer
    seed: int = 0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return hidden_TH, the whole weight with NaN in its padding, targets_T, needed_T."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden_TH = torch.randn(self.num_tokens, self.hidden, generator=generator, dtype=torch.float64)
        weight_VH = torch.randn(self.width, self.hidden, generator=generator, dtype=torch.float64)
        targets_T = torch.randint(0, self.vocab_size, (self.num_tokens,), generator=generator)
        is_forbidden_V = torch.rand(self.vocab_size, generator=generator) < self.forbidden
        if self.forbidden:
            is_forbidden_V[targets_T] = False
            hidden_TH[:, 0] = self.overflow
            weight_VH[: self.vocab_size, 0] = is_forbidden_V.double() * -self.overflow
        weight_VH[self.vocab_size :] = torch.nan
        needed_T = torch.rand(self.num_tokens, generator=generator) < self.needed
        return hidden_TH.to(self.dtype), weight_VH.to(self.dtype), targets_T, needed_T

    @property
    def overflow(self) -> float:
        """Return a number with an infinite square."""
        return torch.finfo(self.dtype).max ** 0.6

    def upstream(self) -> Tensor:
        """Return upstream gradients [2, T] of log-probs and entropies. Some are 0."""
        weights = torch.linspace(-1.0, 2.0, 2 * self.num_tokens, dtype=torch.float64).reshape(2, -1)
        weights[:, 1::3] = 0
        return weights


@dataclass(frozen=True)
class Outcome:
    logprobs_T: Tensor
    entropy_T: Tensor
    grad_hidden_TH: Tensor
    grad_weight_VH: Tensor  # gradient of this rank's rows, or of all rows from the oracle


def of_oracle(case: Case) -> Outcome:
    hidden_TH, weight_VH, targets_T, needed_T = case.inputs()
    hidden_TH, weight_VH = hidden_TH.double().requires_grad_(), weight_VH.double().requires_grad_()
    found = logprobs_and_entropy_of_hidden(
        hidden_TH, weight_VH, targets_T, vocab_size=case.vocab_size, temperature=case.temperature
    )
    logprobs_T, entropy_T = (torch.where(needed_T, v, 0) for v in found)
    (case.upstream() * torch.stack([logprobs_T, entropy_T])).sum().backward()
    assert hidden_TH.grad is not None and weight_VH.grad is not None
    return Outcome(logprobs_T.detach(), entropy_T.detach(), hidden_TH.grad, weight_VH.grad)


def of_ours(case: Case, tp_rank: int = 0, tp_size: int = 1, tp_group: dist.ProcessGroup | None = None) -> Outcome:
    """Compute the case with this rank's part of the weight. The gradient of hidden states is summed over the group."""
    hidden_TH, weight_VH, targets_T, needed_T = case.inputs()
    hidden_TH.requires_grad_()
    weight_vH = weight_VH.chunk(tp_size)[tp_rank].clone().requires_grad_()
    before = 3.0
    buffer_vH = torch.full_like(weight_vH, before, dtype=torch.promote_types(case.dtype, torch.float32))
    logprobs_T, entropy_T = vocab_parallel_logprobs(
        hidden_TH,
        weight_vH,
        targets_T,
        vocab_size=case.vocab_size,
        temperature=case.temperature,
        tp_group=tp_group,
        with_entropy=True,
        needed_T=needed_T if case.needed < 1 else None,
        weight_grad_VH=buffer_vH if case.with_buffer else None,
        tile=case.tile,
    )
    assert entropy_T is not None
    assert logprobs_T.dtype == entropy_T.dtype == buffer_vH.dtype
    (case.upstream().to(logprobs_T.dtype) * torch.stack([logprobs_T, entropy_T])).sum().backward()
    assert hidden_TH.grad is not None and hidden_TH.grad.dtype == case.dtype
    grad_hidden_TH = hidden_TH.grad.to(buffer_vH.dtype)
    if tp_group is not None:
        dist.all_reduce(grad_hidden_TH, group=tp_group)
    if case.with_buffer:
        assert weight_vH.grad is None
        return Outcome(logprobs_T.detach(), entropy_T.detach(), grad_hidden_TH, buffer_vH - before)
    assert weight_vH.grad is not None and weight_vH.grad.dtype == case.dtype
    return Outcome(logprobs_T.detach(), entropy_T.detach(), grad_hidden_TH, weight_vH.grad)


def assert_equal(case: Case, ours: Outcome, oracle: Outcome, tp_rank: int = 0, tp_size: int = 1) -> None:
    value_tolerance, gradient_tolerance = TOLERANCES[case.dtype]
    if case.dtype == torch.bfloat16:
        gradient_tolerance *= tp_size
    grad_vH, oracle_grad_vH = ours.grad_weight_VH.double(), oracle.grad_weight_VH.chunk(tp_size)[tp_rank].clone()
    if case.forbidden:  # this column's gradient is as large as `overflow`
        grad_vH[:, 0] /= case.overflow
        oracle_grad_vH[:, 0] /= case.overflow
    for actual, expected, tolerance in [
        (ours.logprobs_T, oracle.logprobs_T, value_tolerance),
        (ours.entropy_T, oracle.entropy_T, value_tolerance),
        (ours.grad_hidden_TH, oracle.grad_hidden_TH, gradient_tolerance),
        (grad_vH, oracle_grad_vH, gradient_tolerance),
    ]:
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    padding_v = torch.arange(len(grad_vH)) + tp_rank * len(grad_vH) >= case.vocab_size
    assert grad_vH[padding_v].eq(0).all()
