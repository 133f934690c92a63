"""The training run, top to bottom: sample groups, score them, compute advantages, update the policy, hand its weights on.

Every rank runs this program; there is no controller. Rollouts are shared over the ranks and then gathered, so that every rank
computes the same advantages and the same packing; each then trains on its own part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_mega.algorithm import advantages
from grpo_mega.algorithm.aggregate import token_weights
from grpo_mega.batching import pack
from grpo_mega.config import Config
from grpo_mega.job import Job, export_policy, open_job
from grpo_mega.megatron.policy import Policy
from grpo_mega.observe.progress import progress
from grpo_mega.observe.rollout_metrics import heldout_metrics, mean_over_updates, rollout_metrics
from grpo_mega.rewards.scorer import VERDICTS, drop_unusable
from grpo_mega.rollout import exchange
from grpo_mega.rollout.engine import Sampling
from grpo_mega.types import Group, PackedBatch, Prompt, Sample, StepMetrics


def run(config: Config) -> None:
    """Trains up to config.steps from where the run's last checkpoint ended, evaluating before, during and after.

    Exports the policy to RUN_DIR/hf at the end. Asked to stop, it ends after the step under way, with a checkpoint.
    """
    with open_job(config) as job, job.saved_if_engine_fails():
        first = job.restore()
        job.colocation.publish(first)
        evaluate_if_due(job, first)
        for step in range(first, config.steps):
            train_step(job, step)
            if step == first:
                job.tell_memory()
            if job.is_stopped(step + 1):
                return
            evaluate_if_due(job, step + 1)
        with job.colocation.training():
            export_policy(job.policy, job.model, config.run_dir / "hf")
        job.log.message(f"policy saved as a Hugging Face checkpoint in {config.run_dir / 'hf'}")


def train_step(job: Job, step: int) -> None:
    """One rollout and its optimizer steps, and a checkpoint if one is due; then the engine has the new policy, step + 1."""
    timers = job.timers
    groups = rollout(job, job.prompts(step), job.sampling, step, "sampling")
    groups, num_dropped = drop_unusable(groups)
    metrics: StepMetrics = {"prompts_dropped/gold_unparsable": float(num_dropped)} | rollout_metrics(groups)
    with job.colocation.training():
        if len(groups) >= job.config.batch.mini_batches:
            metrics |= update(job, step, groups)
        job.steps_done = step + 1
        job.save_if_due(step + 1)
    job.log.log_samples(step + 1, groups, job.decode)
    try:
        metrics |= job.colocation.publish(step + 1)
    finally:
        job.log.log_step(step + 1, metrics | timers.lap())
    job.check_mismatch(step + 1, metrics)


def update(job: Job, step: int, groups: Sequence[Group]) -> StepMetrics:
    """The optimizer steps of one rollout. Raises NonFiniteError, with a checkpoint, after too many that are not finite."""
    timers = job.timers
    with timers("pack"):
        samples = assign_advantages(job.config, groups)
        batches = make_batches(job.config, groups, job.policy)
    with timers("logprobs"):
        batches = job.policy.attach_logprobs(batches)
    with timers("update"):
        metrics = mean_over_updates(job.policy.update(batches))
    job.check_finite(step + 1, metrics, samples)
    for message in job.policy.watch(step + 1, metrics.get("mismatch/k3", 0.0)):
        job.log.message(message)
    return metrics | {"guard/level": float(job.policy.guard.level)}


def assign_advantages(config: Config, groups: Sequence[Group]) -> list[Sample]:
    """By the group's rewards, on all samples of the step; they come back flat and in order."""
    a = config.algorithm
    return advantages.assign(
        groups, normalize=a.normalize_advantages, by_std=a.normalize_by_std, ddof=a.std_ddof, eps=a.std_eps
    )


def rollout(job: Job, prompts: Sequence[Prompt], sampling: Sampling, step: int, description: str) -> list[Group]:
    """Scored groups for all prompts, on every rank, all of the current policy. Samples are scored as they end, where they end.

    Raises SyncError if an engine that sampled them held another policy.
    """
    is_shown = job.is_main and job.config.log.progress
    with job.timers("sample"), progress(len(prompts) * sampling.group_size, description, is_shown) as bar:
        num_shown = 0

        def on_sample(sample: Sample) -> None:
            nonlocal num_shown
            job.scorer.submit(sample)
            num_done = job.colocation.board.take(f"{description} of step {step}") + 1  # by all ranks
            bar.advance(num_done - num_shown)
            num_shown = num_done

        mine = job.colocation.sample(prompts, sampling, step=step, on_sample=on_sample)
    with job.runtime.together(), job.timers("reward"):
        job.scorer.finish()
    with job.timers("exchange"):
        groups = exchange.gather(mine, prompts, [f.name for f in job.config.rewards.functions], VERDICTS)
    exchange.check_versions(groups, step)
    return groups


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


def _weights(config: Config, samples: Sequence[Sample], mini_batches: Sequence[Sequence[Sample]]) -> list[float]:
    """Samples without a reward do not train and do not count."""
    counted = [s for s in samples if s.reward is not None]
    num_tokens: float = sum(s.response_len for s in counted)
    if config.algorithm.use_valid_token_scale:  # the mini-batch's share of the rollout's valid tokens
        num_tokens = sum(s.response_len for mini in mini_batches for s in mini if s.reward is not None) / len(mini_batches)
    weights = iter(
        token_weights(
            [s.response_len for s in counted],
            config.algorithm.loss_agg_func,
            max_response_length=config.rollout.max_response_length,
            num_samples=len(counted),
            num_tokens=num_tokens,
        )
    )
    return [next(weights) if s.reward is not None else 0.0 for s in samples]


def evaluate_if_due(job: Job, step: int) -> None:
    """Before the first step, after the last, and every eval.interval steps; a run that goes on does not repeat one."""
    is_due = step in (0, job.config.steps) or job.is_due(job.config.eval.interval, step)
    if is_due and job.heldout_prompts:
        board, deadline_s = job.colocation.board, job.config.rollout.phase_deadline_s
        is_done, *_ = board.meet("evaluation", heldout_path(job, step).exists(), deadline_s)
        if not is_done:  # as the first rank sees it, which writes the file
            evaluate(job, step)


def evaluate(job: Job, step: int) -> None:
    """Answers the held-out prompts greedily; the score is the share of responses with full marks from every reward."""
    greedy = replace(job.sampling, group_size=1, temperature=0.0)
    groups = rollout(job, job.heldout_prompts, greedy, step, "held-out prompts")
    usable, _ = drop_unusable(groups)
    job.log.log_eval(step, heldout_metrics(usable) | {"seconds/evaluation": job.timers.lap()["seconds/step"]})
    if job.is_main:
        rows = [
            {"id": g.prompt.id, "prompt": g.prompt.text, "response": job.decode(s.response_ids), "token_ids": s.response_ids}
            | {"scores": s.scores}
            for g in groups
            for s in g.samples
        ]
        heldout_path(job, step).write_text("".join(json.dumps(row) + "\n" for row in rows))


def heldout_path(job: Job, step: int) -> Path:
    return job.config.run_dir / f"heldout-{step:06d}.jsonl"
