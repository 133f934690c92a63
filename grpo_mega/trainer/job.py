"""A running job: its parts, how they are assembled from a config, its progress, and the actions around a step.

These actions are resume, save, stop, and the end of a run that has diverged. Every rank has a Job. Engine ranks have no
policy: they only generate, and the other ranks save for them.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch.distributed import DistError, PrefixStore

from grpo_mega.checkpoint_io.checkpoints import (
    Manifest,
    check_model,
    export_record,
    latest,
    read_manifest,
    tell_latest,
)
from grpo_mega.checkpoint_io.model import ModelFiles, decoder
from grpo_mega.config import Config
from grpo_mega.data.load import RunData, Sampler
from grpo_mega.distributed.device import PeakMemory
from grpo_mega.distributed.launch import current_rank
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.versions import installed_set
from grpo_mega.distributed.watchdog import HangWatch, StopRequest, recorder
from grpo_mega.errors import EngineError, ResumeError, UserError
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy, shards_of
from grpo_mega.megatron.precision import DTYPES
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.paths import ADAPTER_DIR, CHECKPOINTS, EXPORT_DIR, STATE, TRACE
from grpo_mega.rewards.pool import RewardPool
from grpo_mega.rewards.scorer import Scorer
from grpo_mega.rollout.backlog import Backlog
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.rollout.sessions.agents import AgentWorkers
from grpo_mega.tracking.progress import Pace, Timers, phase, progress
from grpo_mega.tracking.rules import Health
from grpo_mega.tracking.run_log import Hooks, RunLog
from grpo_mega.trainer.colocation import Colocation
from grpo_mega.trainer.export import export_adapter, export_policy, with_end_token
from grpo_mega.trainer.inputs import InputDigests, SameInputs
from grpo_mega.trainer.parts import (
    build_adapter_sync,
    build_engine,
    build_policy,
    build_sync,
    drives_engine,
    make_room,
    measure_free_memory,
    open_agents,
    open_conversations,
    open_log,
    training_sampling,
)
from grpo_mega.trainer.saving import SECONDS_FOR_OTHERS, Checkpoints, gather, verify_files
from grpo_mega.trainer.tracing import Tracer
from grpo_mega.types import Prompt, PromptDraw

BuildPolicy = Callable[[Config, ModelFiles, Runtime], Policy]


@dataclass(kw_only=True)
class TrainingJob:
    """The parts of a job without an engine."""

    config: Config
    runtime: Runtime
    model: ModelFiles
    data: RunData
    sampler: Sampler
    policy: Policy | None  # None on a rank that only generates
    checkpoints: Checkpoints
    inputs: InputDigests
    log: RunLog
    timers: Timers
    stop: StopRequest
    health: Health
    steps_done: int = 0
    optimizer_steps: int = 0  # the policy's optimizer steps after the last finished step
    backlog: Backlog = field(default_factory=Backlog)  # the backlog after the last finished step
    is_stopping: bool = False
    pace: Pace = field(default_factory=Pace)  # measures the passes and optimizer steps of all updates

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

    def draw(self, number: int) -> list[PromptDraw]:
        """Return the prompts of draw `number`. It equals the step's number unless steps drew several batches or
        none.
        """
        return [PromptDraw(self.data.train[one.row], one.source, one.epoch) for one in self.sampler.draws(number)]

    def resume(self) -> int:
        """Load the run's last checkpoint, if it has one, and return the number of finished steps. Raise ResumeError."""
        checkpoint = latest(self.checkpoints.folder)
        if self.policy is not None:
            self.inputs.start()
        if checkpoint is not None:
            manifest = read_manifest(checkpoint)
            if (policy := self.policy) is not None:
                check_model(checkpoint, manifest, self.model.shape, self.config.model.recorded_lora)
                for change in [*self.inputs.changes(manifest.inputs), *installed_set().change(manifest.versions)]:
                    self.log.warn(change)
                with phase("verifying the checkpoint", self.shows_progress):
                    verify_files(checkpoint, manifest, self.runtime.rank, self.runtime.layout.world_size)
                with (
                    phase("loading the checkpoint, tensors", self.shows_progress) as bar,
                    recorder().on_heartbeat(lambda kind: bar.advance()),
                ):
                    policy.restore(checkpoint / STATE)
                self.checkpoints.saved_step, self.optimizer_steps = manifest.step, policy.optimizer_step
                algorithm = self.config.algorithm  # a changed kl_beta overrides the adapted value
                if (
                    algorithm.kl_target is not None
                    and manifest.kl_beta is not None
                    and manifest.kl_beta_from == algorithm.kl_beta
                ):
                    policy.restore_kl_beta(manifest.kl_beta)
                    self.log.message(
                        f"algorithm.kl_beta continues at {manifest.kl_beta:.4g}, as adapted by algorithm.kl_target"
                    )
            self.steps_done = manifest.step
            prompts = {prompt.id: prompt for prompt in self.data.train}
            self.backlog = Backlog.read(checkpoint / STATE, manifest.draws, prompts.get)
            num_started = sum(bool(group.samples) for group in self.backlog.groups)
            if num_started and not self.config.rollout.keeps_unfinished:
                self.log.warn(
                    f"restarting {num_started} groups that earlier steps had started: rollout no longer continues them"
                )
                self.backlog = self.backlog.without_stale(oldest=manifest.step)
            self.log.message(f"resumed after step {manifest.step} from {checkpoint}")
        self.timers.lap()
        return self.steps_done

    def save_if_due(self, step: int, backlog: Backlog) -> None:
        """Count `step` as done. Save if a checkpoint is due, or the run must stop.

        `backlog` is the backlog after the step. Call this while the policy has the devices.
        """
        assert self.policy is not None, "a rank without a policy saves nothing"
        self.steps_done, self.backlog, self.optimizer_steps = step, backlog, self.policy.optimizer_step
        config, interval = self.config, self.config.checkpoint.interval
        self.is_stopping = self.stop.requested() and step < config.steps  # the last step stops anyway
        is_due = interval > 0 and (step % interval == 0 or step == config.steps)
        if is_due or self.is_stopping:
            with self.timers("checkpoint"), progress(None, f"checkpoint of step {step}", self.shows_progress):
                self.save(step)

    def save(self, step: int) -> None:
        """Start to save the policy and the run's progress after `step`. Files are written in the background."""
        assert self.policy is not None, "a rank without a policy saves nothing"
        layout, algorithm = self.runtime.layout, self.config.algorithm
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
                adapter=self.config.model.recorded_lora,
                versions=installed_set().record,
                kl_beta=None if algorithm.kl_target is None else self.policy.algorithm.kl_beta,
                kl_beta_from=None if algorithm.kl_target is None else algorithm.kl_beta,
            ),
            self.backlog.files() if self.is_main else {},
        )

    def tracer(self) -> Tracer:
        """Return the tracer of log.profile."""
        folder, device, ranks = self.config.run_dir / TRACE, self.runtime.device, self.runtime.everyone
        return Tracer(self.config.log.profiled_steps, folder, self.runtime.rank, device, self.timers, self.log, ranks)

    def export(self) -> None:
        """Write the policy to RUN_DIR/hf after the last step. Call this while the policy has the devices."""
        assert self.policy is not None, "a rank without a policy exports nothing"
        folder = self.config.run_dir / EXPORT_DIR
        record = export_record(self.checkpoints.folder, self.steps_done, installed_set().record)
        if self.config.algorithm.is_sft:
            record |= with_end_token(self.model, self.config.rollout.stop_token_ids)
        if (lora := self.config.model.lora) is not None:
            export_adapter(self.policy, self.model, lora, self.config.run_dir / ADAPTER_DIR)
        export_policy(self.policy, self.model, folder, record=record, shows_progress=self.shows_progress)
        self.log.message(f"policy saved as a Hugging Face checkpoint in {folder}")

    def listening(self) -> AbstractContextManager[None]:
        """Return a context in which a first signal stops the run after its step."""
        return self.stop.listening(self.describe_stop)

    def stops_after(self, step: int) -> bool:
        """Allow the step's checkpoint to become visible after the step is logged. Return True if the run must stop
        here.

        The first rank decides. All ranks call it.
        """
        if not self.is_stopping and step < self.config.steps:
            self.checkpoints.poll()
            return False
        self.checkpoints.finish()
        if self.is_stopping:
            if self.is_main:
                self.stop.clear()
            self.log.message(
                f"stopped after step {step} of {self.config.steps} as requested; continue with the same command and"
                " --resume"
            )
        return self.is_stopping

    def describe_stop(self) -> str:
        """Return the answer to a first Ctrl-C: how the run ends now, and the steps that a second one would lose."""
        last, step = self.config.steps, self.steps_done + 1
        saved = 0
        with suppress(ResumeError):
            checkpoint = latest(self.checkpoints.folder)
            saved = read_manifest(checkpoint).step if checkpoint else 0
        started = min(step, last)
        loses = "" if saved >= started else f", losing step {started}"
        if saved + 1 < started:
            loses = f", losing steps {saved + 1}-{started}"
        work = f"finishing step {step} and saving" if step < last else f"finishing step {last}, the last"
        if step > last:
            work = f"writing {self.config.run_dir / EXPORT_DIR}"
        return f"{work}; press again to end now{loses}"

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Save a checkpoint of the finished steps if the run ends by a UserError of all ranks with a policy.

        Save nothing within an update. A ResumeError means that a save failed.
        """
        try:
            yield
        except UserError as error:
            if isinstance(error, ResumeError) or not self.steps_done:
                raise
            try:
                is_saved = self._save_finished()
            except ResumeError as problem:
                raise type(error)(*error.args, *problem.args) from None
            if not is_saved:
                raise
            where = f"a checkpoint of step {self.steps_done} is in {self.checkpoints.folder}"
            raise type(error)(f"{error}; {where}") from None

    def _save_finished(self) -> bool:
        """Save the finished steps. Return False if this rank failed alone, or has no policy, or the store is gone.

        A rank without a policy waits for the save of others that fail too, because the launcher kills them once it
        exits.
        """
        store, is_saved = PrefixStore("failure", self.runtime.store), False
        store.set_timeout(timedelta(seconds=SECONDS_FOR_OTHERS))  # limits the search for a store that is gone
        with suppress(EngineError, DistError):
            failed = Rendezvous(store, self.runtime.rank, self.runtime.layout.world_size)
            if self.policy is None:
                self.release()
                failed.get("failing", SECONDS_FOR_OTHERS)
                failed.get("saved", self.config.hang_deadline_s)
                return False
            failed.set("failing", "")
            is_between_steps = self.policy.optimizer_step == self.optimizer_steps
            states = failed.all_gather("an error", [self.steps_done, is_between_steps], SECONDS_FOR_OTHERS)
            if all(state == [self.steps_done, True] for state in states):
                self.release()
                self.save(self.steps_done)
                self.checkpoints.finish()
                is_saved = True
            failed.set("saved", "")
        return is_saved

    def release(self) -> None:
        """Free memory that the policy may need to be saved."""

    def log_peak_memory(self) -> None:
        """Log the peak memory of each phase so far, as the maximum over ranks. All ranks call it."""
        peaks = gather(self.timers.peaks)
        largest = {phase: max(p.get(phase, 0) for p in peaks) / 2**30 for phase in self.timers.peaks}
        owner = "GPU (tensors)" if self.runtime.device.is_cuda else "process"
        listed = ", ".join(f"{phase} {gib:.2f}" for phase, gib in sorted(largest.items(), key=lambda item: -item[1]))
        self.log.message(f"peak memory per {owner} by phase, largest over ranks, GiB: {listed}")


@dataclass(kw_only=True)
class Job(TrainingJob):
    """A job with an engine."""

    # open_job sets both once the log is open.
    colocation: Colocation = field(init=False)
    rollouts: Rollouts = field(init=False)

    def log_peak_memory(self) -> None:
        super().log_peak_memory()
        if self.colocation.free is not None:
            self.log.message(self.colocation.free.summary())

    def release(self) -> None:
        self.colocation.engine.close()

    def stops_after(self, step: int) -> bool:
        if self.runtime.num_engine_ranks:
            agreed = self.rollouts.rendezvous.all_gather(
                "the end of a step", self.is_stopping, self.config.hang_deadline_s
            )
            self.is_stopping = agreed[0]
        return super().stops_after(step)


AnyJob = TypeVar("AnyJob", bound=TrainingJob)


@contextmanager
def open_job(config: Config, build: BuildPolicy = build_policy, hooks: Hooks | None = None) -> Iterator[Job]:
    """Prepare the job for its first step. The engine has no weights before the first sync_weights.

    The end of the context always closes workers, servers, files and process groups. Evaluation passes another `build`,
    because it needs no optimizer.
    """
    hooks = hooks or Hooks()
    with ExitStack() as stack:
        # Workers import in the background while the model is built. Only the first rank of each engine has workers.
        has_workers = drives_engine(config.layout.engine_ranks, config.rollout.tp)
        pool = stack.enter_context(RewardPool(config.rewards, code_dir=config.code_dir, has_workers=has_workers))
        agents = stack.enter_context(open_agents(config.rollout, config.code_dir) if has_workers else nullcontext())
        shown = partial(phase, enabled=config.log.progress and not current_rank())
        inputs = SameInputs(config, pool.wait_until_ready)
        with shown("connecting the ranks"):
            runtime = runtimes.start(config, inputs.meet)
            stack.callback(runtimes.stop)
        rendezvous = Rendezvous(runtime.store, runtime.rank, runtime.num_ranks)
        model, tokenizer, *_ = inputs.found
        with shown("building the engine"):
            engine = build_engine(config, model, runtime, rendezvous)
        stack.callback(engine.close)
        peak = PeakMemory(runtime.device)
        memory = make_room(engine, runtime, config.rollout, peak)
        policy = build(config, model, runtime) if runtime.trains else None
        with shown("waiting for the engines"), runtime.raise_on_all_ranks(runtime.everyone):
            engine.wait_until_ready()
        timers = Timers(take_peak=peak.take)
        job = open_training(Job, stack, inputs, runtime, policy, timers, hooks)
        trainer, served = shards_of(model.family, model.shape, config.model, runtime), engine.shard_layout
        sync = build_sync(config, DTYPES[config.engine_dtype], trainer, served, runtime, rendezvous)
        job.colocation = Colocation(
            policy, engine, sync, rendezvous, timers, config.rollout, memory, job.log.message, runtime.first_engine_rank
        )
        job.colocation.adapter_sync = build_adapter_sync(config, model, runtime, rendezvous)
        job.colocation.free = measure_free_memory(config, model, runtime, hooks.plan_free)
        job.rollouts = build_rollouts(job, tokenizer, pool, agents)
        stack.enter_context(job.rollouts.conversations or nullcontext())
        yield job


def build_rollouts(job: Job, tokenizer: Any, pool: RewardPool, agents: AgentWorkers | None) -> Rollouts:
    """Connect the engine with the rewards and, with agents, with their conversations. All ranks call it."""
    config, runtime, colocation = job.config, job.runtime, job.colocation
    sampling, decode = training_sampling(config, job.model, tokenizer), decoder(tokenizer, job.model)
    raise_on_all_ranks = partial(runtime.raise_on_all_ranks, runtime.everyone)
    with raise_on_all_ranks():
        conversations = open_conversations(config, tokenizer, decode, sampling, agents, job.log.warn)
    return Rollouts(
        config=config,
        engine=colocation.engine,
        recover=colocation.recover,
        rendezvous=colocation.rendezvous,
        scorer=Scorer(pool, decode),
        sampling=sampling,
        decode=decode,
        timers=job.timers,
        warn=job.log.warn,
        ranks=runtime.everyone,
        raise_on_all_ranks=raise_on_all_ranks,
        conversations=conversations,
    )


def open_training(
    kind: type[AnyJob],
    stack: ExitStack,
    inputs: SameInputs,
    runtime: Runtime,
    policy: Policy | None,
    timers: Timers,
    hooks: Hooks,
) -> AnyJob:
    """Open the log, the watchdog and the checkpoints. The end of `stack` closes them."""
    config = inputs.config
    model, _, data, sampler = inputs.found
    log = open_log(config, runtime, data.notes, hooks)
    stack.callback(log.close)
    gc.freeze()  # Megatron collects garbage in every save; objects alive now stay until the end and need no scan
    tell = partial(tell_latest, config.run_dir / CHECKPOINTS)
    rank, store, deadlines = runtime.rank, runtime.store, (config.hang_deadline_s, config.deadline_of_phase)
    stack.enter_context(HangWatch(config.run_dir, *deadlines, store, rank, runtime.num_ranks, timers, tell))
    shows_progress = rank == 0 and config.log.progress
    checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep, rank, store, log.warn, shows_progress)
    return kind(
        config=config,
        runtime=runtime,
        model=model,
        data=data,
        sampler=sampler,
        policy=policy,
        checkpoints=stack.enter_context(closing(checkpoints)),
        inputs=InputDigests(config, data.digests, rank, runtime.layout.world_size),
        log=log,
        timers=timers,
        stop=StopRequest(config.run_dir),
        health=Health(config.max_nonfinite_steps, config.rollout.mismatch_stop),
    )
