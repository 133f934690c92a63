"""The training run, top to bottom: generate, score, pack, update, sync_weights.

Every rank runs this program; there is no controller. Generation is split across ranks, and then every rank gathers all
groups. So every rank computes the same advantages and the same packing. Then each rank trains its micro-batches.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from grpo_mega.config import Config
from grpo_mega.megatron.policy import Policy
from grpo_mega.rewards.scorer import drop_unusable
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.tracking.metrics import engine_mismatch, mean_over_updates, rollout_metrics
from grpo_mega.tracking.progress import phase
from grpo_mega.tracking.run_log import Hooks, num_logged
from grpo_mega.trainer.batches import (
    assign_advantages,
    attach_logprobs,
    attach_old_logprobs,
    drop_zero_variance,
    gather_old_logprobs,
    is_zero_variance,
    pack,
    share_live,
    staleness_metrics,
    update_policy,
)
from grpo_mega.trainer.evaluation import evaluate_if_due
from grpo_mega.trainer.folder import reraise_with_run_dir
from grpo_mega.trainer.job import Job, open_job
from grpo_mega.trainer.reward_model_refresh import keep_rollout, refresh_rewards_if_due
from grpo_mega.types import Group, PackedBatch, StepMetrics


def run(config: Config, hooks: Hooks | None = None) -> None:
    """Train from the run's last checkpoint to config.steps, evaluate, and export the policy to RUN_DIR/hf.

    Evaluate before, during and after training. When asked to stop, save a checkpoint after the current step and end.
    Ranks without a policy only generate, step by step.
    """
    with (
        reraise_with_run_dir(config.run_dir),
        open_job(config, hooks=hooks) as job,
        job.saved_on_failure(),
        job.listening(),
    ):
        first, tracer = job.resume(), job.tracer()
        with phase("sending the weights to the engines", job.shows_progress):
            job.colocation.sync_weights(version=first)
        evaluate_if_due(job, first)
        take_step = generate_step if job.policy is None else train_step
        for step in range(first, config.steps):
            refresh_rewards_if_due(job, step)
            with tracer.step(step + 1):
                take_step(job, step)
            if step == first:
                job.log_peak_memory()
            if job.stops_after(step + 1):
                return
            evaluate_if_due(job, step + 1)
        if job.policy is not None:
            with job.colocation.training():
                job.export()


def train_step(job: Job, step: int) -> None:
    """Run one rollout and its optimizer steps, save a checkpoint if one is due, and sync policy step + 1 to the engine.

    A step with fewer groups than mini-batches trains nothing. This may happen with dynamic sampling or a small dataset.
    """
    config, policy = job.config, job.policy
    assert policy is not None, "a rank without a policy runs generate_step"
    groups, backlog, metrics = generate(job, step)  # scored in worker processes while generation continues
    with job.timers("pack"):
        if not policy.algorithm.has_kl_reward:  # attach_logprobs assigns advantages with a KL penalty
            assign_advantages(config.rollout, config.rewards, policy.algorithm, groups)
        batches = pack(config, groups, policy)
    with job.colocation.training():  # the trainer owns the GPUs' memory in this block
        batches = attach_logprobs(
            config, groups, batches, policy, job.runtime, job.timers, step, shows_progress=job.shows_progress
        )
        metrics |= update(job, policy, batches)
        after_update(job, policy, step, groups, batches, metrics)
        job.save_if_due(step + 1, backlog)
    with logged(job, step + 1, groups, metrics):
        generate_ahead(job, step)
        metrics |= job.colocation.sync_weights(version=step + 1)
    job.health.check(step + 1, metrics)


def generate_step(job: Job, step: int) -> None:
    """Run a step on a rank without a policy."""
    _, job.backlog, _ = generate(job, step)
    job.steps_done = step + 1
    generate_ahead(job, step)
    job.colocation.sync_weights(version=step + 1)


def generate_ahead(job: Job, step: int) -> None:
    """Wait until engine ranks have generated ahead for the next step, if there are any. Nothing is in flight
    afterwards.
    """
    num_ahead = job.config.rollout.num_ahead(job.config.batch.prompts_per_step)
    if num_ahead and step + 1 < job.config.steps:
        backlog = job.backlog.drawn_up_to(num_ahead, job.draw, ())
        job.backlog = job.rollouts.generate_ahead(backlog, step, num_ahead)


def generate(job: Job, step: int) -> tuple[list[Group], Backlog, StepMetrics]:
    """Return the step's scored groups, the backlog after it, and dropped group counts.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), groups whose advantages are all 0 are replaced using at
    most algorithm.dynamic_sampling_tries further rollouts. Each rollout judges the groups again, across all groups so
    far.
    """
    config, groups, usable, seen = job.config, list[Group](), list[Group](), set[int]()
    wanted, is_dynamic = config.batch.prompts_per_step, config.algorithm.dynamic_sampling_tries > 0
    keeps_unfinished = config.rollout.keeps_unfinished
    backlog = job.backlog.without_stale(oldest=step - config.rollout.max_staleness)
    dropped: dict[str, list[Group]] = {"gold_unparsable": [], "equal_rewards": []}
    for attempt in range(1 + config.algorithm.dynamic_sampling_tries):
        backlog = backlog.drawn_up_to(config.rollout.num_started(wanted), job.draw, seen)
        if not backlog.groups:  # the dataset is small and already drawn
            break
        seen |= {group.prompt.id for group in backlog.groups}
        description = "sampling" if attempt == 0 else f"sampling again ({attempt})"
        missing = wanted - len(groups) if keeps_unfinished else wanted
        found, backlog = job.rollouts.generate_from(backlog, step, description, missing)
        if not config.teachers:  # a teacher needs no gold answers
            found, unusable = drop_unusable(found)
            dropped["gold_unparsable"] += unusable
        usable += found
        groups, dropped["equal_rewards"] = (
            drop_zero_variance(config.rollout, config.rewards, config.algorithm, usable) if is_dynamic else (usable, [])
        )
        if len(groups) >= wanted:
            break
    metrics = job.rollouts.flush_usage()
    metrics |= {"prompts_dropped/gold_unparsable": float(len(dropped["gold_unparsable"]))}
    if is_dynamic:
        metrics |= {
            "prompts_dropped/equal_rewards": float(len(dropped["equal_rewards"])),
            "prompts_dropped/surplus": float(max(len(groups) - wanted, 0)),
            "rollouts": attempt + 1.0,
        }
    if keeps_unfinished:
        for reason, given_up in dropped.items():
            backlog = backlog.dropped(reason, given_up)
        backlog = backlog.trained(groups[:wanted]).dropped("surplus", groups[wanted:])
        metrics |= backlog.metrics(config.algorithm.group_size)
    else:
        metrics |= job.rollouts.flush_stats()
    return groups[:wanted], backlog, metrics


def update(job: Job, policy: Policy, batches: Sequence[Sequence[PackedBatch]]) -> StepMetrics:
    """Run the rollout's optimizer steps, one per mini-batch. Return {} without batches."""
    if not batches:
        return {}
    with job.timers("update"):
        return mean_over_updates(update_policy(job.config.batch, policy, batches, job.pace, job.shows_progress))


def after_update(
    job: Job,
    policy: Policy,
    step: int,
    groups: Sequence[Group],
    batches: Sequence[Sequence[PackedBatch]],
    metrics: StepMetrics,
) -> None:
    """Add step metrics, log warnings, and set the next step's KL weight, precision and reference.

    `batches` is empty if the step trained nothing.
    """
    if batches:
        samples = [sample for group in groups for sample in group.samples]
        job.log.log_loads(step + 1, policy.routers.loads)
        if job.config.algorithm.kl_target is not None:
            metrics |= {"kl/beta": policy.algorithm.kl_beta}
            policy.adapt_kl(metrics["kl/mean"], len(samples))
        with job.timers("exchange"):
            first = num_logged(groups, job.config.log.samples_per_step)
            old_logprobs = gather_old_logprobs(
                batches, samples, job.runtime, None if job.config.rollout.keeps_unfinished else first
            )
        attach_old_logprobs(samples[:first], old_logprobs)
        if job.config.rollout.keeps_unfinished:
            metrics |= staleness_metrics(samples, old_logprobs, step)
        if job.config.rollout.routing_replay:
            metrics |= {"routing/live": share_live(samples, job.runtime)}
        blamed = [samples[i] for i in sorted(policy.nonfinite_samples)]
        for message in (
            *job.health.observe(step + 1, metrics, blamed),
            *policy.watch(step + 1, engine_mismatch(metrics)),
        ):
            job.log.warn(message)
        metrics |= {"guard/level": float(policy.guard.level)}
    if job.config.algorithm.ends_iteration(step + 1):
        with job.timers("reference"):
            policy.refresh_reference()
    metrics |= rollout_metrics(groups, partial(is_zero_variance, job.config.algorithm))


@contextmanager
def logged(job: Job, step: int, groups: Sequence[Group], metrics: StepMetrics) -> Iterator[None]:
    """Log `step`'s samples and metrics after the block, even if the block fails. The step's time ends here."""
    try:
        yield
    finally:
        job.log.log_samples(step, groups, job.rollouts.decode)
        keep_rollout(job, step, groups)
        job.log.log_step(step, metrics | job.timers.lap())
