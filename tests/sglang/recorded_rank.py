"""`python recorded_rank.py FOLDER ARGUMENT ...`: run `grpo-mega ARGUMENT ...` as one rank, and store synced weights and
samples.

FOLDER/version-N is a Hugging Face checkpoint of each version that a sync sends to the engines. FOLDER/step-N.pt has the
samples that a step trains: (prompt tokens, response tokens, the engine's log-probs, spans).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_mega import cli, train
from grpo_mega.trainer.export import export_policy
from grpo_mega.trainer.job import Job
from grpo_mega.types import Group

FOLDER = Path(sys.argv[1])
keep = train.keep_rollout


def keep_samples(job: Job, step: int, groups: Sequence[Group]) -> None:
    if job.is_main:
        samples = [sample for group in groups for sample in group.samples]
        rows = [(list(s.prompt.token_ids), list(s.response_ids), list(s.rollout_logprobs), s.spans) for s in samples]
        torch.save(rows, FOLDER / f"step-{step}.pt")
    assert job.policy is not None  # it is updated and synced here
    export_policy(job.policy, job.model, FOLDER / f"version-{step}")
    keep(job, step, groups)


train.keep_rollout = keep_samples
sys.exit(cli.main(sys.argv[2:]))
