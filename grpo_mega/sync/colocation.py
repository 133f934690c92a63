"""The policy and its engine on the same devices: whose turn it is, what moves between them, and what happens when one fails.

A step goes: engine sleeps, policy comes back -> update -> gradients dropped, optimizer to the host -> engine wakes its weights
-> sync and proof -> policy's weights to the host -> engine wakes its cache -> sampling. `publish` is the part after the update;
it runs alike before the first step, after a resume and after a restart of a server. A server that fails is started anew, gets
the current weights, and samples what was left unfinished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.megatron.policy import Policy
from grpo_mega.observe.timers import Timers
from grpo_mega.rollout.engine import Engine, OnSample, Sampling
from grpo_mega.rollout.phase import Economy, Phase
from grpo_mega.rollout.phase import sample as sample_groups
from grpo_mega.sync.memory import GpuMemory
from grpo_mega.sync.weight_sync import WeightSync
from grpo_mega.types import Prompt, StepMetrics


@dataclass
class Colocation:
    policy: Policy
    engine: Engine
    sync: WeightSync
    rendezvous: Rendezvous
    timers: Timers
    config: RolloutConfig
    memory: GpuMemory | None  # None: nothing to share, as on a CPU
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._moves = self.config.sleep == "always" or (self.config.sleep == "auto" and self.memory is not None)
        self._restarts: Counter[int] = Counter()  # by rank of the leader
        self.economy = Economy()
        if self.config.engine == "sglang" and self.memory is None:
            self.say("engines neither sleep nor wake here: without a GPU their memory is the host's")

    def publish(self, version: int) -> StepMetrics:
        """Gives the engine the policy as it is, as policy `version`. Raises SyncError or EngineError, on all ranks."""
        while True:
            num_bytes = self._publish_once(version)
            failures = self._meet_failures("publishing")
            if not failures:
                return {"sync/received_mib": num_bytes / 2**20}
            self._revive(failures)

    def _publish_once(self, version: int) -> int:
        if self._moves:
            with self.timers("offload"):
                self.policy.offload_optimizer()
            with self.timers("wake"):
                self.engine.wake_weights()
        with self.timers("sync"):
            num_bytes = self.sync.publish(self.policy, self.engine, version=version)
        if self._moves:
            with self.timers("offload"):
                self.policy.offload_weights()
            with self.timers("wake"):
                self.engine.wake_cache()
        return num_bytes

    @contextmanager
    def training(self) -> Iterator[None]:
        """While it lasts the devices are the policy's."""
        if self._moves:
            with self.timers("sleep"):
                self.engine.sleep()
            with self.timers("onload"):
                self.policy.onload()
        if self.memory is None:
            yield
            return
        with self.memory.peak_of_training():
            yield
        if self._moves and self.config.sleep == "auto" and self.memory.both_fit():
            self._moves = False
            self.say(f"policy and engine fit on the device together ({self.memory.summary()}): from now on nothing is moved")
            self.engine.wake_weights()
            self.engine.wake_cache()

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int, on_sample: OnSample, wanted: int | None = None
    ) -> Phase:
        """The groups of all prompts, or of the first `wanted` that are done; each prompt is sampled by one rank.

        Raises EngineError on all ranks once a server has failed more than rollout.max_restarts times.
        """
        return sample_groups(
            self.engine,
            self.rendezvous,
            prompts,
            sampling,
            step=step,
            on_sample=on_sample,
            wanted=len(prompts) if wanted is None else min(wanted, len(prompts)),
            deadline_s=self.config.phase_deadline_s,
            mend=self._mend,
            economy=self.economy,
        )

    def _mend(self, version: int) -> None:
        """Engines that failed while sampling are started anew, and have policy `version` again."""
        failures = self._meet_failures("sampling")
        if failures:
            self._revive(failures)
            self.publish(version)

    def _meet_failures(self, phase: str) -> dict[int, str]:
        """Why the engines of which leaders failed, known to all ranks."""
        said = self.rendezvous.all_gather(phase, self.engine.failure, self.config.phase_deadline_s)
        return {rank: why for rank, why in enumerate(said) if why is not None}

    def _revive(self, failures: Mapping[int, str]) -> None:
        """Starts engines anew until all are well; then none of the failed ones has weights."""
        if self._moves:  # a server takes its memory at the start
            self.policy.offload_optimizer()
            self.policy.offload_weights()
        while failures:
            for rank, why in failures.items():
                self._restarts[rank] += 1
                if self._restarts[rank] > self.config.max_restarts:
                    raise EngineError(
                        f"the engine of rank {rank} failed {self._restarts[rank]} times ({why}); "
                        "mend it, or raise rollout.max_restarts, and go on with --resume"
                    )
                self.say(f"the engine of rank {rank} failed and is started anew: {why}")
            self.engine.revive(list(failures))
            failures = self._meet_failures("restarting a server")
        if self._moves:
            self.engine.sleep()
            self.policy.onload_weights()
