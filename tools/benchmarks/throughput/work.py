"""Count the tokens of a step, and its FLOPs with batching/flops.py, from the lengths of its samples. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mega.batching import flops
from grpo_mega.weights.spec import ModelShape

GroupLengths = tuple[int, list[int]]  # tokens of the prompt, and of each response


@dataclass
class Work:
    """The work of one step over all ranks. FLOPs are the model's."""

    samples: int
    prompt_tokens: int  # counts a group's prompt once per sample
    response_tokens: int
    sample_flops: float  # counts each group's prompt once, and all responses
    forward_flops: float  # one pass over all samples; only responses go through the output layer


def work_of(shape: ModelShape, experts_per_token: int, groups: Sequence[GroupLengths]) -> Work:
    def forward(length: int, num_outputs: int) -> float:
        return flops.count(shape, [length], experts_per_token=experts_per_token, num_outputs=num_outputs).forward

    whole = sum(forward(prompt + response, response) for prompt, responses in groups for response in responses)
    return Work(
        samples=sum(len(responses) for _, responses in groups),
        prompt_tokens=sum(prompt * len(responses) for prompt, responses in groups),
        response_tokens=sum(sum(responses) for _, responses in groups),
        sample_flops=whole - sum(forward(prompt, 0) * (len(responses) - 1) for prompt, responses in groups),
        forward_flops=whole,
    )
