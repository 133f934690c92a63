"""A step's arithmetic: prompts, samples, tokens, micro-batches and the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.planner.figures import Figure, Number, figure
from grpo_mega.planner.setup import Setup


@dataclass(frozen=True)
class Batch:
    samples: Figure  # a step
    tokens: Figure  # a step, prompts included
    micro_batches: Figure  # of one data-parallel rank in one optimizer step, samples being of mean length
    most_micro_batches: Figure  # where all are as long as can be
    micro_batch_tokens: Figure  # on average
    bubble: Figure  # share of an update that a pipeline stage waits

    @property
    def figures(self) -> list[Figure]:
        return [self.samples, self.tokens, self.micro_batches, self.most_micro_batches, self.micro_batch_tokens, self.bubble]


def batch(setup: Setup) -> Batch:
    config, layout = setup.config, setup.layout
    samples = figure(
        "samples a step", "", "prompts * group", prompts=config.batch.prompts_per_step, group=config.algorithm.group_size
    )
    tokens = figure(
        "tokens a step",
        "tokens",
        "samples * (mean_prompt + mean_response)",
        samples=samples,
        mean_prompt=setup.mean_prompt,
        mean_response=setup.mean_response,
    )
    shared: dict[str, Number | Figure] = {
        "mini_batches": config.batch.mini_batches,
        "dp": layout.dp,
        "budget": config.batch.tokens_per_micro_batch,
        "rounds": layout.pp if layout.vpp > 1 else 1,
    }
    micro_batches = figure(
        "micro-batches a rank",
        "",
        "ceil(max(tokens / mini_batches / (dp * budget * fill), 1e-9) / rounds) * rounds",
        shared,
        tokens=tokens,
        fill=setup.assumed.packing_fill,
    )
    most = figure(
        "micro-batches a rank, at most",
        "",
        "ceil(ceil(samples / mini_batches) / (dp * floor(budget / longest)) / rounds) * rounds",
        shared,
        samples=samples,
        longest=setup.longest_sample,
    )
    mean_tokens = figure(
        "tokens a micro-batch",
        "tokens",
        "tokens / (mini_batches * dp * micro_batches)",
        tokens=tokens,
        mini_batches=config.batch.mini_batches,
        dp=layout.dp,
        micro_batches=micro_batches,
    )
    bubble = figure(
        "pipeline bubble",
        "",
        "(pp - 1) / (vpp * micro_batches + pp - 1)",
        pp=layout.pp,
        vpp=layout.vpp,
        micro_batches=micro_batches,
    )
    return Batch(samples, tokens, micro_batches, most, mean_tokens, bubble)
