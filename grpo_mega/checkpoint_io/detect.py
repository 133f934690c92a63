"""Find, describe and compare checkpoints: Hugging Face folders, converted checkpoints, and a run's. Only `compare`
needs torch.

A converted Megatron checkpoint contains the Hugging Face files that belong to it (config.json, tokenizer, ...). For a
checkpoint written by training, these files are in the folder that the run started from, named in the run's config.yaml.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint_io.checkpoints import Manifest, SavedPolicy, newer_export, read_manifest
from grpo_mega.checkpoint_io.dcp_read import is_distributed_checkpoint, read_metadata
from grpo_mega.checkpoint_io.hf_files import BIN, INDEX, SINGLE, adapter_problem, has_weights, with_old_fields
from grpo_mega.checkpoint_io.hf_weights import HfWeights
from grpo_mega.checkpoint_io.megatron_weights import MegatronWeights
from grpo_mega.checkpoint_io.slices import ITEM_BYTES, TORCH_NAMES, Files, Weights, main_dtype, target_of
from grpo_mega.errors import ResumeError, WeightMappingError
from grpo_mega.paths import (
    CHECKPOINTS,
    CONFIG_FILE,
    EXPORT_DIR,
    LATEST,
    MANIFEST,
    MAX_JSON_BYTES,
    STATE,
    read_file,
    read_name,
)
from grpo_mega.tracking.progress import progress
from grpo_mega.weights.boxes import alone, whole
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import Family, ModelShape, read_config
from grpo_mega.yaml_text import parse_yaml

# Fields of config.json that name a version or source.
_IGNORED = ("transformers_version", "_name_or_path", "_commit_hash")
_SAME = {"torch_dtype": "dtype"}  # old names of fields
_TRACKER = "latest_checkpointed_iteration.txt"  # file that Megatron-LM's training writes


@dataclass(frozen=True)
class Checkpoint:
    """`weights`: the folder with the tensors. `side`: the folder with config.json and tokenizer. `manifest`: only for
    runs.
    """

    path: Path
    kind: str  # "Hugging Face" or "Megatron"
    weights: Path
    side: Path
    manifest: Manifest | None
    note: str | None = None  # says why a run's policy was taken from RUN_DIR/hf
    export: SavedPolicy | None = None

    @property
    def is_megatron(self) -> bool:
        return self.kind == "Megatron"

    def config(self) -> dict[str, Any]:
        return read_config(self.side)

    def model(self) -> tuple[Family, ModelShape]:
        """Return the family and sizes. Raise WeightMappingError for an unknown type or a missing config field."""
        shape = ModelShape.from_hf_config(self.config())
        return family_of(shape.model_type), shape

    def open(self) -> HfWeights | MegatronWeights:
        """Return the tensors. Raise WeightMappingError if files are damaged or do not belong together."""
        if self.is_megatron:
            return MegatronWeights(self.weights, *self.model())
        weights = HfWeights(self.weights, self.config())
        weights.check_index()
        return weights


def find_checkpoint(path: Path, config_folder: Path | None = None) -> Checkpoint:
    """Return the checkpoint at `path`. `config_folder`: the folder of config.json and tokenizer, if nothing else names
    it.

    Raise WeightMappingError if `path` is not a checkpoint, or its config.json cannot be found.
    """
    if not path.is_dir():
        raise WeightMappingError(f"{path} is not a folder; name the folder of a checkpoint")
    if (problem := adapter_problem(path)) is not None:
        raise WeightMappingError(f"{path} {problem}")
    candidates = [path, path / STATE]  # folders of Megatron's files, if `path` is one, a checkpoint, or above them
    for folder in (path, path / CHECKPOINTS):
        if (folder / LATEST).exists():
            candidates.append(folder / _name_in(folder / LATEST) / STATE)
    if (path / _TRACKER).exists():
        iteration = _name_in(path / _TRACKER)
        is_number = iteration.isascii() and iteration.isdigit()
        candidates.append(path / (f"iter_{int(iteration):07d}" if is_number else iteration))
    state = next((c for c in candidates if is_distributed_checkpoint(c)), None)
    try:
        manifest = read_manifest(state.parent) if state is not None and (state.parent / MANIFEST).exists() else None
        export = newer_export(path, manifest) if (path / CONFIG_FILE).is_file() else None
        own_export = newer_export(path.parent, None) if path.name == EXPORT_DIR else None
    except ResumeError as error:
        raise WeightMappingError(str(error)) from None
    if export is not None and has_weights(export.path):
        folder = export.path
        return Checkpoint(folder, "Hugging Face", folder, config_folder or folder, None, export.note, export)
    if manifest is not None and manifest.adapter is not None:
        raise WeightMappingError(
            f"{path} holds only an adapter; write its policy by `grpo-mega export RUN_DIR OUT --merged`, and name OUT"
        )
    if state is not None:
        return Checkpoint(path, "Megatron", state, config_folder or _side_of(state), manifest)
    if has_weights(path):
        return Checkpoint(path, "Hugging Face", path, config_folder or path, None, export=own_export)
    raise WeightMappingError(
        f"{path} is not a checkpoint: it has neither {SINGLE}, {INDEX} or {BIN} nor .metadata with metadata.json;"
        " give one"
    )


def describe(path: Path, config_folder: Path | None = None) -> dict[str, Any]:
    """Return kind, family, sizes, dtype, step and more, with None for missing values. Raise WeightMappingError."""
    checkpoint = find_checkpoint(path, config_folder)
    _, shape = checkpoint.model()
    weights = checkpoint.open()
    dtypes = Counter(TORCH_NAMES[weights.dtype(name)] for name in weights.shapes)
    manifest, export = checkpoint.manifest, checkpoint.export
    step = manifest.step if manifest else export.step if export else None
    files = [p for p in sorted(checkpoint.weights.iterdir()) if p.is_file()]
    if isinstance(weights, HfWeights):
        kind = "Hugging Face folder" + (", FP8 with block scales" if weights.is_quantised else "")
    else:
        kind = "Megatron distributed checkpoint" + (" of a training run" if manifest else "")
    description = {
        "kind": kind,
        "family": shape.model_type,
        "parameters": sum(prod(s) for s in weights.shapes.values()),
        "tensors": len(weights.shapes),
        "dtype": (
            ", ".join(f"{d} ({n} tensors)" for d, n in dtypes.most_common()) if len(dtypes) > 1 else next(iter(dtypes))
        ),
        "layers": shape.num_layers,
        "experts": shape.num_experts or None,
        "tied_embeddings": shape.tied,
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "layout": None,
        "optimizer": None,
        "step": step,
        "policy_version": step,
        "optimizer_step": manifest and manifest.optimizer_step,
        "config": str(checkpoint.side / "config.json"),
        "note": checkpoint.note,
    }
    if checkpoint.is_megatron:
        saved = read_metadata(checkpoint.weights)
        if manifest:
            description["layout"] = manifest.layout
        else:  # the checkpoint loads at any tensor-parallel size
            projection = next(t for key, t in saved.items() if key.endswith("self_attention.linear_proj.weight"))
            tp_size = len({chunk.offset[-1] for chunk in projection.chunks})
            description["layout"] = f"any (saved in pieces of tp={tp_size})"
        description["optimizer"] = any(key.startswith("optimizer") for key in saved)
    return description


@dataclass
class FileDifference:
    """`config`: different fields as (name, in A, in B). The other lists have tensor names, `other` also shapes and
    dtypes.
    """

    config: list[tuple[str, Any, Any]]
    missing: list[str]  # tensors missing in B
    extra: list[str]
    other: list[str]
    bits: list[str]
    num_equal: int

    def __bool__(self) -> bool:
        return bool(self.config or self.missing or self.extra or self.other or self.bits)


def compare_checkpoints(a: Checkpoint, b: Checkpoint, workers: int = 2, show_progress: bool = True) -> FileDifference:
    """Compare config, names, and every tensor bit by bit. Raise WeightMappingError if a checkpoint is damaged."""
    from grpo_mega.checkpoint_io.reader import Streamer

    ours, theirs = a.open(), b.open()
    # Fields that an export adds make no difference.
    fields, others = (
        {_SAME.get(k, k): v for k, v in with_old_fields(c.config(), main_dtype(w)).items() if k not in _IGNORED}
        for c, w in ((a, ours), (b, theirs))
    )
    changed = [k for k in sorted({*fields, *others}) if fields.get(k) != others.get(k)]
    shapes, other_shapes = _without_derived(ours, a), _without_derived(theirs, b)
    common, other = [], []
    for name in (n for n in shapes if n in other_shapes):
        in_a, in_b = (f"{side.dtype(name)} {list(side.shapes[name])}" for side in (ours, theirs))
        if in_a == in_b:
            common.append(name)
        else:
            other.append(f"{name} is {in_a} in A and {in_b} in B")
    sizes = {name: prod(shapes[name]) * ITEM_BYTES[ours.dtype(name)] for name in common}
    with (
        closing(Files()) as files,
        progress(sum(sizes.values()), "comparing", show_progress, "bytes") as bar,
        ThreadPoolExecutor(workers) as pool,
    ):

        def is_same(name: str) -> bool:
            tensor = alone(whole(name, shapes[name]))
            streams = (Streamer(files).blocks(target_of(tensor, weights)) for weights in (ours, theirs))
            found = all(x == y for x, y in zip(*streams, strict=True))  # blocks depend only on shape and dtype
            bar.advance(sizes[name])
            return found

        bits = [name for name, same in zip(common, pool.map(is_same, common), strict=True) if not same]
    return FileDifference(
        config=[(k, fields.get(k), others.get(k)) for k in changed],
        missing=sorted(set(shapes) - set(other_shapes)),
        extra=sorted(set(other_shapes) - set(shapes)),
        other=other,
        bits=bits,
        num_equal=len(common) - len(bits),
    )


def _name_in(path: Path) -> str:
    try:
        return read_name(path)
    except (OSError, ValueError) as error:
        raise WeightMappingError(f"{path} cannot be read ({error}); write the name of a checkpoint into it") from None


def _side_of(state: Path) -> Path:
    """Return the folder with config.json: `state`, a folder above it, or the model that a run's config.yaml names."""
    for folder in (state, *list(state.resolve().parents)[:4]):
        if (folder / "config.json").is_file():
            return folder
        config = folder / CONFIG_FILE
        if config.is_file():
            try:
                model = Path(parse_yaml(read_file(config, MAX_JSON_BYTES).decode("utf-8"))["model"]["path"])
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise WeightMappingError(
                    f"{config} names no model.path ({error}); name the folder of config.json with --config"
                ) from None
            if (model / "config.json").is_file():
                return model
    raise WeightMappingError(
        f"{state} has no config.json, and no run's config.yaml names a folder with one; name the folder with --config"
    )


def _without_derived(weights: Weights, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the shapes of all tensors except derived ones: rotary tables and a stored copy of a tied output layer."""
    is_tied = checkpoint.model()[1].tied
    derived = ("rotary_emb.inv_freq", "lm_head.weight") if is_tied else ("rotary_emb.inv_freq",)
    return {name: shape for name, shape in weights.shapes.items() if not name.endswith(derived)}
