"""Measure time and memory of log-probs in bf16, forward and backward: 32,768 tokens x 152,064 vocabulary x 4,096
hidden. benchmarks/logprobs.py has the code of each path.

 ours               algorithm/logprobs.py, with the weight's gradient added to an existing fp32 buffer, as in the
                    trainer
 ours with entropy  the same, with entropies
 trl                trl.kernels.chunked_logprob, used by TRL's GRPOTrainer; it always computes entropies
 log_softmax        torch.log_softmax on chunks of 1,024 tokens, each recomputed in its backward pass
Memory is the peak above the memory before (hidden states, weight, the weight's gradient). It includes the gradient of
the hidden states (256 MiB). The error is the largest error of some tokens against float64, relative to the largest.

The last figures are the output layer of a decoding engine with 256 sequences: its product in bf16, and the same product
with fp32 logits, as in SGLang with enable_fp32_lm_head. The error is the largest error of a log-prob in nats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_mega.distributed import device as devices
from tools.benchmarks.gpu.rank import Figure, Options, extra_gib, seconds_of
from tools.benchmarks.logprobs import Inputs, max_error, step

EXTRA_TARGET_GIB = 1.0


def run(options: Options) -> Iterator[Figure]:
    device = devices.select("auto", 0).torch_device
    sizes = (64, 500, 16) if options.tiny else (8192, 152_064, 4096) if options.quick else (32_768, 152_064, 4096)
    case = "{:,} tokens x {:,} x {:,}".format(*sizes)
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
        yield Figure("logprobs", case, f"{name}: time", 1e3 * seconds, "ms", note=note)
        yield Figure("logprobs", case, f"{name}: extra memory", gib, "GiB", target)
    yield from output_layer(options, device, *sizes[1:])


def output_layer(options: Options, device: torch.device, vocab: int, hidden: int) -> Iterator[Figure]:
    """Measure the output layer of a decoding engine with bf16 and with fp32 logits."""
    generator = torch.Generator(device).manual_seed(0)
    num_sequences = 16 if options.tiny else 256
    hidden_BH, weight_VH = (
        torch.empty(rows, hidden, dtype=torch.bfloat16, device=device).normal_(0.0, std, generator=generator)
        for rows, std in ((num_sequences, 1.0), (vocab, 0.02))
    )

    def in_fp32() -> Tensor:
        if device.type == "cuda":
            return torch.mm(hidden_BH, weight_VH.t(), out_dtype=torch.float32)
        return hidden_BH.float() @ weight_VH.float().t()

    exact_BV = (hidden_BH[:8].double() @ weight_VH.double().t()).log_softmax(-1)
    case = f"{num_sequences} sequences x {vocab:,} x {hidden:,}"
    for name, act in (("bf16 logits", lambda: hidden_BH @ weight_VH.t()), ("fp32 logits", in_fp32)):
        error = (act()[:8].double().log_softmax(-1) - exact_BV).abs().max()
        seconds = seconds_of(act, device, options.repeat)
        yield Figure("logprobs", case, name, 1e3 * seconds, "ms", note=f"largest error {error:.1e}")
