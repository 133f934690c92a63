"""What a loss is computed from, and sums over the tokens of one response.

Every vector is [T], the tokens of a micro-batch; a response is whole within one. Tokens with loss_mask 0 count nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# exp(20) = 5e8: far outside of any clip range, and still finite when multiplied with an advantage of 0.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """Each [T] float32 (float64 in tests) unless said otherwise; old_, ref_ and rollout_logprobs carry no gradient."""

    logprobs: Tensor  # with gradient
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor  # 1 on response tokens that train
    loss_weights: Tensor  # from aggregate.token_weights
    segments: Tensor  # int64, which of the micro-batch's num_segments sequences each token is of
    num_segments: int
    entropy: Tensor | None = None  # with gradient if there is an entropy bonus

    def without_masked(self) -> LossInputs:
        """The inputs with 0 on tokens that do not train. Done before any arithmetic: no NaN of theirs meets a gradient."""
        is_trained_T = self.loss_mask > 0

        def clean(values_T: Tensor) -> Tensor:
            return torch.where(is_trained_T, values_T, 0.0)

        return replace(
            self,
            logprobs=clean(self.logprobs),
            old_logprobs=clean(self.old_logprobs),
            ref_logprobs=None if self.ref_logprobs is None else clean(self.ref_logprobs),
            rollout_logprobs=clean(self.rollout_logprobs),
            advantages=clean(self.advantages),
            loss_mask=is_trained_T.to(self.loss_mask.dtype),
            loss_weights=clean(self.loss_weights),
            entropy=None if self.entropy is None else clean(self.entropy),
        )

    def log_ratio(self) -> Tensor:
        """[T] logarithm of the importance ratio, logprobs - old_logprobs, within +-20."""
        return (self.logprobs - self.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def log_mismatch(self) -> Tensor:
        """[T] logarithm of the mismatch ratio, old_logprobs - rollout_logprobs, within +-20."""
        return (self.old_logprobs - self.rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def sequence_sum(self, values_T: Tensor) -> Tensor:
        """[T]: for each token the sum of `values_T` over the trained tokens of its sequence."""
        # float64: on a GPU the order of these sums is not fixed, and this way it cannot be seen.
        sums_S = torch.zeros(self.num_segments, dtype=torch.float64, device=values_T.device)
        sums_S = sums_S.index_add(0, self.segments, (values_T * self.loss_mask).double())
        return sums_S[self.segments].to(values_T.dtype)

    def sequence_mean(self, values_T: Tensor) -> Tensor:
        """[T]: for each token the mean of `values_T` over the trained tokens of its sequence; 0 where there are none."""
        return self.sequence_sum(values_T) / self.sequence_sum(torch.ones_like(values_T)).clamp(min=1.0)
