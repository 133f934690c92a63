"""The policy and its engine: turns on device memory, weight syncs, and recovery of failed engines.

The order in a step: engine sleeps, policy's weights are onloaded -> log-probs of policy, reference and teachers ->
gradients and optimizer are onloaded -> update -> gradients dropped, optimizer offloaded -> engine wakes its weights ->
sync and verification -> policy's weights offloaded -> engine wakes its KV cache -> generation.
`sync_weights` is the part after the update. It also runs before the first step, after a resume and after a restart of a
server. If a server fails, it is restarted, gets the current weights, and generates the unfinished groups. Ranks with
only a policy or only an engine do not share their memory.

A weight sync sends the policy's weights to the engine: each engine rank gets its slices, in buckets, and verifies them.
The plan is made once, because neither layout changes. Every rank takes part in every sync. While the engine loads one
bucket, the next bucket is received and the one after it is packed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.device import PeakMemory
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError, SyncError
from grpo_mega.tracking.progress import GIB, FreeMemory, Timers, progress
from grpo_mega.trainer.saving import all_ranks
from grpo_mega.types import StepMetrics
from grpo_mega.weights.apply import buckets
from grpo_mega.weights.plan import TransferPlan

if TYPE_CHECKING:
    from grpo_mega.megatron.offload import PolicyMemory
    from grpo_mega.megatron.policy import Policy
    from grpo_mega.rollout.engine import Engine, Receiver

MARGIN = 0.08  # share of the device's memory to leave free for fragmentation, NCCL's buffers and longer batches
MAX_NAMED = 8  # maximum number of tensors in an error
AllGather = Callable[[str, list[str]], list[list[str]]]  # (phase, value of this rank) -> values of all ranks


@dataclass
class Colocation:
    policy: Policy | None  # None on a rank that only generates
    engine: Engine
    sync: WeightSync
    rendezvous: Rendezvous
    timers: Timers
    config: RolloutConfig
    memory: GpuMemory | None  # None if policy and engine share no device memory, for example on a CPU
    log: Callable[[str], None]
    first_engine_rank: int = 0
    free: FreeMemory | None = None  # None: not measured, without a GPU and on a rank without a policy
    adapter_sync: WeightSync | None = None  # sends only the adapter; None: syncs send merged weights

    def __post_init__(self) -> None:
        wants_turns = self.config.sleep == "always" or (self.config.sleep == "auto" and self.memory is not None)
        self._takes_turns = wants_turns and not self.config.is_separate
        self._num_restarts: Counter[int] = Counter()  # number of restarts by rank of the leader
        self._has_base = False  # all engines have the base of the adapter
        if self.policy is not None:
            self.policy.make_room = self._make_room
        if self.engine.is_server and self.memory is None:
            self.log("engines do not sleep here, because without a GPU they use host memory")

    def sync_weights(self, version: int) -> StepMetrics:
        """Send the policy's weights to the engine, as policy `version`. Raise SyncError or EngineError on all ranks."""
        while True:
            if self._takes_turns:
                with self.timers("offload"):
                    self._policy_memory.offload_optimizer()
                with self.timers("wake"):
                    self.engine.wake_weights()
            with self.timers("sync"):
                tensors = {} if self.policy is None else self.policy.tensors()
                num_bytes = self._send(tensors, version)
            self._note("sync")
            if self._takes_turns:
                with self.timers("offload"):
                    self._policy_memory.offload_weights()
                with self.timers("wake"):
                    self.engine.wake_cache()
            failures = self._gather_failures("weight sync")
            if not failures:
                return {"sync/received_mib": num_bytes / 2**20} | (self.free.take() if self.free else {})
            self._restart(failures)

    def _send(self, tensors: Mapping[str, Tensor], version: int) -> int:
        """Send the weights, or the adapter and, to engines without it, its base. Return the received bytes."""
        if self.adapter_sync is None:
            return self.sync.sync_weights(tensors, self.engine, version=version)
        num_bytes, lora = 0, None if self.policy is None else self.policy.lora
        if not self._has_base:
            with nullcontext() if lora is None else lora.off():
                num_bytes = self.sync.sync_weights(tensors, self.engine, version=version)
            self._has_base = True
        adapter = {} if lora is None else lora.parameters
        return num_bytes + self.adapter_sync.sync_weights(adapter, self.engine.adapter, version=version)

    @property
    def _policy_memory(self) -> PolicyMemory:
        assert self.policy is not None, "ranks without a policy take no turns"
        return self.policy.memory

    @contextmanager
    def training(self) -> Iterator[None]:
        """Reserve the devices for the policy during the context."""
        self._note("generation")
        if self._takes_turns:
            with self.timers("sleep"):
                self.engine.sleep()
            self._note("asleep")
            with self.timers("onload"):
                self._policy_memory.onload_weights()  # Policy.update onloads the rest
        if self.memory is None:
            yield
            self._note("training")
            return
        with self.memory.peak_of_training():
            try:
                yield
            except torch.OutOfMemoryError as error:
                if self._takes_turns or self.config.sleep == "always":
                    raise
                raise EngineError(
                    f"GPU memory ran out in training while the engine was awake ({error}); continue with --resume"
                    " --set rollout.sleep=always"
                ) from error
        self._note("training")  # nothing of the allocator's peak has been given back yet
        if self.config.sleep == "auto" and self._takes_turns == self.memory.both_fit():
            self._takes_turns, summary = not self._takes_turns, self.memory.summary()
            if not self._takes_turns:
                self.log(f"policy and engine fit on the device together ({summary}): from now on neither is offloaded")
                self.engine.wake_weights()
                self.engine.wake_cache()
                return
            self.log(
                f"policy and engine do not fit on the device together any more ({summary}): from now on they take turns"
            )
            if not self.memory.ran_out:  # otherwise this rank's engine sleeps already
                self.engine.sleep()

    def _make_room(self) -> bool:
        """Make this rank's engine sleep, because an update ran out of memory. Return False if that is not possible.

        Other ranks know only at the end of the update. So the rank must need none of them, for its passes and for its
        engine.
        """
        if self.memory is None or self.policy is None or self.config.sleep != "auto" or self._takes_turns:
            return False
        if self.memory.ran_out or self.config.tp > 1 or not self.policy.can_repeat_passes:
            return False
        self.memory.ran_out = True
        self.engine.sleep()
        torch.cuda.empty_cache()
        return True

    def recover(self, version: int) -> None:
        """Restart failed engines. If there were any, send policy `version` to all engines again.

        All ranks call it together. Raise EngineError on all ranks if a server failed more than rollout.max_restarts
        times.
        """
        failures = self._gather_failures("generation")
        if failures:
            self._restart(failures)
            self.sync_weights(version)

    def _note(self, phase: str) -> None:
        if self.free is not None:
            self.free.note(phase)

    def _gather_failures(self, phase: str) -> dict[int, str]:
        """Return the failures of all engines, by the rank of their leader. The result is identical on all ranks."""
        failures = self.rendezvous.all_gather(phase, self.engine.failure, self.config.phase_deadline_s)
        return {rank: failure for rank, failure in enumerate(failures) if failure is not None}

    def _restart(self, failures: Mapping[int, str]) -> None:
        """Restart failed engines until all engines can be used. Restarted engines have no weights."""
        self._has_base = False
        if self._takes_turns:  # a server allocates its memory at the start
            self._policy_memory.offload_optimizer()
            self._policy_memory.offload_weights()
        while failures:
            for rank, failure in failures.items():
                self._num_restarts[rank] += 1
                if self._num_restarts[rank] > self.config.max_restarts:
                    raise EngineError(
                        f"the engine of rank {rank} failed {self._num_restarts[rank]} times ({failure}); "
                        "remove the cause, or raise rollout.max_restarts, and continue with --resume"
                    )
                self.log(f"the engine of rank {rank} failed and is restarted: {failure}")
            self.engine.restart([rank - self.first_engine_rank for rank in failures])
            failures = self._gather_failures("restarting a server")
        if self._takes_turns:
            self.engine.sleep()
            self._policy_memory.onload_weights()


class GpuMemory:
    """Measures the GPU memory of policy and engine, and decides if both fit at once, identically on all ranks. CUDA
    only.

    The policy needs the peak of its allocations during training. The engine needs its memory when awake.
    """

    def __init__(self, device: torch.device, engine_bytes: int, peak: PeakMemory) -> None:
        """`engine_bytes`: memory of the engine when awake, measured at its start."""
        self._peak = peak
        self._engine_bytes = engine_bytes
        self._training_bytes = 0
        self.ran_out = False  # True once an update on this rank had no memory left while the engine was awake
        self._total_bytes = torch.cuda.get_device_properties(device).total_memory

    @contextmanager
    def peak_of_training(self) -> Iterator[None]:
        self._peak.take()
        self._peak.reserved = 0
        yield
        self._peak.take()
        self._training_bytes = max(self._training_bytes, self._peak.reserved)

    def both_fit(self) -> bool:
        """Return True if both fit on every rank and leave MARGIN of the device free. All ranks call it together."""
        is_enough = self._training_bytes + self._engine_bytes <= (1 - MARGIN) * self._total_bytes
        return all_ranks(is_enough and not self.ran_out)

    def summary(self) -> str:
        return (
            f"training peaks at {self._training_bytes / GIB:.1f} GiB, the engine holds {self._engine_bytes / GIB:.1f}"
            f" GiB, of {self._total_bytes / GIB:.1f} GiB"
        )


@dataclass(frozen=True)
class WeightSync:
    plan: TransferPlan
    dtype: torch.dtype  # the engine's dtype, for tensors that the plan does not quantise
    bucket_bytes: int
    all_gather: AllGather
    verify: bool = True  # send and compare checksums
    ranks: dist.ProcessGroup | None = None  # the group of all ranks of the plan; None: the default group
    shows_progress: bool = False

    def sync_weights(self, tensors: Mapping[str, Tensor], engine: Receiver, *, version: int) -> int:
        """Fill the engine from the policy's `tensors` on all ranks. Return the bytes that this rank received from other
        ranks.

        Raise SyncError with names of tensors on all ranks, if the engine's tensors do not match the plan or a checksum
        differs.
        """
        self._check("starting a sync", engine.start_update(), "the engine's tensors do not match the plan")
        num_bytes, num_rounds = 0, len(self.plan.rounds(self.bucket_bytes, self.dtype.itemsize))
        with progress(num_rounds, "weight sync, buckets", self.shows_progress) as bar:
            for bucket in buckets(
                self.plan,
                tensors,
                dtype=self.dtype,
                bucket_bytes=self.bucket_bytes,
                allocate=engine.allocate,
                group=self.ranks,
                verify=self.verify,
            ):
                engine.load(bucket)
                num_bytes += bucket.num_bytes_received
                bar.advance()
        self._check("ending a sync", engine.end_update(version), f"the engine does not have policy version {version}")
        return num_bytes

    def _check(self, phase: str, problems: list[str], summary: str) -> None:
        """Raise SyncError on all ranks with the problems of the first rank that has any."""
        for rank, names in enumerate(self.all_gather(phase, problems)):
            if names:
                more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
                raise SyncError(
                    f"{summary}, at rank {rank}: {'; '.join(names[:MAX_NAMED])}{more}; start again with --resume"
                )
