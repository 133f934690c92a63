"""A teacher with the reference's weights returns the reference's log-probs each time it is loaded from the host."""

from __future__ import annotations

import itertools

import pytest
import torch

from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.distributed.device import Device
from grpo_mega.megatron.offload import Teacher
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.gpu_policies import SIZES, make_policy, make_samples, packed
from tests.helpers.models import VOCAB_SIZE, make_config


@pytest.mark.rehearsed
@pytest.mark.emulated
def test_a_teacher_from_the_host_returns_the_references_log_probs(device: Device) -> None:
    policy = make_policy(device, algorithm={"kl_beta": 0.01})
    hf_config = make_config("qwen2", **SIZES)
    shape, family = ModelShape.from_hf_config(hf_config.to_dict()), family_of("qwen2")
    teacher = Teacher(policy.config, shape, family, hf_config, policy.runtime, shape.vocab)
    teacher.load(random_reader(family.hf_tensors(shape), seed=3, std=0.05))
    batches = policy.attach_logprobs(packed(policy, make_samples(6, VOCAB_SIZE)))
    for _ in range(2):
        assert all(storage.nbytes() == 0 for storage, _ in teacher._host.taken), "the teacher is not on the host"
        found = teacher.logprobs(batches)
        assert all(
            batch is other for (batch, _), other in zip(found, itertools.chain.from_iterable(batches), strict=True)
        )
        for batch, logprobs_T in found:
            assert batch.ref_logprobs is not None
            assert torch.equal(logprobs_T[batch.loss_mask > 0], batch.ref_logprobs[batch.loss_mask > 0])
