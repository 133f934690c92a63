"""Log-probs of the teachers for a step's samples. The sample's row names its teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from grpo_mega.batching import pack as packing
from grpo_mega.batching.layout import from_samples
from grpo_mega.config import Config
from grpo_mega.data.sources import find_value
from grpo_mega.distributed.recorder import recorder
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.megatron.teacher import Teacher
from grpo_mega.rollout.sglang.session import served_logprobs
from grpo_mega.types import PackedBatch, Sample


def attach_teacher_logprobs(
    config: Config,
    samples: Sequence[Sample],
    batches: Sequence[Sequence[PackedBatch]],
    teachers: Mapping[str, Teacher],
    runtime: Runtime,
) -> None:
    """Set the batches' teacher_logprobs.

    A Megatron teacher computes all tokens, and only the values of its samples are kept. A server computes only its samples, and
    each rank requests a share of them.
    """
    names = [_teacher_of(config, sample) for sample in samples]
    if any(settings.url for settings in config.teachers.values()):
        rows = _ask_servers(config, samples, names, runtime)
        for mini_batch in batches:
            packing.attach(mini_batch, "teacher_logprobs", rows, samples)

    def is_taught(name: str, batch: PackedBatch) -> Tensor:
        is_of = [torch.full((samples[i].response_len,), float(names[i] == name)) for i in batch.sample_indices]
        return (from_samples(is_of, batch, samples) > 0) & (batch.loss_mask > 0)

    for name, teacher in teachers.items():
        if config.algorithm.has_vocab_kl:
            for batch, hidden in teacher.hidden(batches, partial(is_taught, name)):
                batch.teacher_hidden = (batch.teacher_hidden or {}) | {name: hidden}
            continue
        for batch, values in teacher.logprobs(batches):
            kept = values.where(is_taught(name, batch), 0.0)
            batch.teacher_logprobs = kept if batch.teacher_logprobs is None else batch.teacher_logprobs + kept


def _ask_servers(config: Config, samples: Sequence[Sample], names: Sequence[str], runtime: Runtime) -> list[Tensor]:
    """Return log-probs [response_len] for each sample, on every rank; 0 if its teacher is not on a server."""
    lengths = [sample.response_len for sample in samples]
    values_N = torch.zeros(sum(lengths), dtype=torch.float32)
    rows = values_N.split(lengths)
    with runtime.raise_on_all_ranks():
        for name, settings in config.teachers.items():
            mine = [i for i in range(runtime.rank, len(samples), runtime.layout.world_size) if names[i] == name]
            if settings.url is not None:
                found = served_logprobs(settings.url, [samples[i] for i in mine], recorder().beat)
                for i, values in zip(mine, found, strict=True):
                    rows[i].copy_(torch.tensor(values))
    return list(runtime.sum(values_N.to(runtime.device.torch_device)).cpu().split(lengths))


def _teacher_of(config: Config, sample: Sample) -> str:
    column = config.data.teacher_column
    return next(iter(config.teachers)) if column is None else str(find_value(sample.prompt.extras, column))
