"""Read the Hugging Face checkpoint that a run starts from, and write the trained policy as a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from grpo_mega.config import Config
from grpo_mega.data.chat import find_turn_end
from grpo_mega.errors import ConfigError, raise_first
from grpo_mega.formats.export import export
from grpo_mega.formats.reader import open_reader, random_reader
from grpo_mega.megatron.policy import Policy
from grpo_mega.megatron.precision import DTYPES
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.megatron.teacher import Teacher
from grpo_mega.preflight.model import architecture_problems
from grpo_mega.preflight.tokenizer import check_vocabulary
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sglang.session import check_server
from grpo_mega.text import well_formed
from grpo_mega.weights.families import family_of
from grpo_mega.weights.hf_config import difference, resolve
from grpo_mega.weights.spec import Family, ModelShape, read_config


@dataclass(frozen=True)
class ModelFiles:
    """The Hugging Face checkpoint that a run starts from, and the values of its config."""

    folder: Path
    hf_config: Any
    shape: ModelShape
    family: Family
    dtype: torch.dtype  # model.dtype of the run's config


def read_model(config: Config) -> ModelFiles:
    """Read model.path. Raise ConfigError or WeightMappingError if the model cannot be trained."""
    return _read(config.model.path, config)


def _read(folder: Path, config: Config) -> ModelFiles:
    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers and its dependencies raise exceptions of any type
        raise ConfigError(
            f"transformers refuses {folder / 'config.json'} ({' '.join(str(error).split())}); correct the file"
        ) from None
    fields = resolve(hf_config.to_dict())
    if problem := difference(hf_config.model_type, resolve(read_config(folder)), fields):
        raise ConfigError(f"{folder / 'config.json'}: {problem}, as this version reads it; write the field into the file")
    raise_first(architecture_problems(fields))
    shape = ModelShape.from_hf_config(fields)
    return ModelFiles(folder, hf_config, shape, family_of(shape.model_type), DTYPES[config.model.dtype])


def read_tokenizer(model: ModelFiles) -> Any:
    """Load the tokenizer. Raise ConfigError if it cannot be loaded or is larger than the model's vocabulary."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.folder)
    except Exception as error:  # transformers and tokenizers raise exceptions of any type
        raise ConfigError(
            f"the tokenizer of model.path={model.folder} cannot be loaded ({error!r}); fetch its files again"
        ) from None
    check_vocabulary(model.folder, max(tokenizer.get_vocab().values()), model.shape.vocab)
    return tokenizer


def decoder(tokenizer: Any, model: ModelFiles | None = None) -> Callable[[Sequence[int]], str]:
    """Return a function from a response's token ids to its text. Rewards, samples, reports and evaluation all use this text.

    The text leaves out only control tokens: the end-of-sequence, padding and start-of-sequence tokens of the tokenizer, the
    model and its generation config, and the end of a turn in the chat template. Other special tokens, such as <think> or
    <answer>, are text. A token that is only in rollout.stop_token_ids, such as </answer>, is also text, because a format may
    need it.
    """
    hidden = frozenset(_control_ids(tokenizer, model))

    def decode(token_ids: Sequence[int]) -> str:
        shown = [token for token in token_ids if token not in hidden]
        return well_formed(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


def _control_ids(tokenizer: Any, model: ModelFiles | None) -> set[int]:
    ids = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id} - {None}
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} - {tokenizer.unk_token_id}
    turn_end = special.intersection(tokenizer(find_turn_end(tokenizer), add_special_tokens=False)["input_ids"])
    ids |= {token for token in turn_end if tokenizer.convert_ids_to_tokens(token).strip()}  # some tokenizers add line breaks
    if model is not None:
        # transformers' config defaults may name ordinary tokens, so padding and start tokens count only if they are special.
        ids |= _ids_of(model, "eos_token_id") | (special & (_ids_of(model, "pad_token_id") | _ids_of(model, "bos_token_id")))
    return ids


def _ids_of(model: ModelFiles, name: str) -> set[int]:
    """Return the ids in a field such as eos_token_id of the model's config and its generation config."""
    sources = [model.hf_config]
    if (model.folder / "generation_config.json").exists():
        sources.append(GenerationConfig.from_pretrained(model.folder))
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, name, None)
        ids.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return ids


def training_sampling(config: Config, model: ModelFiles, tokenizer: Any) -> Sampling:
    """Return the sampling parameters of training.

    Every end-of-sequence id of the config, the model, its generation config and the tokenizer stops a response.
    """
    stops = {*config.rollout.stop_token_ids, *_ids_of(model, "eos_token_id"), tokenizer.eos_token_id} - {None}
    return Sampling(
        group_size=config.algorithm.group_size,
        temperature=config.rollout.temperature,
        max_response_length=config.rollout.max_response_length,
        stop_token_ids=frozenset(stops),
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        seed=config.seed,
        with_routes=bool(config.rollout.routing_replay),
        longest_first=config.rollout.longest_first,
    )


def build_policy(config: Config, model: ModelFiles, runtime: Runtime) -> Policy:
    """Build the policy and its teachers. The policy gets the checkpoint's weights, or random weights from the seed."""
    policy = Policy(config, model.shape, model.family, model.hf_config, runtime)
    tensors = model.family.hf_tensors(model.shape)
    if config.model.init == "random":
        policy.load(random_reader(tensors, config.seed, model.hf_config.initializer_range))
    else:
        with open_reader(model.folder, model.family, model.shape) as reader:
            reader.check(tensors)
            policy.load(reader.read)
    for name, settings in config.teachers.items():
        if settings.url is None:
            policy.teachers[name] = _build_teacher(config, _read(settings.path, config), runtime, model.shape.vocab)
            continue
        with runtime.raise_on_all_ranks():
            check_server(name, settings.url)
    return policy


def _build_teacher(config: Config, model: ModelFiles, runtime: Runtime, vocab_size: int) -> Teacher:
    teacher = Teacher(config, model.shape, model.family, model.hf_config, runtime, vocab_size)
    with open_reader(model.folder, model.family, model.shape) as reader:
        reader.check(model.family.hf_tensors(model.shape))
        teacher.load(reader.read)
    return teacher


def export_policy(policy: Policy, model: ModelFiles, folder: Path) -> None:
    """Write the policy as a Hugging Face checkpoint."""
    export(
        policy.rank_shards(),
        policy.tensors(),
        family=model.family,
        shape=model.shape,
        dtype=model.dtype,
        source_folder=model.folder,
        folder=folder,
    )
