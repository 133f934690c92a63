"""Load buckets into the parameters and verify them. This code runs in each tensor-parallel server process.

SGLang calls `load` (--custom-weight-loader) with one named tensor. Its name is a JSON request. Its value is the bucket
buffer, if it is sent via CUDA IPC. A buffer is sent once and stays open. An exception here would end the server, so
problems are written to a file in the server's directory, and the trainer reads the file. Differences in FP8 blocks are
reported with their bucket; the trainer keeps them until the update ends.

After a load SGLang may rearrange FP8 blocks for its kernels (`process_weights_after_loading`). On Hopper, and with its
Triton kernels on any GPU, it does not change 128 x 128 blocks with float32 scales. A sync then writes the blocks in
place, so the addresses in CUDA graphs stay valid. Other kernels change shapes and dtypes or move bytes: DeepGEMM on
Blackwell packs scales as powers of two, and Marlin, on GPUs older than an L40, repacks the weights. `check_formats`
detects all such changes before the first bucket, by processing a pattern.

A model with FP8 weights also has scales for an FP8 KV cache. No checkpoint has these scales. A dummy load leaves random
values, and sleep loses them, so this module sets them to SGLang's default, 1.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_mega.weights.apply import VALUES, Entry, mismatched_blocks, mismatched_tensors, subtensor, write_entries

Request = dict[str, Any]
MAX_NAMED = 20  # maximum number of reported problems
REMEDY = "use rollout.server_args={fp8_gemm_backend: triton} or another GPU, or leave rollout.quantization out"
NUM_BUFFERS = 3  # one buffer is loaded while the next one is received and the one after it is packed
_CACHE_SCALES = ("k_scale", "v_scale")
_buffers: dict[
    int, Tensor
] = {}  # the trainer's buffers by slot; a global, because SGLang passes no state between calls


@torch.no_grad()
def load(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    actions = {"check": _check, "fill": _fill, "verify": _verify}
    for text, values in named_tensors:
        request = json.loads(text)
        try:
            problems, has_failed = actions[request["action"]](model, request, values), False
        except Exception as error:  # reported to the trainer, because it would end the server
            problems, has_failed = [f"{request['action']} failed: {error!r}"], True
        path = report_path(Path(tempfile.gettempdir()), int(request["number"]), int(request["tp_rank"]))
        report = {"number": request["number"], "problems": problems[:MAX_NAMED], "has_failed": has_failed}
        path.with_suffix(".part").write_text(json.dumps(report), encoding="utf-8")
        os.replace(path.with_suffix(".part"), path)


def _check(model: nn.Module, request: Request, values: Tensor) -> list[str]:
    """Return how the server's parameters differ from the trainer's table. Zero the padding, because no bucket fills
    it.
    """
    parameters, without = _parameters(model), "none"
    wanted = {name: f"{tuple(shape)} of {dtype}" for name, (shape, dtype) in request["parameters"].items()}
    actual = {name: f"{tuple(p.shape)} of {p.dtype}" for name, p in parameters.items()}
    problems = [
        f"{name}: the server has {actual.get(name, without)}, the table {wanted.get(name, without)}"
        f"{f'; {REMEDY}' if name.endswith('_scale_inv') else ''}"
        for name in sorted(wanted.keys() | actual.keys())
        if wanted.get(name) != actual.get(name)
    ]
    if not (problems := problems or check_formats(model)):
        for name in request["padded"]:
            subtensor(parameters, name).zero_()
    return problems


def _fill(model: nn.Module, request: Request, values: Tensor) -> list[str]:
    """Copy a bucket's pieces into the parameters. Return the names of tensors whose FP8 blocks differ from the
    trainer's.
    """
    if request["opens"]:
        if "file" in request:
            values = torch.from_file(request["file"], shared=True, size=request["num_bytes"], dtype=torch.uint8)
        _buffers[request["slot"]] = values
    used = _buffers[request["slot"]][: request["used_bytes"]]
    entries, parameters = _entries(request), _parameters(model)
    write_entries(entries, used, parameters, getattr(torch, request["dtype"].removeprefix("torch.")))
    problems = mismatched_blocks(entries, used, parameters) if request["verify"] else []
    if used.is_cuda:
        torch.cuda.synchronize()  # the trainer fills the bucket again after the acknowledgement
    return problems


def _verify(model: nn.Module, request: Request, values: Tensor) -> list[str]:
    """Return the names of tensors with a piece whose checksum differs from the trainer's.

    First update the values that the model derives from its parameters. Multi-latent attention keeps copies of
    kv_b_proj's halves; without the update they would be from the previous sync.
    """
    getattr(model, "post_load_weights", lambda: None)()
    for name, parameter in model.named_parameters():
        if _is_cache_scale(name):
            parameter.fill_(1.0)  # sleep may have lost it
    return mismatched_tensors(_entries(request), _parameters(model))


@torch.no_grad()
def check_formats(model: nn.Module) -> list[str]:
    """Set the cache's scales and return the FP8 parameters that SGLang rearranges. The model must not have weights
    yet.
    """
    problems = []
    for path, module in model.named_modules():
        method, own = getattr(module, "quant_method", None), dict(module.named_parameters(recurse=False))
        if method is None:
            continue
        cache_scales = own.keys() & set(_CACHE_SCALES)
        for name in cache_scales:
            own[name].fill_(-1.0)  # SGLang's value for a scale that was not loaded
        sent = {name: p for name, p in own.items() if p.dtype == VALUES or name.endswith("_scale_inv")}
        for p in sent.values():  # a pattern without equal neighbours
            numbers = torch.arange(p.numel(), device=p.device).remainder_(113).add_(1).view(p.shape)
            p.copy_(numbers.to(torch.float32))
        before = {name: _bytes(p).clone() for name, p in sent.items()}
        if sent or cache_scales:
            method.process_weights_after_loading(module)
        after = dict(module.named_parameters(recurse=False))
        problems += [
            f"{path}.{name}: SGLang rearranges it on this device, so it cannot be filled in place; {REMEDY}"
            for name, p in sent.items()
            if name not in after
            or after[name].data_ptr() != p.data_ptr()
            or not torch.equal(_bytes(after[name]), before[name])
        ]
    return problems


def _bytes(parameter: Tensor) -> Tensor:
    return parameter.detach().contiguous().view(-1).view(torch.uint8)


def _is_cache_scale(name: str) -> bool:
    return name.endswith(tuple(f".attn.{scale}" for scale in _CACHE_SCALES))


def _entries(request: Request) -> list[Entry]:
    return [Entry(*fields) for fields in request["entries"]]


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if not _is_cache_scale(name)}


def report_path(folder: Path, number: int, tp_rank: int) -> Path:
    """Return the file where a server process reports on request `number`.

    The trainer reads it before it posts request `number` + NUM_BUFFERS, so names may repeat. `folder` is the server's
    directory, closed to other users.
    """
    return folder / f"loader_{tp_rank}_{number % (NUM_BUFFERS + 1)}.json"
