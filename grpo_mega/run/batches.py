"""From a step's scored groups to the micro-batches of its update: advantages, token weights, packing, log-probs.

The same on every rank but for the micro-batches, of which each data-parallel rank has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from grpo_mega.algorithm.advantages import assign
from grpo_mega.algorithm.aggregate import token_weights
from grpo_mega.algorithm.kl import kl_penalty
from grpo_mega.algorithm.settings import advantage_settings
from grpo_mega.batching import pack
from grpo_mega.config import AlgorithmConfig, Config
from grpo_mega.megatron.gather import gather_responses
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.timers import Timers
from grpo_mega.types import Group, PackedBatch, Sample


def prepare(
    config: Config, groups: Sequence[Group], policy: Policy, runtime: Runtime, timers: Timers
) -> tuple[list[Sample], list[list[PackedBatch]]]:
    """All samples of the step, flat and in order, with advantages; and this rank's micro-batches of each mini-batch.

    A KL penalty in the reward needs log-probs before there are advantages: those that the batches were packed with are then
    replaced by ones that know of it.
    """
    settings = advantage_settings(config)
    with timers("pack"):
        samples = assign(groups, settings)
        batches = make_batches(config, groups, policy)
    with timers("logprobs"):
        batches = policy.attach_logprobs(batches, timers)
    if config.algorithm.has_kl_reward:
        with timers("pack"):
            penalties = gather_responses(lambda batch: _penalty(config.algorithm, batch), batches, samples, runtime)
            assign(groups, settings, penalties)
            for mini_batch in batches:
                pack.attach_advantages(mini_batch, samples)
    return samples, batches


def make_batches(config: Config, groups: Sequence[Group], policy: Policy) -> list[list[PackedBatch]]:
    """This data-parallel rank's micro-batches of each mini-batch, with token weights from global counts."""
    mini_batches = pack.split(groups, config.batch.mini_batches)
    return pack.pack(
        mini_batches,
        [_weights(config, samples, mini_batches) for samples in mini_batches],
        dp_size=policy.dp_size,
        dp_rank=policy.dp_rank,
        token_budget=config.batch.tokens_per_micro_batch,
        length_multiple=policy.length_multiple,
        micro_batch_multiple=policy.micro_batch_multiple,
    )


def has_spread(config: Config, group: Group) -> bool:
    """Tell if a sample of the group that trains has an advantage other than 0, so that the update learns something of it.

    Judged as if the group were the whole step, and without a KL penalty in the reward, for which there are no log-probs yet.
    """
    alone = Group(group.prompt, [replace(sample) for sample in group.samples])
    trained = [s for s in assign([alone], advantage_settings(config)) if _trains(config.algorithm, s)]
    return any(bool(sample.advantages.any()) for sample in trained if sample.advantages is not None)


def _penalty(a: AlgorithmConfig, batch: PackedBatch) -> Tensor | None:
    """[T], of the policy that sampled; None where the stage has no log-probs."""
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        return None
    return kl_penalty(
        batch.old_logprobs,
        batch.ref_logprobs,
        a.kl_penalty_type,
        old_logprobs=batch.old_logprobs,
        max_penalty=a.kl_clamp,
    )


def _weights(config: Config, samples: Sequence[Sample], mini_batches: Sequence[Sequence[Sample]]) -> list[float]:
    """Samples that do not train do not count."""
    a = config.algorithm
    counted = [s for s in samples if _trains(a, s)]
    num_tokens: float = sum(s.response_len for s in counted)
    if a.use_valid_token_scale:  # the mini-batch's share of the rollout's valid tokens
        num_tokens = sum(s.response_len for mini in mini_batches for s in mini if _trains(a, s)) / len(mini_batches)
    weights = iter(
        token_weights(
            [s.response_len for s in counted],
            a.loss_agg_func,
            max_response_length=config.rollout.max_response_length,
            num_samples=len(counted),
            num_tokens=num_tokens,
        )
    )
    return [next(weights) if _trains(a, s) else 0.0 for s in samples]


def _trains(a: AlgorithmConfig, sample: Sample) -> bool:
    """Samples without any reward do not, nor, with overlong_filter, do those that were cut off (they count in the group)."""
    return sample.is_scored and not (a.overlong_filter and sample.finish_reason == "length")
