"""The floating-point operations of a pass over whole segments."""

from collections.abc import Sequence

from grpo_mega.cli.planner.state import Flops, flops_of_totals, unseen_pairs
from grpo_mega.weights.spec import ModelShape


def count_flops(
    shape: ModelShape, lengths: Sequence[int], *, experts_per_token: int = 0, num_outputs: int | None = None
) -> Flops:
    """Count a pass over segments of `lengths` tokens, with `num_outputs` tokens (None: all) through the output layer.

    Raise ConfigError for an MoE model without its number of experts per token.
    """
    num_tokens = sum(lengths)
    num_pairs = sum(n * (n + 1) // 2 - unseen_pairs(shape, n) for n in lengths)
    return flops_of_totals(
        shape,
        num_tokens,
        num_pairs,
        num_tokens if num_outputs is None else num_outputs,
        experts_per_token=experts_per_token,
    )
