"""What a checkpoint is, told from headers and metadata alone; needs no torch."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from grpo_mega.formats.dcp_read import SavedTensor, read_metadata
from grpo_mega.formats.detect import Checkpoint, find_checkpoint
from grpo_mega.formats.dtypes import TORCH_NAMES
from grpo_mega.formats.hf_weights import HfWeights


def describe(path: Path, config_folder: Path | None = None) -> dict[str, Any]:
    """Kind, family, sizes, dtype, step and so on, None where the checkpoint does not tell. Raises WeightMappingError."""
    checkpoint = find_checkpoint(path, config_folder)
    _, shape = checkpoint.model()
    weights = checkpoint.open()
    dtypes = Counter({TORCH_NAMES[d]: n for d, n in Counter(weights.dtype(name) for name in weights.shapes()).items()})
    files = [p for p in sorted(checkpoint.weights.iterdir()) if p.is_file()]
    found = {
        "kind": _kind(checkpoint, weights),
        "family": shape.model_type,
        "parameters": sum(prod(s) for s in weights.shapes().values()),
        "tensors": len(weights.shapes()),
        "dtype": ", ".join(f"{d} ({n} tensors)" for d, n in dtypes.most_common()) if len(dtypes) > 1 else next(iter(dtypes)),
        "layers": shape.num_layers,
        "experts": shape.num_experts or None,
        "tied_embeddings": shape.tied,
        "files": len(files),
        "bytes": sum(p.stat().st_size for p in files),
        "layout": None,
        "optimizer": None,
        "step": checkpoint.manifest.get("step"),
        "policy_version": checkpoint.manifest.get("step"),
        "optimizer_step": checkpoint.manifest.get("optimizer_step"),
        "config": str(checkpoint.side / "config.json"),
        "note": checkpoint.note,
    }
    if checkpoint.is_megatron:
        saved = read_metadata(checkpoint.weights)
        found["layout"] = checkpoint.manifest.get("layout") or _pieces(saved)
        found["optimizer"] = any(key.startswith("optimizer") for key in saved)
    return found


def _kind(checkpoint: Checkpoint, weights: Any) -> str:
    if isinstance(weights, HfWeights):
        return "Hugging Face folder" + (", FP8 with block scales" if weights.is_quantised else "")
    return "Megatron distributed checkpoint" + (" of a training run" if checkpoint.manifest else "")


def _pieces(saved: dict[str, SavedTensor]) -> str:
    """Of what tensor-parallel size the pieces are that it was saved in; it loads at any."""
    columns = {c.offset[-1] for c in saved["decoder.layers.self_attention.linear_proj.weight"].chunks}
    return f"any (saved in pieces of tp={len(columns)})"
