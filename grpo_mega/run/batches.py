"""From a step's scored groups to the micro-batches of its update: advantages, token weights, packing, log-probs.

Every rank computes the same advantages and weights; each data-parallel rank packs its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.algorithm.kl import kl_penalty
from grpo_mega.algorithm.token_weights import contributes_to_loss, mini_batch_weights
from grpo_mega.batching import pack as packing
from grpo_mega.config import AlgorithmConfig, Config
from grpo_mega.megatron.gather import gather_responses
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.timers import Timers
from grpo_mega.types import Group, PackedBatch, Sample


def pack(config: Config, groups: Sequence[Group], policy: Policy) -> list[list[PackedBatch]]:
    """Set the samples' advantages; return this data-parallel rank's micro-batches of each mini-batch. `groups` are all of the
    step."""
    _assign_advantages(config, groups)
    return make_batches(config, groups, policy)


def attach_logprobs(
    config: Config,
    groups: Sequence[Group],
    batches: list[list[PackedBatch]],
    policy: Policy,
    runtime: Runtime,
    timers: Timers,
) -> list[list[PackedBatch]]:
    """Return the batches with old_logprobs and ref_logprobs.

    A KL penalty in the reward needs log-probs before there are advantages: those with which the batches were packed are then
    replaced by advantages that include the penalty.
    """
    with timers("logprobs"):
        batches = policy.attach_logprobs(batches, timers)
    if config.algorithm.has_kl_reward:
        with timers("pack"):
            samples = [sample for group in groups for sample in group.samples]
            penalties = gather_responses(lambda batch: _penalty(config.algorithm, batch), batches, samples, runtime)
            _assign_advantages(config, groups, penalties)
            for mini_batch in batches:
                packing.attach_advantages(mini_batch, samples)
    return batches


def make_batches(config: Config, groups: Sequence[Group], policy: Policy) -> list[list[PackedBatch]]:
    """Return this data-parallel rank's micro-batches of each mini-batch, with token weights from global counts."""
    mini_batches = packing.split(groups, config.batch.mini_batches)
    return packing.pack(
        mini_batches,
        mini_batch_weights(mini_batches, config.algorithm, max_response_length=config.rollout.max_response_length),
        token_budget=config.batch.tokens_per_micro_batch,
        **policy.packing,
    )


def is_zero_variance(config: Config, group: Group) -> bool:
    """Return True unless a sample that contributes to the loss has an advantage other than 0: the update learns nothing then.

    Judged as if the group were the whole step, and without a KL penalty in the reward, whose log-probs are not known yet.
    """
    alone = Group(group.prompt, [replace(sample) for sample in group.samples])
    counted = [s for s in _assign_advantages(config, [alone]) if contributes_to_loss(s, config.algorithm)]
    return not any(bool(sample.advantages.any()) for sample in counted if sample.advantages is not None)


def _assign_advantages(config: Config, groups: Sequence[Group], kl_penalties: Sequence[Tensor] | None = None) -> list[Sample]:
    longest = config.rollout.max_response_length
    return assign_advantages(groups, config.algorithm, max_response_length=longest, kl_penalties=kl_penalties)


def _penalty(a: AlgorithmConfig, batch: PackedBatch) -> Tensor | None:
    """Return the KL penalty [T] of the policy that generated; None where the pipeline stage has no log-probs."""
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        return None
    return kl_penalty(
        batch.old_logprobs,
        batch.ref_logprobs,
        a.kl_penalty_type,
        old_logprobs=batch.old_logprobs,
        kl_clamp=a.kl_clamp,
    )
