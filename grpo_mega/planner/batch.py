"""Arithmetic of a step: prompts, samples, tokens, micro-batches and the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from grpo_mega.planner.figures import TracedNumber, figure, product
from grpo_mega.planner.job import PlannedJob


@dataclass(frozen=True)
class Batch:
    samples: TracedNumber  # per step
    tokens: TracedNumber  # per step, prompts included
    micro_batches: TracedNumber  # per rank and optimizer step, if samples have mean length
    most_micro_batches: TracedNumber  # per rank and optimizer step, if all samples have the maximum length
    micro_batch_tokens: TracedNumber  # mean per rank
    bubble: TracedNumber  # share of an update in which a pipeline stage is idle

    @property
    def figures(self) -> list[TracedNumber]:
        return [self.samples, self.tokens, self.micro_batches, self.most_micro_batches, self.micro_batch_tokens, self.bubble]


def batch(setup: PlannedJob) -> Batch:
    config, pp, vpp, dp, cp = setup.config, setup.layout.pp, setup.layout.vpp, setup.layout.dp, setup.layout.cp
    mean_prompt, mean_response, longest = setup.mean_prompt, setup.mean_response, setup.longest_on_rank
    mini_batches, budget, fill = config.batch.mini_batches, config.batch.tokens_per_micro_batch, setup.assumed.packing_fill
    rounds = pp if vpp > 1 else 1
    all_samples = product("samples per step", "", prompts=config.batch.prompts_per_step, group=config.algorithm.group_size)
    samples = all_samples.value
    all_tokens = figure("tokens per step", "tokens", lambda: samples * (mean_prompt + mean_response))
    tokens = all_tokens.value
    mean = figure(
        "micro-batches per rank",
        "",
        lambda: ceil(max(tokens / mini_batches / (dp * cp * budget * fill), 1e-9) / rounds) * rounds,
    )
    most = figure(
        "micro-batches per rank, at most",
        "",
        lambda: ceil(ceil(samples / mini_batches) / (dp * floor(budget / longest)) / rounds) * rounds,
    )
    micro_batches = mean.value
    mean_tokens = figure("tokens per micro-batch", "tokens", lambda: tokens / (mini_batches * dp * cp * micro_batches))
    bubble = figure("pipeline bubble", "", lambda: (pp - 1) / (vpp * micro_batches + pp - 1))
    return Batch(all_samples, all_tokens, mean, most, mean_tokens, bubble)
