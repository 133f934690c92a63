"""One generation phase of a job: prompts in, scored groups out, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mega.distributed.recorder import recorder
from grpo_mega.observe.progress import progress
from grpo_mega.rewards.scorer import VERDICTS
from grpo_mega.rollout import exchange
from grpo_mega.rollout.engine import Sampling
from grpo_mega.run.job import Job
from grpo_mega.types import Group, Prompt, Sample

_MANY = 2**24  # more samples than a phase has


def rollout(
    job: Job,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    step: int,
    description: str,
    *,
    wanted: int | None = None,
    is_evaluation: bool = False,
) -> list[Group]:
    """Scored groups for all prompts, or for the first `wanted` that are done; in the order of the prompts, on every rank, all
    of the current policy. Samples are scored as they end, where they end.

    Raises SyncError if an engine that sampled them held another policy, and, but for an evaluation, RewardError if a reward
    function is broken.
    """
    is_shown = job.is_main and job.config.log.progress
    with job.timers("sample"), progress(len(prompts) * sampling.group_size, description, is_shown) as bar:
        num_shown = tokens_shown = 0

        def on_sample(sample: Sample) -> None:
            nonlocal num_shown, tokens_shown
            job.scorer.submit(sample)
            # By all ranks; one number for both, since each question to the store takes time.
            counted = job.colocation.rendezvous.fetch_add(f"{description} of step {step}", _MANY * sample.response_len + 1)
            tokens, num_done = divmod(counted + _MANY * sample.response_len + 1, _MANY)
            bar.advance(num_done - num_shown, tokens=tokens - tokens_shown)
            num_shown, tokens_shown = num_done, tokens

        phase = job.colocation.sample(prompts, sampling, step=step, on_sample=on_sample, wanted=wanted)
    job.scorer.keep(phase.mine.values())
    with job.timers("reward"), job.runtime.together():
        job.scorer.finish(recorder().beat)
        if not is_evaluation:
            job.scorer.check()
    with job.timers("exchange"):
        groups = exchange.gather(
            phase.mine,
            {place: prompts[place] for place in phase.places},
            [f.name for f in job.config.rewards.functions],
            VERDICTS,
        )
    exchange.check_versions(groups, step)
    if is_evaluation or not job.scorer.has_warned:  # training warns once, since each step counts the failures
        is_told = _warn_of_failures(job, groups, description)
        job.scorer.has_warned |= is_told and not is_evaluation
    return groups


def _warn_of_failures(job: Job, groups: Sequence[Group], description: str) -> bool:
    """Tells the first error of the reward functions on any rank, if there is one. All ranks call it."""
    samples = [sample for group in groups for sample in group.samples]
    num_failed = sum("error" in sample.verdicts.values() for sample in samples)
    if not num_failed:
        return False
    texts = job.colocation.rendezvous.all_gather("scoring", job.scorer.first_error, job.config.rollout.phase_deadline_s)
    job.log.warn(
        f"{description}: reward functions failed on {num_failed} of {len(samples)} samples, which then have 0 or no score; "
        f"the first: {next(filter(None, texts), 'a worker process ended')}"
    )
    return True
