"""Building the parts of a run from its config: data, policy, engine, sync, rewards, log.

`open_job(config)` is a context manager: whatever way the run ends, workers, files and process groups are closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from grpo_mega.config import Config
from grpo_mega.data.dataset import DatasetReport, load_prompts
from grpo_mega.data.sampler import PromptSampler
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.model import DTYPES, check_architecture
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.observe.run_log import Log, open_run_log
from grpo_mega.observe.timers import Timers
from grpo_mega.rewards.pool import RewardPool
from grpo_mega.rewards.scorer import Scorer
from grpo_mega.rollout.embedded import EmbeddedEngine
from grpo_mega.rollout.engine import Engine, Sampling
from grpo_mega.sync.publish import WeightSync
from grpo_mega.types import Prompt
from grpo_mega.weights.export import export
from grpo_mega.weights.families import family_of
from grpo_mega.weights.hf_io import CheckpointReader
from grpo_mega.weights.initial import random_reader
from grpo_mega.weights.spec import Family, ModelShape


@dataclass(frozen=True)
class ModelFiles:
    """The Hugging Face checkpoint that a run starts from, as its config describes it."""

    folder: Path
    hf_config: Any
    shape: ModelShape
    family: Family
    dtype: torch.dtype  # in which it is trained and served


@dataclass
class Job:
    config: Config
    runtime: Runtime
    model: ModelFiles
    tokenizer: Any
    train_prompts: list[Prompt]
    heldout_prompts: list[Prompt]
    sampler: PromptSampler
    sampling: Sampling
    policy: Policy
    engine: Engine
    sync: WeightSync
    scorer: Scorer
    log: Log
    timers: Timers

    @property
    def is_main(self) -> bool:
        return self.runtime.rank == 0

    def prompts(self, step: int) -> list[Prompt]:
        return [self.train_prompts[i] for i in self.sampler.indices(step)]

    def decode(self, token_ids: list[int]) -> str:
        return decode(self.tokenizer, token_ids)


@contextmanager
def open_job(config: Config) -> Iterator[Job]:
    """A job ready for its first step, except that the engine has no weights before the first publish."""
    with ExitStack() as stack:
        # The workers import in the background while the model is built.
        pool = stack.enter_context(reward_pool(config))
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        train_prompts, report = _prompts(config, config.data.train, tokenizer)
        heldout_prompts = _prompts(config, config.data.heldout, tokenizer)[0] if config.data.heldout else []
        sampler = PromptSampler(len(train_prompts), config.batch.prompts_per_step, config.seed, config.data.shuffle)
        model = read_model(config)

        runtime = runtimes.start(config)
        stack.callback(runtimes.stop)
        log = open_run_log(config, runtime.rank)
        stack.callback(log.close)
        log.message(str(report))
        policy = build_policy(config, model, runtime)
        engine = build_engine(config, model, runtime)
        yield Job(
            config=config,
            runtime=runtime,
            model=model,
            tokenizer=tokenizer,
            train_prompts=train_prompts,
            heldout_prompts=heldout_prompts[: config.eval.num_prompts],
            sampler=sampler,
            sampling=training_sampling(config, model, tokenizer),
            policy=policy,
            engine=engine,
            sync=WeightSync(policy.holdings(), engine.holdings(runtime.layout.world_size), model.dtype),
            scorer=Scorer(pool, partial(decode, tokenizer)),
            log=log,
            timers=Timers(),
        )


def reward_pool(config: Config) -> RewardPool:
    functions = [(f.name, f.weight) for f in config.rewards.functions]
    return RewardPool(functions, config.rewards.num_workers, config.rewards.deadline_s)


def read_model(config: Config) -> ModelFiles:
    """Raises ConfigError or WeightMappingError for a model that cannot be trained."""
    hf_config = AutoConfig.from_pretrained(config.model.path)
    check_architecture(hf_config)
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    return ModelFiles(config.model.path, hf_config, shape, family_of(shape.model_type), DTYPES[config.model.dtype])


def build_policy(config: Config, model: ModelFiles, runtime: Runtime) -> Policy:
    """The policy with its weights: the checkpoint's, or random ones from the seed."""
    policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
    tensors = model.family.hf_tensors(model.shape)
    if config.model.init == "random":
        policy.load(random_reader(tensors, config.seed, model.hf_config.initializer_range))
    else:
        with CheckpointReader(model.folder) as reader:
            reader.check(tensors)
            policy.load(reader.read)
    return policy


def build_engine(config: Config, model: ModelFiles, runtime: Runtime) -> Engine:
    return EmbeddedEngine(
        model.hf_config, model.shape, model.family, model.dtype, runtime.device, config.rollout.max_concurrent
    )


def export_policy(policy: Policy, model: ModelFiles, folder: Path) -> None:
    """Writes the policy as a Hugging Face checkpoint."""
    export(
        policy.holdings(),
        policy.tensors(),
        family=model.family,
        shape=model.shape,
        dtype=model.dtype,
        source_folder=model.folder,
        folder=folder,
    )


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """Text without special tokens, as rewards see it."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


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


def _prompts(config: Config, path: Path, tokenizer: Any) -> tuple[list[Prompt], DatasetReport]:
    data = config.data
    return load_prompts(
        path,
        tokenizer=tokenizer,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        system_prompt=data.system_prompt,
        max_prompt_length=data.max_prompt_length,
    )
