"""Drawing the next token, with a random stream of its own for each sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int, step: int, prompt_id: int, sample_index: int, length: int) -> np.ndarray:
    """[length] float64 in [0, 1): the stream of one sample, a function of these four numbers only (Philox counter)."""
    sequence = np.random.SeedSequence((seed, step, prompt_id, sample_index))
    return np.random.Generator(np.random.Philox(sequence)).random(length)


def draw(logits_BV: Tensor, uniform_B: Tensor | None, *, temperature: float, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Next tokens [B] and their log-probs [B] float32.

    Log-probs are those of softmax(logits / temperature), before top-p and top-k, as the trainer computes them. The token is
    the inverse of the cumulative distribution at `uniform_B`; without it, or at temperature 0, the most likely one.
    """
    scaled = logits_BV.float() / (temperature or 1.0)
    logprobs_BV = torch.log_softmax(scaled, dim=-1)
    if uniform_B is None or temperature == 0:
        tokens = logprobs_BV.argmax(dim=-1)
    else:
        cumulative = _filtered(logprobs_BV.exp(), top_p, top_k).double().cumsum(dim=-1)
        wanted = uniform_B.to(cumulative.device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, wanted, right=True).squeeze(1).clamp_(max=logits_BV.shape[-1] - 1)
    return tokens, logprobs_BV.gather(1, tokens[:, None]).squeeze(1)


def _filtered(probs_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Probabilities with those outside top-k, then outside the smallest set that reaches top-p, set to zero."""
    if top_p == 1.0 and not 0 < top_k < probs_BV.shape[-1]:
        return probs_BV
    ordered, index = probs_BV.sort(dim=-1, descending=True)
    if top_k:
        ordered[:, top_k:] = 0
    before = ordered.cumsum(dim=-1) - ordered
    ordered[before >= top_p * ordered.sum(dim=-1, keepdim=True)] = 0
    return torch.zeros_like(probs_BV).scatter_(1, index, ordered)
