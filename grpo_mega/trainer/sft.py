"""Supervised fine-tuning (SFT), top to bottom: draw rows, pack, update, save.

The loss of a step is the mean negative log-likelihood of all trained tokens of its rows, in nats per token. It is the
loss of train with advantages of 0 and positive_nll, so it depends on no layout, packing or micro-batch.

A step trains batch.prompts_per_step rows in one optimizer step. The rows are the draws of data/load.py, a function
of seed and step: each row once per epoch, and a step may take the last rows of an epoch and the first of the next.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch

from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.config import Config
from grpo_mega.data.chat import Demonstration
from grpo_mega.distributed.device import PeakMemory
from grpo_mega.distributed.launch import current_rank
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.paths import METRICS_FILE
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.text import read_lines
from grpo_mega.tracking.metrics import mean_over_updates
from grpo_mega.tracking.progress import Timers, phase
from grpo_mega.tracking.run_log import Hooks
from grpo_mega.trainer.batches import update_policy
from grpo_mega.trainer.folder import reraise_with_run_dir
from grpo_mega.trainer.inputs import SameInputs
from grpo_mega.trainer.job import TrainingJob, open_training
from grpo_mega.trainer.parts import build_policy
from grpo_mega.types import PackedBatch, Prompt, Sample, StepMetrics

_OF_POLICY_LOSS = ("loss/policy", "ratio/", "clip/", "mismatch/")  # metrics without a meaning here


def run(config: Config, hooks: Hooks | None = None) -> None:
    """Train from the run's last checkpoint to config.steps, with evaluations, and export the policy to RUN_DIR/hf.

    If asked to stop, save a checkpoint after the current step and end.
    """
    with reraise_with_run_dir(config.run_dir), ExitStack() as stack:  # its end always closes files and process groups
        shown = partial(phase, enabled=config.log.progress and not current_rank())
        inputs = SameInputs(config)
        with shown("connecting the ranks"):
            runtime = runtimes.start(config, inputs.meet)
            stack.callback(runtimes.stop)
        timers = Timers(take_peak=PeakMemory(runtime.device).take)
        policy = build_policy(config, inputs.found[0], runtime)
        job = open_training(TrainingJob, stack, inputs, runtime, policy, timers, hooks or Hooks())
        stack.enter_context(job.saved_on_failure())
        stack.enter_context(job.listening())
        first, tracer = job.resume(), job.tracer()
        rows = read_lines(config.run_dir / METRICS_FILE)[0] if job.is_main else []
        is_logged = any(row.get("step") == first and any(name.startswith("eval/") for name in row) for row in rows)
        if not job.runtime.max(torch.tensor([float(is_logged)], device=job.runtime.device.torch_device)):
            evaluate_if_due(job, first)  # a resumed run repeats no evaluation
        for step in range(first, config.steps):
            with tracer.step(step + 1):
                train_step(job, step)
            if step == first:
                job.log_peak_memory()
            if job.stops_after(step + 1):
                return
            evaluate_if_due(job, step + 1)
        job.export()


def train_step(job: TrainingJob, step: int) -> None:
    """Take one optimizer step on the rows of `step`, and save a checkpoint if one is due."""
    policy, turns = job.policy, job.draw(step)
    assert policy is not None
    with job.timers("pack"):
        samples, batches = pack([turn.prompt for turn in turns], policy)
    with job.timers("update"):
        batches = policy.attach_logprobs(batches)
        passes = update_policy(job.config.batch, policy, batches, job.pace, job.shows_progress)
    metrics = {n: v for n, v in mean_over_updates(passes).items() if not n.startswith(_OF_POLICY_LOSS)}
    metrics |= {"rows": float(len(turns)), "epoch": float(max(turn.epoch for turn in turns))}
    job.log.log_loads(step + 1, policy.routers.loads)
    blamed = [samples[i] for i in sorted(policy.nonfinite_samples)]
    for message in (*job.health.observe(step + 1, metrics, blamed), *policy.watch(step + 1, 0.0)):
        job.log.warn(message)
    job.save_if_due(step + 1, Backlog())
    job.log.log_step(step + 1, metrics | job.timers.lap())
    job.health.check(step + 1, metrics)


def pack(rows: Sequence[Prompt], policy: Policy) -> tuple[list[Sample], list[list[PackedBatch]]]:
    """Return a sample for each segment of the rows, and this rank's micro-batches of one mini-batch.

    The trained tokens of a micro-batch have loss_mask 1 and nll_weights 1 / the trained tokens of all rows.
    """
    samples = []
    for row in rows:
        for index, segment in enumerate(cast("Demonstration", row).segments):
            prompt, zeros = Prompt(row.id, "", segment.prompt_ids, ""), [0.0] * len(segment.response_ids)
            sample = Sample(prompt, index, segment.response_ids, zeros, "stop", sampled=segment.trained)
            sample.advantages = torch.tensor(zeros)
            samples.append(sample)
    num_trained = float(sum(sample.num_sampled for sample in samples))
    batches = pack_mini_batches([samples], [[1.0] * len(samples)], policy.packing)
    for batch in batches[0]:
        batch.nll_weights = batch.loss_mask / num_trained
    return samples, batches


def evaluate_if_due(job: TrainingJob, step: int) -> None:
    """Log the mean loss of each held-out set before the first step, after the last, and every eval.interval steps."""
    interval = job.config.eval.interval
    if step not in (0, job.config.steps) and not (interval > 0 and step % interval == 0):
        return
    assert job.policy is not None
    metrics: StepMetrics = {}
    with job.timers("evaluation"):
        for name, rows in job.heldout.items():
            metrics[f"eval/{f'{name}/' if name else ''}loss"] = mean_loss(rows, job.policy, job.runtime)
    if metrics:
        job.log.log_eval(step, metrics | {"seconds/evaluation": job.timers.lap()["seconds/step"]})


def mean_loss(rows: Sequence[Prompt], policy: Policy, runtime: Runtime) -> float:
    """Return the mean negative log-likelihood of the trained tokens. All ranks call it."""
    loss = torch.zeros(1, dtype=torch.float64, device=runtime.device.torch_device)
    for batch, logprobs in policy.evaluate(pack(rows, policy)[1]):
        assert batch.nll_weights is not None
        if runtime.tp_rank == 0:
            loss -= (logprobs.double() * batch.nll_weights).sum()
    return float(runtime.sum(loss))
