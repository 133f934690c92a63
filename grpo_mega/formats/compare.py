"""Comparing two checkpoints of either kind: config, names, and every tensor bit by bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any

from grpo_mega.formats.detect import Checkpoint
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.formats.slices import target_of
from grpo_mega.formats.sources import Files, Weights, whole
from grpo_mega.formats.stream import Streamer
from grpo_mega.observe.progress import progress
from grpo_mega.weights.boxes import Piece

_IGNORED = ("transformers_version", "_name_or_path", "_commit_hash")
_SAME = {"torch_dtype": "dtype"}  # old names of fields


@dataclass
class Difference:
    """`config`: fields as (name, in A, in B). The rest are names of tensors; `other`: of another shape or dtype, and which."""

    config: list[tuple[str, Any, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # in B
    extra: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    num_equal: int = 0

    def __bool__(self) -> bool:
        return bool(self.config or self.missing or self.extra or self.other or self.bits)


def compare(a: Checkpoint, b: Checkpoint, workers: int = 2, show_progress: bool = True) -> Difference:
    """All of it. Raises WeightMappingError if a checkpoint is damaged."""
    found = Difference(config=compare_configs(a.config(), b.config()))
    ours, theirs = a.open(), b.open()
    shapes, other_shapes = _without_derived(ours, a), _without_derived(theirs, b)
    found.missing = sorted(set(shapes) - set(other_shapes))
    found.extra = sorted(set(other_shapes) - set(shapes))
    common = []
    for name in (n for n in shapes if n in other_shapes):
        sides = [(shapes[name], ours.dtype(name)), (other_shapes[name], theirs.dtype(name))]
        if sides[0] == sides[1]:
            common.append(name)
        else:
            found.other.append(f"{name} is {_said(*sides[0])} in A and {_said(*sides[1])} in B")
    sizes = {name: prod(shapes[name]) * ITEM_BYTES[ours.dtype(name)] for name in common}
    with progress(sum(sizes.values()), "comparing", show_progress, "bytes") as bar, ThreadPoolExecutor(workers) as pool:

        def differs(name: str) -> bool:
            is_same = same_tensor(ours, name, theirs, name)
            bar.advance(sizes[name])
            return not is_same

        found.bits = [name for name, is_other in zip(common, pool.map(differs, common), strict=True) if is_other]
    found.num_equal = len(common) - len(found.bits)
    return found


def compare_configs(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The fields that differ, but for those that say who wrote the file."""
    ours, theirs = ({_SAME.get(k, k): v for k, v in c.items() if k not in _IGNORED} for c in (a, b))
    return [(k, ours.get(k), theirs.get(k)) for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k)]


def same_tensor(a: Weights, name: str, b: Weights, other: str) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if a.shapes()[name] != b.shapes()[other] or a.dtype(name) != b.dtype(other):
        return False
    files = Files()
    try:
        streams = []
        for weights, tensor in ((a, name), (b, other)):
            box = whole(tensor, weights.shapes()[tensor])
            target = target_of(tensor, box.stop, (Piece(box, "", box.start),), weights, None)
            streams.append(Streamer(files, block_bytes=1 << 20).blocks(target))
        return _equal_streams(*streams)
    finally:
        files.close()


def _equal_streams(a: Any, b: Any) -> bool:
    """Blocks need not be of the same sizes on both sides."""
    left, right = b"", b""
    for x, y in zip_longest(a, b, fillvalue=b""):
        left, right = left + x, right + y
        length = min(len(left), len(right))
        if left[:length] != right[:length]:
            return False
        left, right = left[length:], right[length:]
    return not left and not right


def _without_derived(weights: Weights, checkpoint: Checkpoint) -> dict[str, Any]:
    """Rotary tables and a stored copy of a tied output layer say nothing of their own."""
    is_tied = checkpoint.model()[1].tied
    derived = ("rotary_emb.inv_freq", "lm_head.weight") if is_tied else ("rotary_emb.inv_freq",)
    return {name: shape for name, shape in weights.shapes().items() if not name.endswith(derived)}


def _said(shape: Any, dtype: str) -> str:
    return f"{dtype} {list(shape)}"
