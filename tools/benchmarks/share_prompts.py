"""Measure the speedup of an update that computes a group's prompt once (batch.share_prompts), by response length.

`python tools/benchmarks/share_prompts.py` runs updates of the trainer's own policy, a dense model of 4 layers in fp32
on one CPU process. A batch has two groups of 8 samples, with prompts of 512 tokens and responses of 64. The same
samples are packed with and without shared prompts. Both take turns in the same run; medians count. Their losses and
gradients are compared.

The last line is JSON with ratio (seconds with / without), tokens (the same ratio for computed tokens), gradient and
loss (differences relative to norm and value), and seconds of both. Exit code 1 if a difference is above 2e-6 or the
ratio is above 0.45.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from grpo_mega.batching.pack import pack_mini_batches
from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.types import PackedBatch, Prompt, Sample, StepMetrics
from tools.benchmarks import harness
from tools.benchmarks.gpu.mfu import random_policy
from tools.benchmarks.gpu.rank import config_of

LIMITS = {"gradient": 2e-6, "loss": 2e-6, "ratio": 0.45}  # the differences allow for fp32 rounding
MODEL = {"num_hidden_layers": 4, "hidden_size": 320, "intermediate_size": 864, "num_attention_heads": 5, "head_dim": 64}
MODEL |= {"num_key_value_heads": 5, "vocab_size": 4099, "max_position_embeddings": 8192, "tie_word_embeddings": True}


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of each response")
    parser.add_argument("--samples", type=int, default=8, help="samples of each of the two groups")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of both; medians count")
    options = parser.parse(arguments, prompt=1, response=1, samples=1, repeat=1)
    torch.set_num_threads(1)
    with only_rank():
        config = config_of(
            Path("unused"),
            {"path": "unused", "dtype": "float32"},
            data={"train": "unused", "max_prompt_length": options.prompt},
            rollout={"max_response_length": 8192},
            batch={"tokens_per_micro_batch": 2**20, "share_prompts": True},
            optimizer={"lr": 1e-12, "clip_grad": 1e9},
        )
        runtime = runtimes.arrange(config, runtimes.join(config))
        try:
            policy = random_policy(Qwen3Config(**MODEL), config, runtime)
            result = compared(policy, MODEL["vocab_size"], options)
        finally:
            runtimes.stop()
    rows = [(f"{options.prompt} + {options.response} tokens", "s", "with / without")]
    rows += [("one by one", f"{result['seconds'][0]:.3f}", ""), ("shared", f"{result['seconds'][1]:.3f}", "")]
    rows += [(f"{name} ratio", "", f"{result[key]:.3f}") for name, key in (("time", "ratio"), ("tokens", "tokens"))]
    return harness.report(rows, result, limits=LIMITS)


def compared(policy: Policy, vocab: int, options: argparse.Namespace) -> dict[str, Any]:
    """Compare updates with and without sharing. Their losses and gradients are from the warm-up round."""
    samples = make_samples(vocab, options.prompt, options.response, options.samples)
    weights = [[1 / len(samples) / options.response] * len(samples)]
    spec = replace(policy.packing, token_budget=options.samples * (options.prompt + options.response))  # one group
    packed: dict[bool, list[list[PackedBatch]]] = {}
    gradients: dict[bool, torch.Tensor] = {}
    losses: dict[bool, float] = {}
    for shared in (False, True):
        batches = pack_mini_batches([samples], weights, replace(spec, share_prompts=shared))
        packed[shared] = policy.attach_logprobs(batches)

    def update(shared: bool) -> harness.Figures:
        metrics: list[StepMetrics] = []
        figures = harness.timed(lambda: metrics.extend(policy.update(packed[shared])))()
        if shared not in losses:  # both use the same weights, except for a negligible optimizer step
            losses[shared] = metrics[0]["loss/total"]
            gradients[shared] = torch.cat([p.main_grad.double().flatten() for p in policy.parameters.values()])  # type: ignore[attr-defined]
        return figures

    variants = {"without": partial(update, False), "with": partial(update, True)}
    found = harness.medians(harness.take_turns(variants, options.repeat, warm_up=1))
    seconds = [found[name]["seconds"] for name in variants]
    counts = [sum(batch.num_tokens for mini in packed[shared] for batch in mini) for shared in (False, True)]
    return {
        "ratio": round(seconds[1] / seconds[0], 3),
        "tokens": round(counts[1] / counts[0], 3),
        "gradient": float((gradients[True] - gradients[False]).norm() / gradients[False].norm()),
        "loss": abs(losses[True] / losses[False] - 1),
        "seconds": [round(value, 3) for value in seconds],
    }


def make_samples(vocab: int, prompt_len: int, response_len: int, group_size: int) -> list[Sample]:
    """Return samples of two groups with random tokens and positive advantages."""
    generator, samples = torch.Generator().manual_seed(3), []
    for group in range(2):
        prompt = Prompt(group, "", tuple(torch.randint(vocab, (prompt_len,), generator=generator).tolist()), "")
        for index in range(group_size):
            response = torch.randint(vocab, (response_len,), generator=generator).tolist()
            sample = Sample(prompt, index, response, [-1.0] * response_len, "length", reward=1.0)
            sample.advantages = 0.5 + torch.rand(response_len, generator=generator)
            samples.append(sample)
    return samples


if __name__ == "__main__":
    harness.start(main)
