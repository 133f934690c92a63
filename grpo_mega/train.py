"""The training run, top to bottom: sample groups, score them, compute advantages, update the policy, hand its weights on.

Every rank runs this program; there is no controller. Rollouts are shared over the ranks and then gathered, so that every rank
computes the same advantages and the same packing; each then trains on its own part.
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
from grpo_mega.run.batches import has_spread, prepare
from grpo_mega.run.evaluation import evaluate_if_due
from grpo_mega.run.job import Job, export_policy, open_job
from grpo_mega.run.rollout import rollout
from grpo_mega.types import Group, StepMetrics


def run(config: Config) -> None:
    """Trains up to config.steps from where the run's last checkpoint ended, evaluating before, during and after.

    Exports the policy to RUN_DIR/hf at the end. Asked to stop, it ends after the step under way, with a checkpoint.
    """
    with open_job(config) as job, job.saved_if_engine_fails():
        first, tracer = job.restore(), Tracer(config, job.runtime.rank, job.runtime.device, job.timers, job.log)
        job.colocation.sync_weights(first)
        evaluate_if_due(job, first)
        for step in range(first, config.steps):
            with tracer.step(step + 1):
                train_step(job, step)
            if step == first:
                job.tell_memory()
            if job.is_stopped(step + 1):
                return
            evaluate_if_due(job, step + 1)
        with job.colocation.training():
            export_policy(job.policy, job.model, config.run_dir / FINISHED)
        job.log.message(f"policy saved as a Hugging Face checkpoint in {config.run_dir / FINISHED}")


def train_step(job: Job, step: int) -> None:
    """One rollout and its optimizer steps, and a checkpoint if one is due; then the engine has the new policy, step + 1."""
    timers = job.timers
    groups, num_draws, metrics = sample_groups(job, step)
    metrics |= rollout_metrics(groups, partial(has_spread, job.config))
    with job.colocation.training():
        if len(groups) >= job.config.batch.mini_batches:
            metrics |= update(job, step, groups)
        job.steps_done, job.draws = step + 1, job.draws + num_draws
        job.save_if_due(step + 1)
    job.log.log_samples(step + 1, groups, job.decode)
    try:
        metrics |= job.colocation.sync_weights(step + 1)
    finally:
        job.log.log_step(step + 1, metrics | timers.lap())
    job.check_health(step + 1, metrics)


def sample_groups(job: Job, step: int) -> tuple[list[Group], int, StepMetrics]:
    """A step's groups, how often prompts were drawn for them, and counts of what was left out.

    With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2), groups that have no advantage other than 0 are replaced out of
    further rollouts, of which there are at most algorithm.dynamic_sampling_tries.
    """
    config, found, seen = job.config, list[Group](), set[int]()
    num_unusable = num_equal = 0
    for attempt in range(1 + config.algorithm.dynamic_sampling_tries):
        prompts = [p for p in job.prompts(job.draws + attempt) if p.id not in seen]
        seen |= {p.id for p in prompts}
        if not prompts:  # the data is small, and has been through
            break
        description = "sampling" if attempt == 0 else f"sampling again ({attempt})"
        groups = rollout(job, prompts, job.sampling, step, description, wanted=config.batch.prompts_per_step)
        groups, num_dropped = drop_unusable(groups)
        num_unusable += num_dropped
        useful = [g for g in groups if has_spread(config, g)] if config.algorithm.dynamic_sampling_tries else groups
        num_equal += len(groups) - len(useful)
        found += useful
        if len(found) >= config.batch.prompts_per_step:
            break
    metrics = {"prompts_dropped/gold_unparsable": float(num_unusable)} | job.generator.flush_stats()
    if config.algorithm.dynamic_sampling_tries:
        surplus = max(len(found) - config.batch.prompts_per_step, 0)
        metrics |= {
            "prompts_dropped/equal_rewards": float(num_equal),
            "prompts_dropped/surplus": float(surplus),
            "rollouts": attempt + 1.0,
        }
    return found[: config.batch.prompts_per_step], attempt + 1, metrics


def update(job: Job, step: int, groups: Sequence[Group]) -> StepMetrics:
    """The optimizer steps of one rollout."""
    samples, batches = prepare(job.config, groups, job.policy, job.runtime, job.timers)
    num_passes = sum(map(len, batches)) * (job.config.layout.vpp or 1) * job.config.batch.epochs
    is_shown = job.is_main and job.config.log.progress
    with job.timers("update"), progress(num_passes, "update, micro-batches", is_shown) as bar, recorder().heard(bar.advance):
        metrics = mean_over_updates(job.policy.update(batches))
    with job.timers("exchange"):
        attach_old_logprobs(batches, samples, job.runtime, num_logged(groups, job.config.log.samples_per_step))
    blamed = [samples[i] for i in sorted(job.policy.nonfinite_samples)]
    messages = [*job.health.observe(step + 1, metrics, blamed), *job.policy.watch(step + 1, metrics.get("mismatch/k3", 0.0))]
    for message in messages:
        job.log.warn(message)
    return metrics | {"guard/level": float(job.policy.guard.level)}
