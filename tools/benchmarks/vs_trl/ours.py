"""Our side of benchmarks/vs_trl: the job that `grpo-mega train` opens, with the same train_step and update."""

from __future__ import annotations

import json
import time
from multiprocessing.connection import Connection
from typing import Any

import grpo_mega.megatron  # noqa: F401  # this import applies patches, so it must come first
from grpo_mega.config import Config
from grpo_mega.distributed.launch import only_rank
from grpo_mega.paths import METRICS_FILE
from grpo_mega.train import train_step
from grpo_mega.trainer.batches import assign_advantages, attach_logprobs, pack
from grpo_mega.trainer.job import Job, open_job
from grpo_mega.types import Group, Prompt, Sample
from tools.benchmarks.vs_trl.contestant import Peak
from tools.benchmarks.vs_trl.reward import reward
from tools.benchmarks.vs_trl.task import Task, given_rollout


def config_of(task: Task, tokens_per_micro_batch: int) -> Config:
    return Config.model_validate(
        {
            "run_dir": task.folder / "ours",
            "steps": 1_000_000,
            "seed": task.seed,
            "model": {"path": task.folder / "model", "dtype": "float32"},
            "data": {"train": str(task.folder / "train.jsonl"), "max_prompt_length": task.prompt_length},
            "rollout": {"max_response_length": task.max_length, "max_concurrent": task.num_samples},
            "algorithm": {
                "group_size": task.group_size,
                "kl_beta": 0.0,
                "loss_agg_func": "token-mean",
                "ratio_clip_eps": 0.2,
                "use_valid_token_scale": True,
                "std_eps": 1e-4,
            },
            "rewards": {"functions": [{"name": "tools.benchmarks.vs_trl.reward.score"}], "num_workers": 1},
            "batch": {
                "prompts_per_step": task.prompts,
                "mini_batches": task.mini_batches,
                "tokens_per_micro_batch": tokens_per_micro_batch,
            },
            "optimizer": {"lr": task.lr, "betas": (0.9, 0.95)},
            "log": {"progress": False},
        }
    )


def serve(task: Task, channel: Connection, tokens_per_micro_batch: int) -> None:
    with only_rank(), open_job(config_of(task, tokens_per_micro_batch)) as job:
        job.resume()
        job.colocation.sync_weights(version=0)
        channel.send({"ready": True})
        peak, step = Peak(), 0
        while (request := channel.recv()) is not None:
            groups = given_groups(task, request["ratio"], request["number"]) if request["kind"] == "update" else []
            job.timers.lap()
            peak.take()
            started_at = time.perf_counter()
            answer = update(job, groups) if groups else whole_step(job, step)
            channel.send({"seconds": time.perf_counter() - started_at, "peak": peak.take(), **answer})
            step += 1
            if groups:
                job.colocation.sync_weights(version=step)


def update(job: Job, groups: list[Group]) -> dict[str, Any]:
    """Do one update as in grpo_mega.train.train_step. Return losses and gradient norms by optimizer step."""
    assert job.policy is not None
    for group in groups:
        for sample in group.samples:
            sample.reward = reward(job.rollouts.decode(sample.response_ids))
    assign_advantages(job.config.rollout, job.config.rewards, job.policy.algorithm, groups)
    batches = pack(job.config, groups, job.policy)
    batches = attach_logprobs(job.config, groups, batches, job.policy, job.runtime, job.timers)
    passes = job.policy.update(batches)
    return {"losses": [p["loss/total"] for p in passes], "norms": [p["grad_norm"] for p in passes]}


def whole_step(job: Job, step: int) -> dict[str, Any]:
    train_step(job, step)
    line = json.loads((job.config.run_dir / METRICS_FILE).read_text().splitlines()[-1])
    num_samples = job.config.batch.prompts_per_step * job.config.algorithm.group_size
    return {"tokens": line["response_length/mean"] * num_samples, "longest": line["response_length/max"]}


def given_groups(task: Task, ratio: float, number: int) -> list[Group]:
    prompts, responses = given_rollout(task, ratio, number)
    groups = [Group(Prompt(place, "", tuple(ids), ""), []) for place, ids in enumerate(prompts)]
    for number_of_sample, ids in enumerate(responses):
        place, index = divmod(number_of_sample, task.group_size)
        sample = Sample(groups[place].prompt, index, ids, rollout_logprobs=[0.0] * len(ids), finish_reason="stop")
        groups[place].samples.append(sample)
    return groups
