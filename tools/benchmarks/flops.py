"""Check that the time of a sample is proportional to its FLOPs. Takes about a minute on a CPU.

`python tools/benchmarks/flops.py` trains with the trainer's own Policy.update on one sample of each of --lengths tokens, on
Megatron's local layers in fp32. It measures CPU time on one thread, and takes the minimum of --repeat rounds, because other
work on the machine only adds time. The model has one layer of width 768. Attention, with work that grows with the square of the
length, is 16% of its FLOPs at 1,024 tokens and 60% at 8,192, as in an 8B model at 12 and at 70 thousand tokens.

    length   share   seconds     time    FLOPs   tokens      # share: attention in FLOPs; last three: relative to the first row

The balancer assigns samples to ranks by the FLOPs of batching/flops.py, so "time" should follow FLOPs, not tokens. The last
line is JSON with lengths, seconds, time, flops, tokens, the ratio of time to FLOPs that is farthest from 1 (worst), and the
same for tokens (worst_by_tokens). Exit code 1 if tokens predict the time better than FLOPs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `python tools/benchmarks/flops.py`

from grpo_mega import console
from grpo_mega.batching import flops
from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks.gpu.mfu import Work, make_batches, reader
from tools.benchmarks.gpu.models import MODELS
from tools.benchmarks.gpu.rank import config_of

FIELDS = MODELS["tiny"] | {"num_hidden_layers": 1, "hidden_size": 768, "intermediate_size": 768}
FIELDS |= {"num_attention_heads": 12, "num_key_value_heads": 12}
SHAPE = ModelShape.from_hf_config(FIELDS)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args(arguments)
    if min(options.lengths) < 2 or options.repeat < 1 or len(options.lengths) < 2:
        parser.error("--lengths must be two or more of at least 2 tokens, and --repeat at least 1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return report(options.lengths, measure(options.lengths, options.repeat))
    finally:
        torch.set_num_threads(threads)


def measure(lengths: Sequence[int], repeat: int) -> list[float]:
    """Return the CPU seconds of one update for each length."""
    works = [Work(prompt_tokens=n // 2, segment_tokens=n, segments=1, micro_batches=1) for n in lengths]
    config = config_of(
        Path("unused"),
        {"path": "unused", "dtype": "float32"},
        data={"train": "unused", "max_prompt_length": max(lengths)},
        rollout={"max_response_length": max(lengths)},
        batch={"tokens_per_micro_batch": 2 * max(lengths)},
        device="cpu",
    )
    with only_rank():
        device = runtimes.join(config)
        try:
            runtime = runtimes.arrange(config, device)
            policy = Policy(config, SHAPE, family_of(SHAPE.model_type), AutoConfig.for_model(**FIELDS), runtime)
            policy.load(reader(device.torch_device))
            batches = [policy.attach_logprobs(make_batches(policy, SHAPE.vocab, work)) for work in works]
            policy.update(batches[0])  # creates the optimizer's state
            seconds = [math.inf] * len(lengths)
            for _ in range(repeat):
                for place, each in enumerate(batches):
                    started_at = time.process_time()
                    policy.update(each)
                    seconds[place] = min(seconds[place], time.process_time() - started_at)
            return seconds
        finally:
            runtimes.stop()


def report(lengths: Sequence[int], seconds: Sequence[float]) -> int:
    counts = [flops.count(SHAPE, [n], num_outputs=n - n // 2) for n in lengths]
    times = [value / seconds[0] for value in seconds]
    modelled = [count.forward / counts[0].forward for count in counts]
    tokens = [n / lengths[0] for n in lengths]
    print(f"{'length':>8}{'share':>8}{'seconds':>10}{'time':>9}{'FLOPs':>9}{'tokens':>9}")
    for n, count, value, *ratios in zip(lengths, counts, seconds, times, modelled, tokens, strict=True):
        share = count.attention / count.forward
        print(f"{n:8}{share:8.0%}{value:10.3f}" + "".join(f"{ratio:9.2f}" for ratio in ratios))
    worst, by_tokens = farthest(times, modelled), farthest(times, tokens)
    found = {"lengths": list(lengths), "seconds": seconds, "time": times, "flops": modelled, "tokens": tokens}
    print(json.dumps(found | {"worst": worst, "worst_by_tokens": by_tokens}))
    return 0 if abs(math.log(worst)) < abs(math.log(by_tokens)) else 1


def farthest(times: Sequence[float], expected: Sequence[float]) -> float:
    """Return the ratio of time to expectation that is farthest from 1."""
    return max((a / b for a, b in zip(times, expected, strict=True)), key=lambda ratio: abs(math.log(ratio)))


if __name__ == "__main__":
    console.install()
    raise SystemExit(main())
