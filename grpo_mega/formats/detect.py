"""Finding out what a path is: a Hugging Face folder, a converted checkpoint, or one of a run; needs no torch.

A Megatron checkpoint carries the Hugging Face files that belong to it (config.json, tokenizer, ...) beside its own. One that
training wrote has them in the folder that the run started from, which the run's config.yaml names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dcp_read import is_distributed_checkpoint
from grpo_mega.formats.hf_files import INDEX, SINGLE
from grpo_mega.formats.hf_weights import BIN, BIN_INDEX, HfWeights
from grpo_mega.formats.megatron_weights import MegatronWeights
from grpo_mega.paths import CHECKPOINTS, CONFIG_FILE, FINISHED
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import Family, ModelShape, read_config

STATE, MANIFEST, LATEST = "state", "checkpoint.json", "latest"  # of a run's checkpoints
_TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM's own training


@dataclass(frozen=True)
class Checkpoint:
    """`weights`: the folder with the tensors; `side`: the one with config.json and tokenizer; `manifest`: a run's, or empty."""

    path: Path
    kind: str  # "Hugging Face" or "Megatron"
    weights: Path
    side: Path
    manifest: dict[str, Any]
    note: str | None = None  # where the tensors are, if not where one would look first

    @property
    def is_megatron(self) -> bool:
        return self.kind == "Megatron"

    def config(self) -> dict[str, Any]:
        return read_config(self.side)

    def model(self) -> tuple[Family, ModelShape]:
        """Raises WeightMappingError for an unknown type or a config without a needed field."""
        shape = ModelShape.from_hf_config(self.config())
        return family_of(shape.model_type), shape

    def open(self) -> HfWeights | MegatronWeights:
        """Raises WeightMappingError if files are damaged or do not belong together."""
        if self.is_megatron:
            return MegatronWeights(self.weights, *self.model())
        return HfWeights(self.weights, self.config())


def find_checkpoint(path: Path, config_folder: Path | None = None) -> Checkpoint:
    """What `path` is. `config_folder`: where config.json and tokenizer are, if they are not found otherwise.

    Raises WeightMappingError if it is no checkpoint, or its config.json cannot be found.
    """
    path = Path(path)
    if not path.is_dir():
        raise WeightMappingError(f"{path} is not a folder; give that of a checkpoint")
    state = _state_of(path)
    if state is not None:
        side = config_folder or _side_of(state)
        return Checkpoint(path, "Megatron", state, side, _manifest_of(state))
    if _is_hugging_face(path):
        return Checkpoint(path, "Hugging Face", path, config_folder or path, {})
    finished = path / FINISHED
    if (path / CONFIG_FILE).is_file() and _is_hugging_face(finished):
        note = f"{path} has no checkpoints: taking {finished}, the policy after its last step"
        return Checkpoint(finished, "Hugging Face", finished, config_folder or finished, {}, note)
    raise WeightMappingError(
        f"{path} is not a checkpoint: it has neither {SINGLE}, {INDEX} or {BIN} nor .metadata with metadata.json; give one"
    )


def _is_hugging_face(path: Path) -> bool:
    return any((path / name).exists() for name in (SINGLE, INDEX, BIN, BIN_INDEX))


def _state_of(path: Path) -> Path | None:
    """The folder of Megatron's files: itself, or within a checkpoint, the checkpoints, or the folder of a run."""
    candidates = [path, path / STATE]
    for folder in (path, path / CHECKPOINTS):
        if (folder / LATEST).is_file():
            candidates.append(folder / (folder / LATEST).read_text().strip() / STATE)
    if (path / _TRACKER).is_file():
        iteration = (path / _TRACKER).read_text().strip()
        candidates.append(path / (iteration if iteration == "release" else f"iter_{int(iteration):07d}"))
    return next((c for c in candidates if is_distributed_checkpoint(c)), None)


def _side_of(state: Path) -> Path:
    if (state / "config.json").is_file():
        return state
    for folder in list(state.resolve().parents)[:4]:
        if (folder / "config.json").is_file():
            return folder
        if (folder / CONFIG_FILE).is_file():
            found = Path(yaml.safe_load((folder / CONFIG_FILE).read_text())["model"]["path"])
            if (found / "config.json").is_file():
                return found
    raise WeightMappingError(f"{state} has no config.json, and no run's config.yaml leads to one; give its folder by --config")


def _manifest_of(state: Path) -> dict[str, Any]:
    path = state.parent / MANIFEST
    return json.loads(path.read_text()) if path.is_file() else {}
