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
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from grpo_mega.rollout.backlog import Backlog, num_tokens
from grpo_mega.types import Group, Prompt, Routes, Sample, Span

FILE = "backlog.safetensors"
FIELDS = ("index", "finish_reason", "scores", "verdicts", "reward", "step_ends", "step_rewards")


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
    arrays = {
        "tokens": np.fromiter(chain.from_iterable(s.response_ids for s in samples), np.int32),
        "logprobs": np.fromiter(chain.from_iterable(s.rollout_logprobs for s in samples), np.float32),
    }
    if routes := [s.routes.experts for s in samples if s.routes]:
        arrays["routes"] = np.concatenate(routes)
    groups = [
        {"prompt": g.prompt.id, "checksum": _checksum(g.prompt), "samples": [_fields(s) for s in g.samples]}
        for g in backlog.groups
    ]
    save_file(arrays, folder / FILE, {"groups": json.dumps(groups), "ledger": json.dumps(backlog.ledger)})


def read(folder: Path, draws: int, prompt_of: Callable[[int], Prompt | None]) -> Backlog:
    """Return the backlog in a folder, an empty one if there is no file; `prompt_of(id)` gives a prompt of the data."""
    if not (folder / FILE).exists():
        return Backlog(draws)
    with safe_open(folder / FILE, "numpy") as file:
        header = file.metadata()
        routes = file.get_tensor("routes") if "routes" in file.keys() else None  # noqa: SIM118  # a file has no __contains__
        tokens, logprobs = array("i", file.get_tensor("tokens").tobytes()), array("f", file.get_tensor("logprobs").tobytes())
    rows = json.loads(header["groups"])
    bounds = pairwise(accumulate((s["length"] for row in rows for s in row["samples"]), initial=0))
    num_routed = 0
    groups, changed = list[Group](), list[Group]()
    for row in rows:
        prompt = prompt_of(row["prompt"])
        is_same = prompt is not None and _checksum(prompt) == row["checksum"]
        group = Group(prompt if prompt is not None else Prompt(row["prompt"], "", (), ""), [])
        for fields in row["samples"]:
            begin, end = next(bounds)
            spans = [Span(*span) for span in fields["spans"]]
            kept: dict[str, Any] = {name: fields[name] for name in FIELDS}
            if routes is not None and "routed" in fields:
                kept["routes"] = Routes(routes[num_routed : num_routed + fields["routed"]], fields["routes_checksum"])
                num_routed += fields["routed"]
            kept |= {"response_ids": tokens[begin:end], "rollout_logprobs": logprobs[begin:end]}
            group.samples.append(Sample(prompt=group.prompt, spans=spans, **kept))
        (groups if is_same else changed).append(group)
    return Backlog(draws, tuple(groups), Counter(json.loads(header["ledger"]))).dropped("data_changed", changed)


def _fields(sample: Sample) -> dict[str, Any]:
    fields = {name: getattr(sample, name) for name in FIELDS} | {"length": sample.response_len, "spans": list(sample.spans)}
    if sample.routes:
        fields |= {"routed": len(sample.routes.experts), "routes_checksum": sample.routes.checksum}
    return fields


def _checksum(prompt: Prompt) -> int:
    return zlib.crc32(array("q", prompt.token_ids).tobytes())
