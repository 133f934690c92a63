"""A running job: its parts, its progress, and the actions around a step: resume, save, stop, end on divergence.

Every rank has a Job. Engine ranks have no policy: they only generate, and the other ranks save for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from grpo_mega.config import Config
from grpo_mega.data.load import RunData
from grpo_mega.data.sampler import Sampler
from grpo_mega.distributed.stop import StopRequest
from grpo_mega.errors import EngineError, RefreshError
from grpo_mega.formats.checkpoint_files import STATE, Manifest, check_model, latest, read_manifest
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.progress import progress
from grpo_mega.observe.run_log import RunLog
from grpo_mega.observe.timers import Timers
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.run.checkpoints import Checkpoints, verify
from grpo_mega.run.colocation import Colocation
from grpo_mega.run.health import Health
from grpo_mega.run.input_digests import InputDigests
from grpo_mega.run.model_files import ModelFiles
from grpo_mega.types import Prompt, StepMetrics, Turn


@dataclass
class Job:
    config: Config
    runtime: Runtime
    model: ModelFiles
    data: RunData
    sampler: Sampler
    policy: Policy | None  # None on a rank that only generates
    colocation: Colocation
    rollouts: Rollouts
    checkpoints: Checkpoints
    inputs: InputDigests
    log: RunLog
    timers: Timers
    stop: StopRequest
    health: Health
    steps_done: int = 0
    backlog: Backlog = field(default_factory=Backlog)  # the backlog after the last finished step
    is_stopping: bool = False

    @property
    def is_main(self) -> bool:
        return self.runtime.rank == 0

    @property
    def shows_progress(self) -> bool:
        return self.is_main and self.config.log.progress

    @property
    def heldout(self) -> dict[str, list[Prompt]]:
        """Return the held-out prompts by the name of their set; "" if there is only one set, without a name."""
        return {name: prompts[: self.config.eval.num_prompts] for name, prompts in self.data.heldout_sets.items()}

    def draw(self, number: int) -> list[Turn]:
        """Return the prompts of draw `number`. It equals the step's number unless steps drew several batches or none."""
        return [Turn(self.data.train[one.row], one.source, one.epoch) for one in self.sampler.draws(number)]

    def resume(self) -> int:
        """Load the run's last checkpoint, if it has one, and return the number of finished steps. Raise ResumeError."""
        checkpoint = latest(self.checkpoints.folder)
        if self.policy is not None:
            self.inputs.start()
        if checkpoint is not None:
            manifest = read_manifest(checkpoint)
            if self.policy is not None:
                self._restore(self.policy, checkpoint, manifest)
            self._take_progress(checkpoint, manifest)
            self.log.message(f"resumed after step {manifest.step} from {checkpoint}")
        self.timers.lap()
        return self.steps_done

    def save_if_due(self, step: int) -> None:
        """Save if a checkpoint is due, the run must stop, or it has diverged. Call this while the policy has the devices."""
        config, interval = self.config, self.config.checkpoint.interval
        self.is_stopping = self.stop.requested() and step < config.steps  # the last step stops anyway
        is_due = interval > 0 and (step % interval == 0 or step == config.steps)
        if is_due or self.is_stopping or self.health.has_diverged:
            with self.timers("checkpoint"), progress(None, f"checkpoint of step {step}", self.shows_progress):
                self.save(step)

    def save(self, step: int) -> None:
        """Start to save the policy and the run's progress after `step`. Files are written in the background."""
        assert self.policy is not None, "a rank without a policy saves nothing"
        layout = self.runtime.layout
        self.checkpoints.save(
            self.policy,
            Manifest(
                step=step,
                optimizer_step=self.policy.optimizer_step,
                fingerprint=self.policy.fingerprint(),
                layout=f"tp={layout.tp},pp={layout.pp},vpp={layout.vpp},cp={layout.cp},dp={layout.dp}",
                model=asdict(self.model.shape),
                seed=self.config.seed,
                checksums={},
                draws=self.backlog.draws,
                inputs=self.inputs.digests(),
                kl_beta=None if self.config.algorithm.kl_target is None else self.policy.algorithm.kl_beta,
                kl_beta_from=None if self.config.algorithm.kl_target is None else self.config.algorithm.kl_beta,
            ),
            self.backlog,
        )

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Save a checkpoint of the finished steps if an engine or a refresh of the reward model finally fails.

        A rank without a policy waits until the other ranks have saved it.
        """
        try:
            yield
        except (EngineError, RefreshError) as error:
            self.colocation.engine.close()  # the policy may need the engine's memory
            if self.policy is None:
                self._wait_until_saved()
                raise
            self.save(self.steps_done)
            self.checkpoints.finish()
            self._wait_until_saved()
            raise type(error)(f"{error}; a checkpoint of step {self.steps_done} is in {self.checkpoints.folder}") from None

    def stops_after(self, step: int) -> bool:
        """Allow the step's checkpoint to become visible after the step is logged. Return True if the run must stop here.

        The first rank decides. All ranks call it.
        """
        if self.runtime.num_engine_ranks:
            agreed = self.rollouts.rendezvous.all_gather("the end of a step", self.is_stopping, self.config.hang_deadline_s)
            self.is_stopping = agreed[0]
        if not self.is_stopping and step < self.config.steps:
            self.checkpoints.poll()
            return False
        self.checkpoints.finish()
        if self.is_stopping:
            if self.is_main:
                self.stop.clear()
            self.log.message(
                f"stopped after step {step} of {self.config.steps} as requested; continue with the same command and --resume"
            )
        return self.is_stopping

    def check_health(self, step: int, metrics: StepMetrics) -> None:
        """End a run that has diverged, after its step is logged. Raise NonFiniteError, with a checkpoint, or MismatchError."""
        if self.health.has_diverged:
            self.checkpoints.finish()
        self.health.check(step, metrics, self.checkpoints.folder)

    def log_peak_memory(self) -> None:
        """Log the peak memory of each phase so far, as the maximum over ranks. All ranks call it."""
        peaks: list[dict[str, int]] = [{}] * dist.get_world_size()
        dist.all_gather_object(peaks, self.timers.peaks)
        largest = {phase: max(p.get(phase, 0) for p in peaks) / 2**30 for phase in self.timers.peaks}
        owner = "GPU (tensors)" if self.runtime.device.is_cuda else "process"
        listed = ", ".join(f"{phase} {gib:.2f}" for phase, gib in sorted(largest.items(), key=lambda item: -item[1]))
        self.log.message(f"peak memory per {owner} by phase, largest over ranks, GiB: {listed}")

    def _restore(self, policy: Policy, checkpoint: Path, manifest: Manifest) -> None:
        check_model(checkpoint, manifest.model, self.model.shape)
        for change in self.inputs.changes(manifest.inputs):
            self.log.warn(change)
        verify(checkpoint, manifest, self.runtime.rank, self.runtime.layout.world_size)
        policy.restore(checkpoint / STATE)
        self.checkpoints.saved_step = manifest.step
        algorithm = self.config.algorithm  # a changed kl_beta overrides the adapted value
        if algorithm.kl_target is not None and manifest.kl_beta is not None and manifest.kl_beta_from == algorithm.kl_beta:
            policy.restore_kl_beta(manifest.kl_beta)
            self.log.message(f"algorithm.kl_beta continues at {manifest.kl_beta:.4g}, as adapted by algorithm.kl_target")

    def _take_progress(self, checkpoint: Path, manifest: Manifest) -> None:
        self.steps_done = manifest.step
        prompts = {prompt.id: prompt for prompt in self.data.train}
        self.backlog = Backlog.read(checkpoint / STATE, manifest.draws, prompts.get)
        num_started = sum(bool(group.samples) for group in self.backlog.groups)
        if num_started and not self.config.rollout.keeps_unfinished:
            self.log.warn(f"restarting {num_started} groups that earlier steps had started: rollout no longer continues them")
            self.backlog = self.backlog.without_stale(oldest=manifest.step)

    def _wait_until_saved(self) -> None:
        """Wait for the saving ranks, because the launcher kills them once this rank exits. Give up if a rank is gone."""
        if self.runtime.num_engine_ranks:
            with suppress(EngineError):
                self.rollouts.rendezvous.all_gather("a last checkpoint", "", self.config.hang_deadline_s)
