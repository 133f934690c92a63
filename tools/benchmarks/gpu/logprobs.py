"""Measure time and memory of log-probs in bf16, forward and backward: 32,768 tokens x 152,064 vocabulary x 4,096
hidden. benchmarks/logprobs.py has the code of each path.

 ours               algorithm/logprobs.py, with the weight's gradient added to an existing fp32 buffer, as in the
                    trainer
 ours with entropy  the same, with entropies
 trl                trl.kernels.chunked_logprob, used by TRL's GRPOTrainer; it always computes entropies
 log_softmax        torch.log_softmax on chunks of 1,024 tokens, each recomputed in its backward pass
Memory is the peak above the memory before (hidden states, weight, the weight's gradient). It includes the gradient of
the hidden states (256 MiB). The error is the largest error of some tokens against float64, relative to the largest.
"""

from __future__ import annotations

from typing import Any

import torch

from grpo_mega.distributed import device as devices
from tools.benchmarks.gpu.rank import Figure, Options, extra_gib, seconds_of
from tools.benchmarks.logprobs import Inputs, max_error, step

EXTRA_TARGET_GIB = 1.0


def run(options: Options) -> list[Figure]:
    device = devices.select("auto", 0).torch_device
    sizes = (64, 500, 16) if options.tiny else (8192, 152_064, 4096) if options.quick else (32_768, 152_064, 4096)
    case = "{:,} tokens x {:,} x {:,}".format(*sizes)
    found: list[Figure] = []
    for name in ("ours", "ours with entropy", "trl", "log_softmax"):
        path, _, more = name.partition(" ")
        inputs = Inputs(*sizes, device, is_ours=path == "ours", dtype=torch.bfloat16)
        values: list[Any] = []

        def act(path: str = path, more: str = more, inputs: Inputs = inputs, values: list[Any] = values) -> None:
            values.clear()
            inputs.hidden_TH.grad = None
            values.extend(step(path, inputs, with_entropy=bool(more)))

        try:
            seconds = seconds_of(act, device, options.repeat)
            values.clear()
            inputs.hidden_TH.grad = None
            gib = extra_gib(act, device)
        except ImportError:
            options.say(f"logprobs: {name} skipped: it is not installed")
            continue
        except torch.OutOfMemoryError:
            options.say(f"logprobs: {name} skipped: it does not fit into memory")
            continue
        target = EXTRA_TARGET_GIB if path == "ours" else None
        note = f"largest error {max_error(inputs, *values):.1e}"
        found.append(Figure("logprobs", case, f"{name}: time", 1e3 * seconds, "ms", note=note))
        found.append(Figure("logprobs", case, f"{name}: extra memory", gib, "GiB", target))
    return found
