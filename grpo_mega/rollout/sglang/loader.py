"""Runs inside the server, in each of its tensor-parallel processes: takes buckets over into the parameters, and proves them.

SGLang calls `load` (--custom-weight-loader) with one named tensor, whose name is a request in JSON and whose value is the
bucket where that comes by CUDA IPC. An exception here would end the server, so there is none: what went
wrong is written to the file that the request names, which the trainer reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from grpo_mega.weights.apply import Entry, part_of
from grpo_mega.weights.receive import differing, put

Request = dict[str, Any]
MAX_NAMED = 20  # problems in a report


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    for text, values in named_tensors:
        request = json.loads(text)
        try:
            problems = _ACTIONS[request["action"]](_parameters(model), request, values)
        except Exception as error:  # told to the trainer; here it would end the server
            problems = [f"{request['action']} failed: {error!r}"]
        _report(request, problems)


def _check(parameters: dict[str, Tensor], request: Request, values: Tensor) -> list[str]:
    """Before the first bucket: the server's parameters are those of the table; padding, which no bucket fills, is zeroed."""
    wanted = {name: tuple(shape) for name, shape in request["shapes"].items()}
    found = {name: tuple(p.shape) for name, p in parameters.items()}
    problems = [
        f"{name}: the server has {found.get(name, 'none')}, the table {wanted.get(name, 'none')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    problems += [f"{name}: not {request['dtype']}" for name, p in parameters.items() if str(p.dtype) != request["dtype"]]
    if not problems:
        for name in request["padded"]:
            part_of(parameters, name).zero_()
    return problems


def _fill(parameters: dict[str, Tensor], request: Request, values: Tensor) -> list[str]:
    """Copies a bucket's pieces to their places."""
    if "file" in request:
        values = torch.from_file(request["file"], shared=True, size=request["num_bytes"], dtype=torch.uint8)
    flat = values[: request["used_bytes"]].view(_dtype(request["dtype"]))
    put(_entries(request), flat, parameters)
    if flat.is_cuda:
        torch.cuda.synchronize()  # the trainer fills the bucket again as soon as this is acknowledged
    return []


def _prove(parameters: dict[str, Tensor], request: Request, values: Tensor) -> list[str]:
    """The names of tensors of which a piece has another checksum than the trainer's."""
    return differing(_entries(request), parameters)


def _entries(request: Request) -> list[Entry]:
    return [Entry(*fields) for fields in request["entries"]]


_ACTIONS: dict[str, Callable[[dict[str, Tensor], Request, Tensor], list[str]]] = {
    "check": _check,
    "fill": _fill,
    "prove": _prove,
}


def _parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _report(request: Request, problems: list[str]) -> None:
    path = request["report"]
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump({"id": request["id"], "num_problems": len(problems), "problems": problems[:MAX_NAMED]}, file)
    os.replace(f"{path}.part", path)
