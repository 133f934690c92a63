"""TRL's side of benchmarks/vs_trl: the real GRPOTrainer. It waits for a request at the start of every rollout.

Only two things in TRL are replaced, so that both contestants train on the same mini-batches: `rollout_func` supplies
the given responses, and samples of a rollout are not shuffled.
"""

from __future__ import annotations

import contextlib
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from tools.benchmarks.vs_trl.contestant import Peak
from tools.benchmarks.vs_trl.reward import reward
from tools.benchmarks.vs_trl.task import Task, given_rollout

ENDLESS = 1_000_000


class Stop(Exception):
    """Raised when there are no more requests."""


class Turns(TrainerCallback):
    """A callback that receives a request before a rollout's first optimizer step and answers after its last."""

    def __init__(self, channel: Connection, task: Task) -> None:
        self.channel, self.task = channel, task
        self.trainer: Any = None
        self.given = given_rollout(task, 1, 0)
        self.peak = Peak()
        self.started_at = 0.0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.lengths = [0.0, 0.0]

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids, response_ids = self.given
        each = [ids for ids in prompt_ids for _ in range(self.task.group_size)]
        return {"prompt_ids": each, "completion_ids": response_ids, "logprobs": None}

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.task.mini_batches:
            return
        request = self.channel.recv()
        if request is None:
            raise Stop
        is_given = request["kind"] == "update"
        if is_given:
            self.given = given_rollout(self.task, request["ratio"], request["number"])
        self.trainer.rollout_func = self.rollout if is_given else None
        self.losses, self.norms = [], []
        self.peak.take()
        self.started_at = time.perf_counter()

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "grad_norm" in logs:
            self.losses.append(float(logs["loss"]))
            self.norms.append(float(logs["grad_norm"]))
            if "completions/mean_length" in logs:  # TRL logs the rollout's lengths with its first optimizer step
                self.lengths = [float(logs[f"completions/{of}_length"]) for of in ("mean", "max")]
            if state.global_step % self.task.mini_batches == 0:
                answer = {"seconds": time.perf_counter() - self.started_at, "losses": self.losses, "norms": self.norms}
                answer |= {"tokens": self.lengths[0] * self.task.num_samples, "longest": self.lengths[1]}
                self.channel.send(answer | {"peak": self.peak.take()})


def serve(task: Task, channel: Connection, micro_batch: int) -> None:
    disable_progress_bar()
    setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)  # noqa: B010
    from datasets import load_dataset

    turns = Turns(channel, task)
    per_mini_batch = task.num_samples // task.mini_batches
    micro_batch = min(micro_batch, per_mini_batch)
    num_micro_batches = per_mini_batch // micro_batch
    config = GRPOConfig(
        output_dir=str(task.folder / "trl"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_micro_batches,
        steps_per_generation=task.mini_batches * num_micro_batches,
        num_generations=task.group_size,
        max_completion_length=task.max_length,
        temperature=1.0,
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        max_steps=ENDLESS,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        logging_strategy="steps",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=task.seed,
    )
    trainer = GRPOTrainer(
        model=str(task.folder / "model"),
        reward_funcs=[score],
        args=config,
        train_dataset=load_dataset("json", data_files=str(task.folder / "train.jsonl"), split="train"),
        callbacks=[turns],
    )
    turns.trainer = trainer
    channel.send({"ready": True})
    with contextlib.suppress(Stop):
        trainer.train()


def score(completions: list[Any], **kwargs: Any) -> list[float]:
    return [reward(one[0]["content"]) for one in completions]
