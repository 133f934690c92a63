"""Policy and engine share a device: what is on it during the teachers' passes, and an update that runs out of memory.

The engine here only records its calls, and memory runs out on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_mega.algorithm.losses import LossOutputs
from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.distributed.device import Device
from grpo_mega.errors import EngineError
from grpo_mega.megatron.offload import Teacher
from grpo_mega.tracking.progress import FreeMemory, Timers
from grpo_mega.trainer.batches import attach_teacher_logprobs
from grpo_mega.trainer.colocation import Colocation
from grpo_mega.types import PackedBatch
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.gpu_policies import SIZES, MadePolicy, make_policy, make_samples, packed
from tests.helpers.models import VOCAB_SIZE, make_config

pytestmark = [pytest.mark.rehearsed, pytest.mark.emulated]
TAUGHT: dict[str, Any] = {
    "algorithm": {"distill_kl": "forward", "distill_beta": 0.5},
    "teachers": {"one": {"path": "unused"}},
}


class Memory:
    """Answers `both_fit` as told."""

    def __init__(self, *answers: bool) -> None:
        self._answers, self.ran_out = list(answers), False

    @contextmanager
    def peak_of_training(self) -> Iterator[None]:
        yield

    def both_fit(self) -> bool:
        return self._answers.pop(0) and not self.ran_out

    def summary(self) -> str:
        return "as told"


def colocate(policy: MadePolicy, memory: Memory | None = None) -> tuple[Colocation, list[str], list[str]]:
    """Return a colocation, the calls of its engine, and its log."""
    calls, log = list[str](), list[str]()
    names = ("sleep", "wake_weights", "wake_cache")
    engine: Any = SimpleNamespace(is_server=True, **{name: lambda name=name: calls.append(name) for name in names})
    rollout, unused = policy.config.rollout, Any
    return Colocation(policy, engine, unused, unused, Timers(), rollout, memory, log.append), calls, log  # type: ignore[arg-type]


def make_teacher(policy: MadePolicy) -> Teacher:
    hf_config = make_config("qwen2", **SIZES)
    shape, family = ModelShape.from_hf_config(hf_config.to_dict()), family_of("qwen2")
    teacher = Teacher(policy.config, shape, family, hf_config, policy.runtime, shape.vocab)
    teacher.load(random_reader(family.hf_tensors(shape), seed=4, std=0.05))
    return teacher


def batches_of(policy: MadePolicy) -> list[list[PackedBatch]]:
    return policy.attach_logprobs(packed(policy, make_samples(6, VOCAB_SIZE), token_budget=128))


def test_teachers_compute_before_gradients_and_optimizer_are_on_the_device(device: Device) -> None:
    policy = make_policy(device, rollout={"sleep": "always"})
    policy.update(batches_of(policy))
    policy.memory.offload_optimizer()
    weights = policy.memory.device_bytes
    policy.memory.offload_weights()
    colocation, calls, _ = colocate(policy)
    seen: list[int] = []

    def take(hidden_TH: Tensor, batch: PackedBatch) -> None:
        seen.append(policy.memory.device_bytes)

    with colocation.training():
        batches = batches_of(policy)
        teacher = make_teacher(policy)
        with teacher._on_device():
            teacher._pipeline.evaluate(batches, take)
        policy.update(batches)
        assert policy.memory.device_bytes > 2 * weights
    assert len(batches[0]) > 1 and seen == [weights] * len(batches[0]) and calls == ["sleep"]


def test_the_free_memory_of_every_phase_is_a_metric_beside_the_plans(device: Device) -> None:
    """A reading counts what policy and engine hold: 10 GiB less what is on the device."""
    policy = make_policy(device, rollout={"sleep": "always"})
    policy.update(batches_of(policy))
    policy.memory.offload_optimizer()
    policy.memory.offload_weights()
    colocation, calls, _ = colocate(policy)
    planned = dict.fromkeys(FreeMemory.PHASES, 5.0)

    def read() -> int:
        engine = {"sleep": 0, "wake_weights": 1, "wake_cache": 3}[calls[-1] if calls else "wake_cache"]
        return (10 - engine << 30) - policy.memory.device_bytes

    free = FreeMemory(read, list)
    free.planned, colocation.free = planned, free
    colocation.sync = SimpleNamespace(sync_weights=lambda *arguments, **options: 0)  # type: ignore[assignment]
    colocation.rendezvous = SimpleNamespace(all_gather=lambda *arguments: [None])  # type: ignore[assignment]
    colocation.engine.failure = None
    with colocation.training():
        policy.update(batches_of(policy))
        state = policy.memory.device_bytes / 2**30
    metrics = colocation.sync_weights(version=1)
    weights = 9 - metrics["memory/free_sync_gib"]
    assert metrics["memory/free_generation_gib"] == 7 and metrics["memory/free_asleep_gib"] == 10
    assert metrics["memory/free_training_gib"] == 10 - state and 0 < weights < state / 2
    assert {name: metrics[f"memory/planned_free_{name}_gib"] for name in planned} == planned


def test_a_teachers_output_layer_is_copied_once_per_update(device: Device) -> None:
    policy = make_policy(device, **TAUGHT)
    teacher = make_teacher(policy)
    policy.teachers["one"] = teacher
    head, copies = teacher.head_VG, list[str]()
    assert head.is_pinned() == device.is_cuda and head.any()

    def copy(*arguments: Any, **options: Any) -> Tensor:
        copies.append("head")
        return head.to(*arguments, **options)

    teacher.head_VG = SimpleNamespace(to=copy)  # type: ignore[assignment]
    batches = batches_of(policy)
    samples = make_samples(6, VOCAB_SIZE)
    attach_teacher_logprobs(policy.config.teachers, None, policy, samples, batches, policy.runtime)
    [metrics] = policy.update(batches)
    assert len(batches[0]) > 1 and copies == ["head"] and metrics["loss/distill"] != 0
    assert not policy._heads, "the output layer stays on the device"


def updated(policy: MadePolicy) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    metrics = policy.update(batches_of(policy))
    return metrics, {name: tensor.detach().cpu().clone() for name, tensor in policy.parameters.items()}


def run_out_once(policy: MadePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second micro-batch from now on find no memory, once."""
    count, loss = [0], policy._loss

    def fail(hidden_TH: Tensor, batch: PackedBatch) -> LossOutputs:
        count[0] += 1
        if count[0] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(hidden_TH, batch)

    monkeypatch.setattr(policy, "_loss", fail)


def test_an_update_without_memory_runs_again_while_the_engine_sleeps(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [updated(policy) for policy in [make_policy(device)] for _ in range(2)]
    policy = make_policy(device)
    colocation, calls, log = colocate(policy, Memory(True, True, True))
    with colocation.training():
        first = updated(policy)
    run_out_once(policy, monkeypatch)
    with colocation.training():
        second = updated(policy)
    for (metrics, weights), (same_metrics, same_weights) in zip(expected, (first, second), strict=True):
        assert metrics == same_metrics
        assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    assert calls == ["sleep", "wake_weights", "wake_cache", "sleep"], "the engine sleeps once, in the second update"
    assert len(log) == 2 and "take turns" in log[1]
    with colocation.training():
        pass
    assert calls[4:] == ["sleep"] and len(log) == 2, "policy and engine take turns for the rest of the run"


def test_turns_start_again_on_all_ranks_if_both_do_not_fit_any_more(device: Device) -> None:
    colocation, calls, log = colocate(make_policy(device), Memory(True, False))
    for _ in range(2):
        with colocation.training():
            pass
    assert calls == ["sleep", "wake_weights", "wake_cache", "sleep"] and len(log) == 2


@pytest.mark.parametrize("layout", [{"overlap_grad_reduce": True}, {}])
def test_a_rank_that_others_wait_for_ends_with_the_remedy(
    layout: dict[str, Any], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy(device, layout=layout, rollout={"sleep": "auto" if layout else "never"})
    colocation, calls, _ = colocate(policy, Memory(True))
    if layout:
        with colocation.training():
            pass
        calls.clear()
    run_out_once(policy, monkeypatch)
    with pytest.raises(EngineError, match=r"--resume --set rollout\.sleep=always"), colocation.training():
        updated(policy)
    assert not calls
