"""Assemble a run from its config: data, engine, policy, sync, rewards, log, checkpoints."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from grpo_mega.config import Config
from grpo_mega.data.load import load_data
from grpo_mega.distributed.device import PeakMemory
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.stop import StopRequest
from grpo_mega.distributed.watchdog import HangWatch
from grpo_mega.formats.checkpoint_files import latest, read_manifest, tell_latest
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.loaded_kernels import in_use
from grpo_mega.megatron.policy import Policy, policy_shards
from grpo_mega.megatron.precision import DTYPES
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.run_log import RunLog, open_run_log
from grpo_mega.observe.timers import Timers
from grpo_mega.paths import CHECKPOINTS
from grpo_mega.rewards.scorer import Scorer
from grpo_mega.rewards.workers.pool import RewardPool
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.run.checkpoints import Checkpoints
from grpo_mega.run.colocation import Colocation
from grpo_mega.run.engines import build_engine, build_sync, make_room
from grpo_mega.run.folder import adopt, trim
from grpo_mega.run.health import Health
from grpo_mega.run.input_digests import InputDigests
from grpo_mega.run.job import Job
from grpo_mega.run.model_files import ModelFiles, build_policy, decoder, read_model, read_tokenizer, training_sampling

BuildPolicy = Callable[[Config, ModelFiles, Runtime], Policy]


@contextmanager
def open_job(config: Config, build: BuildPolicy = build_policy) -> Iterator[Job]:
    """Prepare the job for its first step. The engine has no weights before the first sync_weights.

    The end of the context always closes workers, servers, files and process groups. Evaluation passes another `build`, because
    it needs no optimizer.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(_reward_pool(config))  # the workers import in the background while the model is built
        model = read_model(config)
        tokenizer = read_tokenizer(model)
        data = load_data(config.data, tokenizer)
        sampler = data.sampler(config.data, config.batch.prompts_per_step, config.seed, config.rollout)
        pool.wait_until_ready()

        runtime = runtimes.start(config)
        stack.callback(runtimes.stop)
        rendezvous = Rendezvous(runtime.store, runtime.rank, runtime.num_ranks)
        engine = build_engine(config, model, runtime, rendezvous)
        stack.callback(engine.close)
        peak = PeakMemory(runtime.device)
        memory = make_room(engine, runtime, config.rollout, peak)
        policy = build(config, model, runtime) if runtime.trains else None
        with runtime.raise_on_all_ranks(runtime.everyone):
            engine.wait_until_ready()
        timers = Timers(take_peak=peak.take)
        stop = StopRequest(config.run_dir)
        log = _open_log(config, runtime, data.notes)
        stack.callback(log.close)
        gc.freeze()  # Megatron collects garbage in every save; objects alive now stay until the end and need no scan
        stack.enter_context(_hang_watch(config, runtime, timers))
        trainer = policy_shards(model.family, model.shape, config, runtime)
        sync = build_sync(config, DTYPES[config.engine_dtype], trainer, engine, runtime, rendezvous)
        colocation = Colocation(
            policy, engine, sync, rendezvous, timers, config.rollout, memory, log.message, runtime.first_engine_rank
        )
        sampling, decode = training_sampling(config, model, tokenizer), decoder(tokenizer, model)
        checkpoints = stack.enter_context(closing(Checkpoints(config, runtime.rank, runtime.store, log.warn)))
        yield Job(
            config=config,
            runtime=runtime,
            model=model,
            data=data,
            sampler=sampler,
            policy=policy,
            colocation=colocation,
            rollouts=Rollouts(
                config,
                engine,
                colocation.recover,
                rendezvous,
                Scorer(pool, decode),
                sampling,
                decode,
                timers,
                log.warn,
                runtime.everyone,
                partial(runtime.raise_on_all_ranks, runtime.everyone),
            ),
            checkpoints=checkpoints,
            inputs=InputDigests(config, data.digests, runtime.rank, runtime.layout.world_size),
            log=log,
            timers=timers,
            stop=stop,
            health=Health(config),
        )


def _reward_pool(config: Config) -> RewardPool:
    """Create this rank's reward workers. Only the first rank of each engine has workers, to score its engine's samples."""
    rank, num_engine_ranks = int(os.environ.get("RANK", "0")), config.layout.engine_ranks
    if num_engine_ranks:
        rank -= int(os.environ["WORLD_SIZE"]) - num_engine_ranks
    return RewardPool(config.rewards, has_workers=rank >= 0 and rank % config.rollout.tp == 0)


def _open_log(config: Config, runtime: Runtime, notes: Sequence[str]) -> RunLog:
    """Open the log. Remove lines after the last checkpoint, because the run repeats these steps.

    Log the kernels in use, notes on the data, and the settings that a resume changed.
    """
    changes: list[str] = []
    if runtime.rank == 0:
        checkpoint = latest(config.run_dir / CHECKPOINTS)
        trim(config.run_dir, read_manifest(checkpoint).step if checkpoint else -1)
        changes = adopt(config)
    log = open_run_log(config, runtime.rank)
    for message in (in_use(runtime.device).line(), *notes, *changes):
        log.message(message)
    return log


def _hang_watch(config: Config, runtime: Runtime, timers: Timers) -> HangWatch:
    last_checkpoint = partial(tell_latest, config.run_dir / CHECKPOINTS)
    return HangWatch(config, runtime.store, runtime.rank, runtime.num_ranks, timers, last_checkpoint)
