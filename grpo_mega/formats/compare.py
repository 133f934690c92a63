"""Compare two checkpoints of either kind: config, names, and every tensor bit by bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any

from grpo_mega.formats.detect import Checkpoint
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.formats.slices import Files, Weights, box_target
from grpo_mega.formats.stream import Streamer
from grpo_mega.observe.progress import progress
from grpo_mega.weights.boxes import whole

_IGNORED = ("transformers_version", "_name_or_path", "_commit_hash")
_SAME = {"torch_dtype": "dtype"}  # old names of fields


@dataclass
class Difference:
    """`config`: different fields as (name, in A, in B). The other lists have tensor names, `other` also shapes and dtypes."""

    config: list[tuple[str, Any, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # tensors missing in B
    extra: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    bits: list[str] = field(default_factory=list)
    num_equal: int = 0

    def __bool__(self) -> bool:
        return bool(self.config or self.missing or self.extra or self.other or self.bits)


def compare(a: Checkpoint, b: Checkpoint, workers: int = 2, show_progress: bool = True) -> Difference:
    """Compare two checkpoints completely. Raise WeightMappingError if one is damaged."""
    difference = Difference(config=compare_configs(a.config(), b.config()))
    ours, theirs = a.open(), b.open()
    shapes, other_shapes = _without_derived(ours, a), _without_derived(theirs, b)
    difference.missing = sorted(set(shapes) - set(other_shapes))
    difference.extra = sorted(set(other_shapes) - set(shapes))
    common = []
    for name in (n for n in shapes if n in other_shapes):
        sides = [(shapes[name], ours.dtype(name)), (other_shapes[name], theirs.dtype(name))]
        if sides[0] == sides[1]:
            common.append(name)
        else:
            in_a, in_b = (f"{dtype} {list(shape)}" for shape, dtype in sides)
            difference.other.append(f"{name} is {in_a} in A and {in_b} in B")
    sizes = {name: prod(shapes[name]) * ITEM_BYTES[ours.dtype(name)] for name in common}
    total = sum(sizes.values())
    with (
        closing(Files()) as files,
        progress(total, "comparing", show_progress, "bytes") as bar,
        ThreadPoolExecutor(workers) as pool,
    ):

        def differs(name: str) -> bool:
            box = whole(name, shapes[name])
            is_same = _equal_streams(*(Streamer(files).blocks(box_target(box, weights)) for weights in (ours, theirs)))
            bar.advance(sizes[name])
            return not is_same

        difference.bits = [name for name, is_other in zip(common, pool.map(differs, common), strict=True) if is_other]
    difference.num_equal = len(common) - len(difference.bits)
    return difference


def compare_configs(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the fields that differ, except fields that name the library version or the source."""
    ours, theirs = ({_SAME.get(k, k): v for k, v in c.items() if k not in _IGNORED} for c in (a, b))
    return [(k, ours.get(k), theirs.get(k)) for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k)]


def _equal_streams(a: Any, b: Any) -> bool:
    """Compare two streams of blocks. Block sizes may differ."""
    left, right = b"", b""
    for x, y in zip_longest(a, b, fillvalue=b""):
        left, right = left + x, right + y
        length = min(len(left), len(right))
        if left[:length] != right[:length]:
            return False
        left, right = left[length:], right[length:]
    return not left and not right


def _without_derived(weights: Weights, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the shapes of all tensors except derived ones: rotary tables and a stored copy of a tied output layer."""
    is_tied = checkpoint.model()[1].tied
    derived = ("rotary_emb.inv_freq", "lm_head.weight") if is_tied else ("rotary_emb.inv_freq",)
    return {name: shape for name, shape in weights.shapes.items() if not name.endswith(derived)}
