"""The backlog of partial rollouts as a file of a checkpoint: tokens and log-probs as arrays, the rest as JSON in the header.

A prompt is stored as its index in the training data and a checksum of its tokens. If the data has another prompt at this index
now, its deferred turns and its group are dropped. The ledger counts the dropped group if it has samples.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from safetensors import safe_open
from safetensors.numpy import save_file

from grpo_mega.rollout.backlog import Backlog, num_tokens
from grpo_mega.rollout.sample_arrays import arrays_of, fields_of, samples_of
from grpo_mega.types import Group, Prompt, Turn

FILE = "backlog.safetensors"


def num_bytes(backlog: Backlog) -> int:
    """Return the approximate size of the file."""
    samples = [sample for group in backlog.groups for sample in group.samples]
    num_routes = sum(sample.routes.experts.nbytes for sample in samples if sample.routes)
    return 8 * num_tokens(backlog.groups) + num_routes + 512 * (len(backlog.groups) + len(samples) + len(backlog.deferred))


def write(backlog: Backlog, folder: Path) -> None:
    """Write the file, unless there is nothing to write."""
    if not (backlog.groups or backlog.ledger or backlog.deferred):
        return
    samples = [sample for group in backlog.groups for sample in group.samples]
    groups = [
        {"prompt": g.prompt.id, "checksum": _checksum(g.prompt), "samples": [fields_of(s) for s in g.samples]}
        for g in backlog.groups
    ]
    deferred = [[t.prompt.id, _checksum(t.prompt), t.source, t.epoch] for t in backlog.deferred]
    header = {"groups": groups, "ledger": backlog.ledger, "deferred": deferred}
    save_file(arrays_of(samples), folder / FILE, {name: json.dumps(value) for name, value in header.items()})


def read(folder: Path, draws: int, prompt_of: Callable[[int], Prompt | None]) -> Backlog:
    """Return the backlog in a folder, or an empty one if it has no file. `prompt_of(id)` returns a prompt of the data."""
    if not (folder / FILE).exists():
        return Backlog(draws)
    with safe_open(folder / FILE, "numpy") as file:
        header = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a file is not a mapping
    rows = json.loads(header["groups"])
    prompts = [_same_prompt(prompt_of, row["prompt"], row["checksum"]) for row in rows]
    stand_ins = [prompt or Prompt(row["prompt"], "", (), "") for prompt, row in zip(prompts, rows, strict=True)]
    fields = ((prompt, one) for prompt, row in zip(stand_ins, rows, strict=True) for one in row["samples"])
    samples = samples_of(arrays, fields)
    groups, changed = list[Group](), list[Group]()
    for row, prompt, stand_in in zip(rows, prompts, stand_ins, strict=True):
        group = Group(stand_in, list(islice(samples, len(row["samples"]))))
        if prompt is not None:
            groups.append(group)
        elif group.samples:
            changed.append(group)
    found = [(_same_prompt(prompt_of, number, checksum), place) for number, checksum, *place in json.loads(header["deferred"])]
    deferred = tuple(Turn(prompt, *place) for prompt, place in found if prompt is not None)
    return Backlog(draws, tuple(groups), Counter(json.loads(header["ledger"])), deferred).dropped("data_changed", changed)


def _same_prompt(prompt_of: Callable[[int], Prompt | None], number: int, checksum: int) -> Prompt | None:
    """Return the data's prompt with this id, or None if it has changed since the file was written."""
    prompt = prompt_of(number)
    return prompt if prompt is not None and _checksum(prompt) == checksum else None


def _checksum(prompt: Prompt) -> int:
    return zlib.crc32(array("q", prompt.token_ids).tobytes())
