"""Find the models and data sets that flags name: on this machine, or on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_mega.data.rows import read_rows
from grpo_mega.errors import ConfigError
from grpo_mega.files import read_json
from grpo_mega.paths import user_path

PROMPT_COLUMNS = ("prompt", "problem", "question")  # default columns: the first one that the set has
_FORMATS = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"[\w][\w.-]*(?:/[\w][\w.-]*)?")
# All files of a checkpoint that may be read: no weights in other formats, and no code.
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def find_model(name: str, revision: str | None, *, is_cached: bool) -> Path:
    """Return the folder of a checkpoint: a local one, or one of the hub, downloaded once into its cache. Raise ConfigError.

    `is_cached`: another process has downloaded it, so the network is not used.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise ConfigError(f"--model_revision {revision} is for models of the hub, but {name} is a folder; leave it out")
        return Path(name)
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"--model_name_or_path {name} is no folder; name one, or a model of the Hugging Face hub (owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_MODEL_FILES, local_files_only=is_cached))
    except Exception as error:  # raised by the hub's client, the network or the disk
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"--model_name_or_path {name} is neither a local folder nor available from the Hugging Face hub ({reason}); "
            "check name, revision and network, or download it elsewhere and name its folder"
        ) from None


def own_dtype(model: Path) -> str:
    """Return float32 if the model's config.json has this dtype, else bfloat16."""
    try:
        fields = read_json(model / "config.json")
    except (OSError, ValueError):
        return "bfloat16"  # preflight reports the problem with the file
    dtype = fields.get("dtype") or fields.get("torch_dtype") if isinstance(fields, dict) else None
    return "float32" if dtype == "float32" else "bfloat16"


def find_data(name: str, config: str | None, split: str | None) -> str:
    """Return the value of data.train for a file, a folder or a name on the hub. Raise ConfigError."""
    path = user_path(name)
    is_local = path.exists() or path.suffix in _FORMATS or not _HUB_NAME.fullmatch(name.removeprefix("hub:"))
    if is_local:
        if config is not None:
            raise ConfigError(f"--dataset_config {config} is for data sets of the hub, but {name} is a path; leave it out")
        if split is None:
            return str(path)
        if not path.is_dir():
            raise ConfigError(f"split {split!r} of {name}: a file has no splits; leave it out, or set data.heldout by --set")
        return f"{path}@{split}"
    return f"hub:{name.removeprefix('hub:')}{f':{config}' if config else ''}{f'@{split}' if split else ''}"


def find_prompt_column(path: str) -> str | None:
    """Return the first of PROMPT_COLUMNS in the data set; None if it has none of them."""
    first = next(iter(read_rows(path)), None)
    return next((column for column in PROMPT_COLUMNS if first and column in first.values), None)


def count_rows(path: str) -> int:
    return sum(1 for _ in read_rows(path))
