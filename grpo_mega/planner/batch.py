"""A step's arithmetic: prompts, samples, tokens, micro-batches and the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from grpo_mega.planner.figures import Figure, Number, formula, product
from grpo_mega.planner.setup import Setup


@dataclass(frozen=True)
class Batch:
    samples: Figure  # per step
    tokens: Figure  # per step, prompts included
    micro_batches: Figure  # of one data-parallel rank in one optimizer step, with samples of mean length
    most_micro_batches: Figure  # the same with all samples as long as can be
    micro_batch_tokens: Figure  # on average
    bubble: Figure  # share of an update that a pipeline stage waits

    @property
    def figures(self) -> list[Figure]:
        return [self.samples, self.tokens, self.micro_batches, self.most_micro_batches, self.micro_batch_tokens, self.bubble]


def batch(setup: Setup) -> Batch:
    config, layout = setup.config, setup.layout
    mini_batches, budget = config.batch.mini_batches, config.batch.tokens_per_micro_batch
    rounds = layout.pp if layout.vpp > 1 else 1
    samples = product("samples per step", "", prompts=config.batch.prompts_per_step, group=config.algorithm.group_size)
    tokens = _tokens(samples.value, setup.mean_prompt, setup.mean_response)
    micro_batches = _micro_batches(tokens.value, setup.assumed.packing_fill, mini_batches, layout.dp, budget, rounds)
    most = _most_micro_batches(samples.value, setup.longest_sample, mini_batches, layout.dp, budget, rounds)
    mean_tokens = _micro_batch_tokens(tokens.value, mini_batches, layout.dp, micro_batches.value)
    return Batch(samples, tokens, micro_batches, most, mean_tokens, _bubble(layout.pp, layout.vpp, micro_batches.value))


@formula("tokens per step", "tokens")
def _tokens(samples: Number, mean_prompt: float, mean_response: float) -> float:
    return samples * (mean_prompt + mean_response)


@formula("micro-batches per rank")
def _micro_batches(tokens: Number, fill: float, mini_batches: int, dp: int, budget: int, rounds: int) -> int:
    return ceil(max(tokens / mini_batches / (dp * budget * fill), 1e-9) / rounds) * rounds


@formula("micro-batches per rank, at most")
def _most_micro_batches(samples: Number, longest: int, mini_batches: int, dp: int, budget: int, rounds: int) -> int:
    return ceil(ceil(samples / mini_batches) / (dp * floor(budget / longest)) / rounds) * rounds


@formula("tokens per micro-batch", "tokens")
def _micro_batch_tokens(tokens: Number, mini_batches: int, dp: int, micro_batches: Number) -> float:
    return tokens / (mini_batches * dp * micro_batches)


@formula("pipeline bubble")
def _bubble(pp: int, vpp: int, micro_batches: Number) -> float:
    return (pp - 1) / (vpp * micro_batches + pp - 1)
