"""Measure multi-turn rollouts of an SGLang server with Qwen3-4B's shape: conversations of 1 to 4 turns, whose tools
answer at once with 5 tokens.

The same number of single responses is measured for comparison. All turns and responses have the same length, so a
sampled token of a conversation costs more only by what turns cost: requests, prefills of new tokens, and places that
are empty while the last conversations run. The weights are random. Without a GPU the embedded engine is measured, to
try the code.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import runtime as runtimes
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.types import Group, Prompt
from tools.benchmarks.gpu.engine import config_for, engine_kind, opened
from tools.benchmarks.gpu.rank import Figure, Options, seconds_of
from tools.benchmarks.turns.__main__ import Conversations

MOST_TURNS, TOOL_TOKENS = 4, 5


def run(options: Options) -> list[Figure]:
    kind = engine_kind(options)
    if kind is None:
        return []
    model, (num_prompts, length) = ("tiny", (2, 4)) if options.tiny else ("qwen3-4b", (8 if options.quick else 32, 128))
    keys = {"max_response_length": MOST_TURNS * (length + TOOL_TOKENS), "max_concurrent": 8 * num_prompts}
    sampling = Sampling(8, 1.0, length, frozenset(), seed=1)
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as name, only_rank():
        config = config_for(model, kind, Path(name), **keys)
        device = runtimes.join(config)
        try:
            with opened(model, config, device) as (trainer, engine, sync):
                sync.sync_weights(trainer.weights, engine, version=0)
                groups = groups_of(num_prompts, config.data.max_prompt_length)

                def generate(conversations: Any) -> None:
                    found = engine.generate(RolloutRequest(groups, sampling, 0, conversations=conversations))
                    if engine.failure is not None or not all(one.is_complete(8) for one in found.values()):
                        raise RuntimeError(f"the engine failed: {engine.failure}")

                seconds = {
                    "conversations": seconds_of(lambda: generate(Conversations()), device.torch_device, options.repeat),
                    "single responses": seconds_of(lambda: generate(None), device.torch_device, options.repeat),
                }
        finally:
            runtimes.stop()
    num_turns = {
        "conversations": sum(1 + (prompt + sample) % MOST_TURNS for prompt in groups for sample in range(8)),
        "single responses": 8 * num_prompts,
    }
    case = f"{model}, {8 * num_prompts} samples with turns of {length} tokens, {kind}"
    rates = {name: num_turns[name] * length / seconds[name] for name in seconds}
    return [
        *(Figure("turns", case, f"sampled tokens of {name}", rate, "tokens/s") for name, rate in rates.items()),
        Figure("turns", case, "cost of a token", rates["single responses"] / rates["conversations"], "times"),
    ]


def groups_of(num_prompts: int, longest: int) -> dict[int, Group]:
    """Return prompts of random tokens that the smallest vocabulary has."""
    rng = random.Random(0)
    lengths = [rng.randint(1, min(longest, 256)) for _ in range(num_prompts)]
    ids = [tuple(rng.randrange(2, 300) for _ in range(length)) for length in lengths]
    return {index: Group(Prompt(index, "", tokens, ""), []) for index, tokens in enumerate(ids)}
