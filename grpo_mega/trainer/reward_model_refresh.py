"""Refresh the reward model between iterations, with a command of the user (DeepSeekMath, arXiv 2402.03300, algorithm
1).

An iteration is algorithm.ref_model_sync_steps steps. Before the next iteration starts, rank 0 runs
rewards.refresh_command and all ranks wait. Then the servers of `reward_model` must answer, as at the start.
rewards/README.md lists the command's inputs. A run that resumes between two iterations runs the command again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Sequence
from functools import partial

from grpo_mega.distributed.launch import die_with_launcher
from grpo_mega.errors import ConfigError, RefreshError
from grpo_mega.paths import LOGS, REPLAY_FILE, ROLLOUTS_FILE, refresh_log, write_atomically
from grpo_mega.processes import shared_folder
from grpo_mega.rewards.reward_model import check_reachable
from grpo_mega.text import json_line, read_json_lines
from grpo_mega.trainer.job import Job
from grpo_mega.types import Group

# Prefixes of variables that are only for the ranks.
_OF_RANKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "GRPO_MEGA_",
)


def keep_rollout(job: Job, step: int, groups: Sequence[Group]) -> None:
    """Append all samples of a step to a file in the run's folder, if there is a refresh command."""
    length = job.config.algorithm.ref_model_sync_steps
    if job.config.rewards.refresh_command is None or length is None or not job.is_main:
        return
    with (job.config.run_dir / ROLLOUTS_FILE).open("a", encoding="utf-8") as file:
        for sample in (sample for group in groups for sample in group.samples):
            row = {
                "step": step,
                "iteration": -(-step // length),
                "prompt_id": sample.prompt.id,
                "index": sample.index,
                "prompt": sample.prompt.text,
                "answer": sample.prompt.answer,
                "response": job.rollouts.decode(sample.response_ids),
                "finish_reason": sample.finish_reason,
                "reward": sample.reward,
                "rewards": sample.scores,
            }
            file.write(json_line(row))


def refresh_rewards_if_due(job: Job, step: int) -> None:
    """Run the command if an iteration ends after `step` finished steps.

    Raise RefreshError on all ranks if the command fails, or if a server does not answer after it.
    """
    config, length = job.config, job.config.algorithm.ref_model_sync_steps
    if (
        config.rewards.refresh_command is None
        or length is None
        or step == 0
        or not config.algorithm.ends_iteration(step)
    ):
        return
    with job.timers("refresh"):
        job.log.message(f"iteration {step // length} has ended: running rewards.refresh_command")
        _agree(job, _run_command(job, config.rewards.refresh_command, step, step // length) if job.is_main else None)
        problem = None
        try:
            for function in config.rewards.functions:
                if function.name == "reward_model":
                    check_reachable(function.options)
        except ConfigError as error:
            problem = f"after rewards.refresh_command, {error}"
        _agree(job, problem)


def _agree(job: Job, problem: str | None) -> None:
    """Raise the first problem of any rank on all ranks. Do not wait in a collective, because the command may take
    hours.
    """
    deadline_s = job.config.rewards.refresh_deadline_s + job.config.hang_deadline_s
    for found in job.rollouts.rendezvous.all_gather("the refresh of the reward model", problem, deadline_s):
        if found is not None:
            raise RefreshError(found)


def _run_command(job: Job, command: str, step: int, iteration: int) -> str | None:
    """Run the command. Return why it failed; None if it succeeded."""
    config = job.config
    # The command reads these samples. The random choice is the same each time.
    path = config.run_dir / ROLLOUTS_FILE
    rows = [(line, row["iteration"]) for line, row in read_json_lines(path) if row] if path.exists() else []
    earlier = [place for place, (_, number) in enumerate(rows) if number < iteration]
    drawn = random.Random(f"{config.seed} {iteration}").sample(
        earlier, round(config.data.replay_fraction * len(earlier))
    )
    chosen = {*drawn, *(place for place, (_, number) in enumerate(rows) if number == iteration)}
    write_atomically(config.run_dir / REPLAY_FILE, b"".join(rows[place][0] for place in sorted(chosen)))
    folder, deadline_s = config.run_dir.resolve(), config.rewards.refresh_deadline_s
    given = {"REPLAY": folder / REPLAY_FILE, "RUN_DIR": folder, "ITERATION": iteration, "STEP": step}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RANKS)}
    environment["TMPDIR"] = str(shared_folder())  # the run's temporary folder is removed with the run
    environment |= {f"GRPO_MEGA_{name}": str(value) for name, value in given.items()}
    log = config.run_dir / LOGS / refresh_log(step)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        # The command gets a separate session, so Ctrl-C stops the trainer and not the command.
        process = subprocess.Popen(
            command,
            shell=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_launcher, os.getpid()),  # the kernel kills the command if the trainer dies
        )
    try:
        code = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return (
            f"rewards.refresh_command was not done after rewards.refresh_deadline_s={deadline_s:g}; see {log}, and"
            " raise it"
        )
    return (
        f"rewards.refresh_command ended with code {code}; see {log}, correct it and continue with --resume"
        if code
        else None
    )
