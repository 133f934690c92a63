"""One rank of the offload tests: policies that move to the host and back between all steps, against policies that
stay.
"""

from __future__ import annotations

import itertools
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_mega import config as configs
from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.config import Config
from grpo_mega.distributed import device as devices
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.pipeline import BACKWARD, FORWARD
from grpo_mega.megatron.policy import OPTIMIZER, Policy
from grpo_mega.types import Group, PackedBatch, Prompt, Sample
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers import late_streams
from tests.helpers.models import VOCAB_SIZE, make_config
from tests.helpers.ranks import run_cases

OVERLAP = ",overlap_grad_reduce=true,overlap_param_gather=true"
LAYOUTS = {
    1: ("tp=1 float32", "tp=1 bfloat16", f"tp=1{OVERLAP} bfloat16"),
    4: (
        "tp=2,dp=2 float32",
        f"tp=2,dp=2,sequence_parallel=true{OVERLAP} bfloat16",
        "pp=2,dp=2 bfloat16",
        f"pp=2,dp=2{OVERLAP} float32",
        "cp=2,dp=2 float32",
        f"pp=2,vpp=2,dp=2{OVERLAP} bfloat16",
    ),
}
RESUMED = {1: ("tp=1 float32", "tp=1 bfloat16"), 4: (f"pp=2,dp=2{OVERLAP} bfloat16",)}
WITH_REFERENCE = {1: ("tp=1 float32",), 4: (f"pp=2,dp=2{OVERLAP} bfloat16",)}
MANY_STEPS = 200

# The result of a step: metrics, a checksum of this rank's weights, and the fingerprint of the master weights.
Record = tuple[list[dict[str, float]], int, str]


class Trainee:
    """A policy and its steps. Several of them run one after another in the same processes."""

    def __init__(self, config: Config, model_type: str = "qwen2", **changes: Any) -> None:
        """`changes` apply to the model's config."""
        runtime = runtimes.arrange(config, devices.select("cpu", 0))
        hf_config = make_config(model_type, **changes)
        shape = ModelShape.from_hf_config(hf_config.to_dict())
        family = family_of(model_type)
        self.config = config
        self.policy = Policy(config, shape, family, hf_config, runtime)
        self.policy.load(random_reader(family.hf_tensors(shape), seed=3, std=0.15))

    def update(self, step: int) -> list[dict[str, float]]:
        return self.policy.update(self.policy.attach_logprobs(make_batches(self.policy, self.config, step)))

    def record(self, metrics: list[dict[str, float]]) -> Record:
        return metrics, self.checksum(), self.policy.fingerprint()

    def checksum(self) -> int:
        # numpy() on the tensor itself would pin it.
        copies = [t.detach().clone() for t in self.policy.tensors().values()]
        return zlib.crc32(b"".join(t.view(torch.uint8).numpy().tobytes() for t in copies))

    def away(self) -> None:
        self.policy.memory.offload_optimizer()
        self.policy.memory.offload_weights()

    # Bytes that Megatron's structures should hold.

    @property
    def buffers(self) -> list[Any]:
        return [buffer for chunk in self.policy.chunks for buffer in chunk.buffers]

    @property
    def inner_optimizers(self) -> list[Any]:
        return [part.optimizer for part in optimizers.parts(self.policy._optimizer)]

    @property
    def weight_bytes(self) -> int:
        return sum(b.numel * b.param_dtype.itemsize for b in self.buffers)

    @property
    def grad_bytes(self) -> int:
        return sum(b.numel * 4 for b in self.buffers)

    @property
    def optimizer_bytes(self) -> int:
        """fp32 shards are views of fp32 weights. Moments exist after the first step."""
        sizes = [p.numel() for o in self.inner_optimizers for group in o.param_groups for p in group["params"]]
        has_moments = all(o.state for o in self.inner_optimizers)
        is_fp32 = self.config.model.dtype == "float32"
        return sum(sizes) * ((0 if is_fp32 else 4) + (8 if has_moments else 0))

    def held(self) -> dict[str, int]:
        """Return the bytes that the storages hold now."""
        states = [s for o in self.inner_optimizers for s in o.state.values()]
        return {
            "weights": _storage_bytes([b.param_data for b in self.buffers]),
            "weights' views": _storage_bytes(self.policy.parameters.values()),
            "gradients": _storage_bytes([b.grad_data for b in self.buffers]),
            "gradients' views": _storage_bytes([p.main_grad for p in self.policy.parameters.values()]),
            "moments": _storage_bytes([s[name] for s in states for name in ("exp_avg", "exp_avg_sq")]),
            "masters": _storage_bytes([p for o in self.inner_optimizers for g in o.param_groups for p in g["params"]]),
        }


def check_moving_changes_nothing(text: str, rank: int, folder: Path) -> None:
    config = make_config_of(text)
    staying = Trainee(config)
    expected = [staying.record(staying.update(step)) for step in range(3)]
    for (metrics, _, fingerprint), (_, _, later) in itertools.pairwise(expected):
        assert metrics[-1]["grad_norm"] > 0 and fingerprint != later
    moving = Trainee(config)
    for inner in moving.inner_optimizers:
        inner.register_step_pre_hook(lambda *_: check_all_has_arrived(moving))
    check_moves(moving)  # before the first step Adam has no moments
    for step, record in enumerate(expected):
        if step != 1:  # update loads missing parts
            moving.policy.memory.onload()
            moving.policy.memory.onload()
        found = moving.update(step)
        assert found == record[0], (step, found, record[0])
        check_moves(moving)
        if step % 2:  # fingerprint loads missing parts
            assert moving.policy.fingerprint() == record[2]
        moving.policy.memory.onload_weights()
        assert moving.checksum() == record[1]
        check_replicas_are_equal(moving)


def check_reference(text: str, rank: int, folder: Path) -> None:
    """Before the first update the reference's log-probs equal the policy's; they stay the same after it. Policy weights
    return."""
    trainee = Trainee(make_config_of(text))

    def logprobs() -> tuple[list[Any], list[Any]]:
        before = trainee.checksum()
        batches = trainee.policy.attach_logprobs(make_batches(trainee.policy, trainee.config, 5))
        assert trainee.checksum() == before
        flat = [b for mini_batch in batches for b in mini_batch if b.ref_logprobs is not None]  # last stage only
        return [b.old_logprobs.tolist() for b in flat], [b.ref_logprobs.tolist() for b in flat]

    old, first = logprobs()
    assert first == old
    trainee.update(0)
    trainee.away()
    trainee.policy.memory.onload_weights()
    old, later = logprobs()
    assert later == first and (old != first or not first)


def check_all_has_arrived(trainee: Trainee) -> None:
    """On a GPU the optimizer state may still be in transfer while log-probs are computed, but not when it is used."""
    memory = trainee.policy.memory
    for moved in (memory._moved_weights, memory._moved_optimizer):
        assert not moved.is_away and moved._arrival is None


def check_moves(trainee: Trainee) -> None:
    """Move to the host and back. Freed memory is free to the byte, and parts that are already there do not move."""
    policy = trainee.policy
    everything = trainee.weight_bytes + trainee.grad_bytes + trainee.optimizer_bytes
    assert policy.memory.device_bytes == everything, (policy.memory.device_bytes, everything)
    before = trainee.checksum()
    for _ in range(2):
        policy.memory.offload_optimizer()
        assert policy.memory.device_bytes == trainee.weight_bytes
    held = trainee.held()
    assert held["gradients"] == held["gradients' views"] == held["moments"] == 0, held
    assert trainee.checksum() == before, "a sync must be able to read the weights while the rest is on the host"
    for _ in range(2):
        policy.memory.offload_weights()
        assert policy.memory.device_bytes == 0
        assert not any(trainee.held().values()), trainee.held()
    copies = [moved.copy for moved in (policy.memory._moved_weights, policy.memory._moved_optimizer)]
    host_bytes = sum(copy.nbytes for copy in copies)
    assert host_bytes >= trainee.weight_bytes + trainee.optimizer_bytes
    try:
        policy.tensors()
    except AssertionError as error:
        assert "onload_weights" in str(error)
    else:
        raise AssertionError("tensors() returned weights that are on the host")
    policy.memory.onload()
    assert policy.memory.device_bytes == everything
    assert all(not b.grad_data.any() for b in trainee.buffers), "gradients must be zero after onload"
    assert trainee.checksum() == before
    trainee.away()
    assert sum(copy.nbytes for copy in copies) == host_bytes, "host memory must be reused"


def check_replicas_are_equal(trainee: Trainee) -> None:
    """Each data-parallel rank has every weight of the last update, also with an overlapped gather."""
    mine = (trainee.policy._runtime.layout.place(dist.get_rank())[:2], trainee.checksum())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert len(set(everyone)) == len({place for place, _ in everyone}), everyone


def check_resume(text: str, rank: int, folder: Path) -> None:
    """Save and restore while the policy is on the host. The resumed run continues as if it had never stopped."""
    config = make_config_of(text)
    staying = Trainee(config)
    expected = [staying.record(staying.update(step)) for step in range(3)]
    moving = Trainee(config)
    for step in range(2):
        moving.update(step)
        moving.away()
    state = folder / text
    if rank == 0:
        state.mkdir()
    dist.barrier()
    saved = torch.tensor([num_beats(lambda: moving.policy.save(state))])
    dist.all_reduce(saved)  # data-parallel replicas write nothing, but progress on any rank counts
    assert saved > 0, "save reports no progress, so a slow disk would count as a hang"
    moving.away()
    resumed = Trainee(config)
    resumed.update(9)
    resumed.away()
    assert num_beats(lambda: resumed.policy.restore(state)) >= len(resumed.policy.tensors())
    assert resumed.policy.optimizer_step == moving.policy.optimizer_step
    for trainee in (resumed, moving):
        trainee.away()
        trainee.policy.memory.onload_weights()
        assert trainee.checksum() == expected[1][1] and trainee.policy.fingerprint() == expected[1][2]
    resumed.away()
    assert resumed.record(resumed.update(2)) == expected[2]


def num_beats(act: Callable[[], None]) -> int:
    """Return how often the hang watch hears of progress during `act()`, besides collectives."""
    beats: list[int] = []
    with recorder().on_heartbeat(lambda kind: beats.append(1)):
        act()
    return len(beats)


def check_pieces(text: str, rank: int, folder: Path) -> None:
    """An update reports the start of every forward pass, backward pass and optimizer step, once on each rank."""
    trainee = Trainee(make_config_of(text, "model.recompute=full"))
    batches = trainee.policy.attach_logprobs(make_batches(trainee.policy, trainee.config, 0))
    kinds: list[str] = []
    with recorder().on_heartbeat(kinds.append):
        trainee.policy.update(batches)
    passes = trainee.config.layout.vpp or 1
    expected: list[tuple[int, str]] = []
    for mini_batch in batches:
        expected += [(passes * len(mini_batch), kind) for kind in (FORWARD, BACKWARD)] + [(1, OPTIMIZER)]
    found, rest = [], kinds
    for _ in batches:
        end = rest.index(OPTIMIZER) + 1
        part, rest = rest[:end], rest[end:]
        found += [(part.count(kind), kind) for kind in (FORWARD, BACKWARD, OPTIMIZER)]
        assert part.index(FORWARD) < part.index(BACKWARD)
    assert found == expected and not rest, (kinds, expected)


def check_many_steps(rank: int, folder: Path) -> None:
    """Take one optimizer step each, on a model of 2 layers. The KL penalty makes each loss depend on the weights."""
    overrides = ("batch.mini_batches=1", "batch.tokens_per_micro_batch=512")
    config = make_config_of("tp=1 bfloat16", *overrides)
    start = time.perf_counter()
    staying = Trainee(config, num_hidden_layers=2)
    expected = [staying.update(step % 8)[0] for step in range(MANY_STEPS)]
    weights = {name: weight.detach().clone() for name, weight in staying.policy.tensors().items()}
    fingerprint = staying.policy.fingerprint()
    moving, found = Trainee(config, num_hidden_layers=2), []
    for step in range(MANY_STEPS):
        moving.policy.memory.onload()
        found += moving.update(step % 8)
        moving.away()
        assert moving.policy.memory.device_bytes == 0
    losses = [
        torch.tensor([m["loss/total"] for m in run], dtype=torch.float64).view(torch.int64) for run in (expected, found)
    ]
    assert torch.equal(*losses), (losses[0] != losses[1]).nonzero()[0]
    assert len(losses[0].unique()) == MANY_STEPS == moving.policy.optimizer_step, (
        "the losses do not depend on the weights"
    )
    assert found == expected  # also gradient norms and other metrics
    moving.policy.memory.onload()
    for name, weight in moving.policy.tensors().items():
        assert torch.equal(weight.view(torch.int16), weights[name].view(torch.int16)), name
    assert moving.policy.fingerprint() == fingerprint
    print(f"{MANY_STEPS} steps twice: {time.perf_counter() - start:.1f} s", file=sys.stderr)


def check_fp8_weights_go(rank: int, folder: Path) -> None:
    """Transformer Engine stores FP8 copies of weights in its modules' `_fp8_workspaces`; they are dropped."""
    trainee = Trainee(make_config_of("tp=1 bfloat16"))
    module: Any = next(m for chunk in trainee.policy.chunks for m in chunk.modules() if not list(m.children()))
    module._fp8_workspaces = {"weight": torch.zeros(2)}
    trainee.policy.memory.offload_optimizer()
    assert module._fp8_workspaces == {}


def make_config_of(text: str, *overrides: str) -> Config:
    """Parse "layout dtype". Two mini-batches and a reference, so log-probs are computed before the update too."""
    layout, dtype = text.split(" ")
    raw = {
        "run_dir": "unused",
        "steps": MANY_STEPS,
        "model": {"path": "unused", "dtype": dtype},
        "data": {"train": "unused", "max_prompt_length": 12},
        "rollout": {"max_response_length": 24},
        "algorithm": {"group_size": 4, "kl_beta": 0.02},
        "batch": {"prompts_per_step": 2, "mini_batches": 2, "tokens_per_micro_batch": 64},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
    }
    for part in layout.split(","):
        configs.apply_override(raw, f"layout.{part}")
    for override in overrides:
        configs.apply_override(raw, override)
    return configs.validate(raw)


def make_batches(policy: Policy, config: Config, step: int) -> list[list[PackedBatch]]:
    """Return the groups of a step, split into the config's mini-batches."""
    groups = make_groups(step)
    assign_advantages(groups, config.algorithm, max_response_length=config.rollout.max_response_length)
    size = len(groups) // config.batch.mini_batches
    mini_batches = [[s for g in groups[i : i + size] for s in g.samples] for i in range(0, len(groups), size)]
    return pack_mini_batches(
        mini_batches,
        [[1 / sum(s.response_len for s in samples)] * len(samples) for samples in mini_batches],
        policy.packing,
    )


def make_groups(step: int) -> list[Group]:
    """Return two prompts with four responses of different lengths each."""
    generator = torch.Generator().manual_seed(step)

    def ints(n: int) -> list[int]:
        return torch.randint(2, VOCAB_SIZE, (n,), generator=generator).tolist()

    groups = []
    for g in range(2):
        prompt = Prompt(g, "", tuple(ints(3 + g)), "")
        responses = [ints(4 + 3 * i + g) for i in range(4)]
        rewards = torch.rand(4, generator=generator).tolist()
        groups.append(
            Group(
                prompt,
                [Sample(prompt, i, r, [-3.0] * len(r), "stop", reward=rewards[i]) for i, r in enumerate(responses)],
            )
        )
    return groups


def _storage_bytes(tensors: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def main() -> None:
    late_streams.install()  # a missing wait shows as a wrong number
    world_size = int(sys.argv[2])
    cases: dict[str, Callable[[int, Path], None]] = {
        f"moving: {text}": partial(check_moving_changes_nothing, text) for text in LAYOUTS[world_size]
    }
    cases |= {f"pieces: {text}": partial(check_pieces, text) for text in LAYOUTS[world_size]}
    cases |= {f"reference: {text}": partial(check_reference, text) for text in WITH_REFERENCE[world_size]}
    cases |= {f"resume: {text}": partial(check_resume, text) for text in RESUMED[world_size]}
    if world_size == 1:
        cases |= {"many steps": check_many_steps, "fp8 weights": check_fp8_weights_go}
    run_cases(cases)


if __name__ == "__main__":
    main()
