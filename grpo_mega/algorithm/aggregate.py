"""How the losses of single tokens become one number: a weight for each token, fixed before any batch is packed.

The global loss is sum_t weight_t * loss_t over all tokens of a mini-batch, on whatever rank and in whatever micro-batch they
are. Since the weights come from global counts, no layout can change the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def token_weights(
    response_lens: Sequence[int],
    kind: Aggregation,
    *,
    max_response_length: int,
    num_samples: int,
    num_tokens: float,
) -> list[float]:
    """For each sample the weight of each of its response tokens. Empty responses get 0.

    num_samples and num_tokens are global counts: of the mini-batch, or of what else the loss is to be averaged over.

    token-mean               1 / num_tokens                           DAPO (arXiv 2503.14476) eq. 8
    seq-mean-token-mean      1 / (num_samples * length)               DeepSeekMath (arXiv 2402.03300) eq. 3
    seq-mean-token-sum       1 / num_samples
    seq-mean-token-sum-norm  1 / (num_samples * max_response_length)  Dr. GRPO (arXiv 2503.20783)
    """
    if kind == "token-mean":
        divisors = [num_tokens for _ in response_lens]
    elif kind == "seq-mean-token-mean":
        divisors = [num_samples * length for length in response_lens]
    elif kind == "seq-mean-token-sum":
        divisors = [num_samples for _ in response_lens]
    else:
        assert kind == "seq-mean-token-sum-norm", kind
        divisors = [num_samples * max_response_length for _ in response_lens]
    return [1.0 / divisor if length else 0.0 for length, divisor in zip(response_lens, divisors, strict=True)]
