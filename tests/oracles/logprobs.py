"""Test oracles of the vocab-parallel log-probs, on whole tensors.

They are simple enough to check by eye: no tiles, no process groups, no memory savings, in the dtype of the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs_and_entropy(
    logits_TV: Tensor, targets_T: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return logprobs_T of `targets_T` and entropy_T of softmax(logits_TV[:, :vocab_size] / temperature),
    differentiable.
    """
    logp_TV = torch.log_softmax(logits_TV[:, :vocab_size] / temperature, dim=-1)
    logprobs_T = logp_TV.gather(1, targets_T.unsqueeze(1)).squeeze(1)
    # Masked inside and outside of the product, because the gradient of 0 * -inf is NaN even if the value is not used.
    is_possible_TV = logp_TV > -torch.inf
    finite_TV = torch.where(is_possible_TV, logp_TV, 0)
    entropy_T = -torch.where(is_possible_TV, finite_TV.exp() * finite_TV, 0).sum(dim=-1)
    return logprobs_T, entropy_T


def logprobs_and_entropy_of_hidden(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the same for the logits hidden_TH @ weight_VH[:vocab_size].T."""
    logits_TV = hidden_TH @ weight_VH[:vocab_size].t()
    return logprobs_and_entropy(logits_TV, targets_T, vocab_size=vocab_size, temperature=temperature)
