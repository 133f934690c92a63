"""The inputs of a loss, and sums over the tokens of one response.

Every vector is [T], the tokens of a micro-batch. A response is never split over micro-batches, unless it has several
segments and the loss needs no sums over responses (AlgorithmConfig.has_sequence_sums). With context parallelism a rank
has a part of each response, and sums over a response include all parts, with exact gradients. Tokens with loss_mask 0
count in no sum, mean or count.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.config import AlgorithmConfig
from grpo_mega.types import LossVectors

# Bound of every log-ratio. exp(20) = 5e8 is far outside any clip range, and still finite when multiplied by an
# advantage of 0.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor) -> Tensor:
    """Return a log-ratio clamped to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(kw_only=True)
class LossInputs(LossVectors):
    """Vectors [T] in float32 (float64 in tests) unless noted. old_, ref_ and rollout_logprobs have no gradient."""

    logprobs: Tensor  # with gradient
    old_logprobs: Tensor
    segments: Tensor  # int64, index of each token's sequence (its sample) in the micro-batch
    num_segments: int
    teacher_kl: Tensor | None = None  # KL over the vocabulary, with gradient
    entropy: Tensor | None = None  # with gradient if there is an entropy bonus
    cp_group: dist.ProcessGroup | None = None  # ranks that hold the other parts of the same responses

    @classmethod
    def of_batch(cls, batch: LossVectors, **computed: Any) -> LossInputs:
        """Return the batch's vectors with the `computed` fields."""
        return cls(**{one.name: getattr(batch, one.name) for one in fields(LossVectors)}, **computed)

    @classmethod
    def of_masked_token(cls, a: AlgorithmConfig, *, has_reference: bool) -> LossInputs:
        """Return one masked token. Its loss and metrics are 0, with the same names as in all micro-batches of a run."""
        zero = torch.zeros(1)
        return cls(
            logprobs=zero,
            old_logprobs=zero,
            ref_logprobs=zero if has_reference else None,
            rollout_logprobs=zero,
            advantages=zero,
            loss_mask=zero,
            loss_weights=zero,
            segments=torch.zeros(1, dtype=torch.int64),
            num_segments=1,
            teacher_logprobs=zero if a.distill_beta > 0 and not a.has_vocab_kl else None,
            teacher_kl=zero if a.has_vocab_kl else None,
            entropy=zero if a.calculate_entropy else None,
            nll_weights=zero,
            covariance_mask=zero,
        )

    def without_masked(self) -> LossInputs:
        """Return the inputs with 0 on masked tokens, before any arithmetic, so no NaN of a masked token reaches a
        gradient.
        """
        is_unmasked_T = self.loss_mask > 0
        clean: dict[str, Any] = {
            name: torch.where(is_unmasked_T, value, 0.0)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in ("loss_mask", "segments")
        }
        return replace(self, **clean, loss_mask=is_unmasked_T.to(self.loss_mask.dtype))

    def log_ratio(self) -> Tensor:
        """Return the logarithm [T] of the importance ratio, logprobs - old_logprobs, clamped to +-20."""
        return bounded(self.logprobs - self.old_logprobs)

    def log_mismatch(self) -> Tensor:
        """Return the logarithm [T] of the mismatch ratio, old_logprobs - rollout_logprobs, clamped to +-20."""
        return bounded(self.old_logprobs - self.rollout_logprobs)

    def log_policy_over_teacher(self) -> Tensor:
        """Return the logarithm [T] of policy over teacher, old_logprobs - teacher_logprobs, clamped to +-20."""
        assert self.teacher_logprobs is not None, "distillation needs teacher_logprobs"
        return bounded(self.old_logprobs - self.teacher_logprobs)

    def sequence_sum(self, values_T: Tensor) -> Tensor:
        """Return [T]: for each token the sum of `values_T` over the unmasked tokens of its sequence."""
        # Float64 hides the order of the sums, which is not fixed on a GPU.
        sums_S = torch.zeros(self.num_segments, dtype=torch.float64, device=values_T.device)
        sums_S = sums_S.index_add(0, self.segments, (values_T * self.loss_mask).double())
        if self.cp_group is not None:
            sums_S = _SumOverRanks.apply(sums_S, self.cp_group)
        return sums_S[self.segments].to(values_T.dtype)

    def sequence_mean(self, values_T: Tensor) -> Tensor:
        """Return [T]: for each token the mean of `values_T` over the unmasked tokens of its sequence, or 0 without
        any.
        """
        return self.sequence_sum(values_T) / self.sequence_sum(torch.ones_like(values_T)).clamp(min=1.0)

    def sequence_max(self, values_T: Tensor) -> Tensor:
        """Return [T]: for each token the largest of `values_T` over the unmasked tokens of its sequence, at least 0."""
        maxima_S = torch.zeros(self.num_segments, dtype=values_T.dtype, device=values_T.device)
        maxima_S = maxima_S.scatter_reduce(0, self.segments, values_T * self.loss_mask, "amax")
        if self.cp_group is not None:
            # No loss has a gradient through a maximum.
            dist.all_reduce(maxima_S, op=dist.ReduceOp.MAX, group=self.cp_group)
        return maxima_S[self.segments]


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors, on each rank. The loss is the sum of the ranks' losses, so gradients are summed
    too.
    """

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
