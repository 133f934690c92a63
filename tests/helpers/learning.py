"""A policy that learns the quickstart's task from demonstrations. Tests compare its losses in bf16 and FP8."""

from __future__ import annotations

import importlib.util
import random
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_mega.checkpoint_io.reader import random_reader
from grpo_mega.distributed.device import Device
from grpo_mega.types import Sample
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.gpu_policies import SIZES, make_policy, make_sample, packed, precision_of
from tests.helpers.models import make_config

KEPT = {"fp8_parameters": True, "fp8_reference": True}


@cache
def arithmetic() -> ModuleType:
    """Import the quickstart's task."""
    path = Path(__file__).resolve().parents[2] / "examples" / "arithmetic.py"
    spec = importlib.util.spec_from_file_location("arithmetic", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def demonstrations(steps: int, per_step: int, seed: int = 0) -> tuple[int, list[list[Sample]]]:
    """Return the vocabulary size, and demonstrations per step as responses with advantage 1. Only the seed decides
    them.
    """
    task, rng = arithmetic(), random.Random(seed)
    tokenizer = task.make_tokenizer()
    problems, _ = task.make_problems(rng)
    found = []
    for _ in range(steps):
        chosen = rng.sample(problems, per_step)
        prompts = task.render_prompts(tokenizer, chosen)
        pairs = zip(prompts, (task.demonstrate(problem, rng) + "<eos>" for problem in chosen), strict=True)
        ids = [[tokenizer(text)["input_ids"] for text in pair] for pair in pairs]
        found.append([make_sample(i, prompt, response, 1.0) for i, (prompt, response) in enumerate(ids)])
    return len(tokenizer), found


def losses(
    device: Device,
    recipe: str | None,
    *,
    steps: int,
    per_step: int,
    seed: int = 0,
    keeps_fp8: bool = False,
    moments_dtype: str = "float32",
) -> list[float]:
    """Return nats per token before each step. The policy's update raises log-probs of responses with advantage 1.

    The seed decides weights and demonstrations. `recipe` None means bf16.
    """
    vocab, samples_of_steps = demonstrations(steps, per_step, seed)
    sizes = SIZES or {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    hf_config = make_config("qwen2", **(sizes | {"vocab_size": vocab}))
    shape = ModelShape.from_hf_config(hf_config.to_dict())
    precision: dict[str, Any] = (KEPT if keeps_fp8 else {}) | (precision_of(recipe) if recipe else {})
    policy = make_policy(
        device,
        hf_config,
        random_reader(family_of(shape.model_type).hf_tensors(shape), seed=3 + seed, std=0.05),
        optimizer={"lr": 3e-3, "warmup_steps": 5, "betas": (0.9, 0.98), "moments_dtype": moments_dtype},
        precision=precision,
    )
    found = []
    for samples in samples_of_steps:
        [metrics] = policy.update(policy.attach_logprobs(packed(policy, samples)))
        found.append(metrics["mismatch/abs_mean"])  # rollout_logprobs are 0, so this is the loss
    return found
