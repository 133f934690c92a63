"""The training run, top to bottom: generate, score, pack, update, sync_weights.

Every rank runs this program; there is no controller. Generation is shared over the ranks and its groups are then gathered, so
that every rank computes the same advantages and the same packing; each then trains on its own micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from grpo_mega.config import Config
from grpo_mega.distributed.recorder import recorder
from grpo_mega.megatron.gather import attach_old_logprobs
from grpo_mega.observe.metrics import mean_over_updates, rollout_metrics
from grpo_mega.observe.progress import progress
from grpo_mega.observe.samples import num_logged
from grpo_mega.observe.tracing import Tracer
from grpo_mega.paths import FINISHED
from grpo_mega.rewards.scorer import drop_unusable
from grpo_mega.run.batches import attach_logprobs, is_zero_variance, pack
from grpo_mega.run.build import open_job
from grpo_mega.run.evaluation import evaluate_if_due
from grpo_mega.run.job import Job
from grpo_mega.run.model_files import export_policy
from grpo_mega.run.refresh import keep_rollout, refresh_rewards_if_due
from grpo_mega.types import Group, PackedBatch, StepMetrics


def run(config: Config) -> None:
    """Train from the run's last checkpoint up to config.steps, evaluating before, during and after; then export to RUN_DIR/hf.

    If asked to stop, end after the current step, with a checkpoint.
    """
    with open_job(config) as job, job.saved_on_failure():
        first, tracer = job.resume(), Tracer(config, job.runtime.rank, job.runtime.device, job.timers, job.log)
        job.colocation.sync_weights(version=first)
        evaluate_if_due(job, first)
        for step in range(first, config.steps):
            refresh_rewards_if_due(job, step)
            with tracer.step(step + 1):
                train_step(job, step)
            if step == first:
                job.log_peak_memory()
            if job.stops_after(step + 1):
                return
            evaluate_if_due(job, step + 1)
        with job.colocation.training():
            export_policy(job.policy, job.model, config.run_dir / FINISHED)
        job.log.message(f"policy saved as a Hugging Face checkpoint in {config.run_dir / FINISHED}")


def train_step(job: Job, step: int) -> None:
    """Do one rollout and its optimizer steps, and save a checkpoint if one is due; then the engine has policy step + 1."""
    groups, num_draws, metrics = generate(job, step)
    metrics |= rollout_metrics(groups, partial(is_zero_variance, job.config))
    with job.colocation.training():  # while this lasts, the GPUs' memory is the trainer's
        if len(groups) >= job.config.batch.mini_batches:
            with job.timers("pack"):
                batches = pack(job.config, groups, job.policy)
            batches = attach_logprobs(job.config, groups, batches, job.policy, job.runtime, job.timers, step)
            metrics |= update(job, step, groups, batches)
        job.steps_done, job.draws = step + 1, job.draws + num_draws
        if job.config.algorithm.ends_iteration(step + 1):
            with job.timers("reference"):
                job.policy.refresh_reference()
        job.save_if_due(step + 1)
    job.log.log_samples(step + 1, groups, job.rollouts.decode)
    keep_rollout(job, step + 1, groups)
    try:
        metrics |= job.colocation.sync_weights(version=step + 1)
    finally:
        job.log.log_step(step + 1, metrics | job.timers.lap())
    job.check_health(step + 1, metrics)


def generate(job: Job, step: int) -> tuple[list[Group], int, StepMetrics]:
    """Return the step's scored groups, how many batches of prompts were drawn for them, and counts of what was left out.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), groups without an advantage other than 0 are replaced from
    further rollouts, at most algorithm.dynamic_sampling_tries of them.
    """
    config, groups, seen = job.config, list[Group](), set[int]()
    wanted, is_dynamic = config.batch.prompts_per_step, config.algorithm.dynamic_sampling_tries > 0
    num_unusable = num_equal = 0
    for attempt in range(1 + config.algorithm.dynamic_sampling_tries):
        prompts = [p for p in job.prompts(job.draws + attempt) if p.id not in seen]
        seen |= {p.id for p in prompts}
        if not prompts:  # the data set is small, and all of it was drawn
            break
        description = "sampling" if attempt == 0 else f"sampling again ({attempt})"
        drawn, num_dropped = job.rollouts.generate(prompts, step, description, wanted=wanted), 0
        if not config.teachers:  # a teacher needs no gold answers
            drawn, num_dropped = drop_unusable(drawn)
        useful = [g for g in drawn if not is_zero_variance(config, g)] if is_dynamic else drawn
        num_unusable += num_dropped
        num_equal += len(drawn) - len(useful)
        groups += useful
        if len(groups) >= wanted:
            break
    metrics = {"prompts_dropped/gold_unparsable": float(num_unusable)} | job.rollouts.generator.flush_stats()
    if is_dynamic:
        metrics |= {
            "prompts_dropped/equal_rewards": float(num_equal),
            "prompts_dropped/surplus": float(max(len(groups) - wanted, 0)),
            "rollouts": attempt + 1.0,
        }
    return groups[:wanted], attempt + 1, metrics


def update(job: Job, step: int, groups: Sequence[Group], batches: Sequence[Sequence[PackedBatch]]) -> StepMetrics:
    """Take the optimizer steps of one rollout, one per mini-batch; warn of what is wrong with them."""
    samples = [sample for group in groups for sample in group.samples]
    num_passes = sum(map(len, batches)) * (job.config.layout.vpp or 1) * job.config.batch.epochs
    with (
        job.timers("update"),
        progress(num_passes, "update, micro-batches", job.shows_progress) as bar,
        recorder().heard(bar.advance),
    ):
        metrics = mean_over_updates(job.policy.update(batches))
    if job.config.algorithm.kl_target is not None:
        metrics["kl/beta"] = job.policy.algorithm.kl_beta
        job.policy.adapt_kl(metrics["kl/mean"], len(samples))
    with job.timers("exchange"):
        attach_old_logprobs(batches, samples, job.runtime, num_logged(groups, job.config.log.samples_per_step))
    blamed = [samples[i] for i in sorted(job.policy.nonfinite_samples)]
    messages = [*job.health.observe(step + 1, metrics, blamed), *job.policy.watch(step + 1, metrics.get("mismatch/k3", 0.0))]
    for message in messages:
        job.log.warn(message)
    return metrics | {"guard/level": float(job.policy.guard.level)}
