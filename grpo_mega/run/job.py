"""Building the parts of a run from its config: data, policy, engine, sync, rewards, log.

`open_job(config)` is a context manager: whatever way the run ends, workers, files and process groups are closed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from grpo_mega.config import Config
from grpo_mega.data.load import load_data
from grpo_mega.data.sampler import Sampler
from grpo_mega.distributed.recorder import recorder
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.stop import StopRequest
from grpo_mega.distributed.watchdog import HangWatch
from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.formats.checkpoint_files import STATE, Manifest, check_model, latest, read_manifest, tell_latest
from grpo_mega.formats.export import export
from grpo_mega.formats.reader import open_reader, random_reader
from grpo_mega.hardware.device import PeakMemory
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.found import in_use
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.precision import DTYPES
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.progress import progress
from grpo_mega.observe.run_log import Log, open_run_log
from grpo_mega.observe.timers import Timers
from grpo_mega.paths import CHECKPOINTS
from grpo_mega.rewards.scorer import Scorer
from grpo_mega.rewards.workers.pool import RewardPool
from grpo_mega.rollout.engine import Sampling
from grpo_mega.run.checkpoints import Checkpoints, verify
from grpo_mega.run.engines import build_engine, build_sync, make_room
from grpo_mega.run.folder import adopt, trim
from grpo_mega.run.health import Health
from grpo_mega.run.inputs import RunInputs
from grpo_mega.sync.colocation import Colocation
from grpo_mega.text import well_formed
from grpo_mega.types import Prompt, StepMetrics
from grpo_mega.validation.architecture import check_architecture
from grpo_mega.validation.tokenizer import check_vocabulary
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import Family, ModelShape


@dataclass(frozen=True)
class ModelFiles:
    """The Hugging Face checkpoint that a run starts from, as its config describes it."""

    folder: Path
    hf_config: Any
    shape: ModelShape
    family: Family
    dtype: torch.dtype  # in which it is trained and served


BuildPolicy = Callable[[Config, ModelFiles, Runtime], Policy]


@dataclass
class Job:
    config: Config
    runtime: Runtime
    model: ModelFiles
    tokenizer: Any
    train_prompts: list[Prompt]
    heldout: dict[str, list[Prompt]]  # by the names of their sets; "" where there is only one without a name
    sampler: Sampler
    sampling: Sampling
    policy: Policy
    colocation: Colocation
    scorer: Scorer
    log: Log
    timers: Timers
    checkpoints: Checkpoints
    stop: StopRequest
    inputs: RunInputs
    health: Health
    steps_done: int = 0
    draws: int = 0  # so many times a step's number of prompts were drawn from the data by the steps done
    is_stopping: bool = False

    @property
    def is_main(self) -> bool:
        return self.runtime.rank == 0

    def prompts(self, draw: int) -> list[Prompt]:
        return [self.train_prompts[i] for i in self.sampler.indices(draw)]

    def decode(self, token_ids: list[int]) -> str:
        return decode(self.tokenizer, token_ids)

    def is_due(self, interval: int, step: int) -> bool:
        return interval > 0 and step % interval == 0

    def restore(self) -> int:
        """Loads the run's last checkpoint, if it has one; returns the number of steps done. Raises ResumeError."""
        found = latest(self.checkpoints.folder)
        step = draws = 0
        self.inputs.begin()
        if found is not None:
            manifest = read_manifest(found)
            check_model(found, manifest.model, self.model.shape)
            for change in self.inputs.changes(manifest.inputs):
                self.log.warn(change)
            verify(found, manifest, self.runtime.rank, self.runtime.layout.world_size)
            self.policy.restore(found / STATE)
            step = self.checkpoints.saved_step = manifest.step
            draws = step if manifest.draws is None else manifest.draws
            self.log.message(f"resumed after step {step} from {found}")
        self.timers.lap()
        self.steps_done, self.draws = step, draws
        return step

    @contextmanager
    def saved_if_engine_fails(self) -> Iterator[None]:
        """Leaves a checkpoint of the steps done when an engine fails for good."""
        try:
            yield
        except EngineError as error:
            self.colocation.engine.close()  # whose memory the policy may need
            self.save(self.steps_done)
            self.checkpoints.finish()
            raise EngineError(f"{error}; a checkpoint of step {self.steps_done} is in {self.checkpoints.folder}") from None

    def save_if_due(self, step: int) -> None:
        """After the update, while the devices are the policy's; also when the run was asked to stop, or has diverged."""
        config = self.config
        self.is_stopping = self.stop.requested() and step < config.steps  # after the last step there is nothing to stop
        is_last = step == config.steps and config.checkpoint.interval > 0
        if self.is_stopping or is_last or self.health.has_diverged or self.is_due(config.checkpoint.interval, step):
            is_shown = self.is_main and self.config.log.progress
            with self.timers("checkpoint"), progress(None, f"checkpoint of step {step}", is_shown):
                self.save(step)

    def is_stopped(self, step: int) -> bool:
        """Allows a checkpoint to become visible, now that the step is logged; tells whether the run is to stop here."""
        if not self.is_stopping and step < self.config.steps:
            self.checkpoints.poll()
            return False
        self.checkpoints.finish()
        if self.is_stopping:
            if self.is_main:
                self.stop.clear()
            self.log.message(
                f"stopped after step {step} of {self.config.steps} as asked; go on with the same command and --resume"
            )
        return self.is_stopping

    def save(self, step: int) -> None:
        layout = self.runtime.layout
        self.checkpoints.save(
            self.policy,
            Manifest(
                step=step,
                optimizer_step=self.policy.optimizer_step,
                fingerprint=self.policy.fingerprint(),
                layout=f"tp={layout.tp},pp={layout.pp},vpp={layout.vpp},dp={layout.dp}",
                model=asdict(self.model.shape),
                seed=self.config.seed,
                checksums={},
                draws=self.draws,
                inputs=self.inputs.digests(),
            ),
        )

    def tell_memory(self) -> None:
        """Logs the most memory that each phase has held so far, on the rank that held most. All ranks call it."""
        peaks: list[dict[str, int]] = [{}] * self.runtime.layout.world_size
        dist.all_gather_object(peaks, self.timers.peaks)
        worst = {phase: max(p.get(phase, 0) for p in peaks) / 2**30 for phase in self.timers.peaks}
        of = "of the GPU's tensors" if self.runtime.device.is_cuda else "of a rank's process"
        listed = ", ".join(f"{phase} {gib:.2f}" for phase, gib in sorted(worst.items(), key=lambda item: -item[1]))
        self.log.message(f"peak memory {of} by phase, GiB: {listed}")

    def check_health(self, step: int, metrics: StepMetrics) -> None:
        """Ends a run that has diverged, once its step is logged. Raises NonFiniteError, with a checkpoint, or MismatchError."""
        if self.health.has_diverged:
            self.checkpoints.finish()
        self.health.check(step, metrics, self.checkpoints.folder)


@contextmanager
def open_job(config: Config, build: BuildPolicy | None = None) -> Iterator[Job]:
    """A job ready for its first step, except that the engine has no weights before the first publish.

    `build` makes the policy; None: one that trains, from the model that the run starts with.
    """
    with ExitStack() as stack:
        # The workers import in the background while the model is built.
        pool = stack.enter_context(reward_pool(config))
        model = read_model(config)
        tokenizer = read_tokenizer(model)
        data = load_data(config.data, tokenizer)
        sampler = data.sampler(config.data, config.batch.prompts_per_step, config.seed, config.rollout)
        pool.wait_until_ready()

        runtime = runtimes.start(config)
        stack.callback(runtimes.stop)
        rendezvous = Rendezvous(runtime.store, runtime.rank, runtime.layout.world_size)
        engine = build_engine(config, model.hf_config, model.family, model.shape, model.dtype, runtime, rendezvous)
        stack.callback(engine.close)
        peak = PeakMemory(runtime.device)
        memory = make_room(engine, runtime, config.rollout, peak)
        policy = (build or build_policy)(config, model, runtime)
        with runtime.together():
            engine.wait_until_ready()
        timers = Timers(take_peak=peak.take)
        stop = StopRequest(config.run_dir)
        log = _open_log(config, runtime, data.notes)
        stack.callback(log.close)
        # What is alive now stays so: Megatron collects garbage in every save, which would go through all of it.
        gc.freeze()
        stack.enter_context(_hang_watch(config, runtime, timers))
        checkpoints = stack.enter_context(closing(_open_checkpoints(config, runtime, log)))
        yield Job(
            config=config,
            runtime=runtime,
            model=model,
            tokenizer=tokenizer,
            train_prompts=data.train,
            heldout={name: prompts[: config.eval.num_prompts] for name, prompts in data.heldout_sets.items()},
            sampler=sampler,
            sampling=training_sampling(config, model, tokenizer),
            policy=policy,
            colocation=Colocation(
                policy=policy,
                engine=engine,
                sync=build_sync(config, model.dtype, policy, engine, rendezvous),
                rendezvous=rendezvous,
                timers=timers,
                config=config.rollout,
                memory=memory,
                say=log.message,
            ),
            scorer=Scorer(pool, partial(decode, tokenizer)),
            log=log,
            timers=timers,
            checkpoints=checkpoints,
            stop=stop,
            inputs=RunInputs(config.model, data.digests, runtime.rank, runtime.layout.world_size),
            health=Health(config),
        )


def _open_checkpoints(config: Config, runtime: Runtime, log: Log) -> Checkpoints:
    return Checkpoints(
        config.run_dir / CHECKPOINTS,
        config.checkpoint,
        runtime.rank,
        store=runtime.store,
        warn=log.warn,
        shows_progress=config.log.progress,
    )


def _hang_watch(config: Config, runtime: Runtime, timers: Timers) -> HangWatch:
    return HangWatch(
        runtime.store,
        runtime.rank,
        runtime.layout.world_size,
        timers=timers,
        recorder=recorder(),
        deadline_s=config.hang_deadline_s,
        deadline_of_phase=config.deadline_of_phase,
        run_dir=config.run_dir,
        last_checkpoint=partial(tell_latest, config.run_dir / CHECKPOINTS),
    )


def _open_log(config: Config, runtime: Runtime, notes: Sequence[str]) -> Log:
    """Without what was logged after the last checkpoint, which will be done again; it begins with whose kernels are used."""
    changes: list[str] = []
    if runtime.rank == 0:
        found = latest(config.run_dir / CHECKPOINTS)
        trim(config.run_dir, read_manifest(found).step if found else -1)
        changes = adopt(config)
    log = open_run_log(config, runtime.rank)
    for message in (in_use(runtime.device).line(), *notes, *changes):
        log.message(message)
    return log


def reward_pool(config: Config) -> RewardPool:
    """The workers of this rank, which scores what its engine samples: the first rank of an engine does, the others rest."""
    is_leader = int(os.environ.get("RANK", "0")) % config.rollout.tp == 0
    rewards = config.rewards
    return RewardPool(
        [(f.name, f.weight) for f in rewards.functions],
        rewards.num_workers if is_leader else 0,
        rewards.deadline_s,
        options={f.name: f.options for f in rewards.functions},
        step_splitter=rewards.step_splitter,
    )


def read_model(config: Config) -> ModelFiles:
    """Raises ConfigError or WeightMappingError for a model that cannot be trained."""
    try:
        hf_config = AutoConfig.from_pretrained(config.model.path)
    except Exception as error:  # transformers and what it builds on raise what they like
        raise ConfigError(
            f"transformers refuses {config.model.path / 'config.json'} ({' '.join(str(error).split())}); mend the file"
        ) from None
    check_architecture(hf_config.to_dict())
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    return ModelFiles(config.model.path, hf_config, shape, family_of(shape.model_type), DTYPES[config.model.dtype])


def read_tokenizer(model: ModelFiles) -> Any:
    """Raises ConfigError for one that cannot be loaded or is larger than the model's vocabulary."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder)
    except Exception as error:  # transformers and tokenizers raise what they like
        raise ConfigError(
            f"the tokenizer of model.path={model.folder} cannot be loaded ({error!r}); fetch its files again"
        ) from None
    check_vocabulary(model.folder, max(tokenizer.get_vocab().values()), model.shape.vocab)
    return tokenizer


def build_policy(config: Config, model: ModelFiles, runtime: Runtime) -> Policy:
    """The policy with its weights: the checkpoint's, or random ones from the seed."""
    policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
    tensors = model.family.hf_tensors(model.shape)
    if config.model.init == "random":
        policy.load(random_reader(tensors, config.seed, model.hf_config.initializer_range))
    else:
        with open_reader(model.folder, model.family, model.shape) as reader:
            reader.check(tensors)
            policy.load(reader.read)
    return policy


def export_policy(policy: Policy, model: ModelFiles, folder: Path) -> None:
    """Writes the policy as a Hugging Face checkpoint."""
    export(
        policy.rank_shards(),
        policy.tensors(),
        family=model.family,
        shape=model.shape,
        dtype=model.dtype,
        source_folder=model.folder,
        folder=folder,
    )


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Text without special tokens, as rewards see it."""
    return well_formed(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def training_sampling(config: Config, model: ModelFiles, tokenizer: Any) -> Sampling:
    """How training samples are drawn. All end-of-sequence ids stop: the generation config's, the model's, the tokenizer's."""
    stops = {*config.rollout.stop_token_ids, tokenizer.eos_token_id}
    sources = [model.hf_config]
    if (model.folder / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(model.folder))
    for source in sources:
        eos = source.eos_token_id
        stops.update(eos if isinstance(eos, (list, tuple)) else [eos])
    return Sampling(
        group_size=config.algorithm.group_size,
        temperature=config.rollout.temperature,
        max_response_length=config.rollout.max_response_length,
        stop_token_ids=frozenset(s for s in stops if s is not None),
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        seed=config.seed,
    )
