"""From a step's scored groups to the micro-batches of its update: advantages, token weights, packing, log-probs.

Every rank computes the same advantages and weights. Each data-parallel rank packs its micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from grpo_mega.algorithm import advantages
from grpo_mega.algorithm.advantages import WITHOUT_BASELINE
from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.kl import kl_penalty
from grpo_mega.algorithm.losses import choose_by_covariance
from grpo_mega.algorithm.token_weights import contributes_to_loss, mean_importance, mini_batch_weights, positive_weights
from grpo_mega.batching import pack as packing
from grpo_mega.batching.layout import from_samples, response_places, routes_row, sampled_mask
from grpo_mega.config import AlgorithmConfig, BatchConfig, Config, RewardsConfig, RolloutConfig, TeacherConfig
from grpo_mega.data.rows import find_value
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.errors import MismatchError
from grpo_mega.megatron.pipeline import BACKWARD, FORWARD
from grpo_mega.megatron.policy import OPTIMIZER, Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.rollout.backlog import send_routes
from grpo_mega.rollout.routes import is_intact, num_recorded
from grpo_mega.rollout.sglang.client import served_logprobs
from grpo_mega.tracking.metrics import K3_STALE
from grpo_mega.tracking.progress import Pace, Timers, progress
from grpo_mega.types import Group, PackedBatch, Sample, StepMetrics

MiniBatches = Sequence[Sequence[PackedBatch]]  # the micro-batches of each mini-batch


def pack(config: Config, groups: Sequence[Group], policy: Policy) -> MiniBatches:
    """Return this data-parallel rank's micro-batches of each mini-batch, with token weights from global counts.

    `groups` are all groups of the step. Assign their advantages before, unless attach_logprobs does it. Return [] if
    there are fewer groups than mini-batches.
    """
    if len(groups) < config.batch.mini_batches:
        return []
    is_assigned = all(sample.advantages is not None for group in groups for sample in group.samples)
    assert is_assigned or config.algorithm.has_kl_reward, "assign advantages before packing"
    mini_batches = packing.split(groups, config.batch.mini_batches)
    return packing.pack_mini_batches(
        mini_batches,
        mini_batch_weights(mini_batches, config.algorithm, max_response_length=config.rollout.max_response_length),
        policy.packing,
    )


def attach_logprobs(
    config: Config,
    groups: Sequence[Group],
    batches: MiniBatches,
    policy: Policy,
    runtime: Runtime,
    timers: Timers,
    step: int = 0,
    *,
    shows_progress: bool = False,
) -> MiniBatches:
    """Return the batches with old_, ref_ and teacher_logprobs, and with the values that the loss computes from
    mini-batches.

    A KL penalty in the reward needs log-probs, so advantages with it are assigned here. Without batches there is no
    penalty.
    """
    a, samples = policy.algorithm, [sample for group in groups for sample in group.samples]
    if not batches:
        if a.has_kl_reward:
            assign_advantages(config.rollout, config.rewards, a, groups)
        return []
    if config.rollout.routing_replay:
        with timers("exchange"):
            attach_routes(batches, samples, runtime)
        check_routes(batches, samples, runtime)
    own = sum(teacher.url is None for teacher in config.teachers.values())
    num_models = int(config.needs_old_logprobs) + int(config.algorithm.kl_beta > 0) + own
    with _shown_passes(num_models * _num_passes(policy, batches), shows_progress):
        with timers("logprobs"):
            batches = policy.attach_logprobs(batches, timers)
        if config.teachers:
            with timers("teacher"):
                attach_teacher_logprobs(config.teachers, config.data.teacher_column, policy, samples, batches, runtime)
    with timers("pack"):
        if a.has_kl_reward:
            penalties = gather_responses(lambda batch: _penalty(a, batch), batches, samples, runtime)
            assign_advantages(config.rollout, config.rewards, a, groups, penalties)
            assigned = [s.advantages for s in samples if s.advantages is not None]
            for batch in chain.from_iterable(batches):
                batch.advantages = from_samples(assigned, batch, samples)
        if a.positive_nll > 0:
            weights = [w for mini in packing.split(groups, len(batches)) for w in positive_weights(mini, a)]
            rows = [w * sampled_mask(s) for s, w in zip(samples, weights, strict=True)]
            for batch in chain.from_iterable(batches):
                batch.nll_weights = from_samples(rows, batch, samples)
        if a.needs_mini_batch:
            old_logprobs = gather_responses(lambda batch: batch.old_logprobs, batches, samples, runtime)
            random = torch.Generator().manual_seed(config.seed * 2**31 + step)
            _attach_from_whole(a, groups, batches, old_logprobs, random)
    return batches


@contextmanager
def _shown_passes(num_passes: int, is_shown: bool) -> Iterator[None]:
    """Show the progress of the forward passes of policy, reference and teachers inside."""
    with (
        progress(num_passes, "log-probs, micro-batches", is_shown and num_passes > 0) as bar,
        recorder().on_heartbeat(lambda kind: bar.advance() if kind == FORWARD else None),
    ):
        yield


def _num_passes(policy: Policy, batches: MiniBatches) -> int:
    return sum(map(len, batches)) * len(policy.models)


def update_policy(
    config: BatchConfig, policy: Policy, batches: MiniBatches, pace: Pace, is_shown: bool
) -> list[StepMetrics]:
    """Run the optimizer steps of one rollout, and show their progress. Return the metrics of each step."""
    num_passes = _num_passes(policy, batches) * config.epochs
    pieces = {FORWARD: num_passes, BACKWARD: num_passes, OPTIMIZER: config.optimizer_steps}
    with (
        progress(sum(pieces.values()), "update, passes and optimizer steps", is_shown) as bar,
        pace.over(pieces, bar) as start,
        recorder().on_heartbeat(start),
    ):
        return policy.update(batches)


def attach_teacher_logprobs(
    teachers: Mapping[str, TeacherConfig],
    column: str | None,
    policy: Policy,
    samples: Sequence[Sample],
    batches: MiniBatches,
    runtime: Runtime,
) -> None:
    """Set the batches' teacher_logprobs.

    A Megatron teacher computes all tokens, and only the values of its samples are kept. A server computes only its
    samples, and each rank requests a share of them.
    """
    names = [
        next(iter(teachers)) if column is None else str(find_value(sample.prompt.extras, column)) for sample in samples
    ]
    if any(settings.url for settings in teachers.values()):
        lengths = [sample.response_len for sample in samples]
        values_N = torch.zeros(sum(lengths), dtype=torch.float32)  # log-probs of all samples, end to end
        rows = values_N.split(lengths)
        with runtime.raise_on_all_ranks():
            for name, settings in teachers.items():
                mine = [i for i in range(runtime.rank, len(samples), runtime.layout.world_size) if names[i] == name]
                if settings.url is not None:
                    found = served_logprobs(name, settings.url, [samples[i] for i in mine], recorder().heartbeat)
                    for i, row in zip(mine, found, strict=True):
                        rows[i].copy_(torch.tensor(row))
        rows = runtime.sum(values_N.to(runtime.device.torch_device)).cpu().split(lengths)
        for batch in chain.from_iterable(batches):
            batch.teacher_logprobs = from_samples(rows, batch, samples)

    def is_taught(is_of: Sequence[Tensor], batch: PackedBatch) -> Tensor:
        return (from_samples(is_of, batch, samples) > 0) & (batch.loss_mask > 0)

    for name, teacher in policy.teachers.items():
        is_of = [torch.full((s.response_len,), float(other == name)) for s, other in zip(samples, names, strict=True)]
        if policy.algorithm.has_vocab_kl:
            for batch, hidden in teacher.hidden(batches, partial(is_taught, is_of)):
                batch.teacher_hidden = (batch.teacher_hidden or {}) | {name: hidden}
            continue
        for batch, values in teacher.logprobs(batches):
            kept = values.where(is_taught(is_of, batch), 0.0)
            batch.teacher_logprobs = kept if batch.teacher_logprobs is None else batch.teacher_logprobs + kept


def attach_routes(batches: MiniBatches, samples: Sequence[Sample], runtime: Runtime) -> None:
    """Send the recorded experts of each sample to the data-parallel rank that trains it. Set the batches' routes."""
    trainers_N = torch.zeros(len(samples), dtype=torch.int64, device=runtime.device.torch_device)  # 1 + dp_rank
    for batch in chain.from_iterable(batches):
        trainers_N[batch.sample_indices] = 1 + runtime.dp_rank
    ranks_of: dict[int, list[int]] = {0: []}
    for rank in range(runtime.layout.world_size):
        ranks_of.setdefault(1 + runtime.layout.place(rank)[2], []).append(rank)
    readers = [ranks_of[trainer] for trainer in runtime.max(trainers_N).tolist()]
    send_routes(samples, readers, runtime.device.torch_device)
    for batch in chain.from_iterable(batches):
        batch.routes = routes_row(batch, samples)


def check_routes(batches: MiniBatches, samples: Sequence[Sample], runtime: Runtime) -> None:
    """Raise MismatchError on all ranks if a packed row's experts differ from the recorded experts of a sample."""
    worst = 0  # 1 + index of a sample with wrong experts; 0 if there is none
    for batch in chain.from_iterable(batches):
        positions, cuts = batch.position_ids.numpy(), batch.cu_seqlens.tolist()
        for index, start, end in zip(batch.sample_indices, cuts, cuts[1:], strict=False):
            if (recorded := samples[index].routes) and batch.routes is not None:
                here = positions[start:end]  # positions within the sample
                is_there = here < len(recorded.experts)
                is_same = (batch.routes[start:end].numpy()[is_there] == recorded.experts[here[is_there]]).all()
                worst = worst if is_same and is_intact(recorded) else 1 + index
    worst = int(runtime.max(torch.tensor([worst], device=runtime.device.torch_device)))
    if worst:
        sample = samples[worst - 1]
        raise MismatchError(
            f"the experts of sample {sample.index} of prompt {sample.prompt.id} differ from the experts that its engine"
            " recorded; continue from the last checkpoint with --resume"
        )


def share_live(samples: Sequence[Sample], runtime: Runtime) -> float:
    """Return the share of tokens without recorded experts. The trainer's routers choose experts for them."""
    recorded = torch.tensor([num_recorded(samples, runtime.rank)], device=runtime.device.torch_device)
    return 1 - int(runtime.sum(recorded)) / max(1, sum(sample.total_len for sample in samples))


def is_zero_variance(a: AlgorithmConfig, group: Group) -> bool:
    """Return True if the update learns nothing from the group, because all samples in the loss have advantage 0.

    The advantages must be assigned, over all groups of the step. With a teacher the update learns from any group.
    """
    if a.distill_beta > 0:
        return False
    rows = [sample.advantages for sample in group.samples if contributes_to_loss(sample, a)]
    assert all(row is not None for row in rows), f"prompt {group.prompt.id} has no advantages yet"
    return not any(bool(row.any()) for row in rows if row is not None)


def drop_zero_variance(
    rollout: RolloutConfig, rewards: RewardsConfig, a: AlgorithmConfig, groups: Sequence[Group]
) -> tuple[list[Group], list[Group]]:
    """Return the groups that the update learns from, and the other groups.

    `groups` are all usable groups that the step generated so far. The advantages are computed over all of them, because
    a group with equal rewards may differ from other groups. The KL penalty of a reward is not known yet. Without a
    group baseline equal rewards are no reason to generate more groups, so no group is dropped. The advantages in
    `groups` are not set.
    """
    if a.adv_type in WITHOUT_BASELINE:
        return list(groups), []
    judged = [Group(group.prompt, [replace(sample) for sample in group.samples]) for group in groups]
    assign_advantages(rollout, rewards, a, judged)
    useful, equal = list[Group](), list[Group]()
    for group, copy in zip(groups, judged, strict=True):
        (equal if is_zero_variance(a, copy) else useful).append(group)
    return useful, equal


def assign_advantages(
    rollout: RolloutConfig,
    rewards: RewardsConfig,
    a: AlgorithmConfig,
    groups: Sequence[Group],
    kl_penalties: Sequence[Tensor] | None = None,
) -> None:
    """Set the samples' advantages. `groups` are all groups of the step; `kl_penalties`: see algorithm/advantages.py."""
    longest, weights = rollout.max_response_length, {f.name: f.weight for f in rewards.functions}
    if rollout.agent is not None:  # the names that it returns have weight 1
        weights = dict.fromkeys(sorted({n for g in groups for s in g.samples for n in s.scores}), 1.0) | weights
    advantages.assign_advantages(
        groups, a, max_response_length=longest, kl_penalties=kl_penalties, reward_weights=weights
    )


def staleness_metrics(samples: Sequence[Sample], old_logprobs: Sequence[Tensor], version: int) -> StepMetrics:
    """Return the staleness of tokens in the loss, in policy versions, and the mismatch for each staleness.

    The mismatch is the k3 of old_logprobs and rollout_logprobs, in nats per token. `old_logprobs` has a row per sample,
    with NaN for tokens not in the loss.
    """
    tokens, sums = Counter[int](), dict[int, float]()
    for sample, old in zip(samples, old_logprobs, strict=True):
        log_ratio = (old - torch.tensor(sample.rollout_logprobs)).double()
        k3 = log_ratio.expm1() - log_ratio
        for span in sample.spans:
            values, age = k3[span.start : span.end], version - span.version
            values = values[~values.isnan()]
            tokens[age] += len(values)
            sums[age] = sums.get(age, 0.0) + float(values.sum())
    counts = {age: n for age, n in sorted(tokens.items()) if n}
    if not counts:
        return {}
    mean = sum(age * n for age, n in counts.items()) / sum(counts.values())
    mismatch = {f"{K3_STALE}{age}": sums[age] / n for age, n in counts.items()}
    return {"staleness/mean": mean, "staleness/max": float(max(counts)), **mismatch}


def _attach_from_whole(
    a: AlgorithmConfig,
    groups: Sequence[Group],
    batches: MiniBatches,
    old_logprobs: Sequence[Tensor],
    random: torch.Generator,
) -> None:
    """Set the tokens chosen by covariance and the mean importance weight in the batches.

    Both depend on all samples of a mini-batch and are identical on every rank. The mean needs all tokens too, because
    the rounding of sums per rank would depend on the layout. `old_logprobs` has a row per sample of the step.
    """
    samples = [sample for group in groups for sample in group.samples]
    rows = [torch.zeros_like(row) for row in old_logprobs]
    start = 0
    for members, mini_batch in zip(packing.split(groups, len(batches)), batches, strict=True):
        end = start + len(members)
        mask_T = torch.cat([float(contributes_to_loss(s, a)) * sampled_mask(s) for s in members])
        old_T = torch.cat(list(old_logprobs[start:end]))
        whole = LossInputs(  # the response tokens of the mini-batch, end to end, before the update
            logprobs=old_T,
            old_logprobs=old_T,
            rollout_logprobs=torch.tensor([value for s in members for value in s.rollout_logprobs]),
            advantages=torch.cat([s.advantages for s in members if s.advantages is not None]),
            loss_mask=mask_T,
            loss_weights=mask_T,
            segments=torch.arange(len(members)).repeat_interleave(torch.tensor([s.response_len for s in members])),
            num_segments=len(members),
        )
        if a.correction.batch_normalize:
            mean = mean_importance(whole, a.correction)
            for batch in mini_batch:
                batch.importance_mean = mean
        if a.is_by_covariance:
            rows[start:end] = choose_by_covariance(whole, a, random).split([s.response_len for s in members])
            for batch in mini_batch:
                batch.covariance_mask = from_samples(rows, batch, samples)
        start = end


def _penalty(a: AlgorithmConfig, batch: PackedBatch) -> Tensor | None:
    """Return the KL penalty [T] of the policy before the update; None if this pipeline stage has no log-probs."""
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        return None
    return kl_penalty(
        batch.old_logprobs,
        batch.ref_logprobs,
        a.kl_penalty_type,
        old_logprobs=batch.old_logprobs,
        kl_clamp=a.kl_clamp,
    )


def gather_responses(
    values_of: Callable[[PackedBatch], Tensor | None],
    mini_batches: MiniBatches,
    samples: Sequence[Sample],
    runtime: Runtime,
    first: int | None = None,
) -> list[Tensor]:
    """Return a [response_len] float32 tensor on the host for each sample of the step, identical on every rank.

    `values_of(batch)` returns a [T] row, or None on stages without values. Collective: one reduction over all tokens.
    `first` limits the result to that many samples; None: all samples.
    """
    lengths = [sample.response_len for sample in samples[:first]]
    device = runtime.device.torch_device
    values_N = torch.zeros(sum(lengths), dtype=torch.float32, device=device)
    parts = values_N.split(lengths)
    for batch in chain.from_iterable(mini_batches):
        values_T = values_of(batch)
        if values_T is not None and runtime.tp_rank == 0:
            for index, places in zip(batch.sample_indices, response_places(batch, samples), strict=True):
                for in_row, in_response in places if index < len(parts) else []:
                    parts[index][in_response] = values_T[in_row]
    return list(runtime.sum(values_N).cpu().split(lengths))


def gather_old_logprobs(
    mini_batches: MiniBatches, samples: Sequence[Sample], runtime: Runtime, first: int | None = None
) -> list[Tensor]:
    """Return the old log-probs of the step's (first) samples after the update. Tokens outside the loss have NaN."""

    def values_of(batch: PackedBatch) -> Tensor | None:
        return None if batch.old_logprobs is None else batch.old_logprobs.where(batch.loss_mask > 0, torch.nan)

    return gather_responses(values_of, mini_batches, samples, runtime, first)


def attach_old_logprobs(samples: Sequence[Sample], old_logprobs: Sequence[Tensor]) -> None:
    """Set old_logprobs of the first samples of a step; None for a sample with sampled tokens outside the loss."""
    for sample, values in zip(samples, old_logprobs, strict=False):
        values = values.masked_fill(sampled_mask(sample) == 0, 0.0)
        sample.old_logprobs = None if bool(values.isnan().any()) else values.tolist()
