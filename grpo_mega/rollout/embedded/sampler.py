"""Sample the next token. Each sample has a separate random stream."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 256  # tokens per partial sum; only these sums need double precision, not the whole vocabulary


def uniforms(
    seed: int, step: int, prompt_id: int, sample_index: int, length: int, turn: int | None = None
) -> np.ndarray:
    """Return [length] float64 in [0, 1): the random stream (Philox) of a sample or of a turn of its conversation.

    It depends only on the other arguments, and a shorter stream is the start of a longer one.
    """
    numbers = (seed, step, prompt_id, sample_index) if turn is None else (seed, step, prompt_id, sample_index, turn)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers))).random(length)


def draw(
    logits_BV: Tensor, uniform_B: Tensor | None, *, temperature: float, top_p: float, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return the next tokens [B] and their log-probs [B] float32.

    Log-probs are log-softmax(logits / temperature), before top-p and top-k, as in the trainer. The token is the inverse
    of the cumulative distribution at `uniform_B`. Without `uniform_B`, or at temperature 0, it is the most likely
    token. If logits have NaN, it is any token of the vocabulary, with log-prob NaN.
    """
    scaled_BV = logits_BV.float() if temperature in (0, 1) else logits_BV.float() / temperature
    max_B1 = scaled_BV.amax(dim=-1, keepdim=True)
    num_rows, vocab = scaled_BV.shape
    num_blocks = -(-vocab // _BLOCK)
    # exp of the logits in blocks, padded with zeros after the end of the vocabulary
    masses_BW = scaled_BV.new_zeros((num_rows, num_blocks * _BLOCK))
    torch.exp(scaled_BV - max_B1, out=masses_BW[:, :vocab])
    masses_BNK = masses_BW.view(num_rows, num_blocks, _BLOCK)
    sums_BN = masses_BNK.sum(dim=-1).double()
    log_total_B = sums_BN.sum(dim=-1).log()
    if uniform_B is None or temperature == 0:
        tokens = scaled_BV.argmax(dim=-1)
    else:
        if top_p < 1 or 0 < top_k < vocab:
            masses_BNK = _filtered(masses_BNK.flatten(1), top_p, top_k).view_as(masses_BNK)
            sums_BN = masses_BNK.sum(dim=-1).double()
        tokens = _locate(masses_BNK, sums_BN, uniform_B.to(sums_BN.device)).clamp_(max=vocab - 1)
    chosen_B1 = scaled_BV.gather(1, tokens[:, None]) - max_B1
    return tokens, (chosen_B1.squeeze(1).double() - log_total_B).float()


def _locate(masses_BNK: Tensor, sums_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the tokens [B] at `uniform_B` of the cumulative distribution, never a token without mass.

    Find the block first, then the token within the block.
    """
    cumulative_BN = sums_BN.cumsum(dim=-1)
    block_B1, wanted_B1 = _search(cumulative_BN, uniform_B[:, None] * cumulative_BN[:, -1:])
    before_B1 = cumulative_BN.gather(1, block_B1) - sums_BN.gather(1, block_B1)
    within_BK = (
        masses_BNK[torch.arange(len(masses_BNK), device=masses_BNK.device), block_B1.squeeze(1)].double().cumsum(dim=-1)
    )
    # A block's sum was rounded in float32; the sum within the block is in double precision.
    share_B1 = (wanted_B1 - before_B1) / sums_BN.gather(1, block_B1)
    place_B1, _ = _search(within_BK, share_B1.clamp(min=0) * within_BK[:, -1:])
    return (block_B1 * _BLOCK + place_B1).squeeze(1)


def _search(cumulative_BX: Tensor, wanted_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index [B, 1] with a cumulative mass above the wanted mass, and the wanted mass, kept below the
    total.
    """
    whole_B1 = cumulative_BX[:, -1:]
    wanted_B1 = torch.minimum(wanted_B1, torch.nextafter(whole_B1, torch.zeros_like(whole_B1)))
    # If the masses are NaN, searchsorted returns an index beyond the end.
    return torch.searchsorted(cumulative_BX, wanted_B1, right=True).clamp_(max=cumulative_BX.shape[-1] - 1), wanted_B1


def _filtered(probs_BV: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set masses to zero outside top-k, then outside the smallest set that reaches top-p."""
    ordered, index = probs_BV.sort(dim=-1, descending=True)
    if top_k:
        ordered[:, top_k:] = 0
    before = ordered.cumsum(dim=-1) - ordered
    ordered[before >= top_p * ordered.sum(dim=-1, keepdim=True)] = 0
    return torch.zeros_like(probs_BV).scatter_(1, index, ordered)
