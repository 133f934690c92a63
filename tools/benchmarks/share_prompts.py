"""Measure the speedup of an update that computes a group's prompt once (batch.share_prompts), by response length.

`python tools/benchmarks/share_prompts.py` runs updates of the trainer's own policy, a dense model of 4 layers in fp32 on one
CPU process. A batch has two groups of 8 samples, with prompts of 512 tokens and responses of 64. The same samples are packed
with and without shared prompts. Both take turns in the same run; medians count. Their losses and gradients are compared.
--sweep doubles the responses until the gain is below a twentieth.

The last line is JSON with ratio (seconds with / without), tokens (the same ratio for computed tokens), gradient and loss
(differences relative to norm and value), seconds of both, and by_response for --sweep. Exit code 1 if a difference reaches 2e-6
or the ratio is above 0.45.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `python tools/benchmarks/share_prompts.py`

from grpo_mega import console
from grpo_mega.batching.pack import pack
from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.megatron.policy import Policy
from grpo_mega.types import PackedBatch, Prompt, Sample
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks.gpu.mfu import reader
from tools.benchmarks.gpu.rank import config_of

MAX_RATIO, MAX_DIFFERENCE = 0.45, 2e-6  # the difference allows for fp32 rounding
GAIN = 0.95  # sharing pays if the ratio of times is below this
MODEL = {"num_hidden_layers": 4, "hidden_size": 320, "intermediate_size": 864, "num_attention_heads": 5, "head_dim": 64}
MODEL |= {"num_key_value_heads": 5, "vocab_size": 4099, "max_position_embeddings": 8192, "tie_word_embeddings": True}


@dataclass
class Found:
    ratio: float
    tokens: float
    gradient: float
    loss: float
    seconds: tuple[float, float]  # without, with


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    lengths = [options.response]
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
            hf_config = Qwen3Config(**MODEL)
            shape = ModelShape.from_hf_config(hf_config.to_dict())
            policy = Policy(config, shape, family_of("qwen3"), hf_config, runtime)
            policy.load(reader(torch.device("cpu")))
            found = {n: compared(policy, shape.vocab, options, n) for n in lengths}
            while options.sweep and found[lengths[-1]].ratio < GAIN and lengths[-1] < 4096:
                lengths.append(2 * lengths[-1])
                found[lengths[-1]] = compared(policy, shape.vocab, options, lengths[-1])
        finally:
            runtimes.stop()
    headline = found[options.response]
    for n, one in found.items():
        print(f"{options.prompt} + {n:5} tokens: {one.ratio:.3f} of the time, {one.tokens:.3f} of the tokens", flush=True)
    is_same = all(max(one.gradient, one.loss) < MAX_DIFFERENCE for one in found.values())
    is_met = is_same and headline.ratio <= MAX_RATIO
    print(json.dumps(asdict(headline) | {"by_response": {n: one.ratio for n, one in found.items()}, "met": is_met}))
    return 0 if is_met else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of each response; first length of --sweep")
    parser.add_argument("--samples", type=int, default=8, help="samples of each of the two groups")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of both; medians count")
    parser.add_argument("--sweep", action="store_true", help="double the responses until sharing gains less than a twentieth")
    options = parser.parse_args(arguments)
    for name in ("prompt", "response", "samples", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}={getattr(options, name)}: must be at least 1")
    return options


def compared(policy: Policy, vocab: int, options: argparse.Namespace, response: int) -> Found:
    """Compare updates with and without sharing, for responses of this length."""
    samples = make_samples(vocab, options.prompt, response, options.samples)
    weights = [[1 / len(samples) / response] * len(samples)]
    packed: list[list[list[PackedBatch]]] = []
    for share_prompts in (False, True):
        tokens = options.samples * (options.prompt + response)  # one group per micro-batch
        rows = pack([samples], weights, replace(policy.packing, token_budget=tokens, share_prompts=share_prompts))
        packed.append(policy.attach_logprobs(rows))
    seconds: list[list[float]] = [[], []]
    gradients, losses = [], []
    for number in range(options.repeat + 1):
        for batches, times in zip(packed, seconds, strict=True):
            start = time.perf_counter()
            metrics = policy.update(batches)
            times.append(time.perf_counter() - start)
            if not number:  # both use the same weights, except for a negligible optimizer step
                losses.append(metrics[0]["loss/total"])
                gradients.append(torch.cat([p.main_grad.double().flatten() for p in policy.parameters.values()]))  # type: ignore[attr-defined]
    without, shared = (statistics.median(times[1:]) for times in seconds)
    plain, other = gradients
    gradient, loss = float((other - plain).norm() / plain.norm()), abs(losses[1] / losses[0] - 1)
    counts = [sum(batch.num_tokens for mini in batches for batch in mini) for batches in packed]
    ratios = round(shared / without, 3), round(counts[1] / counts[0], 3)
    return Found(*ratios, gradient, loss, (round(without, 3), round(shared, 3)))


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
    console.install()
    sys.exit(main())
