"""The inputs of a loss, and sums over the tokens of one response.

Every vector is [T], the tokens of a micro-batch; a response is never cut over micro-batches. With context parallelism a rank
has a part of each response, and sums over a response are taken over all parts, with exact gradients. Tokens with loss_mask 0
are in no sum, mean or count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Bound of every log-ratio. exp(20) = 5e8 is far outside of any clip range, and finite when multiplied by an advantage of 0.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """Vectors [T] in float32 (float64 in tests) unless noted; old_, ref_ and rollout_logprobs carry no gradient."""

    logprobs: Tensor  # with gradient
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor  # 1 on response tokens that contribute to the loss
    loss_weights: Tensor  # from token_weights.py
    segments: Tensor  # int64, the index of each token's sequence in the micro-batch
    num_segments: int
    teacher_logprobs: Tensor | None = None  # of the model to distil from
    teacher_kl: Tensor | None = None  # over the vocabulary, with gradient
    entropy: Tensor | None = None  # with gradient if there is an entropy bonus
    # From all tokens of the mini-batch, before the update; None or 1 where no method asks for it.
    nll_weights: Tensor | None = None  # of the negative log-likelihood, from token_weights.py
    is_chosen: Tensor | None = None  # 1 on the tokens that covariance.py chooses
    importance_mean: float = 1.0  # by which the correction divides its weights
    cp_group: dist.ProcessGroup | None = None  # the ranks that hold the other parts of the same responses

    @classmethod
    def of_masked_token(cls, *, has_reference: bool, has_entropy: bool, distill_kl: str | None = None) -> LossInputs:
        """Return one masked token: its loss and metrics are 0, under the names that all micro-batches of a run have."""
        zero = torch.zeros(1)
        has = (has_reference, has_entropy, distill_kl == "sampled", distill_kl not in (None, "sampled"))
        ref, entropy, teacher, teacher_kl = (zero if has_it else None for has_it in has)
        segment = torch.zeros(1, dtype=torch.int64)
        masked = cls(zero, zero, ref, zero, zero, zero, zero, segment, 1, nll_weights=zero, is_chosen=zero)
        return replace(masked, teacher_logprobs=teacher, teacher_kl=teacher_kl, entropy=entropy)

    def without_masked(self) -> LossInputs:
        """Return the inputs with 0 on masked tokens: before any arithmetic, so that no NaN of theirs reaches a gradient."""
        is_unmasked_T = self.loss_mask > 0

        def clean(values_T: Tensor) -> Tensor:
            return torch.where(is_unmasked_T, values_T, 0.0)

        def clean_any(values_T: Tensor | None) -> Tensor | None:
            return None if values_T is None else clean(values_T)

        return replace(
            self,
            logprobs=clean(self.logprobs),
            old_logprobs=clean(self.old_logprobs),
            ref_logprobs=clean_any(self.ref_logprobs),
            rollout_logprobs=clean(self.rollout_logprobs),
            advantages=clean(self.advantages),
            loss_mask=is_unmasked_T.to(self.loss_mask.dtype),
            loss_weights=clean(self.loss_weights),
            teacher_logprobs=clean_any(self.teacher_logprobs),
            teacher_kl=clean_any(self.teacher_kl),
            entropy=clean_any(self.entropy),
            nll_weights=clean_any(self.nll_weights),
            is_chosen=clean_any(self.is_chosen),
        )

    def log_ratio(self) -> Tensor:
        """Return the logarithm [T] of the importance ratio, logprobs - old_logprobs, clamped to +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def log_mismatch(self) -> Tensor:
        """Return the logarithm [T] of the mismatch ratio, old_logprobs - rollout_logprobs, clamped to +-20."""
        return (self.old_logprobs - self.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def log_lead(self) -> Tensor:
        """Return the logarithm [T] of policy over teacher, old_logprobs - teacher_logprobs, clamped to +-20."""
        assert self.teacher_logprobs is not None, "distillation needs teacher_logprobs"
        return (self.old_logprobs - self.teacher_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_sum(self, values_T: Tensor) -> Tensor:
        """Return [T]: for each token the sum of `values_T` over the unmasked tokens of its sequence."""
        # In float64, so that the order of these sums, which is not fixed on a GPU, does not show in the result.
        sums_S = torch.zeros(self.num_segments, dtype=torch.float64, device=values_T.device)
        sums_S = sums_S.index_add(0, self.segments, (values_T * self.loss_mask).double())
        if self.cp_group is not None:
            sums_S = _SumOverRanks.apply(sums_S, self.cp_group)
        return sums_S[self.segments].to(values_T.dtype)

    def sequence_mean(self, values_T: Tensor) -> Tensor:
        """Return [T]: for each token the mean of `values_T` over the unmasked tokens of its sequence, or 0 without any."""
        return self.sequence_sum(values_T) / self.sequence_sum(torch.ones_like(values_T)).clamp(min=1.0)

    def sequence_max(self, values_T: Tensor) -> Tensor:
        """Return [T]: for each token the largest of `values_T` over the unmasked tokens of its sequence, at least 0."""
        maxima_S = torch.zeros(self.num_segments, dtype=values_T.dtype, device=values_T.device)
        maxima_S = maxima_S.scatter_reduce(0, self.segments, values_T * self.loss_mask, "amax")
        if self.cp_group is not None:
            dist.all_reduce(maxima_S, op=dist.ReduceOp.MAX, group=self.cp_group)  # no loss has a gradient through a maximum
        return maxima_S[self.segments]


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors, on each. The loss is the sum of their losses, so gradients are summed over ranks too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
