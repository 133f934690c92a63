"""Compare the time to offload and onload a policy with a plain copy of as many bytes between host and device.

`python tools/benchmarks/offload.py` makes the storages of a trainer's rank, without gradients, because they are freed
and not copied. The weights are views of one bf16 buffer, as in Megatron. Each parameter has an fp32 master weight and
Adam's two moments with separate storages. The trainer's own PolicyMemory moves them: it copies, and frees and allocates
device memory. The plain copy moves one flat tensor to pinned memory and back and frees nothing. Both take turns in the
same run; medians count. Without a GPU the same code copies from RAM to RAM, and new memory costs page faults. The
ratios' target of 1.2 is for a GPU.

--gib is the size to move: whole layers of --model (14 bytes per parameter), and its embedding if it fits into half of
the size. The last line is JSON with offload_ratio and onload_ratio (ours / plain), gib, device, num_storages, seconds
of each (medians) and met (null without a GPU). Exit code 1 if a bit changed, 2 for invalid arguments.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from grpo_mega.distributed import device as devices
from grpo_mega.errors import ConfigError
from grpo_mega.megatron.offload import PolicyMemory, storages_of
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, megatron_shards
from grpo_mega.weights.spec import ModelShape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness
from tools.benchmarks.gpu.models import MODELS, layer_parameters, shape_of

TARGET = 1.2
NUMBERS = 251  # bf16 represents all integers below this exactly
BYTES_A_PARAMETER = 2 + 3 * 4
DEFAULTS = {"cpu": ("qwen2.5-0.5b", 1.0), "cuda": ("qwen2.5-1.5b", 8.0)}


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--model", choices=sorted(MODELS), help="default: qwen2.5-1.5b on a GPU, qwen2.5-0.5b elsewhere"
    )
    parser.add_argument("--gib", type=float, help="default: 8 on a GPU, 1 elsewhere")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of both; medians count")
    options = parser.parse(arguments, repeat=1)
    if options.gib is not None and not options.gib > 0:
        parser.error(f"--gib={options.gib} must be above 0")
    device = devices.select(options.device, 0)
    usual_model, usual_gib = DEFAULTS[device.type]
    sizes = parameter_sizes(shape_of(options.model or usual_model), int((options.gib or usual_gib) * 2**30))
    weights, state = make(sizes, device.torch_device)
    seconds = measure(weights, state, device, options.repeat)
    is_whole = all(bool((t == number % NUMBERS).all()) for number, t in enumerate([*weights, *state]))
    gib = sum(sizes) * BYTES_A_PARAMETER / 2**30
    ratios = {f"{name}_ratio": round(seconds[name] / seconds[f"plain_{name}"], 4) for name in ("offload", "onload")}
    result = ratios | {
        "gib": round(gib, 4),
        "device": device.type,
        "num_storages": len(storages_of([*weights, *state])),
        "met": max(ratios.values()) <= TARGET if device.is_cuda else None,
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
    }
    where = torch.cuda.get_device_name() if device.is_cuda else "CPU: from RAM to RAM, which has no target"
    print(
        f"{gib:.2f} GiB in {result['num_storages']} storages, {where}; target on a GPU: {TARGET} times the plain copy"
    )
    rows = [("", "s", "GiB/s"), *((name, f"{value:.3f}", f"{gib / value:.1f}") for name, value in seconds.items())]
    return harness.report(rows, result, problems=[] if is_whole else ["offloading and onloading changed the values"])


def parameter_sizes(shape: ModelShape, num_bytes: int) -> list[int]:
    """Return the number of elements of each parameter that fits. Raise ConfigError if no layer fits."""
    limit = num_bytes // BYTES_A_PARAMETER
    holding = megatron_shards(family_of(shape.model_type), shape, MegatronLayout()).rank_shards(0)
    sizes = {name: math.prod(local.shape) for name, local in holding.items()}
    layers = [[n for name, n in sizes.items() if f".layers.{i}." in name] for i in range(shape.num_layers)]
    embedding = [n for name, n in sizes.items() if ".layers." not in name]
    found = embedding if sum(embedding) <= limit // 2 else []
    for layer in layers:
        if sum(found) + sum(layer) <= limit:
            found = found + layer
    if not found:
        need = layer_parameters(shape) * BYTES_A_PARAMETER / 2**30
        raise ConfigError(
            f"--gib={num_bytes / 2**30:.4g} does not hold a layer of {need:.2f} GiB; raise it or use a smaller --model"
        )
    return found


def make(sizes: list[int], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights and optimizer state. Each tensor is filled with a different number, modulo NUMBERS."""
    buffer = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    weights = list(buffer.split(sizes))
    state = [torch.empty(n, dtype=torch.float32, device=device) for n in sizes for _ in range(3)]
    for number, tensor in enumerate([*weights, *state]):
        tensor.fill_(number % NUMBERS)
    return weights, state


def measure(weights: list[Tensor], state: list[Tensor], device: devices.Device, repeat: int) -> dict[str, float]:
    """Return the median seconds of each act. The first round is not measured, because it allocates host memory."""
    memory = PolicyMemory((), lambda: weights, lambda: state, is_cuda=device.is_cuda)
    num_bytes = sum(s.nbytes() for s in storages_of([*weights, *state]))
    flat = torch.ones(num_bytes, dtype=torch.uint8, device=device.torch_device)
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.is_cuda)

    def offload() -> None:
        memory.offload_optimizer()
        memory.offload_weights()

    def onload() -> None:
        memory.onload()
        memory.onload_optimizer()

    acts: dict[str, Callable[[], object]] = {
        "offload": offload,
        "plain_offload": lambda: host.copy_(flat, non_blocking=True),
        "onload": onload,
        "plain_onload": lambda: flat.copy_(host, non_blocking=True),
    }

    def round_of_all() -> harness.Figures:
        """Offload before onload, in every round."""
        return {name: harness.timed(act, torch.cuda.synchronize)()["seconds"] for name, act in acts.items()}

    return harness.medians(harness.take_turns({"": round_of_all}, repeat, warm_up=1))[""]


if __name__ == "__main__":
    harness.start(main)
