"""Ways to spoil the files of a working run. Each takes the run's folder, with the model in `model`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SHARD = "model-00002-of-00006.safetensors"
NORM = "model.layers.0.input_layernorm.weight"  # a tensor in SHARD
OTHER_NORM = "model.layers.0.post_attention_layernorm.weight"  # another tensor of the same size in SHARD

Spoil = Callable[[Path], Any]


def write(name: str, content: str | bytes) -> Spoil:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def remove(*names: str) -> Spoil:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def cut(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-7])


def change(name: str, **fields: Any) -> Spoil:
    """Set fields of a JSON object. None removes a field."""

    def spoil(folder: Path) -> None:
        found = json.loads((folder / name).read_text()) | fields
        (folder / name).write_text(json.dumps({key: value for key, value in found.items() if value is not None}))

    return spoil


def model(**fields: Any) -> Spoil:
    return change("model/config.json", **fields)


def tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Spoil:
    """Change the tensors of one shard."""

    def spoil(folder: Path) -> None:
        found = load_file(folder / "model" / SHARD)
        edit(found)
        save_file(found, folder / "model" / SHARD)

    return spoil


def header(edit: Callable[[list[tuple[str, Any]]], Any]) -> Spoil:
    """Change the header of a shard, a list of (name, entry). The tensor bytes do not change."""

    def spoil(folder: Path) -> None:
        path = folder / "model" / SHARD
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        pairs = json.loads(data[8:end], object_pairs_hook=list)
        found = [(name, dict(entry)) for name, entry in pairs if name != "__metadata__"]
        edit(found)
        text = ("{" + ", ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found) + "}").encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return spoil


def entry_of(found: list[tuple[str, Any]], name: str) -> Any:
    return next(entry for other, entry in found if other == name)


def shift(found: list[tuple[str, Any]], num_bytes: int) -> None:
    """Move the last tensor of a file to a higher offset."""
    entry = max(found, key=end_of)[1]
    entry["data_offsets"] = [offset + num_bytes for offset in entry["data_offsets"]]


def end_of(pair: tuple[str, Any]) -> int:
    return pair[1]["data_offsets"][1]


def grow(found: list[tuple[str, Any]], num_rows: int) -> None:
    """Let the last tensor of a file have more rows than its bytes contain."""
    entry = max(found, key=end_of)[1]
    before = math.prod(entry["shape"])
    entry["shape"][0] += num_rows
    entry["data_offsets"][1] += 4 * (math.prod(entry["shape"]) - before)


def overlap(found: list[tuple[str, Any]]) -> None:
    entry_of(found, OTHER_NORM)["data_offsets"] = entry_of(found, NORM)["data_offsets"]


def index_names(name: Any) -> Spoil:
    """Replace a shard's name in the index. "DIR" in it is the run's folder, where else.safetensors is a copy of the
    shard.
    """

    def spoil(folder: Path) -> None:
        shutil.copy(folder / "model" / SHARD, folder / "else.safetensors")
        index = folder / "model/model.safetensors.index.json"
        found = json.loads(index.read_text())
        named = name.replace("DIR", str(folder)) if isinstance(name, str) else name
        found["weight_map"] = {t: named if file == SHARD else file for t, file in found["weight_map"].items()}
        index.write_text(json.dumps(found))

    return spoil


def rows(*lines: Any) -> Spoil:
    return write("train.jsonl", "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def all_of(*spoils: Spoil) -> Spoil:
    return lambda folder: [spoil(folder) for spoil in spoils]
