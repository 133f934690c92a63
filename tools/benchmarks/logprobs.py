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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness, peers

PATHS = ("trl", "ours", "log_softmax")
TEMPERATURE = 0.9
TRL_CHUNK = 32768  # columns per tile; equals trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
NUM_CHECKED = 8  # tokens compared with float64
SIZES = ("tokens", "vocab", "hidden", "threads")


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
    peers.require("trl")
    given = [f"--{key}={getattr(options, key)}" for key in (*SIZES, "trained")]
    children = {name: partial(harness.run_child, name, [__file__, "--child", name, *given]) for name in PATHS}
    found = harness.medians(harness.take_turns(children, options.repeat))
    print(
        f"{options.tokens} tokens x {options.vocab} vocabulary x {options.hidden} hidden, forward and backward, float32"
    )
    rows = [("", "extra MiB", "CPU s", "s", "max error")]
    for name, f in found.items():
        rows.append(
            (name, f"{f['extra_mib']:.1f}", f"{f['cpu_seconds']:.2f}", f"{f['seconds']:.2f}", f"{f['max_error']:.1e}")
        )
    result: dict[str, Any] = {}
    for peer, suffix in (("trl", ""), ("log_softmax", "_log_softmax")):
        result[f"memory_ratio{suffix}"] = round(found["ours"]["extra_mib"] / found[peer]["extra_mib"], 4)
        result[f"cpu_ratio{suffix}"] = round(found["ours"]["cpu_seconds"] / found[peer]["cpu_seconds"], 3)
    result |= {"max_error": found["ours"]["max_error"], "paths": found}
    return harness.report(rows, result, limits={"memory_ratio": 1.0, "cpu_ratio": 1.0})


def run(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one path in this process. A small warm-up run comes first, so one-time allocations of libraries do not
    count.
    """
    import torch

    torch.set_num_threads(options.threads)
    step(name, *inputs(4, 64, 8, 1.0))
    given = inputs(options.tokens, options.vocab, options.hidden, options.trained)
    before, results = resident_kib("VmRSS"), list[Any]()
    figures = harness.timed(lambda: results.extend(step(name, *given)))()
    return figures | {"extra_mib": (resident_kib("VmHWM") - before) / 1024, "max_error": max_error(*given, *results)}


def inputs(num_tokens: int, vocab: int, hidden: int, trained: float) -> tuple[Any, ...]:
    """Return hidden_TH and weight_VH with zeros as gradients, targets_T, needed_T, and the gradient of the
    log-probs.
    """
    import torch

    torch.manual_seed(0)
    hidden_TH = torch.randn(num_tokens, hidden).requires_grad_()
    weight_VH = torch.empty(vocab, hidden).normal_(std=2 / hidden**0.5).requires_grad_()
    for leaf in (hidden_TH, weight_VH):
        leaf.grad = torch.empty_like(leaf).fill_(0)  # writing makes the memory resident
    targets_T = torch.randint(0, vocab, (num_tokens,))
    needed_T = torch.arange(num_tokens) >= round(num_tokens * (1 - trained))  # a prompt, then its response
    return hidden_TH, weight_VH, targets_T, needed_T, torch.randn(num_tokens) * needed_T


def step(name: str, hidden_TH: Any, weight_VH: Any, targets_T: Any, needed_T: Any, upstream_T: Any) -> tuple[Any, Any]:
    """Return log-probs and entropies. Add the gradients to the inputs' buffers."""
    import torch
    from torch.nn.functional import linear

    if name == "ours":
        from grpo_mega.algorithm.logprobs import vocab_parallel_logprobs

        logprobs_T, entropy_T = vocab_parallel_logprobs(
            hidden_TH,
            weight_VH,
            targets_T,
            vocab_size=len(weight_VH),
            temperature=TEMPERATURE,
            with_entropy=True,
            needed_T=needed_T,
            weight_grad_VH=weight_VH.grad,
        )
    elif name == "trl":
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        found = ChunkedLogProbFunction.apply(
            hidden_TH, weight_VH, None, targets_T, TEMPERATURE, TRL_CHUNK, None, 1.0, ("log_probs", "entropy")
        )
        logprobs_T, entropy_T = (v.masked_fill(~needed_T, 0) for v in found[:2])
    else:
        logp_TV = torch.log_softmax(linear(hidden_TH, weight_VH) / TEMPERATURE, dim=-1)
        logprobs_T = logp_TV.gather(1, targets_T[:, None]).squeeze(1)
        with torch.no_grad():
            entropy_T = -(logp_TV.exp() * logp_TV).sum(dim=-1)
        del logp_TV
    assert entropy_T is not None
    (logprobs_T * upstream_T).sum().backward()
    return logprobs_T.detach(), entropy_T.detach()


def max_error(
    hidden_TH: Any, weight_VH: Any, targets_T: Any, needed_T: Any, upstream_T: Any, logprobs_T: Any, entropy_T: Any
) -> float:
    """Return the largest error of log-probs, entropies and hidden gradients against float64, relative to each largest
    value.
    """
    import torch

    sample_N = needed_T.nonzero().squeeze(1)
    sample_N = sample_N[:: max(1, len(sample_N) // NUM_CHECKED)]
    with torch.no_grad():
        hidden_NH = hidden_TH[sample_N].double() / TEMPERATURE
        logits_NV = torch.cat([hidden_NH @ rows.double().t() for rows in weight_VH.split(8192)], dim=1)
        logp_NV = torch.log_softmax(logits_NV, dim=-1)
        probabilities = logp_NV.exp()
        weighted_NH = sum(
            p @ rows.double() for p, rows in zip(probabilities.split(8192, dim=1), weight_VH.split(8192), strict=True)
        )
        expected = [
            (logprobs_T[sample_N], logp_NV.gather(1, targets_T[sample_N, None]).squeeze(1)),
            (entropy_T[sample_N], -(probabilities * logp_NV).sum(dim=1)),
            (
                hidden_TH.grad[sample_N],
                (weight_VH[targets_T[sample_N]].double() - weighted_NH) * (upstream_T[sample_N, None] / TEMPERATURE),
            ),
        ]
        return max(float((ours - exact).abs().max() / exact.abs().max()) for ours, exact in expected)


def resident_kib(field: str) -> int:
    """Return VmRSS (resident now) or VmHWM (peak) in KiB. Reading VmRSS resets VmHWM."""
    if field == "VmRSS":
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    harness.start(main)
