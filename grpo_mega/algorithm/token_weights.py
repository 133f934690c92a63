"""The weight of each token in the loss, computed before any batch is packed.

The loss of a mini-batch is sum_t weight_t * loss_t over all its sampled tokens, on any rank and in any micro-batch. The
weights come from global counts of sampled tokens, so no layout can change the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from grpo_mega.config import AlgorithmConfig
from grpo_mega.config.algorithm import Aggregation
from grpo_mega.types import Sample


def mini_batch_weights(
    mini_batches: Sequence[Sequence[Sample]], a: AlgorithmConfig, *, max_response_length: int
) -> list[list[float]]:
    """Return, for each sample of each of the step's mini-batches, the weight of each of its sampled tokens.

    Samples that do not contribute to the loss get 0 and do not count. With use_valid_token_scale, token-mean divides by
    the tokens of the whole rollout over the number of mini-batches.
    """
    lengths = [[s.num_sampled if contributes_to_loss(s, a) else 0 for s in samples] for samples in mini_batches]
    num_tokens: list[float] = [sum(response_lens) for response_lens in lengths]
    if a.use_valid_token_scale:
        num_tokens = [sum(num_tokens) / len(mini_batches)] * len(mini_batches)
    return [
        token_weights(
            response_lens,
            a.loss_agg_func,
            max_response_length=max_response_length,
            num_samples=sum(contributes_to_loss(s, a) for s in samples),
            num_tokens=count,
        )
        for samples, response_lens, count in zip(mini_batches, lengths, num_tokens, strict=True)
    ]


def contributes_to_loss(sample: Sample, a: AlgorithmConfig) -> bool:
    """Return False for samples outside the loss.

    These are samples without a reward, unless a teacher teaches them, and with overlong_filter samples that a limit of
    tokens, turns or time ended. Both stay in their group.
    """
    return (sample.is_scored or a.distill_beta > 0) and not (a.overlong_filter and sample.is_truncated)


def positive_weights(mini_batch: Sequence[Sample], a: AlgorithmConfig) -> list[float]:
    """Return, for each sample, the weight of each of its sampled tokens in the negative log-likelihood of right
    answers.

    Right answers are responses in the loss with a reward above positive_above. The weight is 1 / the tokens of all
    right answers (VAPO, arXiv 2504.05118, eq. 9), and 0 for other samples.
    """
    is_right = [contributes_to_loss(s, a) and s.reward is not None and s.reward > a.positive_above for s in mini_batch]
    num_tokens = sum(s.num_sampled for s, it_is in zip(mini_batch, is_right, strict=True) if it_is)
    return [1.0 / num_tokens if it_is and num_tokens else 0.0 for it_is in is_right]


def token_weights(
    response_lens: Sequence[int],
    kind: Aggregation,
    *,
    max_response_length: int,
    num_samples: int,
    num_tokens: float,
) -> list[float]:
    """Return, for each sample, the weight of each of its response tokens. Empty responses get 0.

    num_samples and num_tokens are global counts, of the mini-batch or of any other set that the loss averages over.

        token-mean               1 / num_tokens                           DAPO (arXiv 2503.14476) eq. 8
        seq-mean-token-mean      1 / (num_samples * length)               DeepSeekMath (arXiv 2402.03300) eq. 3
        seq-mean-token-sum       1 / num_samples
        seq-mean-token-sum-norm  1 / (num_samples * max_response_length)  Dr. GRPO (arXiv 2503.20783)
    """
    divisor_of: Mapping[Aggregation, Callable[[int], float]] = {
        "token-mean": lambda length: num_tokens,
        "seq-mean-token-mean": lambda length: num_samples * length,
        "seq-mean-token-sum": lambda length: num_samples,
        "seq-mean-token-sum-norm": lambda length: num_samples * max_response_length,
    }
    return [1.0 / divisor_of[kind](length) if length else 0.0 for length in response_lens]
