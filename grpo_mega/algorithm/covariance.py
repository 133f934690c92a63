"""Choose the tokens that clip_cov and kl_cov treat differently: tokens with a large covariance of log-prob and advantage.

Input: a whole mini-batch with the log-probs before its update, so neither micro-batches nor ranks change the choice. Output: 1
on the chosen tokens. Such tokens reduce the entropy most (Cui et al., arXiv 2505.22617).
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.config import AlgorithmConfig


@torch.no_grad()
def choose(x: LossInputs, a: AlgorithmConfig, generator: torch.Generator) -> Tensor:
    """Return [T]: 1 on the chosen tokens (arXiv 2505.22617, section 4.2), else 0.

    With cov_t = (old_logprobs_t - their mean) (A_t - its mean), and means over the mini-batch:

        clip_cov  chooses at random among the tokens with cov_low < cov_t < cov_high
        kl_cov    chooses the tokens with the largest cov_t

    The number of chosen tokens is a share cov_share of all tokens, rounded down but at least one; clip_cov may find fewer.
    """
    is_chosen_T = torch.zeros_like(x.old_logprobs)
    where_N = torch.nonzero(x.loss_mask > 0)[:, 0]
    if not len(where_N):
        return is_chosen_T
    logprobs_N, advantages_N = x.old_logprobs[where_N].double(), x.advantages[where_N].double()
    cov_N = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
    if a.loss_type == "clip_cov":
        candidates = torch.nonzero((cov_N > a.cov_low) & (cov_N < a.cov_high))[:, 0]
        ranked = candidates[torch.randperm(len(candidates), generator=generator)]
    else:
        ranked = cov_N.argsort(descending=True, stable=True)
    is_chosen_T[where_N[ranked[: max(1, int(a.cov_share * len(where_N)))]]] = 1.0
    return is_chosen_T
