"""Several optimizer steps on one rank against a replay in float64: transformers' model, the loss written out, torch's AdamW.

Nothing of the trainer has a part in the replay.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_model, save_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_mega import config as configs
from grpo_mega.commands.check import Case, Outcome, run_cases
from grpo_mega.types import Group, Prompt, Sample

pytestmark = pytest.mark.distributed

TEMPERATURE, KL_BETA, ENTROPY_BONUS, CLIP_EPS = 0.9, 0.3, 0.02, 0.2
MINI_BATCHES, EPOCHS, PROMPTS, GROUP_SIZE = 2, 3, 4, 3
LR, BETAS, EPS, WEIGHT_DECAY, CLIP_GRAD = 4e-3, (0.8, 0.97), 1e-4, 3.0, 0.25
SIZES = {
    "num_hidden_layers": 5,
    "hidden_size": 44,
    "intermediate_size": 76,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 111,
}


class Replay:
    """The steps by transformers and torch alone, all in float64. `weights` are those after them."""

    def __init__(self, model: Any, groups: list[Group]) -> None:
        self.model = copy.deepcopy(model).double().requires_grad_(True)
        self.grad_norms: list[float] = []
        self.clipped: list[float] = []  # share of each step's ratios outside of 1 -+ CLIP_EPS
        with torch.no_grad():
            self.old = {id(s): self.logprobs(s)[0] for g in groups for s in g.samples}
        kept = {n: p for n, p in self.model.named_parameters() if n.endswith(("norm.weight", ".bias"))}
        rest = [p for n, p in self.model.named_parameters() if n not in kept]
        assert len(kept) == 5 * 5 + 1 and len(rest) == 5 * 7 + 1  # a tied embedding is one parameter
        decay = [{"params": rest, "weight_decay": WEIGHT_DECAY}, {"params": [*kept.values()], "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(decay, lr=LR, betas=BETAS, eps=EPS)
        size = len(groups) // MINI_BATCHES
        for _ in range(EPOCHS):
            for i in range(0, len(groups), size):
                self.step(groups[i : i + size])

    def step(self, groups: list[Group]) -> None:
        self.adam.zero_grad()
        num_scored = sum(s.reward is not None for g in groups for s in g.samples)
        num_clipped = num_tokens = 0.0
        for group in groups:
            rewards = torch.tensor([s.reward for s in group.samples if s.reward is not None], dtype=torch.float64)
            for sample in group.samples:
                if sample.reward is None:
                    continue
                advantage = (sample.reward - rewards.mean()) / (rewards.std() + 1e-6)
                logprobs, entropy = self.logprobs(sample)
                old = reference = self.old[id(sample)]  # no step lies between the start and the rollout
                ratio = torch.exp(logprobs - old)
                policy = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_EPS, 1 + CLIP_EPS) * advantage)
                kl = torch.exp(reference - logprobs) - 1 - (reference - logprobs)
                (-(policy - KL_BETA * kl + ENTROPY_BONUS * entropy).mean() / num_scored).backward()
                num_clipped += float(((ratio - 1).abs() > CLIP_EPS).sum())
                num_tokens += len(ratio)
        self.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)))
        self.clipped.append(num_clipped / num_tokens)
        self.adam.step()

    def logprobs(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the response's tokens, and the entropies there."""
        tokens = torch.tensor([*sample.prompt.token_ids, *sample.response_ids])
        logits = self.model(tokens[None]).logits[0, len(sample.prompt.token_ids) - 1 : -1] / TEMPERATURE
        table = torch.log_softmax(logits, -1)
        return table.gather(1, tokens[len(sample.prompt.token_ids) :, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Outcome, Replay]:
    folder = tmp_path_factory.mktemp("replay")
    model = make_model("qwen2", seed=3, tied=True, **SIZES)
    save_checkpoint(model, folder / "model")
    groups = make_groups()
    torch.save(groups, folder / "groups.pt")
    [outcome] = run_cases([Case("replay", make_config(folder / "model"))], folder)
    return model, outcome, Replay(model, groups)


def test_metrics_of_every_step_are_those_of_the_replay(played: tuple[Any, Outcome, Replay]) -> None:
    _, outcome, replay = played
    assert len(outcome.updates) == MINI_BATCHES * EPOCHS
    assert [m["grad_norm"] for m in outcome.updates] == pytest.approx(replay.grad_norms, rel=2e-5)
    assert all(norm > 1.2 * CLIP_GRAD for norm in replay.grad_norms), replay.grad_norms
    assert replay.clipped[-1] > 0.05, replay.clipped


def test_weights_after_several_steps_are_those_of_the_replay(played: tuple[Any, Outcome, Replay]) -> None:
    """How far each tensor moved; norms and biases move too, but do not decay."""
    model, outcome, replay = played
    found = AutoModelForCausalLM.from_pretrained(outcome.checkpoint, dtype=torch.float32).state_dict()
    start, end = model.state_dict(), replay.model.state_dict()
    assert found.keys() == end.keys()
    for name, values in end.items():
        moved = values - start[name].double()
        assert moved.abs().max() > LR, name
        error = (found[name].double() - values).norm() / moved.norm()
        assert error < 2e-4, (name, float(error))


def make_config(model: Path) -> configs.Config:
    return configs.validate(
        {
            "run_dir": "unused",
            "steps": 1,
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "unused", "max_prompt_length": 12},
            "rollout": {"max_response_length": 24, "temperature": TEMPERATURE},
            "algorithm": {
                "group_size": GROUP_SIZE,
                "kl_beta": KL_BETA,
                "calculate_entropy": True,
                "entropy_bonus": ENTROPY_BONUS,
                "ratio_clip_eps": CLIP_EPS,
                "kl_clamp": None,
            },
            "batch": {
                "prompts_per_step": PROMPTS,
                "mini_batches": MINI_BATCHES,
                "epochs": EPOCHS,
                "tokens_per_micro_batch": 80,
            },
            "optimizer": {
                "lr": LR,
                "betas": list(BETAS),
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
                "clip_grad": CLIP_GRAD,
            },
        }
    )


def make_groups() -> list[Group]:
    """Ragged random responses; one sample has no reward."""
    generator = torch.Generator().manual_seed(11)

    def ints(n: int) -> list[int]:
        return torch.randint(2, SIZES["vocab_size"], (n,), generator=generator).tolist()

    groups = []
    for g in range(PROMPTS):
        prompt = Prompt(g, "", tuple(ints(3 + g)), "")
        samples = []
        for i in range(GROUP_SIZE):
            tokens = ints(5 + 4 * i + g)
            reward = float(torch.rand(1, generator=generator))
            samples.append(Sample(prompt, i, tokens, [-4.0] * len(tokens), "stop", 0, reward=reward))
        groups.append(Group(prompt, samples))
    groups[2].samples[0].reward = None
    return groups
