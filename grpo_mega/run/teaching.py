"""Log-probs of the teachers for a step's samples, each from the teacher that its row names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from grpo_mega.batching.layout import from_samples
from grpo_mega.config import Config
from grpo_mega.megatron.teacher import Teacher
from grpo_mega.types import PackedBatch, Sample


def attach_teacher_logprobs(
    config: Config,
    samples: Sequence[Sample],
    batches: Sequence[Sequence[PackedBatch]],
    teachers: Mapping[str, Teacher],
) -> None:
    """Set the batches' teacher_logprobs, on the last stage. Every teacher sees all tokens; those of its samples are kept."""
    for name, teacher in teachers.items():
        for batch, values in teacher.logprobs(batches):
            mine = [samples[i] for i in batch.sample_indices]
            is_of_T = from_samples(
                [torch.full((s.response_len,), _teacher_of(config, s) == name) for s in mine], batch, samples
            )
            kept = values.where(is_of_T, 0.0)
            batch.teacher_logprobs = kept if batch.teacher_logprobs is None else batch.teacher_logprobs + kept


def _teacher_of(config: Config, sample: Sample) -> str:
    column = config.data.teacher_column
    return next(iter(config.teachers)) if column is None else str(sample.prompt.extras[column])
