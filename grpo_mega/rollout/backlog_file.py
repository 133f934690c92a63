"""The backlog of partial rollouts as a file of a checkpoint: tokens and log-probs as arrays, the rest as JSON in the header.

Prompts are named by their place in the training data, with a checksum of their tokens: where the data has another prompt there
now, the group is dropped, and the ledger says so.
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
from grpo_mega.types import Group, Prompt

FILE = "backlog.safetensors"


def num_bytes(backlog: Backlog) -> int:
    """Return the size of the file, roughly."""
    samples = [sample for group in backlog.groups for sample in group.samples]
    num_routes = sum(sample.routes.experts.nbytes for sample in samples if sample.routes)
    return 8 * num_tokens(backlog.groups) + num_routes + 512 * (len(backlog.groups) + len(samples))


def write(backlog: Backlog, folder: Path) -> None:
    """Write the file, unless there is nothing to write."""
    if not (backlog.groups or backlog.ledger):
        return
    samples = [sample for group in backlog.groups for sample in group.samples]
    groups = [
        {"prompt": g.prompt.id, "checksum": _checksum(g.prompt), "samples": [fields_of(s) for s in g.samples]}
        for g in backlog.groups
    ]
    save_file(arrays_of(samples), folder / FILE, {"groups": json.dumps(groups), "ledger": json.dumps(backlog.ledger)})


def read(folder: Path, draws: int, prompt_of: Callable[[int], Prompt | None]) -> Backlog:
    """Return the backlog in a folder, an empty one if there is no file; `prompt_of(id)` gives a prompt of the data."""
    if not (folder / FILE).exists():
        return Backlog(draws)
    with safe_open(folder / FILE, "numpy") as file:
        header = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a file is no mapping
    rows = json.loads(header["groups"])
    prompts = [prompt_of(row["prompt"]) for row in rows]
    stand_ins = [prompt or Prompt(row["prompt"], "", (), "") for prompt, row in zip(prompts, rows, strict=True)]
    fields = ((prompt, one) for prompt, row in zip(stand_ins, rows, strict=True) for one in row["samples"])
    samples = samples_of(arrays, fields)
    groups, changed = list[Group](), list[Group]()
    for row, prompt, stand_in in zip(rows, prompts, stand_ins, strict=True):
        is_same = prompt is not None and _checksum(prompt) == row["checksum"]
        group = Group(stand_in, list(islice(samples, len(row["samples"]))))
        (groups if is_same else changed).append(group)
    return Backlog(draws, tuple(groups), Counter(json.loads(header["ledger"]))).dropped("data_changed", changed)


def _checksum(prompt: Prompt) -> int:
    return zlib.crc32(array("q", prompt.token_ids).tobytes())
