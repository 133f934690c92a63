"""Compare log-probs and entropies from hidden states with TRL and plain log_softmax, forward and backward, on a CPU.

`python tools/benchmarks/logprobs.py` runs each path in a separate process with one thread, at 1,024 tokens x 152,064
vocabulary x 1,024 hidden in float32. All paths have the same hidden states, output weight and upstream gradient. They
compute log-probs and entropies at temperature 0.9, and add the gradients of hidden states and weight to existing
buffers, as a trainer does:
 ours         algorithm.logprobs.vocab_parallel_logprobs
 trl          the code of TRL's GRPOTrainer for its model's last hidden states (trl.kernels.chunked_logprob, with its
              tiles)
 log_softmax  torch.log_softmax on full logits, and the entropy from it without gradient
Memory is the process's peak above its memory just before. CPU time includes all threads. --trained is the share of
tokens in the loss: for other tokens TRL's path on a CPU discards its results, and ours computes nothing.

The last line is JSON with memory_ratio and cpu_ratio (ours / TRL), memory_ratio_log_softmax and cpu_ratio_log_softmax,
max_error (ours against float64: log-probs, entropies and hidden gradients of a sample of tokens, relative to the
largest), and for every path its max_error and the medians cpu_seconds, seconds and extra_mib. Exit code 1 if our path
needs more memory or CPU time than TRL's, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs
from grpo_mega.distributed.device import Device, PeakMemory
from tools.benchmarks import harness

PATHS = ("trl", "ours", "log_softmax")
TEMPERATURE = 0.9
TRL_CHUNK = 32768  # columns per tile; equals trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
CHUNK = 1024  # tokens per chunk of log_softmax in chunks
NUM_CHECKED = 8  # tokens compared with float64
SIZES = ("tokens", "vocab", "hidden", "threads")
CPU = torch.device("cpu")


class Inputs:
    """The inputs of a path. `sink_VH` is the buffer for the weight's gradient: fp32 for ours."""

    def __init__(
        self,
        num_tokens: int,
        vocab: int,
        hidden: int,
        device: torch.device = CPU,
        *,
        is_ours: bool,
        dtype: torch.dtype = torch.float32,
        trained: float = 1.0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

        self.hidden_TH = normal(num_tokens, hidden).requires_grad_()
        self.weight_VH = normal(vocab, hidden).mul_(2 / hidden**0.5).requires_grad_()
        self.targets_T = torch.randint(0, vocab, (num_tokens,), generator=generator, device=device)
        # a prompt, then its response
        self.needed_T = torch.arange(num_tokens, device=device) >= round(num_tokens * (1 - trained))
        self.upstream_T = normal(num_tokens).float() * self.needed_T
        sink_dtype = torch.float32 if is_ours else dtype
        self.sink_VH = torch.empty_like(self.weight_VH, dtype=sink_dtype).fill_(0)  # writing makes the memory resident
        self.weight_VH.grad = None if is_ours else self.sink_VH


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--trained", type=float, default=1.0, help="share of the tokens in the loss")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--repeat", type=int, default=1, help="rounds of all paths; medians count")
    parser.add_argument("--child", choices=PATHS, help=argparse.SUPPRESS)
    options = parser.parse(arguments, **dict.fromkeys(SIZES, 1), repeat=1)
    if not 0 < options.trained <= 1:
        parser.error(f"--trained={options.trained} must be above 0 and at most 1")
    if options.child:
        print(json.dumps(run(options.child, options)))
        return 0
    harness.require("trl")
    given = [f"--{key}={getattr(options, key)}" for key in (*SIZES, "trained")]
    children = {name: partial(harness.run_child, name, [__file__, "--child", name, *given]) for name in PATHS}
    found = harness.medians(harness.take_turns(children, options.repeat))
    print(
        f"{options.tokens} tokens x {options.vocab} vocabulary x {options.hidden} hidden, forward and backward, float32"
    )
    formats = {"extra_mib": ".1f", "cpu_seconds": ".2f", "seconds": ".2f", "max_error": ".1e"}
    rows: list[tuple[str, ...]] = [("", "extra MiB", "CPU s", "s", "max error")]
    rows += [(name, *(format(f[key], form) for key, form in formats.items())) for name, f in found.items()]
    result: dict[str, Any] = {}
    for peer, suffix in (("trl", ""), ("log_softmax", "_log_softmax")):
        result[f"memory_ratio{suffix}"] = round(found["ours"]["extra_mib"] / found[peer]["extra_mib"], 4)
        result[f"cpu_ratio{suffix}"] = round(found["ours"]["cpu_seconds"] / found[peer]["cpu_seconds"], 3)
    result |= {"max_error": found["ours"]["max_error"], "paths": found}
    return harness.report(rows, result, limits={"memory_ratio": 1.0, "cpu_ratio": 1.0})


def run(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one path, after a small run, so one-time allocations of libraries do not count."""
    torch.set_num_threads(options.threads)
    step(name, Inputs(4, 64, 8, is_ours=name == "ours"))
    sizes = options.tokens, options.vocab, options.hidden
    given = Inputs(*sizes, is_ours=name == "ours", trained=options.trained)
    given.hidden_TH.grad = torch.empty_like(given.hidden_TH).fill_(0)
    peak, results = PeakMemory(Device("cpu", CPU)), list[Any]()
    before = peak.take()  # the memory now, because the peak has just been reset
    figures = harness.timed(lambda: results.extend(step(name, given)))()
    return figures | {"extra_mib": (peak.take() - before) / 2**20, "max_error": max_error(given, *results)}


def step(name: str, given: Inputs, *, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies. Add the gradients to the inputs' buffers. Raise ImportError without TRL."""
    entropy_T: Tensor | None
    if name == "ours":
        logprobs_T, entropy_T = vocab_parallel_logprobs(
            given.hidden_TH,
            given.weight_VH,
            given.targets_T,
            vocab_size=len(given.weight_VH),
            temperature=TEMPERATURE,
            with_entropy=with_entropy,
            needed_T=given.needed_T,
            weight_grad_VH=given.sink_VH,
        )
    elif name == "trl":
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        more = (TEMPERATURE, TRL_CHUNK, None, 1.0, ("log_probs", "entropy"))
        found = ChunkedLogProbFunction.apply(given.hidden_TH, given.weight_VH, None, given.targets_T, *more)
        logprobs_T, entropy_T = found[:2]
    elif with_entropy:
        logp_TV = torch.log_softmax(linear(given.hidden_TH, given.weight_VH) / TEMPERATURE, dim=-1)
        logprobs_T = logp_TV.gather(1, given.targets_T[:, None]).squeeze(1)
        with torch.no_grad():
            entropy_T = -(logp_TV.exp() * logp_TV).sum(dim=-1)
        del logp_TV
    else:
        chunks = zip(given.hidden_TH.split(CHUNK), given.targets_T.split(CHUNK), strict=True)
        logprobs_T = torch.cat(
            [checkpoint(_chunk, hidden_nH, given.weight_VH, t, use_reentrant=False) for hidden_nH, t in chunks]
        )
        entropy_T = None
    logprobs_T.backward(given.upstream_T.to(logprobs_T.dtype))
    return logprobs_T.detach(), None if entropy_T is None else entropy_T.detach()


def _chunk(hidden_nH: Tensor, weight_VH: Tensor, targets_n: Tensor) -> Tensor:
    logits_nV = linear(hidden_nH, weight_VH).float() / TEMPERATURE
    return torch.log_softmax(logits_nV, dim=-1).gather(1, targets_n[:, None]).squeeze(1)


@torch.no_grad()
def max_error(given: Inputs, logprobs_T: Tensor, entropy_T: Tensor | None) -> float:
    """Return the largest error of log-probs, entropies, and fp32 hidden gradients, relative to each largest value."""
    assert given.hidden_TH.grad is not None
    sample_N = given.needed_T.nonzero().squeeze(1)
    sample_N = sample_N[:: max(1, len(sample_N) // NUM_CHECKED)]
    targets_N, weight_VH = given.targets_T[sample_N], given.weight_VH
    hidden_NH = given.hidden_TH[sample_N].double() / TEMPERATURE
    logits_NV = torch.cat([hidden_NH @ rows.double().t() for rows in weight_VH.split(8192)], dim=1)
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    probabilities = logp_NV.exp()
    expected = [(logprobs_T, logp_NV.gather(1, targets_N[:, None]).squeeze(1))]
    if entropy_T is not None:
        expected.append((entropy_T, -(probabilities * logp_NV).sum(dim=1)))
    if given.hidden_TH.dtype == torch.float32:
        pieces = zip(probabilities.split(8192, dim=1), weight_VH.split(8192), strict=True)
        offsets_NH = weight_VH[targets_N].double() - sum(p @ rows.double() for p, rows in pieces)
        expected.append((given.hidden_TH.grad, offsets_NH * (given.upstream_T[sample_N, None] / TEMPERATURE)))
    return max(float((ours[sample_N] - exact).abs().max() / exact.abs().max()) for ours, exact in expected)


if __name__ == "__main__":
    harness.start(main)
