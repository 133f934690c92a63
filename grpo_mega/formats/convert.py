"""The two conversions. Both stream, resume, prove what they wrote, and leave nothing under the output's name before that."""

from __future__ import annotations

from pathlib import Path

from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.formats.compare import same_tensor
from grpo_mega.formats.detect import find_checkpoint
from grpo_mega.formats.dtypes import FROM_TORCH, WEIGHTS
from grpo_mega.formats.hf_weights import HfWeights
from grpo_mega.formats.layouts import hf_plan, megatron_plan
from grpo_mega.formats.megatron_weights import MegatronWeights
from grpo_mega.formats.output import Report, check_free, write
from grpo_mega.formats.records import check_records

DEFAULT_SHARD_BYTES = 5_000_000_000
_OUTPUT_LAYER = "lm_head.weight"


def convert_hf_to_mcore(
    folder: Path, out: Path, *, dtype: str | None = None, workers: int = 2, show_progress: bool = True
) -> Report:
    """A Hugging Face folder as a Megatron distributed checkpoint, with the folder's config and tokenizer beside it.

    `dtype`: torch's name of the one to cast to; None keeps each tensor's own. Raises ConfigError or WeightMappingError in one
    line for whatever cannot be converted, before anything is written if headers tell it.
    """
    cast = _known(dtype)
    check_free(out)
    checkpoint = find_checkpoint(folder)
    if checkpoint.is_megatron:
        raise ConfigError(f"{folder} is a Megatron checkpoint already; convert_mcore_to_hf.py takes it")
    weights = checkpoint.open()
    assert isinstance(weights, HfWeights)
    plan = megatron_plan(checkpoint, weights, cast)
    family, shape = checkpoint.model()
    embedding = family.embedding.hf[0]
    if shape.tied and _OUTPUT_LAYER in weights.shapes() and not same_tensor(weights, _OUTPUT_LAYER, weights, embedding):
        raise WeightMappingError(
            f"{folder}: {_OUTPUT_LAYER} is not {embedding}, though config.json has tie_word_embeddings=true; set it to false"
        )
    return write(plan, out, workers, show_progress)


def convert_mcore_to_hf(
    folder: Path,
    out: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: str | None = None,
    workers: int = 2,
    config_folder: Path | None = None,
    show_progress: bool = True,
) -> Report:
    """A Megatron distributed checkpoint, converted or a run's, saved in any layout, as a Hugging Face folder.

    `config_folder`: where config.json and tokenizer are, if the checkpoint does not tell.
    """
    cast = _known(dtype)
    check_free(out)
    checkpoint = find_checkpoint(folder, config_folder)
    if not checkpoint.is_megatron:
        if checkpoint.path != Path(folder):
            raise ConfigError(f"{folder} has no checkpoints; use {checkpoint.path}, which is a Hugging Face folder already")
        raise ConfigError(f"{folder} is a Hugging Face folder already; convert_hf_to_mcore.py takes it")
    weights = checkpoint.open()
    assert isinstance(weights, MegatronWeights)
    try:
        check_records(weights, workers, show_progress)
        return write(hf_plan(checkpoint, weights, max_shard_bytes, cast), out, workers, show_progress)
    finally:
        weights.close()


def _known(dtype: str | None) -> str | None:
    names = {name: code for name, code in FROM_TORCH.items() if code in WEIGHTS}
    if dtype is not None and dtype not in names:
        raise ConfigError(f"--dtype={dtype} is not known; use one of {', '.join(sorted(names))}")
    return names[dtype] if dtype else None
